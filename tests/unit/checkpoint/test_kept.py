"""Checkpoints of older versions give the same scores.

rc1/model.pt is of 1.0.0rc1: digits, calibrated. Commit 5852d40b wrote commit_5852d40b/plain.pt and
vlpl.pt (best.pt of the two runs), and computed the scores of `IMAGES` in scores.json, as
`model(IMAGES).sigmoid()` of `load_model(FILE, WEIGHTS)`. The commands, in an empty folder:

    python CHECKOUT/scripts/make_digits.py --layout csv --train 64 --val 32 scenes
    SMALL="+experiment=digits data=csv data.root=scenes data.image_size=64 data.augment=none
        data.cutout=0 backbone.model_args={channels:[4,8,8,8],stem_width:4,output_stride:16}
        head.embed_dim=8 head.num_heads=2 head.mlp_dim=16
        train.epochs=2 train.batch_size=16 optim.name=adamw optim.lr=3e-3"
    mldec train $SMALL name=plain
    mldec predict outputs/plain scenes/images --content scores --jsonl scores.jsonl
    mldec train $SMALL train.ema_decay=null loss=vlpl loss.scores=scores.jsonl
        loss.threshold=0.5 name=vlpl
"""

import json
from pathlib import Path

import pytest
import torch
from support import QUICK

from mldec.checkpoint import load_model
from mldec.errors import CheckpointError
from mldec.files.torch_files import read_torch

HERE = Path(__file__).parent
RC1 = HERE / "rc1"
COMMIT = HERE / "commit_5852d40b"
IMAGES = torch.arange(4 * 3 * 64 * 64).view(4, 3, 64, 64).remainder(251).to(torch.uint8)


def test_checkpoint_of_first_version_gives_same_scores():
    loaded = load_model(RC1 / "model.pt")
    with torch.no_grad():
        logits = loaded.model(IMAGES[:2])
    expected = json.loads((RC1 / "expected.json").read_text(encoding="utf-8"))
    assert list(loaded.classes.names) == expected["classes"]
    torch.testing.assert_close(logits, torch.tensor(expected["logits"]), rtol=0, atol=1e-4)
    scores = loaded.calibration.scaled(logits).sigmoid()
    assert scores[0].tolist() == pytest.approx(expected["scores"], abs=1e-4)
    assert list(loaded.calibration.thresholds) == pytest.approx(expected["thresholds"])


@pytest.mark.parametrize("case", ["plain ema", "plain raw", "vlpl raw"])
def test_checkpoint_of_commit_5852d40b_gives_same_scores(case):
    name, weights = case.split()
    expected = json.loads((COMMIT / "scores.json").read_text(encoding="utf-8"))[case]
    with torch.no_grad():
        scores = load_model(COMMIT / f"{name}.pt", weights).model(IMAGES).sigmoid()
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=0, atol=1e-6)


def test_run_with_a_removed_loss_is_not_resumed(cli, here):
    error = cli.fault("train", *QUICK, f"resume={COMMIT / 'vlpl.pt'}")
    [line] = error.splitlines()
    for text in ("vlpl.pt", "loss=vlpl", "commit 5852d40b"):
        assert text in line


def test_error_of_a_removed_part_names_the_commit_that_has_it(tmp_path):
    state = read_torch(RC1 / "model.pt")
    state["config"]["head"] = {"_target_": "mldec.heads.RAMMatch"}
    path = tmp_path / "model.pt"
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="head=ram_match") as caught:
        load_model(path)
    assert str(path) in str(caught.value)
    assert "commit 5852d40b" in str(caught.value)
