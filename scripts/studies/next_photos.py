"""Compare ways to choose the next photos to label: `python scripts/studies/next_photos.py ...`.

VOC and COREL are folders in the layout of `data=csv`, with the splits train and val, and train and
test. All labels are known, and those of a photo are hidden until it is chosen.

- Features: mean tokens of EfficientNet-Lite0 with ImageNet weights (a file with --weights) at 224
  pixels, computed once. Each feature is standardized.
- Classifier: logistic regression for each class with an L2 penalty, trained by 15 steps of L-BFGS
  per round from the weights of the last round. It is the model of `+experiment=finetune_frozen
  head=gap` (linear layer on mean tokens, binary cross entropy), which AdamW trains there. The
  penalty was chosen on VOC.
- A run starts with 100 random photos (Corel5k: 200) and adds as many in each round. The mAP of
  the validation photos is computed in each round. The goal is 95 % of the mAP of a classifier
  with all labels.
- Thresholds maximize the F1 of each class on the validation photos, as in `mldec calibrate`.

Each finished run is a line of runs.jsonl in the folder --features, so that an interrupted study can
be resumed. The last step writes benchmarks/next_photos.json and prints the tables.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from mldec import build
from mldec.config.compose import compose
from mldec.data.loader import eval_loader
from mldec.data.types import DataModule, Split, StoredImages
from mldec.evaluators.average_precision import average_precision
from mldec.runtime.console import progress_bar, to_console
from mldec.runtime.environment import environment
from mldec.tools.next import choose, uncertainties

OUT = Path(__file__).resolve().parents[2] / "benchmarks" / "next_photos.json"
SEEDS = range(5)
ROUNDS = {"voc": 100, "corel5k": 200}  # photos of the first and of each following round
GOAL = 0.95
C = 3e-3  # inverse strength of the L2 penalty, as in scikit-learn
MOST = {"voc": 1500, "corel5k": 3600}  # photos of the last round
SHOWN = {"voc": (200, 300, 500, 700, 1000, 1500), "corel5k": (400, 800, 1200, 1800, 2400, 3000)}
CONVERGED = 200  # steps of L-BFGS for the classifier with all labels
STEPS = 15  # steps in each round, which starts with the weights of the last round


@dataclass(frozen=True)
class Photos:
    """Features float32 [n, C] and labels int8 [n, K] of both splits of a set."""

    train: np.ndarray
    labels: np.ndarray
    val: np.ndarray
    val_labels: np.ndarray


@dataclass(frozen=True)
class Round:
    """What a strategy may use to choose photos."""

    scores: np.ndarray  # float32 [N, K], of the photos without labels
    features: np.ndarray  # float32 [N, C]
    labeled: np.ndarray  # float32 [M, C], features of the photos with labels
    positives: np.ndarray  # int [K], positives among them
    thresholds: np.ndarray  # float32 [K]
    rng: np.random.Generator
    count: int  # photos to choose

    def uncertainty(self, *, fixed: bool = False, balanced: bool = False) -> np.ndarray:
        """Return the sum of the uncertainties of all classes, float [N].

        `fixed`: the threshold of each class is 0.5. `balanced`: each class is weighted by the
        inverse of its positives.
        """
        thresholds = np.full_like(self.thresholds, 0.5) if fixed else self.thresholds
        uncertainty = uncertainties(self.scores, thresholds.tolist())
        if balanced:
            return uncertainty @ (1 / (1 + self.positives))
        return uncertainty.sum(1)


def at_random(now: Round) -> np.ndarray:
    """Choose photos at random."""
    return now.rng.permutation(len(now.scores))[: now.count]


def most_uncertain(**options: bool) -> Callable[[Round], np.ndarray]:
    """Return a strategy that chooses the photos with the largest uncertainty."""
    return lambda now: np.argsort(-now.uncertainty(**options))[: now.count]


def most_different(now: Round) -> list[int]:
    """Choose photos that differ from the labeled and the chosen photos (k-center)."""
    return choose(np.ones(len(now.scores)), now.features, now.labeled, now.count)


def uncertain_and_different(**options: bool) -> Callable[[Round], list[int]]:
    """Return the strategy of `mldec next`, or a variant."""
    return lambda now: choose(now.uncertainty(**options), now.features, now.labeled, now.count)


def badge(now: Round) -> list[int]:
    """Choose photos by BADGE (Ash et al., ICLR 2020) for several labels: k-means++ of gradients.

    The gradient of a photo is the outer product of its features and of the difference of its scores
    and its predicted labels. Scores are first moved by the thresholds to 0.5.
    """
    thresholds = now.thresholds
    signs = np.where(now.scores >= thresholds, -1, 1)
    residuals = (signs * uncertainties(now.scores, thresholds.tolist()) / 2).astype(np.float32)
    norms = (residuals**2).sum(1) * (now.features**2).sum(1)

    distance = norms
    chosen: list[int] = []
    for _ in range(now.count):
        distance = np.maximum(distance, 0)
        distance[chosen] = 0
        if chosen:
            sums = np.cumsum(distance, dtype=np.float64)
            last = int(np.searchsorted(sums, now.rng.random() * sums[-1]))
        else:
            last = int(distance.argmax())
        chosen.append(min(last, len(distance) - 1))
        products = (residuals @ residuals[last]) * (now.features @ now.features[last])
        distance = np.minimum(distance, norms + norms[last] - 2 * products)
    return chosen


STRATEGIES: dict[str, Callable[[Round], Any]] = {
    "random": at_random,
    "uncertainty at 0.5": most_uncertain(fixed=True),
    "uncertainty": most_uncertain(),
    "uncertainty, balanced": most_uncertain(balanced=True),
    "diversity (k-center)": most_different,
    "uncertainty x diversity": uncertain_and_different(),
    "uncertainty x diversity, balanced": uncertain_and_different(balanced=True),
    "BADGE": badge,
}


@torch.inference_mode()
def features(data: DataModule, split: Split, network: torch.nn.Module, title: str) -> list[Any]:
    """Return the mean tokens float32 [n, C] and the labels int8 [n, K] of a split."""
    assert isinstance(split.dataset, StoredImages)
    split = split.viewed(data.transform)
    rows = []
    targets = []
    for batch in progress_bar(
        eval_loader(data, batch_size=16, workers=0, pin=False, dataset=split.dataset), desc=title
    ):
        images = batch.images.contiguous(memory_format=torch.channels_last)
        rows.append(network(images).mean(1).numpy())
        targets.append(batch.targets.numpy())
    return [np.concatenate(rows), np.concatenate(targets)]


def load(name: str, folder: str, val: str, weights: str | None, cache: Path) -> Photos:
    """Return the photos of a folder, with features from the cache if they are there."""
    file = cache / f"{name}.npz"
    if not file.exists():
        settings = ["+experiment=finetune_frozen", "head=gap", "backbone=efficientnet_lite0"]
        settings += ["data.image_size=224", f"data.root={folder}", f"data.val={val}"]
        if weights:
            settings.append(f"backbone.pretrained={weights}")
        parts = build.check(compose(settings))
        data = build.data(parts)
        network = build.backbone(parts).eval().to(memory_format=torch.channels_last)
        arrays = features(data, data.train, network, f"{name}, train")
        arrays += features(data, data.val, network, f"{name}, {val}")
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(file, *arrays)

    train, labels, other, other_labels = np.load(file).values()
    mean = train.mean(0)
    deviation = train.std(0) + 1e-6
    return Photos((train - mean) / deviation, labels, (other - mean) / deviation, other_labels)


def fit(photos: np.ndarray, labels: np.ndarray, weights: Tensor | None, steps: int) -> Tensor:
    """Return the weights [C + 1, K] of logistic regressions; the last row is the bias."""
    inputs = torch.from_numpy(photos)
    targets = torch.from_numpy(labels.astype(np.float32))
    if weights is None:
        weights = torch.zeros(inputs.shape[1] + 1, targets.shape[1])
    weights = weights.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=steps, history_size=10, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = inputs @ weights[:-1] + weights[-1]
        loss = binary_cross_entropy_with_logits(logits, targets, reduction="sum")
        loss = (loss + (weights[:-1] ** 2).sum() / (2 * C)) / len(inputs)
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach()


def logits(weights: Tensor, photos: np.ndarray) -> Tensor:
    """Return the logits of photos, [n, K]."""
    return torch.from_numpy(photos) @ weights[:-1] + weights[-1]


def mean_ap(weights: Tensor, photos: Photos) -> float:
    """Return the mAP of the validation photos in percent, over classes with a positive."""
    precision = average_precision(logits(weights, photos.val), torch.from_numpy(photos.val_labels))
    return 100 * precision["none"].nanmean().item()


def best_thresholds(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the threshold of each class with the highest F1, [K]."""
    order = np.argsort(-scores, axis=0)
    hits = np.take_along_axis(labels, order, axis=0).cumsum(0)
    predicted = np.arange(1, len(scores) + 1)[:, None]
    best = (2 * hits / (predicted + hits[-1])).argmax(0)
    return np.take_along_axis(np.take_along_axis(scores, order, axis=0), best[None], axis=0)[0]


def run(photos: Photos, strategy: Callable[[Round], Any], seed: int, name: str) -> list[float]:
    """Return the mAP after each round of a set."""
    count = ROUNDS[name]
    rng = np.random.default_rng(seed)
    labeled = rng.permutation(len(photos.train))[:count]
    weights = None
    curve = []
    while True:
        weights = fit(photos.train[labeled], photos.labels[labeled], weights, STEPS)
        curve.append(round(mean_ap(weights, photos), 2))
        if len(labeled) >= MOST[name]:
            return curve

        others = np.setdiff1d(np.arange(len(photos.train)), labeled)
        val_scores = logits(weights, photos.val).sigmoid().numpy()
        now = Round(
            logits(weights, photos.train[others]).sigmoid().numpy(),
            photos.train[others],
            photos.train[labeled],
            photos.labels[labeled].sum(0),
            best_thresholds(val_scores, photos.val_labels),
            rng,
            count,
        )
        labeled = np.concatenate([labeled, others[strategy(now)]])


def needed(curve: list[float], goal: float, count: int) -> int | None:
    """Return the number of labeled photos at the first round that reaches the goal."""
    for number, value in enumerate(curve, 1):
        if value >= goal:
            return count * number
    return None


def report(name: str, full: float, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the tables of a set, and return their content."""
    content: dict[str, Any] = {"full mAP": round(full, 2), "goal": round(GOAL * full, 2)}
    shown = SHOWN[name]
    print(f"\n{name}: full mAP {full:.1f}, goal {GOAL * full:.1f}")
    print(f"| strategy | photos for the goal | {' | '.join(map(str, shown))} |")
    print(f"|---|---|{'---|' * len(shown)}")
    for strategy in STRATEGIES:
        curves = [
            line["mAP"] for line in runs if (line["set"], line["strategy"]) == (name, strategy)
        ]
        if len(curves) < len(SEEDS):
            continue
        numbers = [needed(curve, GOAL * full, ROUNDS[name]) for curve in curves]
        reached = [number for number in numbers if number is not None]
        text = f"{len(reached)} of {len(numbers)} runs"
        if len(reached) == len(numbers):
            text = f"{statistics.fmean(reached):,.0f} ± {statistics.stdev(reached):,.0f}"
        cells = []
        for count in shown:
            values = [curve[count // ROUNDS[name] - 1] for curve in curves]
            cells.append(f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}")
        print(f"| {strategy} | {text} | {' | '.join(cells)} |")
        content[strategy] = {
            "photos for the goal": numbers,
            "mAP": dict(zip(shown, cells, strict=True)),
        }
    return content


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("voc")
    parser.add_argument("corel5k")
    parser.add_argument("--weights", help="file with the weights of EfficientNet-Lite0 (timm)")
    parser.add_argument(
        "--features",
        type=Path,
        default=Path("outputs/next_photos"),
        help="folder of the features and runs",
    )
    arguments = parser.parse_args()
    to_console()

    runs = []
    runs_file = arguments.features / "runs.jsonl"
    if runs_file.exists():
        runs = [json.loads(line) for line in runs_file.read_text().splitlines()]
    content: dict[str, Any] = {}
    for name, val in (("voc", "val"), ("corel5k", "test")):
        folder = getattr(arguments, name)
        photos = load(name, folder, val, arguments.weights, arguments.features)
        full = mean_ap(fit(photos.train, photos.labels, None, CONVERGED), photos)
        for seed in SEEDS:
            for title, strategy in STRATEGIES.items():
                key = {"set": name, "strategy": title, "seed": seed}
                if any(key.items() <= line.items() for line in runs):
                    continue
                began = time.process_time()
                line: dict[str, Any] = {**key, "mAP": run(photos, strategy, seed, name)}
                line["cpu_seconds"] = round(time.process_time() - began, 1)
                runs.append(line)
                with runs_file.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        content[name] = report(name, full, runs)

    content["CPU seconds of all runs"] = round(sum(line["cpu_seconds"] for line in runs))
    content["environment"] = environment()
    OUT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
