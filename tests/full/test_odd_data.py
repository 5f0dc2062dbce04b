"""Unusual class names, from training to prediction."""

import json
from pathlib import Path

from PIL import Image
from support import QUICK

WORDS = [word for word in QUICK if not word.startswith("data.")]
WORDS += ["data.cache_dir=cache", "data.image_size=32", "train.batch_size=8", "train.epochs=1"]


def test_unusual_class_names_survive_training_and_prediction(cli, here):
    names = ["Ram C/V, 'Cargo'", "\u72ac", "\U0001f415", "1", "a  b", "x" * 1_000]
    folder = Path("own")
    folder.mkdir()
    rows = []
    for number in range(24):
        Image.new("RGB", (32, 32), (10 * number, 0, 0)).save(folder / f"{number}.png")
        split = "train" if number < 16 else "val"
        rows.append(f'{number}.png,"{names[number % len(names)]}",{split}\n')
    (folder / "data.csv").write_text("path,labels,split\n" + "".join(rows))
    cli.out("train", *WORDS, "data=csv", "data.root=own", "name=odd")
    words = ["own/0.png", "--plugin", "patches", "--json", "-"]
    out = cli.out("predict", "outputs/odd/checkpoints/best.pt", *words)
    (answer,) = json.loads(out)
    assert {item["name"] for item in answer["predictions"]} <= set(names)
