"""Checkpoints of older versions give the same scores."""

import json
from pathlib import Path

import pytest
import torch

from mldec.checkpoint import load_model
from mldec.checkpoint.loading import load, saved_config
from mldec.errors import CheckpointError
from mldec.files.torch_files import read_torch

KEPT = Path(__file__).parent / "rc1"  # written by 1.0.0rc1: digits, calibrated


def with_part(tmp_path, kind, node):
    """Write a copy of the checkpoint with another part in its config."""
    state = read_torch(KEPT / "model.pt")
    state["config"][kind] = node
    torch.save(state, tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.mark.parametrize("loss", ["asl", "vlpl"])
def test_checkpoint_of_first_version_gives_same_scores(loss, tmp_path):
    path = KEPT / "model.pt"
    if loss == "vlpl":
        target = "mldec.losses.VisionLanguagePseudoLabels"
        path = with_part(tmp_path, "loss", {"_target_": target, "scores": "scores.jsonl"})
    loaded = load_model(path)
    images = torch.arange(2 * 3 * 64 * 64).view(2, 3, 64, 64).remainder(251).to(torch.uint8)
    with torch.no_grad():
        logits = loaded.model(images)
    expected = json.loads((KEPT / "expected.json").read_text(encoding="utf-8"))
    assert list(loaded.classes.names) == expected["classes"]
    torch.testing.assert_close(logits, torch.tensor(expected["logits"]), rtol=0, atol=1e-4)
    scores = loaded.calibration.scaled(logits).sigmoid()
    assert scores[0].tolist() == pytest.approx(expected["scores"], abs=1e-4)
    assert list(loaded.calibration.thresholds) == pytest.approx(expected["thresholds"])


@pytest.mark.parametrize("removed", ["mldec.heads.RAMMatch"])
def test_error_of_a_removed_part_names_the_commit_that_has_it(removed, tmp_path):
    path = with_part(tmp_path, removed.split(".")[1].removesuffix("s"), {"_target_": removed})
    with pytest.raises(CheckpointError, match=removed) as caught:
        load_model(path)
    assert str(path) in str(caught.value)
    assert "5852d40b" in str(caught.value)


def test_run_with_a_removed_loss_is_not_resumed(tmp_path):
    target = "mldec.losses.VisionLanguagePseudoLabels"
    path = with_part(tmp_path, "loss", {"_target_": target, "scores": "scores.jsonl"})
    with pytest.raises(CheckpointError, match="VisionLanguagePseudoLabels") as caught:
        saved_config(load(path), path)
    assert "5852d40b" in str(caught.value)
