"""The numbers of a report: scores and decisions, metrics with intervals, the table of classes.

Intervals come from the Bayesian bootstrap (Rubin 1981): a resample gives each image a random weight
from the exponential distribution with mean 1. With the usual bootstrap, which gives it a whole
number, more than a third of the classes with a single positive would have none in a resample.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.sparse import csr_matrix
from scipy.special import expit, logsumexp
from torch import Tensor
from tqdm import tqdm

from mldec.evaluators import Evaluator
from mldec.evaluators.average_precision import average_precision as exact_average_precision
from mldec.evaluators.multi_label import Counts

SEED = 0
STEP = 100  # resamples that are computed together
MOST_RESAMPLES = 1_000
MOST_WORK = 40_000_000_000  # triples of a resample, an image and a class
MOST_WEIGHTS = 50_000_000
COLUMNS = 64  # classes that a thread copies together
ROWS = 1_000  # images that are read at a time

BINS = 15  # of the calibration error
FINE, COARSE = 200, 50  # bins of scores, of equal width
MOST_FINE = 500  # classes with fine bins
MOST_THRESHOLDS = 100  # that are edges of bins
TAILS = np.array([1e-4, 2e-4, 5e-4, 1e-3, 2e-3])  # scores of rare classes are near 0
MOST_PAIRED = 30  # classes of the matrix of pairs

# Some of the classes, in the order of the rows of a block.
Columns = slice | np.ndarray


@dataclass(frozen=True)
class Interval:
    """A number with its 95 % bootstrap interval over images; bounds are NaN if there is none."""

    value: float
    low: float = np.nan
    high: float = np.nan


@dataclass(frozen=True)
class Answers:
    """The scores of N images and K classes, beside their labels."""

    logits: np.ndarray  # float32 [N, K]; if an image has one label, see `normalise`
    labels: np.ndarray  # 1 (present), 0 (absent) or -1 (not annotated), int8 [N, K]
    exclusive: bool  # an image has one label: the class of its highest logit is predicted
    # Otherwise a class is predicted if its logit is above this number, one for all classes or
    # float64 [K]. None, if the evaluator of the data knows no thresholds, counts as 0.
    lowest: float | Tensor | None

    @cached_property
    def predicted(self) -> np.ndarray:
        """The class of the highest logit of each image, int64 [N]; of equal ones the first."""
        return self.logits.argmax(1)

    @cached_property
    def has_label(self) -> np.ndarray:
        """Which images have a label, bool [N]."""
        return (self.labels == 1).any(1)

    def thresholds(self) -> np.ndarray | None:
        """Return the threshold of each class from 0 to 1, float64 [K]; None if there are none."""
        if self.lowest is None:
            return None
        return np.broadcast_to(expit(np.asarray(self.lowest)), self.logits.shape[1])

    def decided(self, columns: Columns, scores: np.ndarray) -> np.ndarray:
        """Return which images k classes are predicted for, by their logits [k, N]: bool [k, N]."""
        if self.exclusive:
            classes = np.arange(self.logits.shape[1])[columns]
            return self.predicted == classes[:, None]

        lowest = 0.0 if self.lowest is None else self.lowest
        if isinstance(lowest, Tensor):
            lowest = lowest.expand(self.logits.shape[1])[columns][:, None]
        return (torch.from_numpy(scores) > lowest).numpy()

    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        """Return the scores from 0 to 1 of some logits, float64 of any shape."""
        return np.exp(scores, dtype=np.float64) if self.exclusive else expit(scores.astype(float))

    def slices(self) -> list[slice]:
        """Return the classes in blocks."""
        return [slice(k, k + COLUMNS) for k in range(0, self.logits.shape[1], COLUMNS)]

    def block(self, columns: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits and the labels of some classes, both [k, N]."""
        own = self.logits[:, columns].T, self.labels[:, columns].T
        return np.ascontiguousarray(own[0]), np.ascontiguousarray(own[1])

    def each_block(self, work: Callable[[slice, np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        """Return what some work makes of each of `slices`, [..., k] joined to [..., K]."""
        slices = self.slices()
        # Threads help: numpy and scipy sort and add without the interpreter's lock.
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            done = threads.map(lambda columns: work(columns, *self.block(columns)), slices)
            bar = tqdm(done, "classes", len(slices), leave=False, disable=None)
            return np.concatenate([*bar], axis=-1)


def normalise(logits: np.ndarray) -> None:
    """Turn logits [N, K] into the logarithms of their softmax, in place: memory is short."""
    for rows in np.split(logits, range(ROWS, len(logits), ROWS)):
        rows -= logsumexp(rows, axis=1, keepdims=True)


def metrics(evaluator: Evaluator, logits: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Return the metrics of a new evaluator, as `mldec evaluate` would print them."""
    blocks = (torch.from_numpy(array).split(ROWS) for array in (logits, targets))
    for block in zip(*blocks, strict=True):
        evaluator.update(*block)
    return evaluator.compute()


def draw(images: int, classes: int) -> np.ndarray:
    """Draw the weights of R resamples, float32 [R / STEP, images, STEP], always the same.

    Of many pairs of an image and a class there are fewer, from `MOST_RESAMPLES` down to `STEP`.
    """
    affordable = min(MOST_WORK // max(1, images * classes), MOST_WEIGHTS // max(1, images))
    steps = max(1, min(affordable, MOST_RESAMPLES) // STEP)
    rng = np.random.default_rng(SEED)
    weights = rng.standard_exponential((steps, images, STEP), np.float32)
    return np.maximum(weights, np.finfo(np.float32).tiny, out=weights)


def count(weights: np.ndarray) -> int:
    """Return the number of resamples R of weights [R / STEP, N, STEP]."""
    return weights.shape[0] * weights.shape[2]


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds of the 95 % percentile intervals of resampled numbers [R, ...]."""
    low, high = np.percentile(values, (2.5, 97.5), axis=0)
    return low, high


def average_precision(scores: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Compute the average precision of one class in each resample.

    It is that of `mldec.evaluators.average_precision`, where an image counts as much as its weight:
    from scores [N], labels [N] of 1, 0 or -1 (left out) and weights [R / STEP, N, STEP] to float32
    [R] in [0, 1], or NaN without a positive.
    """
    positives = np.flatnonzero(labels == 1)
    cuts = np.unique(scores[positives])
    if not len(cuts):
        return np.full(count(weights), np.nan, np.float32)

    # The precision at a positive counts what scores at least as high: each image begins to count
    # at one of the cuts, the highest cut being number 0, or at none of them.
    images = np.flatnonzero((labels >= 0) & (scores >= cuts[0]))
    sums = _summation(cuts, scores, images)
    positive_sums = _summation(cuts, scores, positives)

    values = []
    for step in weights:
        found = positive_sums @ step
        hits = found.cumsum(0)
        precision = hits / (sums @ step).cumsum(0)
        values.append(np.einsum("mr,mr->r", precision, found) / hits[-1])
    return np.concatenate(values)


def _summation(cuts: np.ndarray, scores: np.ndarray, images: np.ndarray) -> csr_matrix:
    """Return the matrix [cuts, N] that sums the weights of the images that begin at each cut."""
    groups = len(cuts) - np.searchsorted(cuts, scores[images], "right")
    order = np.argsort(groups, kind="stable")
    starts = np.concatenate([[0], np.bincount(groups).cumsum()])
    shape = len(starts) - 1, len(scores)
    return csr_matrix((np.ones(len(images), np.float32), images[order], starts), shape)


def counts_of_classes(answers: Answers, weights: np.ndarray) -> list[Counts]:
    """Count the decisions on all classes in each of the R resamples."""

    def work(columns: slice, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        decided = answers.decided(columns, logits) & (labels >= 0)
        present = labels == 1
        chosen = np.stack([decided & present, decided, present]).astype(np.float32)
        return np.concatenate([(chosen @ step).transpose(2, 0, 1) for step in weights])

    resampled = []
    for columns in answers.each_block(work):
        counts = Counts(0)
        counts.hits, counts.predicted, counts.positives = torch.from_numpy(columns.astype(float))
        resampled.append(counts)
    return resampled


@dataclass(frozen=True)
class Numbers:
    """What the answers of a model come to."""

    metrics: dict[str, float]  # as `mldec evaluate` prints them
    precision: np.ndarray  # average precision of each class, float64 [K] in [0, 1], or NaN
    resampled: dict[str, np.ndarray]  # the metrics that have an interval, each float64 [R]
    resampled_precision: np.ndarray  # of each class, float32 [R, K]

    def with_intervals(self) -> dict[str, Interval]:
        """Return the metrics, some of them with their intervals."""
        shown = {name: Interval(value) for name, value in self.metrics.items()}
        for name, values in self.resampled.items():
            shown[name] = Interval(self.metrics[name], *map(float, interval(values)))
        return shown


def resample(values: dict[str, float], answers: Answers, weights: np.ndarray) -> Numbers:
    """Compute the main metrics and the average precision of the classes in each resample.

    Of the metrics of the data's evaluator, `values`, those that these formulas meet get intervals.
    """
    logits, labels = torch.from_numpy(answers.logits), torch.from_numpy(answers.labels)
    precision = exact_average_precision(logits, labels)["none"].numpy()

    def work(_: slice, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        pairs = zip(logits, labels, strict=True)
        return np.stack([average_precision(*pair, weights) for pair in pairs], axis=1)

    resampled_precision = answers.each_block(work)

    # Beside the resamples, each formula is asked about the images as they are.
    once = np.ones((1, len(answers.labels), 1), np.float32)
    plain = _formulas(answers, once, precision[None])
    formulas = _formulas(answers, weights, resampled_precision)
    resampled = {}
    for name, value in values.items():
        formula = "top1" if name.startswith("top1_") else name
        if formula in plain and np.isclose(plain[formula][0], value, rtol=0, atol=1e-4):
            resampled[name] = formulas[formula]
    return Numbers(values, precision, resampled, resampled_precision)


def _formulas(
    answers: Answers, weights: np.ndarray, precision: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the metrics that have an interval in each resample, each float64 [R] in percent."""
    total = np.nan_to_num(precision).astype(np.float64).sum(1)
    num_classes = precision.shape[1]
    num_present = (~np.isnan(precision)).sum(1)
    values = {
        "mAP": 100 * total / num_classes,
        "mAP_skip_empty": 100 * total / np.maximum(num_present, 1),
    }
    if answers.exclusive:
        rows = np.flatnonzero(answers.has_label)
        right = answers.labels[rows, answers.predicted[rows]] == 1
        shares = [right @ step[rows] / step[rows].sum(0) for step in weights]
        return values | {"top1": 100 * np.concatenate(shares).astype(np.float64)}

    summaries = [counts.summary() for counts in counts_of_classes(answers, weights)]
    for name in ("CF1", "OF1"):
        values[name] = np.array([summary[name] for summary in summaries])
    return values


@dataclass(frozen=True)
class Histograms:
    """How often each score occurs, per class: the page moves its thresholds by these.

    A score that equals an edge is in the bin above it: counts at or above an edge are exact.
    """

    edges: np.ndarray  # of the bins, ascending from 0 to 1, [T + 1]
    positives: np.ndarray  # images that show the class, per bin, int64 [K, T]
    negatives: np.ndarray  # annotated images that do not show it, int64 [K, T]
    score_sums: np.ndarray  # sum of the scores of both, float64 [K, T]

    def calibration_bins(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return images, positives and sums of scores in `BINS` bins of equal width, [K, BINS]."""
        bin_of_edge = (self.edges[:-1] * BINS + 1e-9).astype(int)
        bins = np.eye(BINS)[bin_of_edge]
        images = (self.positives + self.negatives) @ bins
        return images, self.positives @ bins, self.score_sums @ bins


def bin_edges(num_classes: int, thresholds: np.ndarray | None) -> np.ndarray:
    """Return the edges of the bins of scores [T + 1]; of many classes they are wider.

    The edges of the `BINS`, and the thresholds of the classes if they are few, are among them.
    """
    bins = FINE if num_classes <= MOST_FINE else COARSE
    edges = [TAILS, 1 - TAILS]
    edges += [np.linspace(0, 1, number + 1) for number in (bins, BINS)]

    of_thresholds = np.unique([] if thresholds is None else thresholds)
    if len(of_thresholds) <= MOST_THRESHOLDS:
        edges.append(of_thresholds)

    # Of edges that differ by their rounding, only one.
    return np.unique(np.concatenate(edges).round(12))


def histograms(answers: Answers, edges: np.ndarray) -> Histograms:
    """Count the scores of each class in the bins between edges [T + 1]."""
    num_bins = len(edges) - 1

    def work(_: slice, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        counted = np.zeros((3, num_bins, len(logits)))
        for row, own_labels in enumerate(labels):
            annotated = own_labels >= 0
            scores = answers.probabilities(logits[row, annotated])
            present = own_labels[annotated] == 1

            # The last bin has its upper edge too.
            bins = np.searchsorted(edges[1:-1], scores, "right")
            counted[0, :, row] = np.bincount(bins[present], minlength=num_bins)
            counted[1, :, row] = np.bincount(bins[~present], minlength=num_bins)
            counted[2, :, row] = np.bincount(bins, scores, minlength=num_bins)
        return counted

    counted = np.ascontiguousarray(answers.each_block(work).swapaxes(1, 2))
    positives, negatives = counted[:2].astype(np.int64)
    return Histograms(edges, positives, negatives, counted[2])


@dataclass(frozen=True)
class ClassTable:
    """The columns of the table of classes; NaN where a value is undefined."""

    names: tuple[str, ...]
    columns: dict[str, list[float]]  # percentages except "positives" and "threshold"
    intervals: tuple[list[float], list[float]]  # of the average precision, K low and K high values

    def weakest(self, most: int = 5) -> list[int]:
        """Return the classes of the lowest average precision, the lowest first."""
        order = np.argsort(self.columns["AP"], kind="stable")  # NaN comes last
        return [int(k) for k in order[:most] if np.isfinite(self.columns["AP"][k])]


def class_table(
    names: tuple[str, ...], answers: Answers, counted: Histograms, numbers: Numbers
) -> ClassTable:
    """Return the columns of the table of classes."""
    # Every image counts once.
    [counts] = counts_of_classes(answers, np.ones((1, len(answers.labels), 1), np.float32))
    columns = {"positives": counts.positives.numpy(), "AP": 100 * numbers.precision}
    for name, column in counts.per_class().items():
        columns["F1" if name == "f1" else name] = 100 * column.numpy()
    thresholds = answers.thresholds()
    if thresholds is not None:
        columns["threshold"] = thresholds

    # The mean over the annotated images of |share of positives - mean score| of their bin.
    images, positives, score_sums = counted.calibration_bins()
    gaps = np.abs(positives - score_sums).sum(1)
    totals = images.sum(1)
    errors = 100 * gaps / np.maximum(totals, 1)
    columns["calibration error"] = np.where(totals > 0, errors, np.nan)

    low, high = interval(numbers.resampled_precision)
    return ClassTable(
        names,
        {name: column.tolist() for name, column in columns.items()},
        ((100 * low).tolist(), (100 * high).tolist()),
    )


@dataclass(frozen=True)
class Pairs:
    """Labels against predictions of C classes.

    If an image has one label, `predictions` is the confusion matrix: rows are labels.
    """

    classes: list[int]  # their indices
    labels: np.ndarray  # images whose labels have both classes, int64 [C, C]
    predictions: np.ndarray  # images whose predictions have both, int64 [C, C]


def pairs_of_classes(answers: Answers) -> Pairs:
    """Return the matrix of the most frequent classes; of one label, of the most confused ones.

    They are in the order of the data, so that related classes stay together.
    """
    if answers.exclusive:
        return _confusions(answers)

    positives = (answers.labels == 1).sum(0)
    classes = np.sort(np.argsort(-positives, kind="stable")[:MOST_PAIRED])

    logits = np.ascontiguousarray(answers.logits[:, classes].T)
    decided = answers.decided(classes, logits).astype(np.float32)
    present = (answers.labels[:, classes].T == 1).astype(np.float32)
    both = [(chosen @ chosen.T).astype(np.int64) for chosen in (present, decided)]
    return Pairs(classes.tolist(), both[0], both[1])


def _confusions(answers: Answers) -> Pairs:
    """Return the confusion matrix; of an image with several labels, the first one counts."""
    images = answers.has_label
    labels, predicted = answers.labels[images].argmax(1), answers.predicted[images]
    right = answers.labels[images, predicted] == 1
    labels = np.where(right, predicted, labels)

    # A mistake counts for both of its classes.
    size = answers.labels.shape[1]
    confused = np.concatenate([labels[~right], predicted[~right]])
    mistakes = np.bincount(confused, minlength=size)
    classes = np.sort(np.argsort(-mistakes, kind="stable")[:MOST_PAIRED])

    matrix = np.zeros((len(classes), len(classes)), np.int64)
    shown = np.isin(labels, classes) & np.isin(predicted, classes)
    rows = np.searchsorted(classes, labels[shown])
    columns = np.searchsorted(classes, predicted[shown])
    np.add.at(matrix, (rows, columns), 1)

    counts = np.bincount(labels, minlength=size)[classes]
    return Pairs(classes.tolist(), np.diag(counts), matrix)
