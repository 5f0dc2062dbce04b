"""Do heat maps point at what they show? `python scripts/studies/pointing.py`.

The pointing game (Zhang et al. 2016, arXiv 1608.00507): for each class that a validation image
shows and that the model finds (score from 0.5), the maximum of its heat map counts if it lies in a
box of the class. No pixel of tolerance is given. Chance is the share of the image that the boxes
cover.

- Digits: the scenes of +experiment=digits, whose squares are known, with heads of all kinds. Each
  run takes four minutes of one CPU core.
- Photos, with --photos: +experiment=finetune_frozen on the photos of docs/results.md; --boxes is
  the file keypoints.json of the repository that they come from, and --originals its folder images:
  the boxes of the animals are in pixels of the originals.

Each row is judged with its own method, and with the others that fit its head. "cells" takes the
centre of the cell of the strongest token instead of the maximum of the map.

Runs are in outputs/pointing_ROW_SEED; an interrupted study goes on where it stopped. At the end
benchmarks/pointing.json gets the figures of the runs that are there.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mldec.benchmark import environment
from mldec.checkpoint import Loaded, load_model
from mldec.data.digits import SceneSettings, compose, digits, split_writings
from mldec.data.images import load_image, read_image
from mldec.data.randomness import SampleRandom
from mldec.errors import DataError, one_line
from mldec.predict import heat_maps as relevance
from mldec.predict.heat_maps import Explainer

TOP = Path(__file__).resolve().parents[2]
OUT = TOP / "benchmarks" / "pointing.json"
FOUND = 0.5  # the score from which on a class counts as found
BATCH = 64
MAX_DIGITS = 4  # as in +experiment=digits

DIGITS = [
    "+experiment=digits",
    "device=cpu",
    "train.workers=0",
    "train.epochs=4",
    "train.channels_last=false",
    "optim.name=adamw",
    "optim.lr=2e-3",
    "backbone.model_args.channels=[32,64,128,256]",
]
PHOTOS = ["+experiment=finetune_frozen", "device=cpu", "train.workers=0"]

Box = tuple[float, float, float, float]  # left, top, right, bottom, as fractions of the image


class Row(NamedTuple):
    """A head whose maps are judged."""

    name: str
    data: str  # digits or photos
    label: str
    settings: list[str]


SMALL = ["head.embed_dim=128", "head.num_heads=4", "head.mlp_dim=256"]
ROWS = [
    Row("ml_decoder", "digits", "ML-Decoder, one query per class", ["head.num_groups=null"]),
    Row("groups_5", "digits", "ML-Decoder, 5 queries", ["head.num_groups=5"]),
    Row("groups_2", "digits", "ML-Decoder, 2 queries", ["head.num_groups=2"]),
    Row("gap", "digits", "GAP", ["head=gap"]),
    Row(
        "query2label",
        "digits",
        "Query2Label",
        ["head=query2label", "head.input_proj=true", *SMALL],
    ),
    Row(
        "transformer",
        "digits",
        "transformer decoder",
        ["head.num_groups=null", "head.self_attention=true", "head.queries=learned"],
    ),
    Row("photos_ml_decoder", "photos", "ML-Decoder, one query per class", []),
    Row("photos_groups_6", "photos", "ML-Decoder, 6 queries", ["head.num_groups=6"]),
    Row("photos_groups_3", "photos", "ML-Decoder, 3 queries", ["head.num_groups=3"]),
    Row("photos_gap", "photos", "GAP", ["head=gap", "optim.lr=3e-3"]),
]


class Scenes(NamedTuple):
    """Images, and the boxes of each class in each of them: class index -> boxes."""

    images: Tensor  # uint8 [B, 3, S, S]
    boxes: list[dict[int, list[Box]]]


def digit_scenes(loaded: Loaded) -> Scenes:
    """Return the validation scenes of the digits, which the model has never seen."""
    data = loaded.config.data
    settings = SceneSettings(
        image_size=data["image_size"], val_images=data["val_images"], seed=data["seed"]
    )
    dataset: Any = digits(settings, max_digits=MAX_DIGITS).val.dataset
    writings = split_writings(settings.seed)[1]

    size = settings.image_size
    images, boxes = [], []
    for index in range(len(dataset)):
        rng = SampleRandom(0)  # validation scenes draw nothing from it
        image, target = dataset.load(index, rng)
        generator = dataset.generator(index, rng)
        _, placed = compose(generator, writings, size=size, max_digits=MAX_DIGITS)

        own: dict[int, list[Box]] = {}
        for row, (left, top, right, bottom) in placed:
            box = (left / size, top / size, right / size, bottom / size)
            own.setdefault(int(writings.labels[row]), []).append(box)
        if sorted(own) != target.nonzero().flatten().tolist():
            raise DataError(f"scene {index}: its squares are not those of its labels")

        images.append(image)
        boxes.append(own)
    return Scenes(torch.stack(images), boxes)


def photo_scenes(loaded: Loaded, photos: Path, keypoints: Path, originals: Path) -> Scenes:
    """Return the validation photos, with the boxes of the animals in them."""
    content = json.loads(keypoints.read_text())
    names = {category["id"]: category["name"] for category in content["categories"]}
    by_file: dict[str, list[tuple[int, list[float]]]] = {}
    for annotation in content["annotations"]:
        file = content["images"][str(annotation["image_id"])]
        column = loaded.classes.names.index(names[annotation["category_id"]])
        by_file.setdefault(file, []).append((column, annotation["bbox"]))

    images, boxes = [], []
    with (photos / "data.csv").open(newline="") as table:
        paths = [row["path"] for row in csv.DictReader(table) if row["split"] == "val"]
    for path in paths:
        # The whole photo is resized to a square, so that fractions of its sides stay what they are.
        width, height = read_image(originals / Path(path).name).size
        own: dict[int, list[Box]] = {}
        for column, (left, top, right, bottom) in by_file.get(Path(path).name, []):
            box = (left / width, top / height, right / width, bottom / height)
            own.setdefault(column, []).append(box)
        images.append(load_image(photos / path, loaded.transform))
        boxes.append(own)
    return Scenes(torch.stack(images), boxes)


def inside(point: tuple[float, float], boxes: list[Box]) -> bool:
    """Tell whether a point, in fractions of the sides of the image, lies in one of the boxes."""
    x, y = point
    return any(left <= x < right and top <= y < bottom for left, top, right, bottom in boxes)


def maximum(heat: Tensor) -> tuple[float, float]:
    """Return the centre of the largest cell of a map [h, w], in fractions of the sides."""
    row, column = divmod(int(heat.argmax()), heat.shape[1])
    return (column + 0.5) / heat.shape[1], (row + 0.5) / heat.shape[0]


def covered(boxes: list[Box]) -> float:
    """Return the share of an image that boxes cover together, to a fiftieth of a percent."""
    points = (torch.arange(224) + 0.5) / 224
    union = torch.zeros(224, 224, dtype=torch.bool)
    for left, top, right, bottom in boxes:
        rows, columns = (points >= top) & (points < bottom), (points >= left) & (points < right)
        union |= rows[:, None] & columns
    return float(union.float().mean())


def judge(loaded: Loaded, scenes: Scenes) -> dict[str, Any]:
    """Play the pointing game with all methods that fit a model, on the same pairs.

    Returns:
        The number of pairs, chance, and the share of maxima inside their boxes per method, all in
        percent. "own" is the method that users see; "cells" is the same without the measured
        positions of the tokens.
    """
    model = loaded.model
    explainer = Explainer(model, loaded.transform.image_size)
    with torch.no_grad():
        tokens = model.backbone(scenes.images[:1])
    method, own = relevance.choose(model, tokens, None)

    functions: dict[str, Callable[..., list[Tensor]]] = {"own": own}
    if model.gives_attention:
        functions["through_attention"] = relevance.through_attention
    functions["times_tokens"] = relevance.times_tokens

    chances = []
    hits: dict[str, list[bool]] = {name: [] for name in ("cells", *functions)}
    for start in range(0, len(scenes.images), BATCH):
        boxes = scenes.boxes[start : start + BATCH]
        with torch.no_grad():
            tokens = model.backbone(scenes.images[start : start + BATCH])
            found = model.classify(tokens).sigmoid() >= FOUND
        wanted = [
            [column for column in sorted(per_class) if found[image, column]]
            for image, per_class in enumerate(boxes)
        ]

        pairs = [
            (image, column) for image, own_classes in enumerate(wanted) for column in own_classes
        ]
        chances += [covered(boxes[image][column]) for image, column in pairs]
        for name, function in functions.items():
            rows = torch.cat(function(model, tokens, wanted, None))
            for (image, column), row, heat in zip(pairs, rows, explainer.place(rows), strict=True):
                hits[name].append(inside(maximum(heat), boxes[image][column]))
                if name == "own":
                    side = int(len(row) ** 0.5)
                    cell = maximum(row.unflatten(0, (side, side)))
                    hits["cells"].append(inside(cell, boxes[image][column]))

    return {
        "method": method,
        "pairs": len(chances),
        "chance": 100 * statistics.fmean(chances),
        "inside": {name: 100 * statistics.fmean(values) for name, values in hits.items()},
    }


def train(row: Row, seed: int, more: list[str]) -> Path:
    """Train a row with one seed, or go on with it, and return the folder of the run."""
    name = f"pointing_{row.name}_{seed}"
    common = DIGITS if row.data == "digits" else PHOTOS
    settings = [*common, *more, *row.settings, f"name={name}", f"seed={seed}", "resume=auto"]
    subprocess.run([sys.executable, "-m", "mldec.train", *settings], cwd=TOP, check=True)
    return TOP / "outputs" / name


def summarise(row: Row, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the entry of a row in the report: the mean over its seeds, and each of them."""
    return {
        "row": row.name,
        "data": row.data,
        "label": row.label,
        "settings": row.settings,
        "method": runs[0]["method"],
        "chance": statistics.fmean(run["chance"] for run in runs),
        "inside": {
            name: statistics.fmean(run["inside"][name] for run in runs)
            for name in runs[0]["inside"]
        },
        "runs": runs,
    }


def chosen_rows(args: argparse.Namespace) -> list[Row]:
    """Return the rows of the command line: those of photos need the photos."""
    parts = [args.part] if args.part else ["digits", *(["photos"] if args.photos else [])]
    return [row for row in ROWS if row.data in parts]


def report(args: argparse.Namespace) -> None:
    """Judge the runs that are there, write the JSON file, and print a line per row.

    The file keeps its figures of the rows that are not judged.
    """
    stored = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    entries = {entry["row"]: entry for entry in stored}
    scenes: dict[str, Scenes] = {}
    for row in chosen_rows(args):
        runs = []
        for seed in range(args.seeds):
            folder = TOP / "outputs" / f"pointing_{row.name}_{seed}"
            if not (folder / "checkpoints" / "best.pt").exists():
                continue

            loaded = load_model(folder, device="cpu")
            if row.data not in scenes and row.data == "digits":
                scenes[row.data] = digit_scenes(loaded)
            elif row.data not in scenes:
                scenes[row.data] = photo_scenes(loaded, args.photos, args.boxes, args.originals)

            result = judge(loaded, scenes[row.data])
            metric = "val_raw/mAP" if loaded.weights == "raw" else "val/mAP"
            mean_ap = loaded.metrics.get(metric, loaded.metrics["val/mAP"])  # without an average
            runs.append({"seed": seed, "mAP": mean_ap, **result})

        if runs:
            entry = entries[row.name] = summarise(row, runs)
            shares = [f"{name} {value:.1f}" for name, value in entry["inside"].items()]
            print(
                f"{row.data} {row.label}: {', '.join(shares)}, chance {entry['chance']:.1f}",
                flush=True,
            )

    content = {
        "common": {"digits": DIGITS, "photos": PHOTOS},
        "found": FOUND,
        "rows": [entries[row.name] for row in ROWS if row.name in entries],
        "environment": environment(),
    }
    OUT.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=Path, metavar="FOLDER", help="photos in the csv form")
    parser.add_argument("--boxes", type=Path, metavar="FILE", help="keypoints.json of the photos")
    parser.add_argument("--originals", type=Path, metavar="FOLDER", help="photos before resizing")
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="of EfficientNet-Lite0; default: timm's"
    )
    parser.add_argument("--part", choices=("digits", "photos"), help="only this part")
    parser.add_argument("--seeds", type=int, default=3, help="seeds per row (default 3)")
    parser.add_argument("--report", action="store_true", help="only judge the runs that are there")
    args = parser.parse_args()
    if args.photos and not (args.boxes and args.originals):
        parser.error("--photos needs --boxes and --originals")
    if args.part == "photos" and not args.photos:
        parser.error("--part photos needs --photos")

    photos = [f"data.root={args.photos.resolve()}"] if args.photos else []
    if args.weights:
        photos.append(f"backbone.pretrained={args.weights.resolve()}")

    with one_line():
        if not args.report:
            for seed in range(args.seeds):
                for row in chosen_rows(args):
                    train(row, seed, photos if row.data == "photos" else [])
        report(args)


if __name__ == "__main__":
    main()
