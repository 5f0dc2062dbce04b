"""`mldec check-data --write`: a training starts with the printed settings."""

import json
import shlex

import numpy as np
from pictures import picture
from PIL import Image


def test_training_on_a_clean_table(cli, here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    folder = here / "own photos"
    folder.mkdir()
    rows = ["path,labels"]
    for video in range(20):
        pixels = np.asarray(picture(64, 48, seed=video)).astype(int)
        for number in range(3):
            noise = np.random.default_rng(number).integers(-5, 6, pixels.shape)
            image = Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))
            image.save(folder / f"{video}-{number}.png")
            rows.append(f"{video}-{number}.png,{'cat' if video % 2 else 'dog;sea'}")
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "data.csv").write_text("\n".join([*rows, "broken.png,cat"]))

    # `check-data` sees the split of `head=ridge`, which holds out no images.
    own = ["+experiment=finetune_frozen"]
    checked = cli("check-data", *own, f"data.root={folder}", "--write", "clean.csv")
    assert checked.status == 0, checked.err
    printed = checked.out.partition("train with ")[2].partition("\n")[0]
    assert "data=csv" in printed
    small = ["backbone=tiny", "head=csra", "train.epochs=1", "train.min_steps=null"]
    small += ["data.image_size=64", "train.workers=0", "name=clean"]
    trained = cli("train", *own, *shlex.split(printed), *small)
    assert trained.status == 0, trained.err
    assert "54 images are in 18 groups" in (here / "outputs/clean/train.log").read_text()
    evaluated = cli("evaluate", "outputs/clean", "--json", "result.json")
    assert evaluated.status == 0, evaluated.err
    assert json.loads((here / "result.json").read_text())["images"] == 6
