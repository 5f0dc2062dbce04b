"""The labels of a split, kept sparse: nine million images of 9,605 classes are half a gigabyte, not 86."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Labels:
    """What is said of each image and class; everything else has one value, `rest`.

    Numpy arrays only, so that loader workers share them: lists would be copied bit by bit as their reference counts
    change.
    """

    starts: np.ndarray  # [N + 1] int64: where the statements on each image start
    classes: np.ndarray  # [M] int32: the class of each statement
    values: np.ndarray  # [M] int8: 1 present, 0 absent, -1 not annotated, or a code of the dataset's own
    num_classes: int
    rest: int = 0  # 0: what is not said is absent; -1: it is not annotated

    def __len__(self) -> int:
        return len(self.starts) - 1

    def row(self, index: int) -> Tensor:
        """Return the target of one image, int8 [K]; the caller's own."""
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        said = slice(self.starts[index], self.starts[index + 1])
        target = np.full(self.num_classes, self.rest, np.int8)
        target[self.classes[said]] = self.values[said]
        return torch.from_numpy(target)

    def dense(self) -> np.ndarray:
        """Return int8 [N, K]."""
        matrix = np.full((len(self), self.num_classes), self.rest, np.int8)
        matrix[self._images(), self.classes] = self.values
        return matrix

    def counts(self, value: int = 1) -> np.ndarray:
        """Return how many images have this value, stated, for each class: int64 [K]."""
        return np.bincount(self.classes[self.values == value], minlength=self.num_classes)

    def counts_per_image(self, value: int = 1) -> np.ndarray:
        """Return how many classes have this value, stated, for each image: int64 [N]."""
        return np.bincount(self._images()[self.values == value], minlength=len(self))

    def select(self, images: np.ndarray) -> "Labels":
        """Return the labels of some images: bool [N], or their indices in the wanted order."""
        indices = np.flatnonzero(images) if images.dtype == bool else images
        lengths = np.diff(self.starts)[indices]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        # The place of each kept statement: its image's start, then one after the other.
        places = np.repeat(self.starts[:-1][indices] - starts[:-1], lengths) + np.arange(starts[-1])
        return replace(self, starts=starts, classes=self.classes[places], values=self.values[places])

    def select_classes(self, columns: Sequence[int]) -> "Labels":
        """Return the labels of some classes only: their indices, in the wanted order."""
        new = np.full(self.num_classes, -1, np.int32)
        new[list(columns)] = np.arange(len(columns))
        classes = new[self.classes]
        kept = classes >= 0
        starts = np.concatenate([[0], np.cumsum(kept)])[self.starts].astype(np.int64)
        return replace(self, starts=starts, classes=classes[kept], values=self.values[kept], num_classes=len(columns))

    def recode(self, values: Mapping[int, int]) -> "Labels":
        """Return the labels with some values replaced, such as {2: -1}."""
        changed = self.values.copy()
        for old, new in values.items():
            changed[self.values == old] = new
        return replace(self, values=changed)

    def fault(self, allowed: range) -> str | None:
        """Return what cannot be about labels that were read from a file, so that nothing in them is trusted further on.

        Args:
            allowed: the values that a label may have.
        """
        columns = {"starts": np.int64, "classes": np.int32, "values": np.int8}
        if any(getattr(self, name).dtype != kind or getattr(self, name).ndim != 1 for name, kind in columns.items()):
            return "its labels are of another type"

        total = len(self.classes)
        if not len(self.starts) or self.starts[0] != 0 or self.starts[-1] != total or len(self.values) != total:
            return "its labels do not fit its images"
        if (self.starts[1:] < self.starts[:-1]).any():
            return "its labels do not fit its images"

        if total and not (self.classes.min() >= 0 and self.classes.max() < self.num_classes):
            return "a label is out of range"
        if total and not (self.values.min() in allowed and self.values.max() in allowed):
            return "a label has an unknown value"
        if self.rest not in (-1, 0):
            return "the value of the other labels is unknown"
        return None

    def _images(self) -> np.ndarray:
        return np.repeat(np.arange(len(self)), np.diff(self.starts))


def from_dense(matrix: np.ndarray, *, rest: int = 0) -> Labels:
    """Return the labels of a matrix of int8 [N, K]."""
    images, classes = np.nonzero(matrix != rest)
    starts = np.searchsorted(images, np.arange(len(matrix) + 1)).astype(np.int64)
    return Labels(starts, classes.astype(np.int32), matrix[images, classes].astype(np.int8), matrix.shape[1], rest)


def from_single(classes: np.ndarray, num_classes: int) -> Labels:
    """Return the labels of images with one class each: whole numbers [N]."""
    ones = np.ones(len(classes), np.int8)
    return Labels(np.arange(len(classes) + 1), np.asarray(classes, np.int32), ones, num_classes)


def from_lists(
    positives: Sequence[Iterable[int]],
    negatives: Sequence[Iterable[int]] | None = None,
    *,
    num_classes: int,
    rest: int = 0,
) -> Labels:
    """Return the labels of images with lists of classes; a class in both lists of an image counts as present."""
    starts = [0]
    classes: list[int] = []
    values: list[int] = []
    for row, present in enumerate(positives):
        said = dict.fromkeys(negatives[row], 0) if negatives is not None else {}
        said |= dict.fromkeys(present, 1)
        classes += said.keys()
        values += said.values()
        starts.append(len(classes))
    return Labels(np.array(starts, np.int64), np.array(classes, np.int32), np.array(values, np.int8), num_classes, rest)


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

    first = np.flatnonzero(np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)])
    values = np.bitwise_or.reduceat(flags, first) if len(first) else flags
    return _from_pairs(pairs[first], values, num_images, num_classes, 0)


def from_statements(
    images: np.ndarray, classes: np.ndarray, values: np.ndarray, *, num_images: int, num_classes: int, rest: int = -1
) -> tuple[Labels, int]:
    """Return the labels of statements in any order, and how many pairs are called both present and absent.

    Such a pair counts as present; a statement made twice counts once.

    Args:
        images: whole numbers [M] below `num_images`.
        classes: whole numbers [M] below `num_classes`.
        values: [M] of 1 and 0.
        num_images: N.
        num_classes: K.
        rest: what is not stated, see `Labels`.
    """
    # One number a statement: sorting it groups the images, and puts "present" last of what is said of a pair.
    said = images.astype(np.int64)
    said *= num_classes
    said += classes
    said *= 2
    said += values == 1
    said.sort()
    pairs = said >> 1
    last = np.append(pairs[1:] != pairs[:-1], True)[: len(pairs)]
    clashes = int(np.count_nonzero(~last[:-1] & (said[1:] != said[:-1])))
    values = (said[last] & 1).astype(np.int8)
    return _from_pairs(pairs[last], values, num_images, num_classes, rest), clashes


def _from_pairs(pairs: np.ndarray, values: np.ndarray, num_images: int, num_classes: int, rest: int) -> Labels:
    """Return the labels of ascending pairs, each the number `image * num_classes + class`."""
    owners, columns = np.divmod(pairs, num_classes)
    starts = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=num_images))]).astype(np.int64)
    return Labels(starts, columns.astype(np.int32), values, num_classes, rest)
