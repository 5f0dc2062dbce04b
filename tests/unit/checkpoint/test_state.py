"""Conversion of checkpoints to plain containers and back, and calibrated logits."""

import copy
import dataclasses
from dataclasses import asdict, replace
from pathlib import Path

import hostile
import networks
import pytest
import torch
from support import assert_equal

from mldec.checkpoint.classes import ScoredClassifier
from mldec.checkpoint.state import FORMAT, Best, Checkpoint
from mldec.data.fingerprint import Fingerprint
from mldec.errors import CheckpointError
from mldec.words.types import VectorOrigin

PATH = Path("x.pt")
NAMES = hostile.NAMES
ORIGIN = VectorOrigin("clip:ViT-B-32:openai", "0" * 64, ("a {}",))
CALIBRATION = replace(
    networks.CALIBRATION,
    thresholds=(0.2, 0.4, 0.6),
    slopes=(0.5,),
    offsets=(0.0,),
    data={"_target_": "x", "size": [1, 2]},
)
PLATT = replace(CALIBRATION, slopes=(1.0, 2.0, 0.0), offsets=(0.0, -1.0, 3.0))


@pytest.fixture(scope="module")
def whole():
    return hostile.good()


@pytest.fixture
def state(whole):
    """A complete checkpoint that a test may change."""
    return copy.deepcopy(whole)


@pytest.mark.parametrize("calibration", [CALIBRATION, PLATT, None])
def test_state_round_trip(state, tmp_path, calibration):
    one = Checkpoint.from_state(state, PATH)
    vectors = torch.randn(3, 5).half()
    classes = replace(
        one.classes, word_vectors=vectors if calibration is None else None, origin=ORIGIN
    )
    one = replace(
        one,
        classes=classes,
        fingerprint=Fingerprint(3, "a", "b", "c"),
        val_fingerprint=Fingerprint(2, "d", "e", "c"),
        best=Best("mAP", 5.0, "ema", 1),
        calibration=calibration,
        unseen=NAMES[1:],
    )
    written = one.to_state()
    assert written["format"] == FORMAT
    assert written.keys() - {"format"} == {field.name for field in dataclasses.fields(Checkpoint)}

    torch.save(written, tmp_path / "x.pt")
    other = Checkpoint.from_state(torch.load(tmp_path / "x.pt", weights_only=True), PATH)
    for name in ("best", "log", "fingerprint", "val_fingerprint", "calibration", "transform"):
        assert getattr(other, name) == getattr(one, name)
    assert other.unseen == one.unseen
    assert other.classes.origin == ORIGIN
    if other.classes.word_vectors is not None:
        assert torch.equal(other.classes.word_vectors, vectors.float())
        other = replace(other, classes=classes)
    assert_equal(other.to_state(), written)
    assert Checkpoint.from_state(written, PATH).model is one.model


@pytest.mark.parametrize(
    ("place", "value", "name"),
    [
        ("classes", {}, "names"),
        ("classes/names", ["a", "a", "b"], "'a'"),
        ("classes/queries", torch.zeros(2, 5), "word vectors"),
        ("transform/image_size", -1, "image_size"),
        ("calibration", {**asdict(CALIBRATION), "thresholds": (0.1, 0.2)}, "calibration"),
        ("format", 1, "format"),
        # Checkpoints of an earlier or a later commit.
        ("sampler", {}, "sampler"),
    ],
)
def test_invalid_part_raises_an_error(state, place, value, name):
    hostile.put(state, place, value)
    with pytest.raises(CheckpointError, match=rf"^x\.pt .*{name}"):
        Checkpoint.from_state(state, PATH)


def test_best_weights_are_the_default(state):
    saved = Checkpoint.from_state(state, PATH)
    assert saved.weights("raw") == (saved.model, "raw")
    assert saved.weights("ema")[0] is saved.ema
    assert saved.weights(None)[1] == "raw"

    scored = replace(saved, best=Best("mAP", 1.0, "ema", 1))
    assert scored.weights(None) == (saved.ema, "ema")


def test_logits_are_scaled_per_class_or_globally():
    logits = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 4.0]])
    assert CALIBRATION.scaled(logits).equal(logits / 2)
    expected = torch.tensor([[1.0, 3.0, 3.0], [-1.0, -1.0, 3.0]])

    class Half(torch.nn.Module):
        def forward(self, images, word_vectors):
            return logits.half()

    scaled = ScoredClassifier(Half(), calibration=PLATT)(logits, None)
    assert scaled.dtype == torch.float32
    assert scaled.equal(expected)

    # The logits are calibrated before they are selected and merged.
    selected = ScoredClassifier(Half(), calibration=PLATT, columns=[2, 0])
    assert selected(logits, None).equal(expected[:, [2, 0]])
    merged = ScoredClassifier(Half(), calibration=PLATT, columns=[2, 0, 1], class_of_name=[1, 0, 0])
    assert merged(logits, None).tolist() == [[3, 3], [-1, 3]]
    assert not merged.state_dict()
