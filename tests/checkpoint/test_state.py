"""The parser of a checkpoint's content: each part, present, missing and malformed."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from support import assert_equal

from mldec.checkpoint.state import FORMAT, Best, Checkpoint, LogPosition, check_format
from mldec.config import moved
from mldec.data.fingerprint import Fingerprint
from mldec.errors import CheckpointError

PATH = Path("x.pt")


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return hostile.good()


@pytest.fixture
def state(whole: dict[str, Any]) -> dict[str, Any]:
    """A whole checkpoint that a test may spoil."""
    return copy.deepcopy(whole)


def refused(state: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.from_state(state, PATH)
    message = str(caught.value)
    assert message.startswith("x.pt ") or " x.pt " in message
    assert "\n" not in message
    return message


def test_a_checkpoint_comes_back_from_its_state(state: dict[str, Any]) -> None:
    one = Checkpoint.from_state(state, PATH)
    one = dataclasses.replace(
        one, fingerprint=Fingerprint(3, "a", "b", "c"), best=Best("mAP", 5.0, "ema", 1)
    )
    written = one.to_state()
    assert written["format"] == FORMAT
    assert written.keys() - {"format"} == {field.name for field in dataclasses.fields(Checkpoint)}

    other = Checkpoint.from_state(written, PATH)
    assert_equal(other.to_state(), written)
    assert (other.best, other.log, other.fingerprint) == (one.best, one.log, one.fingerprint)
    assert other.transform == one.transform
    assert other.model is one.model, "tensors are not copied"


def test_word_queries_are_float32(state: dict[str, Any]) -> None:
    vectors = torch.randn(len(state["classes"]["names"]), 5).half()
    state["classes"]["queries"] = vectors
    queries = Checkpoint.from_state(state, PATH).classes.queries
    assert torch.equal(queries, vectors.float())


def test_unseen_classes_are_some_of_its_classes(state: dict[str, Any]) -> None:
    assert Checkpoint.from_state(state, PATH).unseen is None, "of an earlier version"
    for names in ([], state["classes"]["names"][1:]):
        state["unseen"] = names
        checkpoint = Checkpoint.from_state(state, PATH)
        assert checkpoint.unseen == tuple(names)
        assert checkpoint.to_state()["unseen"] == names

    state["unseen"] = ["zebra"]
    assert "its 'unseen' has a name that is not of its classes" in refused(state)
    for malformed in ("r", [3], ["r", "r"], {"r": 1}):
        state["unseen"] = malformed
        assert "its 'unseen' is not a list of different class names" in refused(state)


NAN, INF = math.nan, math.inf
# Name of a part, where in it, and values that it must not have.
MALFORMED: dict[str, list[tuple[str, Any]]] = {
    "config": [("", []), ("", None), ("seed", torch.zeros(1)), ("data", {3: 4}), ("data", (1,))],
    "classes": [
        ("", {}),
        ("names", []),
        ("names", ("a", "b", "c")),
        ("names", ["a", "a", "b"]),
        ("names", ["a", "b", 3]),
        ("exclusive", 1),
        ("queries", [[1.0]]),
        ("queries", torch.zeros(4, 5)),
        ("queries", torch.zeros(3)),
        ("queries", torch.zeros(3, 5, dtype=torch.int64)),
    ],
    "transform": [("", 64), ("", {1: 2}), ("image_size", torch.zeros(1))],
    "metrics": [("", {"a": "b"}), ("", {"a": True}), ("", {1: 1.0})],
    "best": [
        ("metric", None),
        ("metric", 3),
        ("value", NAN),
        ("value", True),
        ("weights", "both"),
        ("epoch", -1),
        ("epoch", 1.0),
    ],
    "epoch": [("", -1), ("", True), ("", 1.0), ("", 2**53)],
    "step": [("", -1), ("", None)],
    "steps_per_epoch": [("", 0), ("", -4)],
    "model": [("", None), ("", {"a": 1.0}), ("", {1: torch.zeros(1)})],
    "ema": [("", []), ("", {"a": None})],
    "optimizer": [
        ("state", None),
        ("state", {0: 1}),
        ("param_groups", {}),
        ("param_groups", [{}]),
        ("param_groups", [{"params": 0}]),
        ("param_groups", [3]),
    ],
    "scaler": [("", None), ("", {1: 2})],
    "loss": [("", []), ("", {1: 2})],
    "log": [
        ("", None),
        ("lines", -1),
        ("steps", 1.0),
        ("skipped", None),
        ("bad_images", "3"),
        ("loss", "3"),
        ("loss", NAN),
        ("loss", INF),
    ],
}


@pytest.mark.parametrize(
    ("part", "place", "value"),
    [(part, place, value) for part, faults in MALFORMED.items() for place, value in faults],
)
def test_a_malformed_part_is_named(
    state: dict[str, Any], part: str, place: str, value: Any
) -> None:
    if place:
        state[part][place] = value
    else:
        state[part] = value
    message = refused(state)
    assert message.startswith(f"x.pt is no whole checkpoint: its '{part}' is missing or not ")


@pytest.mark.parametrize("part", MALFORMED)
def test_a_missing_part_is_named(state: dict[str, Any], part: str) -> None:
    del state[part]
    assert f"its '{part}' is missing" in refused(state)


def test_before_the_first_evaluation_there_is_no_best(state: dict[str, Any]) -> None:
    state["best"] = dataclasses.asdict(Best())
    assert Checkpoint.from_state(state, PATH).best == Best()
    state["best"]["value"] = 0.0
    assert "its 'best'" in refused(state)


def test_the_sum_of_losses_may_be_no_number_after_a_skipped_step(state: dict[str, Any]) -> None:
    state["log"] = dataclasses.asdict(LogPosition(loss=INF, skipped=1))
    assert Checkpoint.from_state(state, PATH).log.loss == INF


@pytest.mark.parametrize(
    ("epoch", "step", "fits"), [(0, 0, True), (0, 4, True), (1, 3, False), (1, 9, False)]
)
def test_a_step_is_one_of_its_epoch(
    state: dict[str, Any], epoch: int, step: int, fits: bool
) -> None:
    state.update(epoch=epoch, step=step, steps_per_epoch=4)
    if fits:
        assert Checkpoint.from_state(state, PATH).step == step
    else:
        first, last = 4 * epoch, 4 * epoch + 4
        assert f"of 4 steps it must be from {first} to {last}" in refused(state)


@pytest.mark.parametrize(
    "fingerprint",
    [3, {}, {"images": 1, "files": "", "labels": "", "classes": 3}, {"images": -1}],
)
def test_a_fingerprint_is_whole_or_absent(state: dict[str, Any], fingerprint: Any) -> None:
    assert Checkpoint.from_state(state, PATH).fingerprint is None
    state["fingerprint"] = fingerprint
    assert "its 'fingerprint' is not the number of training images" in refused(state)


def test_what_a_file_holds_beside_the_known_keys_is_left(state: dict[str, Any]) -> None:
    for part in ("log", "best", "classes"):
        state[part]["more"] = 3
    state["more"] = 3
    Checkpoint.from_state(state, PATH)


def test_a_transform_of_another_version_is_refused(state: dict[str, Any]) -> None:
    state["transform"]["zoom"] = 2
    assert refused(state).startswith("the transform in x.pt cannot be used: ")
    state["transform"] = {"image_size": -1}
    assert "image_size: -1" in refused(state)


@pytest.mark.parametrize("saved", [0, 3, True, "2", None, torch.ones(1), torch.ones(2)])
def test_an_unknown_format_is_refused(state: dict[str, Any], saved: Any) -> None:
    state["format"] = saved
    with pytest.raises(CheckpointError, match=r"x\.pt has format .*reads 1 to 2: use a newer"):
        check_format(state, PATH)
    assert "has format" in refused(state)


def test_weights_alone_are_for_init() -> None:
    with pytest.raises(CheckpointError, match=r"which resume needs: pass init=x\.pt$"):
        check_format({"weight": torch.zeros(1)}, PATH)


def test_the_arguments_that_version_0_1_left_out_are_filled_in(state: dict[str, Any]) -> None:
    head = state["config"]["head"]
    state["config"]["head"] = {"_target_": head["_target_"]}
    assert Checkpoint.from_state(state, PATH).config["head"] == {"_target_": head["_target_"]}
    state["format"] = 1
    completed = Checkpoint.from_state(state, PATH).config["head"]
    assert completed == moved.completed({"_target_": head["_target_"]})
    assert len(completed) > 1


def test_weights_are_those_that_scored_unless_others_are_named(state: dict[str, Any]) -> None:
    saved = Checkpoint.from_state(state, PATH)
    assert saved.weights("raw", PATH) == (saved.model, "raw")
    assert saved.weights("ema", PATH)[0] is saved.ema
    assert saved.weights(None, PATH)[1] == "raw"

    scored = dataclasses.replace(saved, best=Best("mAP", 1.0, "ema", 1))
    assert scored.weights(None, PATH) == (saved.ema, "ema")
    with pytest.raises(CheckpointError, match=r"x\.pt holds no moving average: pass --weights raw"):
        dataclasses.replace(scored, ema=None).weights(None, PATH)
