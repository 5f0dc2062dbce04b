"""Further multi-label metrics: ranking and decisions per image, area under the ROC curve."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mldec.evaluators.average_precision import COLUMNS, columns_of
from mldec.evaluators.multi_label import on_device
from mldec.runtime import distributed

CHUNK = 2**22  # number of scores that are sorted together


def ranking_metrics(evaluator: Any) -> dict[str, float]:
    """Compute further metrics of multi-label predictions, the same on all ranks.

    Only annotated labels (1 and 0) count, and images without one are ignored. A positive has the
    rank of the last class with the same score. Without labels of -1, the values equal those of
    scikit-learn's functions in brackets.

    - LRAP (label_ranking_average_precision_score): mean precision at the positives of an image; 100
      without positives.
    - coverage (coverage_error): rank of the last positive of an image; 0 without positives. It is a
      number of classes, not a percentage.
    - ranking_loss (label_ranking_loss): share of the pairs of a positive and a negative of an image
      whose positive is not above the negative; 0 without pairs.
    - one_error: share of the images with positives in which no positive is above all negatives.
    - AUROC_macro, AUROC_micro (roc_auc_score): area under the ROC curve, averaged over the classes
      with positives and negatives, and of all labels together.
    - F1_samples (f1_score): F1 of an image; 0 without positives and decisions.
    - exact_match (accuracy_score): share of the images whose decisions are all right.
    - hamming_loss (hamming_loss): share of wrong decisions among all annotated labels.

    20,000 images of 9,605 classes took 20 processor-seconds and 0.2 GB of additional memory.

    Args:
        evaluator: A multi-label evaluator, with the attributes `predictions` and `logit_threshold`.

    Returns:
        Metrics by name, in percent except for coverage. NaN if a metric is not defined.
    """
    blocks = list(zip(*evaluator.predictions.blocks(), strict=True))
    threshold = on_device(evaluator.logit_threshold, torch.device("cpu"))
    rows = []
    for scores, labels in blocks:
        decided = (scores > threshold) & (labels >= 0)
        for image in zip(scores.numpy(), labels.numpy(), decided.numpy(), strict=True):
            rows.append(_of_image(*image))

    # The order of the images depends on the number of ranks. Sort, so that the means do not.
    images = torch.cat(distributed.gather(torch.tensor(rows, dtype=torch.float64).view(-1, 8)))
    means = images.sort(0).values.nanmean(0).tolist()
    lrap, coverage, ranking_loss, one_error, f1, exact, wrong, annotated = means

    logits, targets = evaluator.predictions.shared_by_classes()
    areas = []
    for start in range(0, logits[0].shape[1], COLUMNS):
        columns = slice(start, start + COLUMNS)
        chunk = zip(columns_of(logits, columns), columns_of(targets, columns), strict=True)
        areas += [_area(*of_class) for of_class in chunk]
    all_areas = distributed.join_columns(torch.tensor(areas, dtype=torch.float64))
    return {
        "LRAP": 100 * lrap,
        "coverage": coverage,
        "ranking_loss": 100 * ranking_loss,
        "one_error": 100 * one_error,
        "AUROC_macro": 100 * all_areas.nanmean().item(),
        "AUROC_micro": 100 * _micro_area(blocks),
        "F1_samples": 100 * f1,
        "exact_match": 100 * exact,
        "hamming_loss": 100 * wrong / annotated,
    }


def _of_image(scores: np.ndarray, targets: np.ndarray, decided: np.ndarray) -> list[float]:
    """Return the values of an image in the order of `ranking_metrics`; NaN if it is ignored."""
    is_positive = targets == 1
    positives = np.sort(scores[is_positive])
    negatives = np.sort(scores[targets == 0])
    count = len(positives)
    if count + len(negatives) == 0:
        return [math.nan] * 8

    wrong = (decided != is_positive).sum()
    f1 = 2 * (decided & is_positive).sum() / max(decided.sum() + count, 1)
    decisions = [f1, wrong == 0, wrong, count + len(negatives)]
    if count == 0:
        return [1, 0, 0, math.nan, *decisions]

    # For each positive, in ascending order: the numbers of positives and of negatives with at
    # least the same score.
    hits = count - np.searchsorted(positives, positives)
    errors = len(negatives) - np.searchsorted(negatives, positives)
    ranks = hits + errors
    ranking_loss = errors.mean() / max(len(negatives), 1)
    return [(hits / ranks).mean(), ranks[0], ranking_loss, errors[-1] > 0, *decisions]


def _area(scores: np.ndarray, targets: np.ndarray) -> float:
    """Return the area under the ROC curve of one class; NaN without positives or negatives."""
    negatives = scores[targets == 0]
    positives = np.sort(scores[targets == 1])
    pairs = len(positives) * len(negatives)
    return _ordered_pairs(positives, negatives) / pairs if pairs else math.nan


def _ordered_pairs(positives: np.ndarray, negatives: np.ndarray) -> float:
    """Count the pairs whose positive has the higher score. Equal scores count as 1/2."""
    negatives = np.sort(negatives)
    lower = np.searchsorted(negatives, positives).sum()
    not_higher = np.searchsorted(negatives, positives, side="right").sum()
    return float(lower + not_higher) / 2


def _micro_area(blocks: list[tuple[Tensor, Tensor]]) -> float:
    """Return the area under the ROC curve of all labels of all ranks; NaN if not defined."""
    own = [logits.numpy()[targets.numpy() == 1] for logits, targets in blocks]
    positives = np.sort(np.concatenate(distributed.gather(np.concatenate(own))))

    # Most labels are negatives, so each rank sorts its own in chunks.
    pairs = 0.0
    count = 0
    step = 1 + CHUNK // max(1, *(logits.numel() for logits, _ in blocks))
    for start in range(0, len(blocks), step):
        chunk = blocks[start : start + step]
        negatives = [logits.numpy()[targets.numpy() == 0] for logits, targets in chunk]
        pairs += _ordered_pairs(positives, np.concatenate(negatives))
        count += sum(map(len, negatives))
    pairs, count = distributed.total(torch.tensor([pairs, count], dtype=torch.float64)).tolist()
    return pairs / (count * len(positives)) if count and len(positives) else math.nan
