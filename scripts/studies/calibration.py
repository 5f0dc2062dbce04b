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
from scipy.optimize import brentq, minimize
from scipy.special import expit

from mldec.benchmark import environment
from mldec.calibrate import parser as command_line
from mldec.checkpoint import load_model
from mldec.evaluation import open_for_evaluation
from mldec.evaluators.label_errors import platt
from mldec.runtime.results import write_json

BINS, PERFECT_DRAWS, ROUNDS = 15, 10, 20
# Logits [N, K] and whether an image shows a class, bool [N, K] -> slopes and offsets, [K] or one.
Fitter = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def temperature(logits: np.ndarray, present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit one slope for all classes, as `mldec.calibrate` did before."""

    def derivative(log_slope: float) -> float:
        return float(((expit(logits * np.exp(log_slope)) - present) * logits).sum())

    low, high = np.log(0.05), np.log(20)
    is_inside = derivative(low) < 0 < derivative(high)
    slope = np.exp(brentq(derivative, low, high)) if is_inside else 1.0
    return np.array(slope), np.array(0.0)


def with_offsets(
    logits: np.ndarray, present: np.ndarray, deviation: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Fit one slope for all classes and an offset per class, to the targets of Platt (1999).

    With a `deviation` each class then gets a slope of its own, whose logarithm is normal around the
    common one with this standard deviation.
    """
    positives, negatives = present.sum(0), (~present).sum(0)
    targets = np.where(present, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    mean, spread = logits.mean(0), (logits - logits.mean(0)).std()
    inputs = (logits - mean) / spread

    # Newton's method, whose Hessian is diagonal but for the row of the slope.
    slope, offsets = 0.0, np.log((positives + 1) / (negatives + 1))
    for _ in range(60):
        scores = expit(slope * inputs + offsets)
        weights, wrong = scores * (1 - scores) + 1e-12, scores - targets
        mixed, curvature = (weights * inputs).sum(0), weights.sum(0)
        gradient = (wrong * inputs).sum() - (mixed * wrong.sum(0) / curvature).sum()
        step = gradient / ((weights * inputs**2).sum() - (mixed**2 / curvature).sum())
        step = np.clip(step, -1, 1)
        slope = max(slope - step, 1e-3)
        offsets = offsets - np.clip((wrong.sum(0) - mixed * step) / curvature, -2, 2)

    slopes = np.full(len(offsets), slope)
    for k in range(len(slopes) if deviation else 0):

        def loss(values: np.ndarray, k: int = k) -> tuple[float, np.ndarray]:
            level = slope * np.exp(values[0]) * inputs[:, k]
            logit, prior = level + values[1], values[0] / deviation**2
            wrong = expit(logit) - targets[:, k]
            entropy = (np.logaddexp(0, logit) - targets[:, k] * logit).sum()
            gradient = np.array([(wrong * level).sum() + prior, wrong.sum()])
            return entropy + values[0] * prior / 2, gradient

        log_ratio, offsets[k] = minimize(loss, [0.0, offsets[k]], jac=True, method="L-BFGS-B").x
        slopes[k] *= np.exp(log_ratio)
    return slopes / spread, offsets - slopes / spread * mean


def platt_scaling(logits: np.ndarray, present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit slope and offset of each class, as `mldec.calibrate` does."""
    slopes, offsets = zip(*map(platt, logits.T, present.T), strict=True)
    return np.array(slopes), np.array(offsets)


WAYS: dict[str, Fitter] = {
    "none": lambda logits, present: (np.array(1.0), np.array(0.0)),
    "temperature": temperature,
    "temperature, offset per class": with_offsets,
    "Platt, slopes shrunk": lambda logits, present: with_offsets(logits, present, 0.5),
    "Platt": platt_scaling,
}


def error(scores: np.ndarray, present: np.ndarray) -> float:
    """Return the calibration error over all pairs in percent, as `mldec.calibrate` does."""
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
    args = command_line().parse_args([path])
    scores = open_for_evaluation(load_model(path), args, calibrated=False).scores()
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
