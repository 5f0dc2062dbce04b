"""Decisions on the test photos of Corel5k: `python scripts/studies/corel5k_test.py RUN`.

RUN is the folder of `mldec train +experiment=corel5k`, after `mldec calibrate` with the objective
per_image:5. Two decisions are evaluated: the words at or above their thresholds, and the five words
with the highest margins above them. P and R are means over the 260 words, F1 is their harmonic
mean, and N+ is the number of words with a recall above 0. The intervals are 95 % percentiles of the
Bayesian bootstrap over the test photos, as in `mldec report`. Resampling with replacement would
omit many words with a single test photo, and so underestimate F1. The script writes
benchmarks/corel5k_ridge.json. `mldec evaluate RUN data.val=test` prints the same P, R and F1.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mldec.checkpoint import load_model
from mldec.evaluation.open import open_for_evaluation
from mldec.evaluation.options import EvalOptions
from mldec.evaluators.multi_label import top_k
from mldec.runtime.environment import environment

OUT = Path(__file__).resolve().parents[2] / "benchmarks" / "corel5k_ridge.json"
WORDS = 5  # per photo
RESAMPLES = 2000
SMALLEST = 1e-9  # avoids a division by 0 for words that are not predicted


def metrics(chosen: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return P, R and F1 in percent, [3, R].

    Args:
        chosen: Whether a word is predicted, bool [n, K].
        labels: Whether a word is present, bool [n, K].
        weights: Weights of the photos in each of R resamples, [R, n].
    """
    hits = weights @ (chosen & labels)
    precision = (hits / np.maximum(weights @ chosen, SMALLEST)).mean(1)
    recall = (hits / np.maximum(weights @ labels, SMALLEST)).mean(1)
    f1 = 2 * precision * recall / (precision + recall)
    return 100 * np.stack([precision, recall, f1])


def with_interval(chosen: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Return each metric with its bootstrap interval, N+ and the number of words per photo."""
    weights = np.random.default_rng(0).exponential(size=(RESAMPLES, len(labels)))
    [values] = metrics(chosen, labels, np.ones((1, len(labels)))).T
    resampled = metrics(chosen, labels, weights)
    content: dict[str, Any] = {
        "words per photo": round(float(chosen.sum(1).mean()), 2),
        "N+": int((chosen & labels).any(0).sum()),
    }
    for name, value, row in zip(("P", "R", "F1"), values, resampled, strict=True):
        low, high = np.percentile(row, [2.5, 97.5])
        content[name] = round(float(value), 2)
        content[f"{name}, 95 %"] = [round(float(low), 2), round(float(high), 2)]
    return content


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run")
    run = parser.parse_args().run

    loaded = load_model(run)
    setup = open_for_evaluation(loaded, EvalOptions(checkpoint=run, settings=["data.val=test"]))
    scores = setup.scores()
    logit_threshold = setup.logit_threshold()
    assert logit_threshold is not None
    margins = torch.from_numpy(scores.logits) - logit_threshold
    labels = scores.labels == 1
    content = {
        "objective": loaded.calibration.objective if loaded.calibration else None,
        "cross-fitted on the training photos": loaded.calibration and loaded.calibration.metrics,
        "at the thresholds": with_interval((margins >= 0).numpy(), labels),
        "exactly five words": with_interval(top_k(margins, WORDS).numpy(), labels),
        "environment": environment(),
    }
    OUT.write_text(json.dumps(content, indent=1) + "\n")
    print(OUT.read_text())


if __name__ == "__main__":
    main()
