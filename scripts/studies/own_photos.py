"""Compare recipes for the user's own photos: `python scripts/studies/own_photos.py SET=FOLDER ...`.

Each FOLDER has the layout of `data=csv`, with the splits train and val. `voc/500=FOLDER` takes 500
of its training photos, different ones for each seed. The network is EfficientNet-Lite0 with
ImageNet weights (from a file with --weights FILE). It is frozen: its tokens are computed once, and
only heads are trained.

- tune: each recipe is trained on two thirds of the training photos and evaluated on the other
  third, on three folds for each of the seeds 0, 1 and 2.
- judge: a few recipes are trained on all training photos with five seeds, and evaluated on the
  validation photos after the last step. No recipe was selected on these photos. The recipes are the
  former default, the default, the best recipe on the folds of the set, and the best recipe on the
  folds of all other sets (a subset of VOC is not another set of VOC).
- pixels: one recipe at several image sizes, on the folds and on the validation photos.

Each finished run is a line of benchmarks/own_photos.jsonl, so that an interrupted study can be
resumed. `--report` writes benchmarks/own_photos.json and its plot, and prints the tables.
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn

from mldec import build
from mldec.config.compose import compose
from mldec.data.labels import from_dense
from mldec.data.loader import Batch, TrainBatches
from mldec.evaluation.frozen_features import with_tokens
from mldec.evaluators.average_precision import average_precision
from mldec.model import Classifier
from mldec.runtime.environment import environment
from mldec.runtime.signals import StopRequest
from mldec.training import start
from mldec.training.step import Learner

TOP = Path(__file__).resolve().parents[2]
RUNS = TOP / "benchmarks" / "own_photos.jsonl"
OUT = TOP / "benchmarks" / "own_photos.json"
CPU = torch.device("cpu")
FOLDS = 3
TUNING_SEEDS = range(3)
SEEDS = range(5)
PIXELS = 224
SIZES = (160, 224, 320, 448)  # pixels that --pixels compares

COMMON = ["+experiment=finetune_frozen", "head=csra", "name=study", "device=cpu", "train.workers=0"]
COMMON += ["train.precision=fp32", "backbone=efficientnet_lite0"]
# A third of the paper's width, which costs six times as much here.
NARROW = ["head=ml_decoder", "head.embed_dim=256", "head.mlp_dim=512"]
SHORT = ["train.batch_size=32", "train.epochs=6", "train.min_steps=150"]
# The bias of a class is initialized from its frequency.
START = ["train.start_at_frequency=true"]
SHORT_BCE = ["loss=bce"] + START + SHORT
SHORT_MILD_ASL = ["loss=asl", "loss.gamma_neg=2", "loss.clip=0"] + START + SHORT
FAST = ["optim.lr=3e-3"]
SLOW = ["optim.lr=1e-3"]


def residual(weight: float) -> list[str]:
    """Return the settings of CSRA with one head and a weight of its attention."""
    return ["head=csra", "head.num_heads=1", f"head.lam={weight}"]


# Two former defaults of finetune_frozen, and the second one without its rule for few photos, which
# the changed settings and image sizes start from.
FORMER = "ml_decoder asl, 6 epochs"
DEFAULT = "csra 0.3 bce, start, focus"
PLAIN = "csra 0.3 bce, start"
FOCUS = ["loss.gamma_neg=2"]  # added to DEFAULT if there are fewer photos than classes
RECIPES = {
    FORMER: [
        "head=ml_decoder",
        "loss=asl",
        "loss.gamma_neg=4",
        "loss.clip=0.05",
        "train.start_at_frequency=false",
        "optim.lr=1e-3",
        "train.batch_size=64",
        "train.epochs=6",
        "train.min_steps=null",
    ],
    "gap bce, start": ["head=gap"] + SHORT_BCE + FAST,
    "gap mild asl, start": ["head=gap"] + SHORT_MILD_ASL + FAST,
    "csra 0.3 mild asl, start": residual(0.3) + SHORT_MILD_ASL + FAST,
    "csra 1 mild asl, start": residual(1) + SHORT_MILD_ASL + FAST,
    PLAIN: residual(0.3) + SHORT_BCE + FAST,
    DEFAULT: residual(0.3) + SHORT_BCE + FAST,
    "csra 1 bce, start": residual(1) + SHORT_BCE + FAST,
    "ml_decoder bce, start": ["head=ml_decoder"] + SHORT_BCE + SLOW,
    "narrow bce, start": NARROW + SHORT_BCE + SLOW,
    "narrow mild asl, start": NARROW + SHORT_MILD_ASL + SLOW,
}
# One changed setting.
CHANGES = {
    "rate 1e-3": ["optim.lr=1e-3"],
    "rate 1e-2": ["optim.lr=1e-2"],
    "300 steps": ["train.epochs=12", "train.min_steps=300"],
    "no warm-up": ["schedule.pct_start=0.01"],
    "decay 0.1": ["optim.weight_decay=0.1"],
    "dropout 0.3": ["head.dropout=0.3"],
    "moving average": ["train.ema_decay=0.98"],
    "two-way": ["loss=two_way"],
}
RECIPES |= {f"{PLAIN}, {name}": RECIPES[PLAIN] + CHANGES[name] for name in CHANGES}


@dataclass(frozen=True)
class Photos:
    """Tokens [n, T, C] and labels [n, K] of both splits of a set."""

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]


@cache
def load(folder: str, pixels: int) -> Photos:
    """Return the photos of a folder. Tokens are computed unless they are cached."""
    config = compose(COMMON + [f"data.root={folder}", f"data.image_size={pixels}"])
    parts = build.check(config)
    photos = build.data(parts)
    model = build.model(parts, photos.train.classes)
    data = with_tokens(photos, model, config, device=CPU, stop=StopRequest())

    def tensors(split: Any) -> tuple[Tensor, Tensor]:
        pairs = [split.dataset.load(index, None) for index in range(len(split.dataset))]
        tokens, labels = zip(*pairs, strict=True)
        return torch.stack(tokens), torch.stack(labels)

    return Photos(tensors(data.train), tensors(data.val))


def run(
    name: str, folder: str, recipe: str, seed: int, fold: int | None, pixels: int
) -> dict[str, Any]:
    """Train a recipe on a set, and return mAP, average precisions and CPU time."""
    photos = load(folder, pixels)
    tokens, labels = photos.train
    chosen = torch.arange(len(tokens))
    if "/" in name:
        shuffled = np.random.default_rng(seed).permutation(len(tokens))
        chosen = torch.from_numpy(shuffled[: int(name.split("/")[1])])

    # All recipes have the same folds.
    judged, judged_labels = photos.val
    if fold is not None:
        part = torch.from_numpy(np.random.default_rng(seed).permutation(len(chosen)) % FOLDS)
        judged = tokens[chosen[part == fold]]
        judged_labels = labels[chosen[part == fold]]
        chosen = chosen[part != fold]
    tokens = tokens[chosen]
    labels = labels[chosen]

    settings = COMMON + [f"data.root={folder}"] + RECIPES[recipe] + [f"seed={seed}"]
    if recipe == DEFAULT and len(tokens) < labels.shape[1]:
        settings += FOCUS
    config = compose(settings)
    began = time.process_time()
    model = train(config, tokens, labels)
    seconds = time.process_time() - began
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(block) for block in judged.split(64)])
    precision = average_precision(logits, judged_labels)["none"]
    return {
        "mAP": 100 * precision.nanmean().item(),
        "AP": [
            None if math.isnan(value) else round(100 * value, 2) for value in precision.tolist()
        ],
        "cpu_seconds": round(seconds, 1),
    }


def train(config: Any, tokens: Tensor, labels: Tensor) -> nn.Module:
    """Train the head of a config on tokens [n, T, C] and labels [n, K], as the trainer does."""
    parts = build.check(config)
    torch.manual_seed(config.seed)
    head = parts["head"].call(in_features=tokens.shape[2], num_classes=labels.shape[1])
    loss = build.loss(parts, lambda: from_dense(labels.numpy()))
    if config.train.start_at_frequency:
        start.start_at_frequency(head, from_dense(labels.numpy()), loss)
    batches = TrainBatches(len(tokens), batch_size=config.train.batch_size, seed=config.seed)
    config.train = config.train.with_resolved_epochs(batches.steps)
    config.train.freeze = []
    epochs = config.train.epochs

    no_backbone = nn.Identity()
    no_backbone.num_features = tokens.shape[2]  # type: ignore[assignment]
    model = Classifier(no_backbone, head)
    learner = Learner(config, model, loss, device=CPU, steps=epochs * batches.steps)
    learner.train()
    for batches.epoch in range(epochs):
        for step, keys in enumerate(batches):
            rows = torch.tensor([index for _, index, _ in keys])
            learner.learn([Batch(tokens[rows], labels[rows], rows)], batches.images_in_step(step))
        learner.read()
    return learner.average or model


def finished() -> dict[str, dict[str, Any]]:
    """Return the finished runs by their keys."""
    lines = RUNS.read_text().splitlines() if RUNS.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


def record(
    name: str, folder: str, recipe: str, seed: int, fold: int | None, pixels: int | None = None
) -> None:
    """Do a run unless it is finished, and append its result to the file."""
    title = name if pixels is None else f"{name}@{pixels}"
    key = f"{title} {recipe} seed {seed}" + ("" if fold is None else f" fold {fold}")
    if key in finished():
        return

    line = {"key": key, "settings": RECIPES[recipe]}
    line |= run(name, folder, recipe, seed, fold, pixels or PIXELS)
    with RUNS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{key}: mAP {line['mAP']:.2f}, {line['cpu_seconds']} s", flush=True)


def tune(name: str, folder: str, recipe: str, pixels: int | None = None) -> None:
    """Do the runs of a recipe on the folds of a set."""
    for seed in TUNING_SEEDS:
        for fold in range(FOLDS):
            record(name, folder, recipe, seed, fold, pixels)


def judge(name: str, folder: str, recipe: str, pixels: int | None = None) -> None:
    """Do the runs of a recipe that are evaluated on the validation photos of a set."""
    for seed in SEEDS:
        record(name, folder, recipe, seed, None, pixels)


def tuned(name: str, recipe: str, runs: dict[str, dict[str, Any]]) -> float | None:
    """Return the mean over the folds of a set; None if a run is missing."""
    values = []
    for seed in TUNING_SEEDS:
        for fold in range(FOLDS):
            key = f"{name} {recipe} seed {seed} fold {fold}"
            if key not in runs:
                return None
            values.append(runs[key]["mAP"])
    return statistics.fmean(values)


def choices(names: list[str], runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return for each set the best recipe on its folds, and on the folds of the other sets.

    Recipes with unfinished runs are skipped. The result is empty if there are no others.
    """
    rows: dict[str, dict[str, float]] = {}
    for recipe in RECIPES:
        row = {}
        for name in names:
            value = tuned(name, recipe, runs)
            if value is not None:
                row[name] = value
        if len(row) == len(names):
            rows[recipe] = row
    if not rows:
        return {}

    def best(chosen: list[str]) -> str:
        return max(rows, key=lambda recipe: sum(rows[recipe][name] for name in chosen))

    families = {name: name.partition("/")[0] for name in names}
    return {
        name: {
            "chosen": best([name]),
            "elsewhere": best([other for other in names if families[other] != families[name]]),
        }
        for name in names
    }


def judged(name: str, recipe: str, runs: dict[str, dict[str, Any]]) -> list[float]:
    """Return the results of a recipe on the validation photos of a set, for the finished seeds."""
    keys = [f"{name} {recipe} seed {seed}" for seed in SEEDS]
    return [runs[key]["mAP"] for key in keys if key in runs]


def report(names: list[str]) -> None:
    """Write the JSON file and the plot, and print the tables of the finished runs."""
    runs = finished()
    content: dict[str, Any] = {"recipes": RECIPES, "environment": environment()}
    for title, result in (("folds", tuned), ("judged", judged)):
        content[title] = {
            recipe: {name: result(name, recipe, runs) for name in names} for recipe in RECIPES
        }
        print_table(title, content[title])
    content["choices"] = choices(names, runs)
    print(json.dumps(content["choices"], indent=1))

    # Keys of other image sizes have the form SET@PIXELS.
    sized = sorted({key.partition("@")[0] for key in runs if "@" in key})
    for title, result in (("folds, by pixels", tuned), ("judged, by pixels", judged)):
        content[title] = {
            str(size): {name: result(f"{name}@{size}", PLAIN, runs) for name in sized}
            for size in SIZES
        }
        print_table(title, content[title])
    content["CPU seconds per photo, by pixels"] = costs()
    print(content["CPU seconds per photo, by pixels"])
    OUT.write_text(json.dumps(content, indent=1) + "\n")
    draw(content["judged"])


def print_table(title: str, table: dict[str, dict[str, Any]]) -> None:
    """Print a table in Markdown, with a row per key."""
    names = list(next(iter(table.values())))
    print(f"\n| {title} | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for row, cells in table.items():
        print(f"| {row} | {' | '.join(map(cell, cells.values()))} |")


def costs() -> dict[str, float]:
    """Return the CPU seconds per photo of the network at each size, timed in turns."""
    network = build.backbone(build.check(compose(COMMON + ["data.root=."]))).eval()
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    with torch.inference_mode():
        for _ in range(5):
            for size, times in seconds.items():
                images = torch.zeros(4, 3, size, size)
                began = time.process_time()
                network(images)
                times.append((time.process_time() - began) / len(images))
    return {str(size): round(statistics.median(times), 4) for size, times in seconds.items()}


def draw(table: dict[str, dict[str, list[float]]]) -> None:
    """Plot the results on the validation photos, with a group of points per set."""
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    rows = {recipe: row for recipe, row in table.items() if any(row.values())}
    for number, (recipe, row) in enumerate(rows.items()):
        shown = [(place, results) for place, results in enumerate(row.values()) if results[1:]]
        places = [place + 0.1 * number - 0.05 * len(rows) for place, _ in shown]
        means = [statistics.fmean(results) for _, results in shown]
        spreads = [statistics.stdev(results) for _, results in shown]
        axes.errorbar(places, means, spreads, fmt="o", capsize=2, label=recipe)
    names = list(next(iter(table.values())))
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="mAP on the validation photos, five seeds ± standard deviation")
    axes.yaxis.label.set_fontsize(8)
    axes.legend(fontsize=8)
    figure.savefig(OUT.with_suffix(".png"), dpi=110)


def cell(result: float | list[float] | None) -> str:
    """Return a result, or mean and standard deviation of several seeds, as text."""
    if isinstance(result, list) and len(result) > 1:
        return f"{statistics.fmean(result):.1f} ± {statistics.stdev(result):.1f}"
    return f"{result:.1f}" if isinstance(result, float) else "-"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sets", nargs="+", metavar="SET=FOLDER")
    parser.add_argument("--weights", help="file with the weights of EfficientNet-Lite0 (timm)")
    parser.add_argument("--tune", nargs="*", choices=RECIPES, metavar="RECIPE", default=[])
    parser.add_argument("--judge", nargs="*", choices=RECIPES, metavar="RECIPE", default=[])
    parser.add_argument("--pixels", action="store_true", help="compare image sizes")
    parser.add_argument("--report", action="store_true", help="report the finished runs")
    arguments = parser.parse_args()
    sets = dict(text.split("=", 1) for text in arguments.sets)
    if arguments.weights:
        COMMON.append(f"backbone.pretrained={arguments.weights}")

    for name, folder in sets.items():
        for recipe in arguments.tune:
            tune(name, folder, recipe)
        for recipe in arguments.judge:
            judge(name, folder, recipe)
        for pixels in SIZES if arguments.pixels else ():
            tune(name, folder, PLAIN, pixels)
            judge(name, folder, PLAIN, pixels)
    if arguments.report:
        report(list(sets))


if __name__ == "__main__":
    main()
