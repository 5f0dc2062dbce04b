"""Nodes become parts: targets, arguments, and whether the parts fit each other."""

import numpy as np
import pytest
import torch
from support import CONFIGS

from mldec import build
from mldec.config.compose import compose, options, override
from mldec.config.schema import PARTS
from mldec.data.labels import from_dense
from mldec.data.types import Classes
from mldec.errors import ConfigError
from mldec.heads import GAP, Cosine
from mldec.training import start
from mldec.training.optim import check_trainable

HOSTILE = ["os.system", "builtins.eval", "torch.hub.load", "torch.nn.Linear", "mldec.os.system"]
HOSTILE += ["mldec.checkpoint.loading.load", "mldec.heads.attach", "mldec.heads.gap.nn.Linear"]
HOSTILE += ["mldec.heads.gap.GAP.forward", "mldec.heads.gap.__builtins__", "mldec.headsx.GAP"]
HOSTILE += ["mldec.heads.gap.ConfigError", "mldec.heads.layers._hidden", "mldec.heads..gap.GAP"]


@pytest.fixture(scope="module")
def digits():
    return compose(["+experiment=digits"])


@pytest.mark.parametrize("target", [*HOSTILE, "GAP", "", None, ["mldec.heads.gap.GAP"]])
@pytest.mark.parametrize("part", PARTS)
def test_nothing_but_parts_can_be_named(part, target):
    with pytest.raises(ConfigError, match=f"^{part}._target_") as caught:
        build.locate(part, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mldec.heads.GAP", "mldec.heads.gap.GAP"])
def test_a_part_is_recorded_by_the_name_that_was_given(name):
    part = build.resolve("head", {"_target_": name})
    assert part.target is build.locate("head", "mldec.heads.GAP")
    assert part.node["_target_"] == name
    with pytest.raises(ConfigError, match=r"a loss is defined under mldec\.losses"):
        build.locate("loss", name)


def test_a_plugin_must_be_named_by_the_caller():
    with pytest.raises(ConfigError, match="needs plugins="):
        build.locate("backbone", "patches.Patches")
    assert build.locate("backbone", "patches.Patches", ["patches"]).__name__ == "Patches"
    with pytest.raises(ConfigError, match="not a module class defined there"):
        build.locate("backbone", "patches.torch", ["patches"])


def test_all_faults_of_all_parts_come_in_one_message(digits):
    words = ["head.num_grops=3", "head.num_classes=3", "loss.gamma_neg=abc", "data.seed=null"]
    broken = override(digits, words)
    del broken.backbone["name"]
    with pytest.raises(ConfigError) as caught:
        build.check(broken)
    assert str(caught.value).split("; ") == [
        "data.seed: None is not a whole number",
        "backbone.name is missing: TimmBackbone needs it",
        "head.num_grops: MLDecoder takes no such argument",
        "did you mean 'num_groups'?",
        "head.num_classes: MLDecoder takes no such argument",
        "did you mean 'num_layers'?",
        "loss.gamma_neg: 'abc' is not a finite number",
    ]


def test_the_head_gets_the_width_of_the_backbone_and_the_number_of_classes(digits):
    digits = override(digits, ["plugins=[patches]"])
    digits.backbone = {"_target_": "patches.Patches", "width": 24}
    model = build.model(build.check(digits, build.MODEL_PARTS), Classes(("a", "b", "c")))
    assert model.head.embed.in_features == 24
    assert model(torch.zeros(2, 3, 64, 64, dtype=torch.uint8)).shape == (2, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["+head.scale=0"], "mldec: head.scale is 0: it must be above 0"),  # as the user types it
        (["+head.bias=false"], "mldec: head: a head without a bias is of no use"),
        ([], "mldec: head: num_classes is 10: too many"),  # nothing that the user could type
    ],
)
def test_a_plain_value_error_of_a_part_is_one_line(cli, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    own = ["plugins=[patches]", f"--config-dir={CONFIGS}", "head=particular", "device=cpu"]
    status, _, err = cli("train", "+experiment=digits", *own, *words)
    assert (status, err) == (1, f"{message}\n")


def test_a_group_of_settings_is_filled_from_flat_keys():
    node = {"_target_": "mldec.data.digits.digit", "seed": 3, "val_images": 2}
    part = build.resolve("data", node)
    defaults = {"image_size": 32, "train_images": 8192, "top_k": None, "changed": "refuse"}
    assert part.arguments == {"seed": 3, "val_images": 2, **defaults}
    assert build.data({"data": part}).val.dataset.seed == 3
    with pytest.raises(ConfigError, match=r"data\.scenes: digit takes no such argument"):
        build.resolve("data", {**node, "scenes": {}})


# A loss that counts the training labels


def counting_loss(*words, labels):
    return build.loss(build.check(compose(["+experiment=digits", *words])), labels)


def test_a_loss_counts_the_annotated_training_labels_if_it_needs_them():
    labels = from_dense(np.array([[1, 0, 1], [1, 0, 0], [-1, -1, 0], [1, 1, 0]], np.int8))
    loss = counting_loss("loss=asl", "loss.pos_weight=auto", labels=lambda: labels)
    assert loss.pos_weight.tolist() == [pytest.approx(1 / 3), 2, 3]

    # Counting may take a while: nothing is counted in vain.
    for words in (["loss=bce"], ["loss=asl", "loss.pos_weight=2"], ["loss=partial"]):
        counting_loss(*words, labels=lambda: pytest.fail("it counted"))


def test_a_class_starts_with_its_frequency_as_its_score():
    labels = from_dense(np.array([[1, 0, 1], [1, 0, 0], [-1, -1, 0], [1, 1, 0]], np.int8))
    head = GAP(4, 3)
    start.start_at_frequency(head, labels)
    scores = head(torch.zeros(1, 2, 4)).sigmoid()[0].tolist()
    assert scores == pytest.approx([4 / 5, 2 / 5, 2 / 6])
    with pytest.raises(ConfigError, match=r"^train\.start_at_frequency: Cosine has no bias per"):
        start.start_at_frequency(Cosine(4, 3), labels)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("loss.pos_weight=0", r"^loss\.pos_weight is 0: it must be above 0$"),
        ("+loss.label_counts=3", r"^loss\.label_counts: AsymmetricLoss takes no such argument"),
    ],
)
def test_a_wrong_weight_of_positives_is_refused_in_one_line(word, message):
    with pytest.raises(ConfigError, match=message):
        counting_loss(word, labels=None)


# Parts that do not fit each other


def together(*words, data="digits_single"):
    config = compose([f"+experiment={data}", *words])
    parts = build.check(config)
    module = build.data(parts)
    labels = from_dense(np.eye(len(module.train.classes), dtype=np.int8))
    start.check_together(config, module, build.loss(parts, lambda: labels))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("digits_single", []),
        ("digits_single", ["loss=bce"]),  # as the paper on ImageNet
        ("digits_single", ["loss=asl_single_label"]),
        ("digits_single", ["mix.mixup=0.1", "mix.cutmix=1.0", "loss=bce_threshold"]),
        ("digits", ["mix.cutmix=1", "mix.labels=union", "mix.smoothing=0.1", "loss=asl"]),
        ("digits", ["mix.mixup=1", "mix.labels=union", "loss=partial"]),
        # Nothing is mixed, so that the setting says nothing about the labels.
        ("digits_single", ["mix.mixup=1", "mix.prob=0", "mix.labels=union"]),
    ],
)
def test_parts_that_fit_each_other_pass(data, words):
    together(*words, data=data)


UNFIT = [
    (
        "digits_single",
        "mix.mixup=0.1 loss=asl_single_label",
        "AsymmetricLossSingleLabel wants 0 and",
    ),
    (
        "digits_single",
        "mix.mixup=0.1 mix.labels=union",
        "mix.labels=union gives an image two labels",
    ),
    ("digits", "mix.mixup=0.1 loss=partial", "wants 0 and 1: choose loss=bce or asl"),
    (
        "digits",
        "mix.mixup=0.1 mix.labels=union mix.smoothing=0.1 loss=two_way",
        "mix makes soft lab",
    ),
    (
        "digits",
        "loss=cross_entropy",
        "CrossEntropy is for one label per image, the data has several",
    ),
    (
        "digits_single",
        "loss=asl",
        "AsymmetricLoss is for several labels per image, the data has one",
    ),
    ("digits_single", "train.random_queries=1", "no class, and the data has one label per image"),
    (
        "digits_zsl",
        "train.random_queries=1 loss=asl loss.pos_weight=auto",
        "no class, and AsymmetricLoss has a value per class (pos_weight): leave one out",
    ),
    (
        "digits_zsl",
        "train.random_queries=1 loss=partial loss.class_prior=estimate",
        "PartialAsymmetricLoss has a value per class (estimate)",
    ),
    ("digits_single", "data.top_k=11", "data.top_k is 11"),
]


@pytest.mark.parametrize(("data", "words", "message"), UNFIT)
def test_parts_that_do_not_fit_each_other_are_refused_at_the_start(data, words, message):
    with pytest.raises(ConfigError) as caught:
        together(*words.split(), data=data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_loss_of_a_users_own_need_not_say_what_it_is_for():
    config = compose(["+experiment=digits_single"])
    data = build.data(build.check(config))
    start.check_together(config, data, torch.nn.MSELoss())
    with pytest.raises(ConfigError, match="MSELoss wants 0 and 1"):
        start.check_together(override(config, ["mix.cutmix=1"]), data, torch.nn.MSELoss())


OWN_PHOTOS = [name for name in options("experiment") if name.startswith("finetune")]


@pytest.mark.parametrize(
    ("words", "loss"),
    [
        *(([f"+experiment={name}", "data=folders"], "CrossEntropy") for name in OWN_PHOTOS),
        (["+experiment=finetune_frozen", "data=yolo"], "BinaryCrossEntropy"),
        (["+experiment=finetune_frozen", "data=coco_json"], "BinaryCrossEntropy"),
        (["+experiment=finetune_frozen", "loss.smoothing=0.1"], "BinaryCrossEntropy"),
        (["+experiment=finetune_frozen", "data.exclusive=true"], "CrossEntropy"),
        (["+experiment=finetune_frozen", "data=folders", "loss=bce"], "BinaryCrossEntropy"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_recipes_for_own_photos_fit_every_form_of_data(words, loss):
    config = compose(words)
    config = build.recorded(config, build.check(config))
    check_trainable(config)
    assert config.loss["_target_"].endswith(f".{loss}")
    assert config.data["test_crop"] is None
