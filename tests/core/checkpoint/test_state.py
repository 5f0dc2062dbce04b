"""The parser of a checkpoint's content: each part, present, missing and malformed."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from support import assert_equal

from mldec.checkpoint.state import FORMAT, Best, Checkpoint, check_format
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


@pytest.mark.parametrize(
    "part",
    ["config", "classes", "transform", "metrics", "best", "epoch", "step", "model", "optimizer"],
)
def test_a_part_that_is_missing_or_of_another_type_is_named(
    state: dict[str, Any], part: str
) -> None:
    state[part] = [3]
    assert f"x.pt is no whole checkpoint: its '{part}' is missing or no " in refused(state)
    del state[part]
    assert f"x.pt is no whole checkpoint: its '{part}' is missing or no " in refused(state)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("classes", {}),
        ("classes", {"names": ["a", "a", "b"], "exclusive": False, "queries": None}),
        ("classes", {"names": ["a"], "exclusive": False, "queries": torch.zeros(2, 5)}),
        ("transform", {"image_size": 64, "zoom": 2}),
        ("transform", {"image_size": -1}),
        ("best", {"of": "another version"}),
        ("log", {"of": "another version"}),
        ("fingerprint", {"images": 1}),
        ("calibration", {"slopes": [1]}),
        ("unseen", ["zebra"]),
    ],
)
def test_a_part_of_another_version_or_of_other_classes_is_one_line(
    state: dict[str, Any], part: str, value: Any
) -> None:
    state[part] = value
    refused(state)


@pytest.mark.parametrize("saved", [0, 1, 3, True, "2", None, torch.ones(1), torch.ones(2)])
def test_an_unknown_format_is_refused(state: dict[str, Any], saved: Any) -> None:
    state["format"] = saved
    with pytest.raises(CheckpointError, match=r"x\.pt has format .*reads 2: use another"):
        check_format(state, PATH)
    assert "has format" in refused(state)


def test_weights_alone_are_for_init() -> None:
    with pytest.raises(CheckpointError, match=r"which resume needs: pass init=x\.pt$"):
        check_format({"weight": torch.zeros(1)}, PATH)


def test_weights_are_those_that_scored_unless_others_are_named(state: dict[str, Any]) -> None:
    saved = Checkpoint.from_state(state, PATH)
    assert saved.weights("raw", PATH) == (saved.model, "raw")
    assert saved.weights("ema", PATH)[0] is saved.ema
    assert saved.weights(None, PATH)[1] == "raw"

    scored = dataclasses.replace(saved, best=Best("mAP", 1.0, "ema", 1))
    assert scored.weights(None, PATH) == (saved.ema, "ema")
    with pytest.raises(CheckpointError, match=r"x\.pt holds no moving average: pass --weights raw"):
        dataclasses.replace(scored, ema=None).weights(None, PATH)
