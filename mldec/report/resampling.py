"""Resample the images of an evaluation by weights, to see how far its numbers are down to chance.

The Bayesian bootstrap (Rubin 1981): a resample gives each image a random weight from the
exponential distribution with mean 1, where the usual bootstrap gives it a whole number, how often
it was drawn. With that one, more than a third of the classes with a single positive have none in a
resample, so that their average precision, and mAP with it, would be undefined or 0. Weights are
never 0.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_matrix
from tqdm import tqdm

from mldec.evaluators.multi_label import Counts
from mldec.runtime.console import on_terminal

SEED = 0
STEP = 100  # resamples that are computed together
MOST_RESAMPLES = 1_000
MOST_WORK = 40_000_000_000  # triples of a resample, an image and a class
MOST_WEIGHTS = 50_000_000
COLUMNS = 64  # classes that a thread copies together

# The classes of a block, their scores float32 [k, N] and their labels int8 [k, N].
Block = tuple[slice, np.ndarray, np.ndarray]


def draw(images: int, classes: int) -> np.ndarray:
    """Draw the weights of R resamples, float32 [R / STEP, images, STEP], always the same.

    Args:
        images: number of images.
        classes: number of classes; of many pairs of an image and a class there are fewer resamples,
            from `MOST_RESAMPLES` down to `STEP`.
    """
    affordable = min(MOST_WORK // max(1, images * classes), MOST_WEIGHTS // max(1, images))
    steps = max(1, min(affordable, MOST_RESAMPLES) // STEP)
    rng = np.random.default_rng(SEED)
    weights = rng.standard_exponential((steps, images, STEP), np.float32)
    return np.maximum(weights, np.finfo(np.float32).tiny, out=weights)


def count(weights: np.ndarray) -> int:
    """Return the number of resamples R of weights [R / STEP, N, STEP]."""
    return weights.shape[0] * weights.shape[2]


def average_precision(
    scores: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    interpolations: Sequence[str] = ("none",),
) -> dict[str, np.ndarray]:
    """Compute the average precision of one class in each resample.

    It is that of `mldec.evaluators.average_precision`, where an image counts as much as its weight.

    Args:
        scores: [N].
        labels: 1 (present), 0 (absent) or -1 (left out), [N].
        weights: [R / STEP, N, STEP].
        interpolations: as there.

    Returns:
        For each interpolation, float32 [R] in [0, 1]; NaN without a positive.
    """
    positives = np.flatnonzero(labels == 1)
    cuts = np.unique(scores[positives])
    if not len(cuts):
        return {name: np.full(count(weights), np.nan, np.float32) for name in interpolations}

    # The precision at a positive counts what scores at least as high: each image begins to count
    # at one of the cuts, the highest cut being number 0, or at none of them.
    images = np.flatnonzero((labels >= 0) & (scores >= cuts[0]))
    sums = _summation(len(cuts) - np.searchsorted(cuts, scores[images], "right"), images, labels)
    positive_sums = _summation(
        len(cuts) - np.searchsorted(cuts, scores[positives], "right"), positives, labels
    )

    parts: list[list[np.ndarray]] = [[] for _ in interpolations]
    for step in weights:
        found = positive_sums @ step
        hits = found.cumsum(0)
        precision = hits / (sums @ step).cumsum(0)

        for part, name in zip(parts, interpolations, strict=True):
            part.append(_mean_precision(precision, found, hits, name))
    return {name: np.concatenate(part) for name, part in zip(interpolations, parts, strict=True)}


def _summation(groups: np.ndarray, images: np.ndarray, labels: np.ndarray) -> csr_matrix:
    """Return the matrix that sums the weights of N images in groups, [G, N].

    Args:
        groups: number of the group of some images, from 0 to G - 1, [n].
        images: their indices, [n].
        labels: of all N images.
    """
    order = np.argsort(groups, kind="stable")
    starts = np.concatenate([[0], np.bincount(groups).cumsum()])
    shape = len(starts) - 1, len(labels)
    return csr_matrix((np.ones(len(images), np.float32), images[order], starts), shape)


def _mean_precision(
    precision: np.ndarray, found: np.ndarray, hits: np.ndarray, interpolation: str
) -> np.ndarray:
    """Return the average precision in each resample, [STEP].

    Args:
        precision: at each of m cuts, from the highest to the lowest, [m, STEP].
        found: weight of the positives at each cut, [m, STEP].
        hits: its running sum.
        interpolation: see `mldec.evaluators.average_precision`.
    """
    if interpolation == "none":
        return np.einsum("mr,mr->r", precision, found) / hits[-1]

    # The best precision at no smaller recall.
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    if interpolation == "envelope":
        return np.einsum("mr,mr->r", envelope, found) / hits[-1]

    # At recall 0, 0.1, .. 1: the first cut that reaches it.
    cuts = np.stack([(10 * hits < tenth * hits[-1]).sum(0) for tenth in range(11)])
    return np.take_along_axis(envelope, cuts, 0).mean(0)


def blocks(logits: np.ndarray, labels: np.ndarray) -> Iterator[Block]:
    """Yield the classes in blocks, from logits [N, K] and labels [N, K]."""
    for first in range(0, logits.shape[1], COLUMNS):
        columns = slice(first, min(first + COLUMNS, logits.shape[1]))
        yield (
            columns,
            np.ascontiguousarray(logits[:, columns].T),
            np.ascontiguousarray(labels[:, columns].T),
        )


def each_block(
    logits: np.ndarray, labels: np.ndarray, work: Callable[[slice, np.ndarray, np.ndarray], None]
) -> None:
    """Do some work for each block of classes, in as many threads as torch has, and show a bar.

    Threads help: numpy and scipy sort and add without the interpreter's lock.

    Args:
        logits: [N, K].
        labels: [N, K].
        work: takes a `Block`, and writes its results where they belong.
    """

    def of_columns(first: int) -> None:
        columns = slice(first, first + COLUMNS)
        for _, scores, targets in blocks(logits[:, columns], labels[:, columns]):
            work(slice(first, first + len(scores)), scores, targets)

    starts = range(0, logits.shape[1], COLUMNS)
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        done = threads.map(of_columns, starts)
        hidden = not on_terminal()
        for _ in tqdm(done, "classes", len(starts), leave=False, disable=hidden):
            pass


def precision_of_classes(
    logits: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    interpolations: Sequence[str] = ("none",),
) -> dict[str, np.ndarray]:
    """Compute the average precision of all classes in each resample.

    Args:
        logits: [N, K].
        labels: 1 (present), 0 (absent) or -1 (left out), [N, K].
        weights: [R / STEP, N, STEP].
        interpolations: see `average_precision`.

    Returns:
        For each interpolation, float32 [R, K].
    """
    shape = count(weights), logits.shape[1]
    results = {name: np.zeros(shape, np.float32) for name in interpolations}

    def work(columns: slice, scores: np.ndarray, targets: np.ndarray) -> None:
        for index, own_scores, own_targets in zip(
            range(columns.start, columns.stop), scores, targets, strict=True
        ):
            values = average_precision(own_scores, own_targets, weights, interpolations)
            for name, column in values.items():
                results[name][:, index] = column

    each_block(logits, labels, work)
    return results


@dataclass(frozen=True)
class ResampledCounts:
    """The counts of `mldec.evaluators.multi_label.Counts` in R resamples, float32 [R, K].

    Attributes:
        hits: weights of the true positives.
        predicted: weights of the annotated images that are predicted.
        positives: weights of the positives.
    """

    hits: np.ndarray
    predicted: np.ndarray
    positives: np.ndarray

    def of(self, resample: int) -> Counts:
        """Return the counts in one resample, as the evaluators take them."""
        counts = Counts(0)
        counts.hits, counts.predicted, counts.positives = (
            torch.from_numpy(column[resample].astype(np.float64))
            for column in (self.hits, self.predicted, self.positives)
        )
        return counts


def counts_of_classes(
    logits: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    decide: Callable[[slice, np.ndarray], np.ndarray],
) -> ResampledCounts:
    """Count the decisions on all classes in each resample.

    Args:
        logits: [N, K].
        labels: 1 (present), 0 (absent) or -1 (left out), [N, K].
        weights: [R / STEP, N, STEP].
        decide: maps the classes of a block and their scores [k, N] to decisions, bool [k, N].
    """
    hits, predicted, positives = np.zeros((3, count(weights), logits.shape[1]), np.float32)

    def work(columns: slice, scores: np.ndarray, targets: np.ndarray) -> None:
        decided = decide(columns, scores) & (targets >= 0)
        present = targets == 1
        for rows, chosen in (
            (hits, decided & present),
            (predicted, decided),
            (positives, present),
        ):
            chosen = chosen.astype(np.float32)
            sums = [(chosen @ step).T for step in weights]
            rows[:, columns] = np.concatenate(sums)

    each_block(logits, labels, work)
    return ResampledCounts(hits, predicted, positives)


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds of the 95 % percentile intervals of resampled numbers [R, ...]."""
    if not len(values):
        nothing = np.full(values.shape[1:], np.nan)
        return nothing, nothing
    low, high = np.percentile(values, (2.5, 97.5), axis=0)
    return low, high
