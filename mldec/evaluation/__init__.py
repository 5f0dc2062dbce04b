"""Evaluate a model on validation images, for the trainer and for the command `mldec.evaluate`."""

from mldec.evaluation.evaluating import (
    Results,
    Scores,
    all_scores,
    evaluate,
    evaluate_all,
    left_out,
    memory_advice,
    score,
)

__all__ = [
    "Results",
    "Scores",
    "all_scores",
    "evaluate",
    "evaluate_all",
    "left_out",
    "memory_advice",
    "score",
]
