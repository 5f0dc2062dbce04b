"""Nodes become parts: targets, arguments, and whether the parts fit each other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import CONFIGS

from mldec import build
from mldec.config.compose import compose, override
from mldec.config.schema import Config
from mldec.data.table import Labels, from_dense
from mldec.data.types import Classes
from mldec.errors import ConfigError

HOSTILE = [
    "os.system",
    "builtins.eval",
    "torch.hub.load",
    "torch.nn.Linear",
    "mldec.os.system",
    "mldec.checkpoint.load",
    "mldec.heads.attach",
    "mldec.heads.gap.nn.Linear",
    "mldec.heads.gap.GAP.forward",
    "mldec.heads.gap.__builtins__",
    "mldec.heads.gap.ConfigError",
    "mldec.heads.layers.F.linear",
    "mldec.heads.layers._hidden",
    "mldec.heads..gap.GAP",
    "mldec.headsx.GAP",
    "GAP",
    "",
    None,
    ["mldec.heads.gap.GAP"],
]


@pytest.fixture(scope="module")
def digits() -> Config:
    return compose(["+experiment=digits"])


@pytest.mark.parametrize("target", HOSTILE)
@pytest.mark.parametrize("part", ["data", "backbone", "head", "loss"])
def test_nothing_but_parts_can_be_named(part: str, target: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{part}._target_") as caught:
        build.locate(part, target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mldec.heads.GAP", "mldec.heads.gap.GAP"])
def test_a_part_is_recorded_by_the_name_that_was_given(name: str) -> None:
    part = build.resolve("head", {"_target_": name})
    assert part.target is build.locate("head", "mldec.heads.GAP")
    assert part.node["_target_"] == name


def test_a_plugin_must_be_named_by_the_caller() -> None:
    with pytest.raises(ConfigError, match="needs plugins="):
        build.locate("backbone", "patches.Patches")
    assert build.locate("backbone", "patches.Patches", ["patches"]).__name__ == "Patches"
    with pytest.raises(ConfigError, match="not a module class defined there"):
        build.locate("backbone", "patches.torch", ["patches"])


def test_all_faults_of_all_parts_come_in_one_message(digits: Config) -> None:
    broken = override(
        digits, ["head.num_grops=3", "loss.gamma_neg=abc", "backbone.nam=x", "data.seed=null"]
    )
    with pytest.raises(ConfigError) as caught:
        build.check(broken)
    message = str(caught.value)
    assert "head.num_grops: MLDecoder takes no such argument; did you mean 'num_groups'?" in message
    assert "loss.gamma_neg: 'abc' is not a number" in message
    assert "backbone.nam: TimmBackbone takes no such argument" in message
    assert "data.seed: None is not a whole number" in message
    with pytest.raises(ConfigError, match=r"a loss is defined under mldec\.losses"):
        build.locate("loss", "mldec.heads.gap.GAP")


def test_a_missing_argument_is_named(digits: Config) -> None:
    node = {key: value for key, value in digits.backbone.items() if key != "name"}
    with pytest.raises(ConfigError, match=r"^backbone\.name is missing: TimmBackbone needs it$"):
        build.resolve("backbone", node)


def test_runtime_arguments_cannot_be_set_from_yaml(digits: Config) -> None:
    with pytest.raises(ConfigError, match="takes no such argument"):
        build.resolve("head", {**digits.head, "num_classes": 3})


def test_the_head_gets_the_width_of_the_backbone_and_the_number_of_classes() -> None:
    words = ["+experiment=digits", "plugins=[patches]", "backbone._target_=patches.Patches"]
    node = compose(words)
    node.backbone = {"_target_": "patches.Patches", "width": 24}
    model = build.model(build.check(node, build.MODEL_PARTS), Classes(("a", "b", "c")))
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
def test_a_plain_value_error_of_a_part_is_one_line(
    cli: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    own = ["plugins=[patches]", f"--config-dir={CONFIGS}", "head=particular", "device=cpu"]
    status, _, err = cli("train", "+experiment=digits", *own, *words)
    assert status == 1
    assert err == f"{message}\n"


# A loss that counts the training labels


def counting_loss(*words: str, labels: Callable[[], Labels] | None) -> Any:
    return build.loss(build.check(compose(["+experiment=digits", *words])), labels)


def test_a_loss_counts_the_annotated_training_labels_if_it_needs_them() -> None:
    labels = from_dense(np.array([[1, 0, 1], [1, 0, 0], [-1, -1, 0], [1, 1, 0]], np.int8))
    for option in ("asl", "bce"):
        loss = counting_loss(f"loss={option}", "loss.pos_weight=auto", labels=lambda: labels)
        assert loss.pos_weight.tolist() == [pytest.approx(1 / 3), 2, 3]

    # Counting may take a while: nothing is counted in vain.
    for words in (["loss=bce"], ["loss=asl", "loss.pos_weight=2"], ["loss=partial"]):
        counting_loss(*words, labels=lambda: pytest.fail("it counted"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss.pos_weight=0"], r"^loss\.pos_weight is 0: it must be above 0, or auto$"),
        (["loss.pos_weight=atuo"], r"^loss\.pos_weight: 'atuo' is not a number .* one of auto"),
        (["+loss.label_counts=3"], r"^loss\.label_counts: AsymmetricLoss takes no such argument"),
        (["loss.pos_weight=auto"], r"^loss\.pos_weight auto needs the counts of the training"),
        (["loss=distribution_balanced"], "^loss: the distribution-balanced loss needs the counts"),
    ],
)
def test_a_wrong_weight_of_positives_is_refused_in_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        counting_loss(*words, labels=None)
    assert "\n" not in str(caught.value)


# Parts that do not fit each other


def together(*words: str, data: str = "digits_single") -> None:
    config = compose([f"+experiment={data}", *words])
    parts = build.check(config)
    module = build.data(parts)
    labels = from_dense(np.eye(len(module.train.classes), dtype=np.int8))
    build.check_together(config, module, build.loss(parts, lambda: labels))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("digits_single", []),
        ("digits_single", ["loss=bce"]),  # as the paper on ImageNet
        ("digits_single", ["loss=asl_single_label"]),
        ("digits_single", ["mix.mixup=0.1", "mix.cutmix=1.0", "loss=bce_threshold"]),
        ("digits", []),
        ("digits", ["mix.mixup=1", "loss=asl"]),
        ("digits", ["mix.cutmix=1", "mix.smoothing=0.1", "loss=bce"]),
        ("digits", ["mix.cutmix=1", "mix.labels=union", "mix.smoothing=0.1", "loss=asl"]),
        *[
            ("digits", ["mix.mixup=1", "mix.labels=union", f"loss={loss}"])
            for loss in ("asl", "partial", "distribution_balanced")
        ],
        # Nothing is mixed, so that the setting says nothing about the labels.
        ("digits_single", ["mix.mixup=1", "mix.prob=0", "mix.labels=union"]),
    ],
)
def test_parts_that_fit_each_other_pass(data: str, words: list[str]) -> None:
    together(*words, data=data)


@pytest.mark.parametrize(
    ("data", "words", "message"),
    [
        (
            "digits_single",
            ["mix.mixup=0.1", "loss=asl_single_label"],
            "AsymmetricLossSingleLabel wants 0 and 1",
        ),
        (
            "digits_single",
            ["mix.mixup=0.1", "mix.labels=union"],
            "mix.labels=union gives an image the labels of two, the data has one label per image: "
            "leave it out",
        ),
        *[
            (
                "digits",
                ["mix.mixup=0.1", f"loss={loss}"],
                f"mix makes soft labels, {name} wants 0 and 1: "
                f"choose mix.labels=union, or loss=bce or asl",
            )
            for loss, name in {
                "partial": "PartialAsymmetricLoss",
                "two_way": "TwoWayLoss",
            }.items()
        ],
        (
            "digits",
            ["mix.mixup=0.1", "mix.labels=union", "mix.smoothing=0.1", "loss=two_way"],
            "mix makes soft labels, TwoWayLoss wants 0 and 1: choose loss=bce or asl",
        ),
        (
            "digits",
            ["loss=cross_entropy"],
            "CrossEntropy is for one label per image, the data has several labels",
        ),
        (
            "digits_single",
            ["loss=asl"],
            "AsymmetricLoss is for several labels per image, the data has one label",
        ),
        (
            "digits_single",
            ["train.random_queries=1"],
            "adds queries that are no class, and the data has one label per image: leave one",
        ),
        *[
            (
                "digits_zsl",
                ["train.random_queries=1", *words],
                f"train.random_queries adds queries that are no class, and {name} has a value per "
                f"class ({values}): leave one of them out",
            )
            for words, name, values in (
                (["loss=asl", "loss.pos_weight=auto"], "AsymmetricLoss", "pos_weight"),
                (
                    ["loss=distribution_balanced"],
                    "DistributionBalancedLoss",
                    "loss.freq_inv, loss.logit_bias",
                ),
                (
                    ["loss=partial", "loss.class_prior=estimate"],
                    "PartialAsymmetricLoss",
                    "estimate",
                ),
            )
        ],
        ("digits_single", ["data.top_k=11"], "data.top_k 11 needs as many classes; there are 10"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused_at_the_start(
    data: str, words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        together(*words, data=data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_loss_of_a_users_own_need_not_say_what_it_is_for() -> None:
    config = compose(["+experiment=digits_single"])
    loss = torch.nn.MSELoss()
    data = build.data(build.check(config))
    build.check_together(config, data, loss)
    with pytest.raises(ConfigError, match="MSELoss wants 0 and 1"):
        build.check_together(override(config, ["mix.cutmix=1"]), data, loss)


def test_a_group_of_settings_is_filled_from_flat_keys():
    node = {"_target_": "mldec.data.digits.digit", "seed": 3, "val_images": 2}
    part = build.resolve("data", node)
    defaults = {"image_size": 32, "train_images": 8192, "top_k": None, "changed": "refuse"}
    assert part.arguments == {"seed": 3, "val_images": 2, **defaults}
    assert build.data({"data": part}).val.dataset.seed == 3
    with pytest.raises(ConfigError, match=r"data\.scenes: digit takes no such argument"):
        build.resolve("data", {**node, "scenes": {}})
