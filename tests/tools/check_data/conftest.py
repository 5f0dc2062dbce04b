import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from support import CONFIGS

NAMES = ("red", "green", "blue")


class Judge(NamedTuple):
    """Labelled images, and a model that was trained on one of two folds of them."""

    root: Path  # of the data set
    run: str  # the folder of the run, which left out fold 1/2
    flipped: set[tuple[str, str]]  # file name and class of the labels that are wrong


def write_squares(root, *, images=240, train=200):
    """Write squares of mixed colours and a CSV file, 5 % of ."""
    rng = np.random.default_rng(0)
    shown = rng.random((images, 3)) < 0.4
    flipped = rng.random((images, 3)) < 0.05

    root.mkdir()
    rows = ["path,labels,split"]
    for number in range(images):
        pixels = 200 * shown[number] + rng.integers(0, 50, (16, 16, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(root / f"{number}.png")

        labels = [NAMES[k] for k in np.flatnonzero(shown[number] ^ flipped[number])]
        rows.append(f"{number}.png,{';'.join(labels)},{'train' if number < train else 'val'}")
    (root / "data.csv").write_text("\n".join(rows) + "\n")
    return {(f"{number}.png", NAMES[k]) for number, k in np.argwhere(flipped[:train])}


@pytest.fixture(scope="session")
def judge(tmp_path_factory):
    """A run, made by a real process; tests must not change it."""
    folder = tmp_path_factory.mktemp("judge")
    flipped = write_squares(folder / "mine")

    command = [
        *(sys.executable, "-m", "mldec.train", "+experiment=digits", f"--config-dir={CONFIGS}"),
        *("plugins=[patches]", "backbone=patches", "head=gap", "loss=bce", "device=cpu"),
        *("data=csv", f"data.root={folder / 'mine'}", f"data.cache_dir={folder}"),
        *("data.image_size=16", "data.augment=none", "data.cutout=0", "data.fold=1/2"),
        *("train.epochs=6", "train.batch_size=16", "train.workers=0", "name=fold1"),
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Judge(folder / "mine", str(folder / "outputs" / "fold1"), flipped)
