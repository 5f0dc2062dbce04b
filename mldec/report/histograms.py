"""How often each score occurs: the page draws its curves and moves its thresholds by these."""

import numpy as np

from mldec.calibration.fitting import BINS
from mldec.report.answers import Answers
from mldec.report.content import CoOccurrence, Histograms
from mldec.report.resampling import each_block

FINE, COARSE = 200, 50  # bins of equal width
MOST_FINE = 500  # classes with fine bins
MOST_THRESHOLDS = 100  # that are edges of bins
TAILS = np.array([1e-4, 2e-4, 5e-4, 1e-3, 2e-3])  # scores of rare classes are near 0
SHOWN = 30  # classes of the co-occurrence


def bin_edges(num_classes: int, thresholds: np.ndarray | None) -> np.ndarray:
    """Return the edges of the bins of scores, ascending from 0 to 1, [T + 1].

    Args:
        num_classes: with many of them the bins are wider.
        thresholds: of the classes, which are edges if they are few; None without.
    """
    bins = FINE if num_classes <= MOST_FINE else COARSE
    edges = [np.linspace(0, 1, bins + 1), np.linspace(0, 1, BINS + 1), TAILS, 1 - TAILS]

    of_thresholds = np.unique([] if thresholds is None else thresholds)
    if len(of_thresholds) <= MOST_THRESHOLDS:
        edges.append(of_thresholds)

    # Of edges that differ by their rounding, only one.
    return np.unique(np.concatenate(edges).round(12))


def histograms(answers: Answers, edges: np.ndarray) -> Histograms:
    """Count the scores of each class in the bins between edges [T + 1]."""
    shape = answers.logits.shape[1], len(edges) - 1
    positives, negatives = np.zeros((2, *shape), np.int64)
    score_sums = np.zeros(shape)

    def work(columns: slice, logits: np.ndarray, labels: np.ndarray) -> None:
        for index, own_logits, own_labels in zip(
            range(columns.start, columns.stop), logits, labels, strict=True
        ):
            annotated = own_labels >= 0
            scores = answers.probabilities(own_logits[annotated])
            present = own_labels[annotated] == 1

            # The last bin has its upper edge too.
            bins = np.searchsorted(edges[1:-1], scores, "right")
            counts = np.bincount(bins, minlength=shape[1])
            positives[index] = np.bincount(bins[present], minlength=shape[1])
            negatives[index] = counts - positives[index]
            score_sums[index] = np.bincount(bins, scores, minlength=shape[1])

    each_block(answers.logits, answers.labels, work)
    return Histograms(edges, positives, negatives, score_sums)


def calibration_errors(counted: Histograms) -> np.ndarray:
    """Return the expected calibration error of each class, float64 [K] in [0, 1].

    It is the mean over the annotated images of |share of positives - mean score| of their bin; the
    bins are `BINS` intervals [low, high) of equal width, whose edges are among those counted. NaN
    for a class without an annotated image.
    """
    first = np.searchsorted(counted.edges, np.linspace(0, 1, BINS + 1)[:-1].round(12))
    gaps = np.add.reduceat(counted.positives - counted.score_sums, first, axis=1)

    images = (counted.positives + counted.negatives).sum(1)
    sums = np.abs(gaps).sum(1)
    return np.where(images > 0, sums / np.maximum(images, 1), np.nan)


def co_occurrence(answers: Answers) -> CoOccurrence:
    """Return the matrix of the `SHOWN` most frequent classes; of one label, of the most confused.

    They are in the order of the data, so that related classes stay together.
    """
    if answers.exclusive:
        return _confusions(answers)

    positives = np.array(
        [(answers.labels[:, k] == 1).sum() for k in range(answers.labels.shape[1])]
    )
    classes = np.sort(np.argsort(-positives, kind="stable")[:SHOWN])

    logits = np.ascontiguousarray(answers.logits[:, classes].T)
    decided = answers.decided(classes, logits).astype(np.float32)
    present = (answers.labels[:, classes].T == 1).astype(np.float32)
    return CoOccurrence(
        classes.tolist(),
        (present @ present.T).astype(np.int64),
        (decided @ decided.T).astype(np.int64),
    )


def _confusions(answers: Answers) -> CoOccurrence:
    """Return the confusion matrix; of an image with several labels, the first one counts."""
    images = answers.has_label()
    labels, predicted = answers.labels[images].argmax(1), answers.predicted[images]
    right = answers.labels[images, predicted] == 1
    labels = np.where(right, predicted, labels)

    # A mistake counts for both of its classes.
    size = answers.labels.shape[1]
    mistakes = np.bincount(np.concatenate([labels[~right], predicted[~right]]), minlength=size)
    classes = np.sort(np.argsort(-mistakes, kind="stable")[:SHOWN])

    matrix = np.zeros((len(classes), len(classes)), np.int64)
    shown = np.isin(labels, classes) & np.isin(predicted, classes)
    pairs = np.searchsorted(classes, labels[shown]), np.searchsorted(classes, predicted[shown])
    np.add.at(matrix, pairs, 1)

    counts = np.bincount(labels, minlength=size)[classes]
    return CoOccurrence(classes.tolist(), np.diag(counts), matrix)
