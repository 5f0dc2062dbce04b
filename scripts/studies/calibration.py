#!/usr/bin/env python
"""Judge ways to make probabilities of logits: `python scripts/studies/calibration.py FILES`.

FILES are checkpoints, whose validation images are scored, or .npz files with logits [N, K] and
labels [N, K] of 1 and 0. More than 400 images are also judged by 300 and by 100 of them. Each image
is judged by a fit to the other four fifths, the mean of several draws of images and folds. The file
of `--json` gets the figures of each set at once, beside those that it holds already.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit

from mldec.checkpoint import load_model
from mldec.evaluation.open import open_for_evaluation
from mldec.evaluation.options import EvalOptions
from mldec.evaluators.label_errors import common_slope, platt, soft_targets
from mldec.files.atomic import write_json
from mldec.tools.benchmark import environment

BINS, PERFECT_DRAWS, ROUNDS = 15, 10, 20
# Logits [N, K] and whether an image shows a class, bool [N, K] -> slopes and offsets, [K] or one.
Fitter = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def temperature(logits: np.ndarray, present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit one slope for all classes, as `mldec calibrate` did before."""

    def derivative(log_slope: float) -> float:
        return float(((expit(logits * np.exp(log_slope)) - present) * logits).sum())

    low, high = np.log(0.05), np.log(20)
    is_inside = derivative(low) < 0 < derivative(high)
    slope = np.exp(brentq(derivative, low, high)) if is_inside else 1.0
    return np.array(slope), np.array(0.0)


def with_offsets(logits: np.ndarray, present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit one slope for all classes, and an offset per class, to the targets of Platt (1999)."""
    slope = common_slope(logits, present)
    targets, prior = soft_targets(present, ~present)
    offsets = []
    for column, sought, level in zip((slope * logits).T, targets.T, prior, strict=True):

        def excess(
            offset: float, column: np.ndarray = column, sought: np.ndarray = sought
        ) -> float:
            return float((expit(column + offset) - sought).sum())

        offsets.append(brentq(excess, level - column.max() - 1, level - column.min() + 1))
    return np.array(slope), np.array(offsets)


def platt_scaling(
    logits: np.ndarray, present: np.ndarray, common: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Fit slope and offset of each class."""
    columns = zip(logits.T, present.T, strict=True)
    slopes, offsets = zip(*(platt(*column, common) for column in columns), strict=True)
    return np.array(slopes), np.array(offsets)


def shrunk(logits: np.ndarray, present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit slope and offset of each class, as `mldec calibrate` does."""
    return platt_scaling(logits, present, common_slope(logits, present))


WAYS: dict[str, Fitter] = {
    "none": lambda logits, present: (np.array(1.0), np.array(0.0)),
    "temperature": temperature,
    "temperature, offset per class": with_offsets,
    "Platt": platt_scaling,
    "Platt, slopes shrunk": shrunk,
}


def error(scores: np.ndarray, present: np.ndarray) -> float:
    """Return the calibration error over all pairs in percent, as `mldec calibrate` does."""
    bins = np.minimum((scores * BINS).astype(int), BINS - 1).ravel()
    gaps = np.bincount(bins, (scores - present).ravel(), BINS)
    return 100 * float(np.abs(gaps).sum()) / scores.size


def judged(fitter: Fitter, logits: np.ndarray, present: np.ndarray, seed: int) -> list[float]:
    """Return ECE, that of perfect probabilities, log loss and OF1 at 0.5, all cross-fitted."""
    rng, scaled = np.random.default_rng(seed), np.zeros(logits.shape)
    folds = rng.permutation(len(logits)) % 5
    for fold in range(5):
        own = folds == fold
        slopes, offsets = fitter(logits[~own], present[~own])
        scaled[own] = slopes * logits[own] + offsets

    scores, predicted = expit(scaled), scaled >= 0
    perfect = [error(scores, rng.random(scores.shape) < scores) for _ in range(PERFECT_DRAWS)]
    log_loss = (np.logaddexp(0, scaled) - present * scaled).mean()
    of1 = 200 * (predicted & present).sum() / max(predicted.sum() + present.sum(), 1)
    return [error(scores, present), float(np.mean(perfect)), float(log_loss), float(of1)]


def scored(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return logits and labels of the validation images of a checkpoint, or of a file."""
    if path.endswith(".npz"):
        with np.load(path) as arrays:
            return arrays["logits"].astype(float), arrays["labels"] == 1
    options = EvalOptions(checkpoint=path)
    scores = open_for_evaluation(load_model(path), options, calibrated=False).scores()
    return scores.logits.astype(float), scores.labels == 1


def main() -> None:
    """Judge all ways on all sets, and write the figures."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("files", nargs="+")
    arguments.add_argument("--json", default="benchmarks/calibration.json")
    args = arguments.parse_args()

    out = Path(args.json)
    figures = json.loads(out.read_text())["figures"] if out.exists() else {}
    for path in args.files:
        logits, present = scored(path)
        for size in [len(logits), *(few for few in (300, 100) if len(logits) > 400)]:
            draws = [np.random.default_rng(seed).permutation(len(logits)) for seed in range(ROUNDS)]
            for way, fitter in WAYS.items():
                chosen = [(logits[draw[:size]], present[draw[:size]]) for draw in draws]
                rounds = [judged(fitter, *few, 1000 + seed) for seed, few in enumerate(chosen)]
                values = zip(("ECE", "perfect", "log_loss", "OF1"), np.mean(rounds, 0), strict=True)
                for name, value in values:
                    figures[f"{Path(path).stem}/{size}/{way}/{name}"] = round(float(value), 4)
            content = {"benchmark": "calibration", "figures": figures}
            write_json(args.json, {**content, "environment": environment()})


if __name__ == "__main__":
    main()
