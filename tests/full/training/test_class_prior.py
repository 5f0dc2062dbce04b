"""Class priors, which are estimated in one run and used by another."""

import csv
from pathlib import Path

from support import CONFIGS

from mldec.files.torch_files import read_torch

WORDS = ["+experiment=digits", "plugins=[patches]", "backbone=patches", f"--config-dir={CONFIGS}"]
WORDS += ["head=gap", "data.image_size=64", "data.train_images=16", "data.val_images=8"]
WORDS += ["train.batch_size=8", "train.epochs=1", "train.workers=0", "device=cpu"]


def test_estimated_priors_are_written_and_used_by_another_run(here, cli):
    assert cli("train", *WORDS, "loss=partial_ignore", "name=first").status == 0
    path = Path("outputs/first/class_prior.csv")
    with path.open(newline="") as file:
        rows = {row["Classes"]: float(row["avg_pred"]) for row in csv.DictReader(file)}
    assert (len(rows), list(rows)[:3]) == (10, ["zero", "one", "two"])
    assert all(0 < value < 1 for value in rows.values())

    words = [*WORDS, "loss=partial_selective", f"loss.class_prior={path}"]
    assert cli("train", *words, "name=second").status == 0
    saved = read_torch(Path("outputs/second/checkpoints/last.pt"))
    assert saved["loss"]["class_prior"].double().tolist() == list(rows.values())
    assert not Path("outputs/second/class_prior.csv").exists()
