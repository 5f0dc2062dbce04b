"""Parts from config nodes: allowed targets, arguments, and parts that do not fit together."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support import CONFIGS, experiment

from mldec import build
from mldec.checkpoint.state import Best
from mldec.config import signatures
from mldec.config.compose import compose, options, override
from mldec.config.schema import PARTS
from mldec.data import readers
from mldec.data.labels import from_dense
from mldec.data.types import Classes
from mldec.errors import ConfigError
from mldec.heads import GAP, Cosine
from mldec.losses import AsymmetricLoss, BinaryCrossEntropy
from mldec.losses.base import as_loss
from mldec.training import describe, start
from mldec.training.optim import check_trainable

HOSTILE = ["os.system", "builtins.eval", "torch.hub.load", "torch.nn.Linear", "mldec.os.system"]
HOSTILE += ["mldec.checkpoint.loading.load", "mldec.heads.attach", "mldec.heads.gap.nn.Linear"]
HOSTILE += ["mldec.heads.gap.GAP.forward", "mldec.heads.gap.__builtins__", "mldec.headsx.GAP"]
HOSTILE += ["mldec.heads.gap.ConfigError", "mldec.heads.layers._hidden", "mldec.heads..gap.GAP"]


@pytest.mark.parametrize("target", [*HOSTILE, "GAP", "", None, ["mldec.heads.gap.GAP"]])
def test_only_parts_can_be_targets(target):
    for part in PARTS:
        with pytest.raises(ConfigError, match=f"^{part}._target_"):
            signatures.locate(part, target)


@pytest.mark.parametrize("name", ["mldec.heads.GAP", "mldec.heads.gap.GAP"])
def test_part_keeps_given_name_of_target(name):
    part = build.resolve("head", {"_target_": name})
    assert part.target is signatures.locate("head", "mldec.heads.GAP")
    assert part.node["_target_"] == name


@pytest.mark.parametrize("module", ["coco", "coco_json"])
def test_reader_may_be_named_with_its_module(module):
    """Checkpoints of earlier versions have the names of modules that were renamed."""
    reader = signatures.locate("data", f"mldec.data.readers.{module}.coco")
    assert reader is signatures.locate("data", "mldec.data.readers.coco") is readers.coco


def test_unknown_setting_of_data_lists_those_of_its_reader():
    node = {"_target_": "mldec.data.readers.coco", "root": "x", "file": "a.json"}
    with pytest.raises(
        ConfigError, match=r"^data\.file: .*; known: annotated_only, .*root, "
    ) as caught:
        build.resolve("data", node)
    assert len(str(caught.value)) < 300
    with pytest.raises(ConfigError, match="interpolation"):
        build.resolve("data", {**node, "interpolate": "x"})


def test_plugins_of_the_caller_are_located():
    assert signatures.locate("backbone", "patches.Patches", ["patches"]).__name__ == "Patches"


PLUGIN = """from torch import nn


class Fails(nn.Module):
    def __init__(self, *, width: int = 3):
        super().__init__()
        self.table = {}["missing"]


class Early(nn.Module):
    def __init__(self, in_features, num_classes):
        self.linear = nn.Linear(in_features, num_classes)


class OtherNames(nn.Module):
    def __init__(self, width, classes):
        super().__init__()


class NoReduction(nn.Module):
    pass
"""


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["loss._target_=absent.Loss"], ["loss._target_", "absent.Loss"]),
        (["loss._target_=other.Loss"], ["loss._target_", "other.Loss", "plugins"]),
        (["loss._target_=own.Los"], ["loss._target_", "own.Los"]),
        (["loss._target_=unparsable.Loss"], ["loss._target_", "unparsable.py", "line 1"]),
        (["head._target_=failing.Head"], ["head._target_", "failing.py", "line 2"]),
        (["loss._target_=own.Fails", "loss.widht=2"], ["loss.widht", "width"]),
        (["loss._target_=own.Fails"], ["loss", "Fails", "KeyError", "own.py", "line 7"]),
        (["head._target_=own.Early"], ["head", "Early", "own.py", "line 12"]),
        (["head._target_=own.OtherNames"], ["head.width", "head.classes"]),
        (
            ["head._target_=own.OtherNames", "head.width=1", "head.classes=1"],
            ["head", "OtherNames", "in_features"],
        ),
        (["loss._target_=own.NoReduction"], ["loss", "NoReduction", "reduction"]),
    ],
)
def test_mistakes_in_own_parts_are_one_line(words, named, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(PLUGIN)
    (tmp_path / "unparsable.py").write_text("def broken(:\n")
    (tmp_path / "failing.py").write_text("number = 0\n1 / number\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins = "plugins=[own,absent,unparsable,failing]"

    def start():
        parts = build.check(compose(["+experiment=digits", plugins, *words]))
        build.loss(parts)
        build.model(parts, Classes(("a", "b")), pretrained=False)

    with pytest.raises(ConfigError) as caught:
        start()
    message = str(caught.value)
    assert "\n" not in message
    for name in named:
        assert name in message


def test_error_in_part_of_mldec_keeps_its_type(monkeypatch):
    def fails(self, **arguments):
        raise KeyError("bug")

    monkeypatch.setattr("mldec.losses.AsymmetricLoss.__init__", fails)
    with pytest.raises(KeyError, match="bug"):
        build.Part("loss", "asl", AsymmetricLoss, {}).call()


def test_check_reports_faults_of_all_parts():
    words = ["head.num_grops=3", "head.num_classes=3", "loss.gamma_neg=abc", "data.seed=null"]
    broken = override(experiment("digits"), words)
    del broken.backbone["name"]
    with pytest.raises(ConfigError) as caught:
        build.check(broken)
    message = str(caught.value)
    keys = ["data.seed", "backbone.name", "head.num_grops", "head.num_classes", "loss.gamma_neg"]
    assert [key for key in keys if f"{key}: " in message] == keys
    assert "'num_groups'" in message


def test_model_passes_width_and_number_of_classes_to_head():
    config = override(experiment("digits"), ["plugins=[patches]"])
    config.backbone = {"_target_": "patches.Patches", "width": 24}
    model = build.model(build.check(config, build.MODEL_PARTS), Classes(("a", "b", "c")))
    assert model.head.embed.in_features == 24
    assert model(torch.zeros(2, 3, 64, 64, dtype=torch.uint8)).shape == (2, 3)


def test_value_error_of_part_names_its_key(cli, here):
    own = ["plugins=[patches]", f"--config-dir={CONFIGS}", "head=particular", "device=cpu"]
    for word, name in (("+head.scale=0", "head.scale"), ("+head.bias=false", "head: ")):
        err = cli.fault("train", "+experiment=digits", *own, word)
        assert err.startswith(f"mldec: {name}")


DIGIT = {"_target_": "mldec.data.digits.digit", "seed": 3, "val_images": 2}


def test_dataclass_arguments_are_flat_keys():
    part = build.resolve("data", DIGIT)
    defaults = {"image_size": 32, "train_images": 8192, "top_k": None, "changed": "refuse"}
    assert part.arguments == {"seed": 3, "val_images": 2, **defaults}
    assert build.data({"data": part}).val.dataset.seed == 3


LABELS = from_dense(np.array([[1, 0, 1], [1, 0, 0], [-1, -1, 0], [1, 1, 0]], np.int8))


def counting_loss(*words, labels):
    return build.loss(build.check(override(experiment("digits"), list(words))), labels)


def test_loss_gets_label_counts_only_if_it_uses_them():
    loss = counting_loss("loss=asl", "loss.pos_weight=auto", labels=lambda: LABELS)
    assert loss.pos_weight.tolist() == [pytest.approx(1 / 3), 2, 3]

    # Counting is slow.
    for words in (["loss=bce"], ["loss=asl", "loss.pos_weight=2"], ["loss=partial"]):
        counting_loss(*words, labels=lambda: pytest.fail("it counted"))


def test_start_at_frequency_sets_scores_to_frequencies():
    head = GAP(4, 3)
    start.start_at_frequency(head, LABELS, BinaryCrossEntropy())
    logits = head(torch.zeros(1, 2, 4))
    assert logits.sigmoid()[0].tolist() == pytest.approx([4 / 5, 2 / 5, 2 / 6])


def test_logit_adjustment_is_subtracted_at_the_start():
    head = GAP(4, 3)
    start.start_at_frequency(head, LABELS, BinaryCrossEntropy())
    logits = head(torch.zeros(1, 2, 4))
    loss = counting_loss("loss=bce", "loss.logit_adjustment=0.3", labels=lambda: LABELS)
    start.start_at_frequency(head, LABELS, loss)
    adjusted = head(torch.zeros(1, 2, 4))
    odds = torch.tensor([[4 / 1, 2 / 3, 2 / 4]])
    torch.testing.assert_close(adjusted, 0.7 * odds.log())
    # The adjusted start has the same loss as the start at the frequencies.
    targets = torch.tensor([[1, 0, -1]])
    torch.testing.assert_close(loss(adjusted, targets), BinaryCrossEntropy()(logits, targets))


def test_logit_adjustment_of_asl_shifts_the_logits():
    loss = counting_loss("loss=asl", "loss.logit_adjustment=1.5", labels=lambda: LABELS)
    logits = torch.tensor([[0.3, -1.0, 2.0]], requires_grad=True)
    targets = torch.tensor([[1, 0, 1]])
    shifted = logits + 1.5 * torch.tensor([4 / 1, 2 / 3, 2 / 4]).log()
    value = AsymmetricLoss()(shifted, targets)
    torch.testing.assert_close(loss(logits, targets), value)
    gradients = [torch.autograd.grad(each, logits)[0] for each in (loss(logits, targets), value)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("epochs", "overfits"), [(6, True), (5, False)])
def test_early_best_epoch_is_logged(epochs, overfits):
    line = describe.describe_best(Best("mAP", 48.9, epoch=2), epochs, Path("best.pt"))
    assert "epoch 2" in line
    assert ("train.epochs" in line) is overfits


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: signatures.locate("backbone", "patches.Patches"), "plugins="),
        (lambda: signatures.locate("backbone", "patches.torch", ["patches"]), r"patches\.torch"),
        (lambda: build.resolve("data", {**DIGIT, "scenes": {}}), r"data\.scenes"),
        (
            lambda: start.start_at_frequency(Cosine(4, 3), LABELS, None),
            r"train\.start_at_frequency",
        ),
        (lambda: counting_loss("loss.pos_weight=0", labels=None), r"loss\.pos_weight"),
        (lambda: counting_loss("loss.label_counts=3", labels=None), r"loss\.label_counts"),
        (lambda: together("mix.cutmix=1", loss=torch.nn.MSELoss()), "MSELoss"),
    ],
)
def test_error_names_the_key_or_class(call, name):
    with pytest.raises(ConfigError, match=name):
        call()


def together(*words, data="digits_single", loss=None):
    config = override(experiment(data), list(words))
    parts = build.check(config)
    module = build.data(parts)
    labels = from_dense(np.eye(len(module.train.classes), dtype=np.int8))
    loss = as_loss(loss or build.loss(parts, lambda: labels))
    start.check_together(config, module, loss)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("digits_single", []),
        ("digits_single", ["loss=bce"]),  # as the paper on ImageNet
        ("digits_single", ["mix.mixup=0.1", "mix.cutmix=1.0", "loss=bce_threshold"]),
        ("digits", ["mix.cutmix=1", "mix.labels=union", "mix.smoothing=0.1", "loss=asl"]),
        ("digits", ["mix.mixup=1", "mix.labels=union", "loss=partial"]),
        # No image is mixed.
        ("digits_single", ["mix.mixup=1", "mix.prob=0", "mix.labels=union"]),
    ],
)
def test_check_together_accepts(data, words):
    together(*words, data=data)


@pytest.mark.parametrize(
    ("data", "words", "name"),
    [
        ("digits_single", "mix.mixup=0.1 loss=asl_single_label", "AsymmetricLossSingleLabel"),
        ("digits_single", "mix.mixup=0.1 mix.labels=union", "mix.labels=union"),
        ("digits", "mix.mixup=0.1 loss=partial", "PartialAsymmetricLoss"),
        ("digits", "mix.mixup=0.1 mix.labels=union mix.smoothing=0.1 loss=two_way", "TwoWayLoss"),
        ("digits", "loss=cross_entropy", "CrossEntropy"),
        ("digits_single", "loss=asl", "AsymmetricLoss"),
        ("digits_single", "train.random_queries=1", "train.random_queries"),
        ("digits_zsl", "train.random_queries=1 loss=asl loss.pos_weight=auto", "pos_weight"),
        ("digits_zsl", "train.random_queries=1 loss=partial loss.class_prior=estimate", "estimate"),
        ("digits_single", "data.top_k=11", "data.top_k"),
    ],
)
def test_check_together_names_what_does_not_fit(data, words, name):
    with pytest.raises(ConfigError, match=name):
        together(*words.split(), data=data)


def test_loss_without_attributes_supports_any_hard_labels():
    together(loss=torch.nn.MSELoss())


def test_loss_of_torch_needs_no_code():
    words = ["plugins=[torch]", "loss._target_=torch.nn.BCEWithLogitsLoss", "loss.reduction=sum"]
    loss = build.loss(build.check(override(experiment("digits"), words)))
    assert (loss.reduction, loss.name) == ("sum", "BCEWithLogitsLoss")
    assert not loss.all_reduces


def test_class_prior_of_a_plugin_is_not_a_file():
    class Weighted(torch.nn.Module):
        reduction = "mean"

        def __init__(self, class_prior: str) -> None:
            super().__init__()
            received.append(class_prior)

    received: list[str] = []
    build.loss({"loss": build.Part("loss", "own.Weighted", Weighted, {"class_prior": "uniform"})})
    assert received == ["uniform"]


OWN_PHOTOS = [name for name in options("experiment") if name.startswith("finetune")]


@pytest.mark.parametrize(
    ("name", "words", "loss"),
    [
        *((name, ["data=folders"], "CrossEntropy") for name in OWN_PHOTOS),
        ("finetune_frozen", ["data=yolo"], "BinaryCrossEntropy"),
        ("finetune_frozen", ["data=coco_json"], "BinaryCrossEntropy"),
        ("finetune_frozen", ["data.exclusive=true"], "CrossEntropy"),
        ("finetune_frozen", ["data=folders", "head=csra", "loss=bce"], "BinaryCrossEntropy"),
    ],
)
def test_finetune_recipes_fit_every_data_format(name, words, loss):
    config = compose([f"+experiment={name}", *words])
    config = build.recorded(config, build.check(config))
    check_trainable(config)
    assert config.loss["_target_"].endswith(f".{loss}")
    assert config.data["test_crop"] is None
