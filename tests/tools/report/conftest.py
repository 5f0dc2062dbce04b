"""Runs of seconds on data of each kind, and few resamples."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support import CONFIGS, QUICK

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def squares(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on a fold of squares of mixed colours, of which one file is damaged."""
    rng = np.random.default_rng(0)
    root = tmp_path / "mine"
    root.mkdir()
    rows = ["path,labels,split"]
    for number in range(60):
        shown = rng.random(3) < 0.4
        pixels = 200 * shown + rng.integers(0, 50, (20, 40, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(root / f"{number}.png")
        labels = [name for name, is_shown in zip("rgb", shown, strict=True) if is_shown]
        rows.append(f"{number}.png,{';'.join(labels)},train")
    (root / "data.csv").write_text("\n".join(rows) + "\n")
    (root / "7.png").write_bytes(b"damaged")

    monkeypatch.chdir(tmp_path)
    words = [word for word in QUICK if not word.startswith(("data.", "head.", "--config"))]
    status, _, err = cli(
        "train",
        *words,
        f"--config-dir={CONFIGS}",
        *("head=gap", "loss=bce", "data=csv", f"data.root={root}", f"data.cache_dir={tmp_path}"),
        *("data.fold=1/2", "data.image_size=16", "data.augment=none", "data.cutout=0"),
        *("data.bad_images=skip", "name=squares", "data.test_crop=0.5"),
    )
    assert status == 0, err
    return tmp_path / "outputs" / "squares"
