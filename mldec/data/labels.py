"""The labels of a split, kept sparse: nine million images of 9,605 classes are half a gigabyte, not 86."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Labels:
    """Sparse labels of N images and K classes in CSR form; pairs that are not listed have the value `default`.

    Numpy arrays only, so that loader workers share them: lists would be copied bit by bit as their reference counts
    change.
    """

    starts: np.ndarray  # [N + 1] int64: where the entries of each image start
    classes: np.ndarray  # [M] int32: the class of each entry
    values: (
        np.ndarray
    )  # [M] int8: 1 present, 0 absent, -1 not annotated, or a code of the dataset's own
    num_classes: int
    default: int = 0  # 0: what is not listed is absent; -1: it is not annotated

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> Tensor:
        """Return the target of one image, int8 [K]; the caller's own."""
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")

        entries = slice(self.starts[index], self.starts[index + 1])
        target = np.full(self.num_classes, self.default, np.int8)
        target[self.classes[entries]] = self.values[entries]
        return torch.from_numpy(target)

    def dense(self) -> np.ndarray:
        """Return int8 [N, K]."""
        matrix = np.full((len(self), self.num_classes), self.default, np.int8)
        matrix[self._images(), self.classes] = self.values
        return matrix

    def counts(self, value: int = 1) -> np.ndarray:
        """Count the entries of this value per class: int64 [K]."""
        return np.bincount(self.classes[self.values == value], minlength=self.num_classes)

    def counts_per_image(self, value: int = 1) -> np.ndarray:
        """Count the entries of this value per image: int64 [N]."""
        return np.bincount(self._images()[self.values == value], minlength=len(self))

    def select(self, images: np.ndarray) -> "Labels":
        """Return the labels of some images: bool [N], or their indices in the wanted order."""
        indices = np.flatnonzero(images) if images.dtype == bool else images
        lengths = np.diff(self.starts)[indices]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

        # Where each kept entry was: at the start of its image, then one after the other.
        old_positions = np.repeat(self.starts[:-1][indices] - starts[:-1], lengths) + np.arange(
            starts[-1]
        )
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
        kept = classes >= 0
        starts = np.concatenate([[0], np.cumsum(kept)])[self.starts].astype(np.int64)
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
        """Return what is wrong with labels that were read from a file, so that nothing in them is trusted further on.

        Args:
            allowed: the values that a label may have.
        """
        columns = {"starts": np.int64, "classes": np.int32, "values": np.int8}
        if any(
            getattr(self, name).dtype != kind or getattr(self, name).ndim != 1
            for name, kind in columns.items()
        ):
            return "its labels are of another type"

        total = len(self.classes)
        if (
            not len(self.starts)
            or self.starts[0] != 0
            or self.starts[-1] != total
            or len(self.values) != total
        ):
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

    def _images(self) -> np.ndarray:
        """Return the image of each entry, int64 [M]."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))


def from_dense(matrix: np.ndarray, *, default: int = 0) -> Labels:
    """Return the labels of a matrix of int8 [N, K]."""
    images, classes = np.nonzero(matrix != default)
    starts = np.searchsorted(images, np.arange(len(matrix) + 1)).astype(np.int64)
    values = matrix[images, classes].astype(np.int8)
    return Labels(starts, classes.astype(np.int32), values, matrix.shape[1], default)


def from_single(classes: np.ndarray, num_classes: int) -> Labels:
    """Return the labels of images with one class each: whole numbers [N]."""
    ones = np.ones(len(classes), np.int8)
    return Labels(np.arange(len(classes) + 1), np.asarray(classes, np.int32), ones, num_classes)


def from_entries(
    entries: Sequence[Mapping[int, int]], *, num_classes: int, default: int = 0
) -> Labels:
    """Return the labels of images whose entries are listed one image at a time: class -> value, for each image."""
    lengths = [len(of_image) for of_image in entries]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(starts[-1])

    classes = np.fromiter((column for of_image in entries for column in of_image), np.int32, total)
    values = np.fromiter(
        (value for of_image in entries for value in of_image.values()), np.int8, total
    )
    return Labels(starts, classes, values, num_classes, default)


def from_flags(
    images: np.ndarray, classes: np.ndarray, flags: np.ndarray, *, num_images: int, num_classes: int
) -> Labels:
    """Return the labels of flags in any order: those of a pair are united bit by bit, a pair without any has 0.

    Args:
        images: whole numbers [M] below `num_images`.
        classes: whole numbers [M] below `num_classes`.
        flags: int8 [M], not 0.
        num_images: N.
        num_classes: K.
    """
    pairs = images.astype(np.int64) * num_classes + classes
    order = np.argsort(pairs, kind="stable")
    pairs, flags = pairs[order], flags[order]

    first = np.flatnonzero(_differs_from_the_one_before(pairs))
    values = np.bitwise_or.reduceat(flags, first) if len(first) else flags
    return _from_pairs(pairs[first], values, num_images, num_classes, 0)


def from_statements(
    images: np.ndarray,
    classes: np.ndarray,
    values: np.ndarray,
    *,
    num_images: int,
    num_classes: int,
    default: int = -1,
) -> tuple[Labels, int]:
    """Return the labels of statements in any order, and how many pairs are called both present and absent.

    Such a pair counts as present; a statement made twice counts once.

    Args:
        images: whole numbers [M] below `num_images`.
        classes: whole numbers [M] below `num_classes`.
        values: [M] of 1 and 0.
        num_images: N.
        num_classes: K.
        default: see `Labels`.
    """
    # One number per statement, made in place: 57 million of them are half a gigabyte. Sorting groups the statements by
    # image and class, and puts "present" last among those on one pair.
    statements = images.astype(np.int64)
    statements *= num_classes
    statements += classes
    statements *= 2
    statements += values == 1
    statements.sort()

    # The last statement on a pair decides. A clash is a pair with both values: two neighbours of the same pair differ.
    pairs = statements >> 1
    is_last = np.append(_differs_from_the_one_before(pairs)[1:], True)[: len(pairs)]
    clashes = int(np.count_nonzero(~is_last[:-1] & (statements[1:] != statements[:-1])))

    values = (statements[is_last] & 1).astype(np.int8)
    return _from_pairs(pairs[is_last], values, num_images, num_classes, default), clashes


def _differs_from_the_one_before(numbers: np.ndarray) -> np.ndarray:
    """Tell for each number whether it differs from the one before it, bool [M]; the first one does."""
    differs = np.ones(len(numbers), bool)
    differs[1:] = numbers[1:] != numbers[:-1]
    return differs


def _from_pairs(
    pairs: np.ndarray, values: np.ndarray, num_images: int, num_classes: int, default: int
) -> Labels:
    """Return the labels of ascending pairs, each the number `image * num_classes + class`."""
    images, classes = np.divmod(pairs, num_classes)
    counts = np.bincount(images, minlength=num_images)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Labels(starts, classes.astype(np.int32), values, num_classes, default)
