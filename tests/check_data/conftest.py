import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from support import CONFIGS

NAMES = ("red", "green", "blue")


class Judges(NamedTuple):
    """Labelled images, and a model per fold that was trained on them."""

    root: Path  # of the data set
    runs: tuple[str, str]  # folders of the runs of the folds 1/2 and 2/2
    flipped: set[tuple[str, str]]  # file name and class of the labels that are wrong


def write_squares(root: Path, *, images: int = 240, train: int = 200) -> set[tuple[str, str]]:
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
def judges(tmp_path_factory: pytest.TempPathFactory) -> Judges:
    """Two runs, made by real processes side by side; tests must not change them."""
    folder = tmp_path_factory.mktemp("judges")
    flipped = write_squares(folder / "mine")

    command = [
        *(sys.executable, "-m", "mldec.train", "+experiment=digits", f"--config-dir={CONFIGS}"),
        *("plugins=[patches]", "backbone=patches", "head=gap", "loss=bce", "device=cpu"),
        *("data=csv", f"data.root={folder / 'mine'}", f"data.cache_dir={folder}"),
        *("data.image_size=16", "data.augment=none", "data.cutout=0"),
        *("train.epochs=6", "train.batch_size=16", "train.workers=0"),
    ]
    processes = [
        subprocess.Popen(
            [*command, f"data.fold={number}/2", f"name=fold{number}"],
            cwd=folder,
            env=os.environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2)
    ]
    for process in processes:
        _, err = process.communicate()
        assert process.returncode == 0, err
    runs = (str(folder / "outputs" / "fold1"), str(folder / "outputs" / "fold2"))
    return Judges(folder / "mine", runs, flipped)
