"""Sparse labels of a split: half a gigabyte for nine million images of 9,605 classes, not 86."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Labels:
    """Sparse labels of N images and K classes in CSR form; unlisted entries equal `default`.

    These are numpy arrays, so that loader workers share their memory. Lists would be copied little
    by little, because every access changes the reference counts in their pages.
    """

    # [N + 1] int64: where the entries of each image start.
    starts: np.ndarray

    # [M] int32: the class of each entry.
    classes: np.ndarray

    # [M] int8: 1 present, 0 absent, -1 not annotated, or a code that only this dataset uses.
    values: np.ndarray

    # K.
    num_classes: int

    # The value of unlisted entries: 0 (absent) or -1 (not annotated).
    default: int = 0

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> Tensor:
        """Return the target of one image, int8 [K], as a new tensor.

        Raises:
            IndexError: for an index that is not from 0 to N - 1.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")

        entries = slice(self.starts[index], self.starts[index + 1])
        target = np.full(self.num_classes, self.default, np.int8)
        target[self.classes[entries]] = self.values[entries]
        return torch.from_numpy(target)

    def dense(self) -> np.ndarray:
        """Return all targets as a matrix, int8 [N, K]."""
        matrix = np.full((len(self), self.num_classes), self.default, np.int8)
        matrix[self.images(), self.classes] = self.values
        return matrix

    def counts(self, value: int = 1) -> np.ndarray:
        """Count the listed entries of this value per class: int64 [K]."""
        return np.bincount(self.classes[self.values == value], minlength=self.num_classes)

    def all_counts(self, value: int) -> np.ndarray:
        """Count the images of this value per class, listed or not: int64 [K]."""
        counts = self.counts(value)
        if value != self.default:
            return counts

        listed = np.bincount(self.classes, minlength=self.num_classes)
        return counts + len(self) - listed

    def counts_per_image(self, value: int = 1) -> np.ndarray:
        """Count the listed entries of this value per image: int64 [N]."""
        return np.bincount(self.images()[self.values == value], minlength=len(self))

    def select(self, images: np.ndarray) -> "Labels":
        """Return the labels of some images: bool [N], or their indices in the wanted order."""
        indices = np.flatnonzero(images) if images.dtype == bool else images
        lengths = np.diff(self.starts)[indices]
        starts = _starts(lengths)

        # The entries of an image stay together, so that all of them move by the same distance.
        shifts = np.repeat(self.starts[:-1][indices] - starts[:-1], lengths)
        old_positions = np.arange(starts[-1]) + shifts

        return replace(
            self,
            starts=starts,
            classes=self.classes[old_positions],
            values=self.values[old_positions],
        )

    def select_classes(self, columns: Sequence[int]) -> "Labels":
        """Return the labels of some classes only: their indices, in the wanted order."""
        new_column = np.full(self.num_classes, -1, np.int32)
        new_column[list(columns)] = np.arange(len(columns))

        classes = new_column[self.classes]
        kept = classes >= 0  # the classes that were not asked for have no new column

        # The number of kept entries before each old start is the new start.
        starts = _starts(kept)[self.starts]
        return replace(
            self,
            starts=starts,
            classes=classes[kept],
            values=self.values[kept],
            num_classes=len(columns),
        )

    def recode(self, values: Mapping[int, int]) -> "Labels":
        """Return the labels with some values replaced, such as {2: -1}."""
        changed = self.values.copy()
        for old, new in values.items():
            changed[self.values == old] = new
        return replace(self, values=changed)

    def fault(self, allowed: range) -> str | None:
        """Return what is wrong with labels from a file, or None, so that later code may trust them.

        Args:
            allowed: the values that a label may have.
        """
        columns = ((self.starts, np.int64), (self.classes, np.int32), (self.values, np.int8))
        for array, dtype in columns:
            if array.dtype != dtype or array.ndim != 1:
                return "its labels are of another type"

        # The starts must rise from 0 to M: an index out of range would read the labels of another
        # image, or beyond the arrays.
        total = len(self.classes)
        if not len(self.starts) or len(self.values) != total:
            return "its labels do not fit its images"
        if self.starts[0] != 0 or self.starts[-1] != total:
            return "its labels do not fit its images"
        if (self.starts[1:] < self.starts[:-1]).any():
            return "its labels do not fit its images"

        if total and not (self.classes.min() >= 0 and self.classes.max() < self.num_classes):
            return "a label is out of range"
        if total and not (self.values.min() in allowed and self.values.max() in allowed):
            return "a label has an unknown value"

        if self.default not in (-1, 0):
            return "the default of its labels is unknown"
        return None

    def images(self) -> np.ndarray:
        """Return the image of each entry, int64 [M]."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))


def are_indices(value: object, num_classes: int) -> bool:
    """Return whether a value from a file is a list of class indices, each from 0 to K - 1."""
    # `type` and not `isinstance`, for which true and false are integers.
    return isinstance(value, list) and all(
        type(column) is int and 0 <= column < num_classes for column in value
    )


def from_dense(matrix: np.ndarray, *, default: int = 0) -> Labels:
    """Return the labels in a matrix, int8 [N, K]; entries equal to `default` are not listed."""
    images, classes = np.nonzero(matrix != default)

    # `np.nonzero` returns the entries row by row, so that the images ascend.
    starts = np.searchsorted(images, np.arange(len(matrix) + 1)).astype(np.int64)
    values = matrix[images, classes].astype(np.int8)
    return Labels(starts, classes.astype(np.int32), values, matrix.shape[1], default)


def from_single(classes: np.ndarray, num_classes: int) -> Labels:
    """Return the labels of images with one class each, given as integers [N] from 0 to K - 1."""
    ones = np.ones(len(classes), np.int8)
    return Labels(np.arange(len(classes) + 1), np.asarray(classes, np.int32), ones, num_classes)


def from_entries(
    entries: Sequence[Mapping[int, int]], *, num_classes: int, default: int = 0
) -> Labels:
    """Return the labels of N images from one mapping per image: class index -> value."""
    starts = _starts([len(image_entries) for image_entries in entries])
    total = int(starts[-1])

    # Streamed into arrays: lists of all entries would need many times their memory.
    columns = chain.from_iterable(entries)
    codes = chain.from_iterable(image_entries.values() for image_entries in entries)
    classes = np.fromiter(columns, np.int32, total)
    values = np.fromiter(codes, np.int8, total)
    return Labels(starts, classes, values, num_classes, default)


def from_flags(
    images: np.ndarray, classes: np.ndarray, flags: np.ndarray, *, num_images: int, num_classes: int
) -> Labels:
    """Return the labels of M flags in any order, such as the sizes of annotated objects.

    Flags of the same image and class are combined by a bitwise or; an unlisted pair has the value
    0.

    Args:
        images: the image of each flag, integers [M] from 0 to N - 1.
        classes: the class of each flag, integers [M] from 0 to K - 1.
        flags: int8 [M], not 0.
        num_images: N.
        num_classes: K.
    """
    pairs = images.astype(np.int64) * num_classes + classes
    pairs, positions = np.unique(pairs, return_inverse=True)

    values = np.zeros(len(pairs), np.int8)
    np.bitwise_or.at(values, positions, flags)
    return _from_pairs(pairs, values, num_images, num_classes, 0)


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

    A statement says of an image and a class whether the class is present.

    A pair of image and class that is stated to be both present and absent counts as present; a
    repeated statement counts once.

    Args:
        images: the image of each statement, integers [M] from 0 to N - 1.
        classes: the class of each statement, integers [M] from 0 to K - 1.
        values: the value of each statement, [M] of 1 (present) and 0 (absent).
        num_images: N.
        num_classes: K.
        default: see `Labels`.

    Returns:
        The labels, and the number of pairs that are stated to be both present and absent.
    """
    # Encode each statement as the number 2 * (image * K + class) + value. This is done in place,
    # because 57 million statements are half a gigabyte.
    statements = images.astype(np.int64)
    statements *= num_classes
    statements += classes
    statements *= 2
    statements += values == 1

    # Sorting groups the statements by pair and puts "present" after "absent". Of each group the
    # last statement therefore decides.
    statements.sort()
    pairs = statements >> 1
    is_last = np.ones(len(pairs), bool)
    is_last[:-1] = pairs[:-1] != pairs[1:]

    # A contradictory pair has exactly one place where a different statement follows within the
    # group: from "absent" to "present".
    same_pair_follows = ~is_last[:-1]
    other_statement_follows = statements[:-1] != statements[1:]
    contradictions = int(np.count_nonzero(same_pair_follows & other_statement_follows))

    present = (statements[is_last] & 1).astype(np.int8)
    labels = _from_pairs(pairs[is_last], present, num_images, num_classes, default)
    return labels, contradictions


def _starts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return where the entries of each of N images start, and their total: int64 [N + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _from_pairs(
    pairs: np.ndarray, values: np.ndarray, num_images: int, num_classes: int, default: int
) -> Labels:
    """Return the labels of ascending pairs, each encoded as `image * num_classes + class`."""
    images, classes = np.divmod(pairs, num_classes)
    starts = _starts(np.bincount(images, minlength=num_images))
    return Labels(starts, classes.astype(np.int32), values, num_classes, default)
