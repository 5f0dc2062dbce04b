"""Compare losses under missing labels: `python scripts/studies/missing_labels.py SET=FOLDER ...`.

Datasets, network and tokens are as in `own_photos.py`. The head is average pooling. Each loss is
trained with one random positive per photo, and with 40 % of all positives (at least one per photo).
The seed selects the labels. Binary cross-entropy is also trained with all labels as an upper bound.

- tune: each loss at several learning rates, trained on two thirds of the training photos and
  evaluated on the other third with all labels, on three folds with seed 0. If the best rate is at
  the end of the range, the next rate of `RATES` is tried. Other settings are the authors'.
- judge: each loss at its best rate, trained on all training photos with three seeds, and evaluated
  on the validation photos after the last step.

Each finished run is a line of benchmarks/missing_labels.jsonl, so that an interrupted study can be
resumed. `--report` writes benchmarks/missing_labels.json and its plot, and prints the tables. A
loss is better or worse than AN if the 95 % interval of the paired difference excludes 0.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import own_photos
import torch
from torch import Tensor

from mldec.config.compose import compose
from mldec.data.labels import from_dense, random_positives
from mldec.evaluators.average_precision import average_precision
from mldec.tools.benchmark import environment
from mldec.tools.summary import paired_difference

TOP = Path(__file__).resolve().parents[2]
RUNS = TOP / "benchmarks" / "missing_labels.jsonl"
OUT = TOP / "benchmarks" / "missing_labels.json"
SEEDS = range(3)
FOLDS = 3
RATES = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]
FIRST = RATES[2:5]  # tried for every loss

RECIPE = ["head=gap", "train.batch_size=32", "train.epochs=10", "train.min_steps=300"]
RECIPE += ["train.start_at_frequency=false"]
BOUND = "bce, all labels"
BASE = "an"
PROTOCOLS = ("single positive", "40 % observed")
LOSSES = {
    BASE: ["loss=an"],
    "wan": ["loss=wan"],
    "an_ls": ["loss=an_ls"],
    "asl": ["loss=asl"],
    "focal": ["loss=focal"],
    "em": ["loss=em", "loss.alpha=0.2"],
    "hill": ["loss=hill"],
    "splc": ["loss=splc", "loss.start=0.1"],
    "ll_r": ["loss=ll_r"],
    "ll_ct": ["loss=ll_ct"],
    "gr": ["loss=gr"],
}
SETTINGS = {BOUND: ["loss=bce"]} | LOSSES
ROWS = [("all labels", BOUND)]
for _protocol in PROTOCOLS:
    ROWS += [(_protocol, loss) for loss in LOSSES]


def observed(labels: Tensor, protocol: str, seed: int) -> Tensor:
    """Return labels [n, K] without the positives that a protocol hides."""
    if protocol == "all labels":
        return labels
    sparse = from_dense(labels.numpy())
    share = None if protocol == "single positive" else 0.4
    return torch.from_numpy(sparse.select_entries(random_positives(sparse, seed, share)).dense())


def run(folder: str, row: tuple[str, str], rate: float, seed: int, fold: int | None) -> Any:
    """Train a loss under a protocol, and return mAP and CPU time."""
    protocol, loss = row
    settings = RECIPE + SETTINGS[loss] + [f"optim.lr={rate}", f"seed={seed}"]
    config = compose(own_photos.COMMON + [f"data.root={folder}"] + settings)
    photos = own_photos.load(folder, own_photos.PIXELS)
    tokens, labels = photos.train
    judged, judged_labels = photos.val
    kept = observed(labels, protocol, seed)

    # All losses have the same folds. The held-out fold has all labels.
    if fold is not None:
        part = torch.from_numpy(np.random.default_rng(seed).permutation(len(tokens)) % FOLDS)
        judged = tokens[part == fold]
        judged_labels = labels[part == fold]
        tokens = tokens[part != fold]
        kept = kept[part != fold]

    began = time.process_time()
    model = own_photos.train(config, tokens, kept).eval()
    seconds = time.process_time() - began
    with torch.no_grad():
        logits = torch.cat([model(block) for block in judged.split(64)])
    precision = 100 * average_precision(logits, judged_labels)["none"]
    return {
        "mAP": precision.nanmean().item(),
        "positives": int(kept.sum()),
        "all positives": int(labels.sum()),
        "cpu_seconds": round(seconds, 1),
    }


def finished() -> dict[str, dict[str, Any]]:
    """Return the finished runs by their keys."""
    lines = RUNS.read_text().splitlines() if RUNS.exists() else []
    return {line["key"]: line for line in map(json.loads, lines)}


def key(name: str, row: tuple[str, str], rate: float, seed: int, fold: int | None) -> str:
    """Return the key of a run."""
    text = f"{name}, {row[0]}, {row[1]}, rate {rate:g}, seed {seed}"
    return text if fold is None else f"{text}, fold {fold}"


def record(name: str, folder: str, row: tuple[str, str], rate: float, *which: Any) -> None:
    """Do a run unless it is finished, and append its result to the file."""
    title = key(name, row, rate, *which)
    if title in finished():
        return
    line = {"key": title, **run(folder, row, rate, *which)}
    with RUNS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{title}: mAP {line['mAP']:.2f}, {line['cpu_seconds']} s", flush=True)


def tuned(name: str, row: tuple[str, str]) -> dict[float, float]:
    """Return the mean over the folds for each rate whose runs are finished."""
    runs = finished()
    means = {}
    for rate in RATES:
        keys = [key(name, row, rate, 0, fold) for fold in range(FOLDS)]
        if runs.keys() >= set(keys):
            means[rate] = statistics.fmean(runs[one]["mAP"] for one in keys)
    return means


def tune(name: str, folder: str, row: tuple[str, str]) -> None:
    """Try the rates of a loss, and further rates while the best one is at an end of the range."""
    wanted = set(FIRST)
    while not wanted <= tuned(name, row).keys():
        for rate in sorted(wanted - tuned(name, row).keys()):
            for fold in range(FOLDS):
                record(name, folder, row, rate, 0, fold)
        means = tuned(name, row)
        place = RATES.index(max(means, key=lambda rate: means[rate]))
        wanted |= set(RATES[max(place - 1, 0) : place + 2])


def judged(name: str, row: tuple[str, str]) -> dict[int, float]:
    """Return the results of a loss at its best rate on the validation photos, by seed."""
    runs = finished()
    means = tuned(name, row)
    if not means:
        return {}
    rate = max(means, key=lambda rate: means[rate])
    keys = {seed: key(name, row, rate, seed, None) for seed in SEEDS}
    return {seed: runs[one]["mAP"] for seed, one in keys.items() if one in runs}


def judge(name: str, folder: str, row: tuple[str, str]) -> None:
    """Do the runs of a loss at its best rate on all training photos."""
    means = tuned(name, row)
    for seed in SEEDS:
        record(name, folder, row, max(means, key=lambda rate: means[rate]), seed, None)


def report(names: list[str]) -> None:
    """Write the JSON file and the plot, and print a table per set."""
    content: dict[str, Any] = {"settings": SETTINGS, "recipe": RECIPE, "environment": environment()}
    content["runs"] = list(finished().values())
    for name in names:
        print(f"\n| {name} | loss | rate | mAP | difference to {BASE} | 95 % interval | verdict |")
        print("|---|---|---|---|---|---|---|")
        for row in ROWS:
            results = judged(name, row)
            base = judged(name, (row[0], BASE))
            means = tuned(name, row)
            if not results:
                continue
            cells = ["-"] * 3
            common = sorted(results.keys() & base.keys())
            if row[1] != BASE and len(common) > 1:
                values = [results[seed] for seed in common]
                found = paired_difference(values, [base[seed] for seed in common])
                cells[0] = f"{found['difference']:+.1f}"
                low = found["low"]
                high = found["high"]
                if low is not None and high is not None:
                    cells[1] = f"{low:+.1f} to {high:+.1f}"
                    cells[2] = "open"
                    if low > 0:
                        cells[2] = "better"
                    elif high < 0:
                        cells[2] = "worse"
            rate = max(means, key=lambda rate: means[rate])
            content.setdefault("judged", {})[f"{name}, {row[0]}, {row[1]}"] = {
                "rate": rate,
                "mAP by seed": results,
                "folds by rate": means,
            }
            text = own_photos.cell(list(results.values()))
            print("| " + " | ".join(list(row) + [f"{rate:g}", text] + cells) + " |")
    OUT.write_text(json.dumps(content, indent=1) + "\n")
    draw(names)


def draw(names: list[str]) -> None:
    """Plot the results on the validation photos, with a panel per protocol."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for axes, protocol in zip(panels, PROTOCOLS, strict=True):
        rows = [row for row in ROWS if row[0] in ("all labels", protocol)]
        for number, row in enumerate(rows):
            found = [(place, judged(name, row)) for place, name in enumerate(names)]
            shown = [(place, list(values.values())) for place, values in found if len(values) > 1]
            axes.errorbar(
                [place + 0.06 * (number - len(rows) / 2) for place, _ in shown],
                [statistics.fmean(values) for _, values in shown],
                [statistics.stdev(values) for _, values in shown],
                fmt="o^sDvP"[number % 6],
                capsize=2,
                label=row[1],
            )
        axes.set_xticks(range(len(names)), names)
        axes.set_title(protocol)
    panels[0].set_ylabel("mAP, three seeds ± standard deviation")
    panels[1].legend(fontsize=7)
    figure.savefig(OUT.with_suffix(".png"), dpi=110)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sets", nargs="+", metavar="SET=FOLDER")
    parser.add_argument("--weights", help="file with the weights of EfficientNet-Lite0 (timm)")
    parser.add_argument("--losses", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--report", action="store_true", help="report the finished runs")
    arguments = parser.parse_args()
    sets = dict(text.split("=", 1) for text in arguments.sets)
    if arguments.weights:
        own_photos.COMMON.append(f"backbone.pretrained={arguments.weights}")

    for name, folder in sets.items():
        for row in ROWS:
            if row[1] in arguments.losses and arguments.tune:
                tune(name, folder, row)
            if row[1] in arguments.losses and arguments.judge:
                judge(name, folder, row)
    if arguments.report:
        report(list(sets))


if __name__ == "__main__":
    main()
