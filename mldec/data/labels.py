"""Sparse labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Labels:
    """Sparse labels of N images and K classes in CSR form. Unlisted entries equal `default`.

    The arrays are numpy arrays, so that worker processes share their memory. Lists would be copied
    gradually, because every access changes reference counts (copy-on-write).
    """

    starts: np.ndarray  # [N + 1] int64: start of the entries of each image
    classes: np.ndarray  # [M] int32: the class of each entry

    # [M] int8: 1 present, 0 absent, -1 not annotated, or a dataset-specific code.
    values: np.ndarray

    num_classes: int  # K
    default: int = 0  # value of unlisted entries: 0 (absent) or -1 (not annotated)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> Tensor:
        """Return the target of one image, int8 [K], as a new tensor."""
        entries = slice(self.starts[index], self.starts[index + 1])
        # A new array, so that a change of the target does not change the labels.
        target = np.full(self.num_classes, self.default, np.int8)
        target[self.classes[entries]] = self.values[entries]
        return torch.from_numpy(target)

    def dense(self) -> np.ndarray:
        """Return all targets as a matrix, int8 [N, K]."""
        matrix = np.full((len(self), self.num_classes), self.default, np.int8)
        matrix[self.images(), self.classes] = self.values
        return matrix

    def images(self) -> np.ndarray:
        """Return the image of each entry, int64 [M]."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    def counts(self, value: int = 1) -> np.ndarray:
        """Return the number of listed entries with this value per class, int64 [K]."""
        return np.bincount(self.classes[self.values == value], minlength=self.num_classes)

    def all_counts(self, value: int) -> np.ndarray:
        """Return the number of entries with this value per class, listed or not, int64 [K]."""
        counts = self.counts(value)
        if value == self.default:
            counts = counts + len(self) - np.bincount(self.classes, minlength=self.num_classes)
        return counts

    def counts_per_image(self, value: int = 1) -> np.ndarray:
        """Return the number of listed entries with this value per image, int64 [N]."""
        return np.bincount(self.images()[self.values == value], minlength=len(self))

    def select(self, images: np.ndarray) -> "Labels":
        """Return the labels of some images, given as a bool mask [N] or ordered indices."""
        indices = images
        if images.dtype == bool:
            indices = np.flatnonzero(images)
        lengths = np.diff(self.starts)[indices]
        starts = _starts(lengths)

        # The entries of an image stay together, so they all move by the same distance.
        shifts = np.repeat(self.starts[:-1][indices] - starts[:-1], lengths)
        old = np.arange(starts[-1]) + shifts
        return replace(self, starts=starts, classes=self.classes[old], values=self.values[old])

    def select_classes(self, columns: Sequence[int]) -> "Labels":
        """Return the labels of some classes, given as ordered indices."""
        new_column = np.full(self.num_classes, -1, np.int32)
        new_column[list(columns)] = np.arange(len(columns))

        classes = new_column[self.classes]
        # Entries of the other classes have column -1 for a moment, and are then removed.
        renumbered = replace(self, classes=classes, num_classes=len(columns))
        return renumbered.select_entries(classes >= 0)

    def select_entries(self, entries: np.ndarray) -> "Labels":
        """Return the labels with a subset of the listed entries, given as a bool mask [M]."""
        # The new start is the number of kept entries before the old start.
        starts = _starts(entries)[self.starts]
        return replace(
            self, starts=starts, classes=self.classes[entries], values=self.values[entries]
        )


def from_dense(matrix: np.ndarray, *, default: int = 0) -> Labels:
    """Return the labels of a matrix, int8 [N, K]. Entries equal to `default` are not listed."""
    images, classes = np.nonzero(matrix != default)

    # `np.nonzero` returns the entries row by row, so the images are sorted.
    starts = np.searchsorted(images, np.arange(len(matrix) + 1)).astype(np.int64)
    values = matrix[images, classes].astype(np.int8)
    return Labels(starts, classes.astype(np.int32), values, matrix.shape[1], default)


def from_single(classes: np.ndarray, num_classes: int) -> Labels:
    """Return the labels of images with one class each: integers [N] from 0 to K - 1."""
    starts = np.arange(len(classes) + 1)
    ones = np.ones(len(classes), np.int8)
    return Labels(starts, np.asarray(classes, np.int32), ones, num_classes)


def from_entries(
    entries: Sequence[Mapping[int, int]], *, num_classes: int, default: int = 0
) -> Labels:
    """Return the labels of N images from one mapping of class index to value per image."""
    starts = _starts(list(map(len, entries)))
    total = int(starts[-1])

    # Stream the entries into arrays. Lists would need a multiple of their memory.
    classes = np.fromiter(chain.from_iterable(entries), np.int32, total)
    values_of_images = (image_entries.values() for image_entries in entries)
    values = np.fromiter(chain.from_iterable(values_of_images), np.int8, total)
    return Labels(starts, classes, values, num_classes, default)


def from_statements(
    images: np.ndarray,
    classes: np.ndarray,
    values: np.ndarray,
    *,
    num_images: int,
    num_classes: int,
    default: int = -1,
) -> tuple[Labels, int]:
    """Return the labels of M statements in any order, and the number of contradictory pairs.

    A statement is an image index, a class index, and 1 (present) or 0 (absent). A pair of image and
    class with both values is contradictory, and counts as present. Pairs without a statement have
    the value `default`, 0 or -1.
    """
    # Encode each statement as 2 * (image * K + class) + value, in place: the 57 million statements
    # of Open Images take half a gigabyte.
    statements = images.astype(np.int64)
    statements *= num_classes
    statements += classes
    statements *= 2
    statements += values == 1

    # Sorting groups the statements by pair and puts "present" after "absent". The last statement
    # of each group is its result.
    statements.sort()
    pairs = statements >> 1
    is_last = np.ones(len(pairs), bool)
    is_last[:-1] = pairs[:-1] != pairs[1:]

    # A contradictory pair has exactly one change within its group: "absent" to "present".
    other_statement_follows = statements[:-1] != statements[1:]
    contradictions = int(np.count_nonzero(~is_last[:-1] & other_statement_follows))

    rows, columns = np.divmod(pairs[is_last], num_classes)
    starts = _starts(np.bincount(rows, minlength=num_images))
    present = (statements[is_last] & 1).astype(np.int8)
    labels = Labels(starts, columns.astype(np.int32), present, num_classes, default)
    return labels, contradictions


def _starts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the start of the entries of each image and the total, int64 [N + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
