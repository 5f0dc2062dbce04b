"""Whether a checkpoint is of the run that is to go on from it."""

import dataclasses
from pathlib import Path
from typing import Any

import hostile
import pytest

from mldec import build
from mldec.checkpoint import Checkpoint
from mldec.config.compose import override, parse
from mldec.config.schema import Config
from mldec.data.fingerprint import Fingerprint
from mldec.data.types import Classes
from mldec.errors import CheckpointError
from mldec.training.trainer import check_same_run

PATH = Path("last.pt")
DATA = Fingerprint(12, "files", "labels", "classes")


@pytest.fixture(scope="module")
def saved() -> Checkpoint:
    checkpoint = Checkpoint.from_state(hostile.good(), PATH)
    return dataclasses.replace(checkpoint, fingerprint=DATA)


@pytest.fixture(scope="module")
def config(saved: Checkpoint) -> Config:
    """The config of the same run, as a start records it."""
    config = parse(saved.config)
    return build.recorded(config, build.check(config))


def check(saved: Checkpoint, config: Config, **changes: Any) -> str | None:
    given: dict[str, Any] = {
        "config": config,
        "classes": saved.classes,
        "steps_per_epoch": 4,
        "fingerprint": DATA,
    }
    return check_same_run(saved, PATH, **{**given, **changes})


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["train.epochs=99", "train.workers=7", "device=cuda", "name=other"],
        ["data.bad_images=skip", "data.changed=allow", "train.log_every=1"],
    ],
)
def test_harmless_settings_may_differ(saved: Checkpoint, config: Config, words: list[str]) -> None:
    assert check(saved, override(config, words)) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=3"], "seed: 0 -> 3"),
        (["head.num_heads=2"], "head.num_heads: .* -> 2"),
        (["optim.lr=1", "loss.clip=0.5"], "loss.clip: .* -> 0.5; optim.lr: .* -> 1.0"),
    ],
)
def test_other_settings_are_named_with_both_values(
    saved: Checkpoint, config: Config, words: list[str], said: str
) -> None:
    message = rf"^last\.pt is of a run with other settings \({said}\): put them back, or start a "
    with pytest.raises(CheckpointError, match=message + r"new run with name=\.\.\. init=last\.pt$"):
        check(saved, override(config, words))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classes": Classes(("a", "b"))}, "knows 3 classes, the data has 2"),
        ({"steps_per_epoch": 5}, "has 4 steps per epoch, this run 5: use the same training images"),
        (
            {"fingerprint": dataclasses.replace(DATA, images=11)},
            r"trained on other data \(12 training images, now 11\)",
        ),
    ],
)
def test_other_data_is_refused(
    saved: Checkpoint, config: Config, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"^last\.pt .*{said}"):
        check(saved, config, **changes)


def test_settings_that_an_older_version_did_not_have_have_their_defaults(
    saved: Checkpoint, config: Config
) -> None:
    new = {"pos_weight", "pos_weight_cap"}
    loss = {key: value for key, value in saved.config["loss"].items() if key not in new}
    older = dataclasses.replace(saved, config={**saved.config, "loss": loss})
    assert check(older, config) is None
    with pytest.raises(CheckpointError, match=r"loss\.pos_weight: None -> auto"):
        check(older, override(config, ["loss.pos_weight=auto"]))


def test_changed_data_may_be_allowed_but_no_other_number_of_steps(
    saved: Checkpoint, config: Config
) -> None:
    allowed = override(config, ["data.changed=allow"])
    other = dataclasses.replace(DATA, labels="x")
    warning = check(saved, allowed, fingerprint=other)
    assert warning is not None
    assert "other labels of the same training images" in warning
    with pytest.raises(CheckpointError, match="steps per epoch"):
        check(saved, allowed, fingerprint=other, steps_per_epoch=3)


def test_an_older_checkpoint_has_no_fingerprint(saved: Checkpoint, config: Config) -> None:
    older = dataclasses.replace(saved, fingerprint=None)
    assert "no fingerprint of its training data" in str(check(older, config))


def test_settings_come_before_the_data(saved: Checkpoint, config: Config) -> None:
    """Of several faults the one that explains the others is said."""
    with pytest.raises(CheckpointError, match="other settings"):
        check(saved, override(config, ["seed=3"]), classes=Classes(("a",)), steps_per_epoch=5)
