"""Statistics of a report: metrics with bootstrap intervals, and values per class.

Intervals come from the Bayesian bootstrap (Rubin 1981). Each resample gives every image a random
weight from the exponential distribution with mean 1. The usual bootstrap draws integer weights, so
a class with one positive would have none in more than a third of the resamples.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix
from scipy.special import expit
from torch import Tensor

from mldec.evaluators.average_precision import average_precision
from mldec.evaluators.multi_label import Counts, MultiLabelEvaluator
from mldec.runtime.console import progress_bar

SEED = 0
BLOCK = 100  # resamples that are computed together
MAX_RESAMPLES = 1_000
MAX_TRIPLES = 40_000_000_000  # triples of a resample, an image and a class
MAX_WEIGHTS = 50_000_000
CLASS_BLOCK = 64  # classes that a thread copies together

CALIBRATION_BINS = 15
FINE_BINS = 200  # histogram bins of equal width, for at most `MAX_FINE_CLASSES` classes
COARSE_BINS = 50  # histogram bins of equal width for more classes
MAX_FINE_CLASSES = 500
MAX_THRESHOLDS = 100  # maximum number of different thresholds that become bin edges
TAILS = np.array([1e-4, 2e-4, 5e-4, 1e-3, 2e-3])  # extra edges for the low scores of rare classes
MAX_PAIRED = 30  # classes in the matrix of class pairs

# Maps a slice of k classes, their logits [k, N] and their labels [k, N] to an array [..., k].
BlockFunction = Callable[[slice, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % bootstrap interval over images. Unknown bounds are NaN."""

    value: float
    low: float = np.nan
    high: float = np.nan


@dataclass(frozen=True)
class Predictions:
    """Scores and labels of N images and K classes."""

    logits: np.ndarray  # float32 [N, K]; log-probabilities if `exclusive`
    labels: np.ndarray  # int8 [N, K]: 1 (present), 0 (absent) or -1 (not annotated)
    exclusive: bool  # single-label images: the class with the highest logit is predicted

    # Multi-label images: classes with a logit above the threshold are predicted. It is a float,
    # float64 [K], or None for 0.
    logit_threshold: float | Tensor | None

    @cached_property
    def top_class(self) -> np.ndarray:
        """Class with the highest logit of each image, int64 [N]."""
        return self.logits.argmax(1)

    @cached_property
    def top_is_right(self) -> np.ndarray:
        """Whether an image has the label `top_class`, bool [N]."""
        return self.labels[np.arange(len(self.labels)), self.top_class] == 1

    def thresholds(self) -> np.ndarray | None:
        """Return the thresholds as probabilities, float64 [K], or None without thresholds."""
        if self.logit_threshold is None:
            return None
        return np.broadcast_to(expit(np.asarray(self.logit_threshold)), self.logits.shape[1])

    def decided(self, columns: slice | np.ndarray, logits: np.ndarray) -> np.ndarray:
        """Return the predictions of k classes, bool [k, N], from their logits [k, N]."""
        num_classes = self.logits.shape[1]
        if self.exclusive:
            return self.top_class == np.arange(num_classes)[columns][:, None]

        threshold = 0.0 if self.logit_threshold is None else self.logit_threshold
        if isinstance(threshold, Tensor):
            threshold = threshold.expand(num_classes)[columns][:, None]
        return (torch.from_numpy(logits) > threshold).numpy()

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Convert logits to scores in [0, 1], float64 of the same shape."""
        if self.exclusive:
            return np.exp(logits, dtype=np.float64)
        return expit(logits.astype(float))

    def class_slices(self) -> list[slice]:
        """Return slices that divide the classes into blocks."""
        return [slice(k, k + CLASS_BLOCK) for k in range(0, self.logits.shape[1], CLASS_BLOCK)]

    def of_classes(self, columns: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return contiguous logits and labels of k classes, both [k, N]."""
        logits = np.ascontiguousarray(self.logits[:, columns].T)
        return logits, np.ascontiguousarray(self.labels[:, columns].T)

    def map_classes(self, work: BlockFunction) -> np.ndarray:
        """Apply a function to each block of classes; join its results [..., k] to [..., K]."""
        slices = self.class_slices()
        # Threads are fast here: numpy and scipy release the GIL.
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            results = threads.map(lambda columns: work(columns, *self.of_classes(columns)), slices)
            progress = progress_bar(results, desc="classes", total=len(slices))
            return np.concatenate(list(progress), axis=-1)


def bootstrap_weights(images: int, classes: int) -> np.ndarray:
    """Draw the weights of R resamples from a fixed seed: float32 [R / BLOCK, images, BLOCK].

    R is between `BLOCK` and `MAX_RESAMPLES`. It is smaller for many images and classes.
    """
    affordable = min(MAX_TRIPLES // max(1, images * classes), MAX_WEIGHTS // max(1, images))
    blocks = max(1, min(affordable, MAX_RESAMPLES) // BLOCK)
    rng = np.random.default_rng(SEED)
    weights = rng.standard_exponential((blocks, images, BLOCK), np.float32)
    return np.maximum(weights, np.finfo(np.float32).tiny, out=weights)


def interval_bounds(values: np.ndarray) -> np.ndarray:
    """Return the bounds [2, ...] of the 95 % percentile intervals of resampled values [R, ...]."""
    bounds: np.ndarray = np.percentile(values, (2.5, 97.5), axis=0)
    return bounds


def weighted_average_precision(
    scores: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Compute the average precision of one class in each resample, float32 [R] in [0, 1].

    It is NaN without a positive. Scores and labels (1, 0 or -1) are [N], weights [R / BLOCK, N,
    BLOCK].
    """
    positives = np.flatnonzero(labels == 1)
    cuts = np.unique(scores[positives])
    if not len(cuts):
        return np.full(weights.shape[0] * weights.shape[2], np.nan, np.float32)

    # The precision at a cut counts all images with at least this score. Images below the lowest
    # positive have no effect.
    images = np.flatnonzero((labels >= 0) & (scores >= cuts[0]))
    sums = _sum_per_cut(cuts, scores, images)
    positive_sums = _sum_per_cut(cuts, scores, positives)

    values = []
    for block in weights:
        found = positive_sums @ block
        hits = found.cumsum(0)
        precision = hits / (sums @ block).cumsum(0)
        values.append(np.einsum("mr,mr->r", precision, found) / hits[-1])
    return np.concatenate(values)


def _sum_per_cut(cuts: np.ndarray, scores: np.ndarray, images: np.ndarray) -> csr_matrix:
    """Return a sparse matrix [cuts, N] that sums the image weights between cuts, highest first."""
    groups = len(cuts) - np.searchsorted(cuts, scores[images], "right")
    order = np.argsort(groups, kind="stable")
    starts = np.concatenate([[0], np.bincount(groups).cumsum()])
    shape = (len(starts) - 1, len(scores))
    return csr_matrix((np.ones(len(images), np.float32), images[order], starts), shape)


def weighted_counts(predictions: Predictions, weights: np.ndarray) -> list[Counts]:
    """Return the weighted counts of the decisions on all classes, one per resample."""

    def work(columns: slice, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        decided = predictions.decided(columns, logits) & (labels >= 0)
        present = labels == 1
        masks = np.stack([decided & present, decided, present, labels == 0]).astype(np.float32)
        return np.concatenate([(masks @ block).transpose(2, 0, 1) for block in weights])

    sums = predictions.map_classes(work).astype(float)
    return [Counts.of(torch.from_numpy(resample)) for resample in sums]


def weighted_class_ap(predictions: Predictions, weights: np.ndarray) -> np.ndarray:
    """Return the average precision of all classes in each resample, float32 [R, K] in [0, 1]."""

    def work(_: slice, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        pairs = zip(logits, labels, strict=True)
        return np.stack([weighted_average_precision(*pair, weights) for pair in pairs], axis=1)

    return predictions.map_classes(work)


@dataclass(frozen=True)
class ResampledMetrics:
    """Metrics of a model, and their values in R resamples."""

    metrics: dict[str, float]  # of the evaluator, in percent
    class_ap: np.ndarray  # average precision per class, float64 [K] in [0, 1], or NaN
    resampled: dict[str, np.ndarray]  # metrics with an interval, float64 [R] each, in percent
    resampled_ap: np.ndarray  # average precision per class, float32 [R, K]

    def with_intervals(self) -> dict[str, Interval]:
        """Return all metrics, with intervals if they are known."""
        intervals = {}
        for name, value in self.metrics.items():
            intervals[name] = Interval(value)
            if name in self.resampled:
                low, high = interval_bounds(self.resampled[name]).tolist()
                intervals[name] = Interval(value, low, high)
        return intervals


def bootstrap_metrics(
    metrics: dict[str, float], predictions: Predictions, weights: np.ndarray, evaluator: Any
) -> ResampledMetrics:
    """Resample main metrics (in percent) and the average precision per class with given weights.

    `evaluator` has computed the metrics. A metric of a third-party evaluator has no interval if
    its definition is different.
    """
    logits = torch.from_numpy(predictions.logits)
    labels = torch.from_numpy(predictions.labels)
    class_ap = average_precision(logits, labels)["none"].numpy()
    resampled_ap = weighted_class_ap(predictions, weights)

    # Weights of 1 give the metrics of the original images.
    ones = np.ones((1, len(labels), 1), np.float32)
    original = _main_metrics(predictions, ones, class_ap[None], evaluator)
    candidates = _main_metrics(predictions, weights, resampled_ap, evaluator)
    resampled = {}
    for name, value in metrics.items():
        # "gzsl_" metrics are over all classes, and the suffix of top1 names other labels.
        formula = "top1" if name.startswith("top1_") else name.removeprefix("gzsl_")
        if formula in original and np.isclose(original[formula][0], value, rtol=0, atol=1e-4):
            resampled[name] = candidates[formula]
    return ResampledMetrics(metrics, class_ap, resampled, resampled_ap)


def _main_metrics(
    predictions: Predictions, weights: np.ndarray, class_ap: np.ndarray, evaluator: Any
) -> dict[str, np.ndarray]:
    """Return the metrics that can have intervals, float64 [R] in percent, from AP [R, K]."""
    has_positives = ~np.isnan(class_ap[0])
    values = {"mAP": _mean_ap(class_ap), "mAP_skip_empty": _mean_ap(class_ap[:, has_positives])}
    if predictions.exclusive:
        # Images without a label do not count.
        rows = np.flatnonzero((predictions.labels == 1).any(1))
        right = predictions.top_is_right[rows]
        shares = [right @ block[rows] / block[rows].sum(0) for block in weights]
        values["top1"] = 100 * np.concatenate(shares).astype(np.float64)
        return values

    if len(getattr(evaluator, "unseen", ())):
        # Only the images with an unseen label count.
        columns = evaluator.unseen.numpy()
        labels = predictions.labels[:, columns]
        labels = np.where((labels == 1).any(1, keepdims=True), labels, -1)
        unseen = replace(predictions, logits=predictions.logits[:, columns], labels=labels)
        values["zsl_mAP"] = _mean_ap(weighted_class_ap(unseen, weights))

    counts = weighted_counts(predictions, weights)
    if isinstance(evaluator, MultiLabelEvaluator):
        values["mAP_partial"] = _mean_ap(class_ap[:, evaluator.valid_classes(counts[0])])
    summarize = getattr(evaluator, "summary", Counts.summary)
    summaries = [summarize(resample) for resample in counts]
    for name in ("CF1", "OF1"):
        values[name] = np.array([summary[name] for summary in summaries])
    return values


def _mean_ap(class_ap: np.ndarray) -> np.ndarray:
    """Return the mAP of each resample in percent, float64 [R]; classes without positives are 0."""
    total = np.nan_to_num(class_ap).astype(np.float64).sum(1)
    return 100 * total / max(1, class_ap.shape[1])


@dataclass(frozen=True)
class Histograms:
    """Score histograms per class. A score on an edge belongs to the bin above it."""

    edges: np.ndarray  # bin edges, ascending from 0 to 1, [T + 1]
    positives: np.ndarray  # images with the class, int64 [K, T]
    negatives: np.ndarray  # annotated images without it, int64 [K, T]
    score_sums: np.ndarray  # sum of the scores of both, float64 [K, T]

    def calibration_bins(self) -> np.ndarray:
        """Return images, positives and score sums in bins of equal width, [3, K, bins]."""
        bin_of_edge = (self.edges[:-1] * CALIBRATION_BINS + 1e-9).astype(int)
        bins = np.eye(CALIBRATION_BINS)[bin_of_edge]
        images = self.positives + self.negatives
        return np.stack([images @ bins, self.positives @ bins, self.score_sums @ bins])


def bin_edges(num_classes: int, thresholds: np.ndarray | None) -> np.ndarray:
    """Return the histogram edges [T + 1], which include the edges of the calibration bins."""
    bins = FINE_BINS if num_classes <= MAX_FINE_CLASSES else COARSE_BINS
    edges = [TAILS, 1 - TAILS, np.linspace(0, 1, bins + 1), np.linspace(0, 1, CALIBRATION_BINS + 1)]
    if thresholds is not None and len(np.unique(thresholds)) <= MAX_THRESHOLDS:
        edges.append(thresholds)

    # Merge edges that only differ by rounding errors.
    return np.unique(np.concatenate(edges).round(12))


def score_histograms(predictions: Predictions, edges: np.ndarray) -> Histograms:
    """Count the scores of each class in the bins between edges [T + 1]."""
    num_bins = len(edges) - 1

    def work(_: slice, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        counted = np.zeros((3, num_bins, len(logits)))
        for row, class_labels in enumerate(labels):
            annotated = class_labels >= 0
            scores = predictions.probabilities(logits[row, annotated])
            present = class_labels[annotated] == 1

            # The last bin includes its upper edge.
            bins = np.searchsorted(edges[1:-1], scores, "right")
            counted[0, :, row] = np.bincount(bins[present], minlength=num_bins)
            counted[1, :, row] = np.bincount(bins[~present], minlength=num_bins)
            counted[2, :, row] = np.bincount(bins, scores, minlength=num_bins)
        return counted

    counted = np.ascontiguousarray(predictions.map_classes(work).swapaxes(1, 2))
    positives, negatives = counted[:2].astype(np.int64)
    return Histograms(edges, positives, negatives, counted[2])


@dataclass(frozen=True)
class ClassTable:
    """The columns of the table of K classes. Undefined values are NaN."""

    names: tuple[str, ...]
    columns: dict[str, list[float]]  # percentages except "positives" and "threshold"
    intervals: tuple[list[float], list[float]]  # low and high bounds of the average precision

    def weakest(self, count: int = 5) -> list[int]:
        """Return the classes with the lowest average precision, lowest first."""
        ap = np.array(self.columns["AP"])
        weakest = np.argsort(ap, kind="stable")[:count]  # NaN comes last
        return list(weakest[np.isfinite(ap[weakest])].tolist())


def class_table(
    names: tuple[str, ...],
    counts: Counts,
    thresholds: np.ndarray | None,
    histograms: Histograms,
    resampled: ResampledMetrics,
) -> ClassTable:
    """Return the table of classes, from thresholds [K] and other values of the K classes."""
    columns = {"positives": counts.positives.tolist(), "AP": (100 * resampled.class_ap).tolist()}
    for name, column in counts.per_class().items():
        columns[name] = (100 * column).tolist()
    if thresholds is not None:
        columns["threshold"] = thresholds.tolist()

    # Mean of |share of positives - mean score| over the bins, weighted by their images.
    images, positives, score_sums = histograms.calibration_bins()
    gaps = np.abs(positives - score_sums).sum(1)
    totals = images.sum(1)
    errors = 100 * gaps / np.maximum(totals, 1)
    columns["calibration error"] = np.where(totals > 0, errors, np.nan).tolist()

    low, high = (100 * interval_bounds(resampled.resampled_ap)).tolist()
    return ClassTable(names, columns, (low, high))


@dataclass(frozen=True)
class ClassPairs:
    """Co-occurrence of C classes, or their confusion matrix for single-label images.

    An image counts for a pair if both classes are annotated. All matrices are int64 [C, C], and the
    class of the row is the first one.
    """

    classes: list[int]  # class indices
    labels: np.ndarray  # number of images that are labeled with both classes
    predictions: np.ndarray  # the same for predictions, or the confusion matrix (rows are labels)
    labeled: np.ndarray  # number of images that are labeled with the first class
    predicted: np.ndarray  # the same for predictions


def class_pairs(predictions: Predictions, counts: Counts) -> ClassPairs:
    """Return the matrix of the most frequent or the most confused classes, in their order."""
    importance = counts.positives
    if predictions.exclusive:
        importance = counts.predicted + counts.positives - 2 * counts.hits
    classes = np.sort(np.argsort(-importance.numpy(), kind="stable")[:MAX_PAIRED])

    logits = np.ascontiguousarray(predictions.logits[:, classes].T)
    labels = predictions.labels[:, classes].T
    annotated = labels >= 0
    present = labels == 1
    decided = predictions.decided(classes, logits) & annotated
    first = decided
    if predictions.exclusive:
        # If an image has several labels and one is predicted, the other labels are not confusions.
        present &= decided | ~predictions.top_is_right
        first = present

    def count(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        return (rows.astype(np.float32) @ columns.T.astype(np.float32)).astype(np.int64)

    return ClassPairs(
        classes.tolist(),
        labels=count(present, present),
        predictions=count(first, decided),
        labeled=count(present, annotated),
        predicted=count(decided, annotated),
    )
