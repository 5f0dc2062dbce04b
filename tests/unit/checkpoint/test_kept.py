"""Checkpoints of older versions give the same scores."""

import json
from pathlib import Path

import pytest
import torch

from mldec.checkpoint import load_model
from mldec.errors import CheckpointError
from mldec.files.torch_files import read_torch

KEPT = Path(__file__).parent / "rc1"  # written by 1.0.0rc1: digits, calibrated


def test_checkpoint_of_first_version_gives_same_scores():
    loaded = load_model(KEPT / "model.pt")
    images = torch.arange(2 * 3 * 64 * 64).view(2, 3, 64, 64).remainder(251).to(torch.uint8)
    with torch.no_grad():
        logits = loaded.model(images)
    expected = json.loads((KEPT / "expected.json").read_text(encoding="utf-8"))
    assert list(loaded.classes.names) == expected["classes"]
    torch.testing.assert_close(logits, torch.tensor(expected["logits"]), rtol=0, atol=1e-4)
    scores = loaded.calibration.scaled(logits).sigmoid()
    assert scores[0].tolist() == pytest.approx(expected["scores"], abs=1e-4)
    assert list(loaded.calibration.thresholds) == pytest.approx(expected["thresholds"])


def test_error_of_a_removed_head_names_the_commit_that_has_it(tmp_path):
    state = read_torch(KEPT / "model.pt")
    state["config"]["head"] = {"_target_": "mldec.heads.RAMMatch", "word_dim": 512}
    path = tmp_path / "model.pt"
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="RAMMatch") as caught:
        load_model(path)
    assert str(path) in str(caught.value)
    assert "5852d40b" in str(caught.value)
