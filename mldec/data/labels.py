"""Sparse labels, and simulations of missing labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mldec.errors import DataError, naming_errors
from mldec.files.text import read_lines
from mldec.names import abbreviate


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


def random_drop(labels: Labels, p: float, seed: int) -> Labels:
    """Set each entry to -1 (not annotated) with probability p, independently.

    Source: Alibaba-MIIL/PartialLabelingCSL, coco_simulation.py ("rps"), arXiv 2110.10955.
    """
    matrix = labels.dense()
    rng = np.random.default_rng(seed)
    matrix[rng.random(matrix.shape, np.float32) < p] = -1
    return from_dense(matrix, default=labels.default)


def fixed_per_class(labels: Labels, n: int, seed: int) -> Labels:
    """Keep n random positives and n random negatives per class, or all if there are fewer.

    All other entries become -1 (not annotated).

    Source: Alibaba-MIIL/PartialLabelingCSL, coco_simulation.py ("fpc"), arXiv 2110.10955.
    """
    matrix = labels.dense()
    kept = np.full_like(matrix, -1)
    rng = np.random.default_rng(seed)

    for column in range(labels.num_classes):
        for value in (1, 0):
            images = np.flatnonzero(matrix[:, column] == value)
            chosen = rng.choice(images, min(n, len(images)), replace=False)
            kept[chosen, column] = value

    return from_dense(kept, default=-1)


def random_positives(labels: Labels, seed: int, share: float | None = None) -> np.ndarray:
    """Return a mask of random positives, bool [M], at least one per image.

    Source: Cole et al. (CVPR 2021, arXiv 2106.09708) for one positive per image. A share of all
    positives, in (0, 1], follows the lists of Zhang et al. (arXiv 2112.07368), which are not purely
    random.
    """
    shuffled = np.random.default_rng(seed).permutation(np.flatnonzero(labels.values == 1))
    _, first = np.unique(labels.images()[shuffled], return_index=True)
    chosen = np.zeros(len(labels.values), bool)
    chosen[shuffled[first]] = True

    if share is not None:
        others = np.delete(shuffled, first)
        more = max(round(share * len(shuffled)) - len(first), 0)
        chosen[others[:more]] = True
    return chosen


def listed_positives(labels: Labels, files: Sequence[str], path: Path) -> np.ndarray:
    """Return a mask of the positives, bool [M], in a file of the format of robust-loss-mlml.

    Source: xinyu1205/robust-loss-mlml. Lines such as `name.jpg,3 41` have the name of an image
    file, without its folder, and class indices. All images in `files` must be listed. Other images
    are ignored. Raises DataError if the file does not match the images or their positives.
    """
    # Maps a file name to the row of its image.
    rows: dict[str, int] = {}
    for row, file in enumerate(files):
        name = Path(file).name
        if name in rows:
            raise DataError(f"{path}: {files[rows[name]]} and {file} share a name; rename one")
        rows[name] = row

    # Maps image and class of a positive to the index of its entry.
    positions: dict[tuple[int, int], int] = {}
    entries = zip(labels.images(), labels.classes, labels.values, strict=True)
    for entry, (row, column, value) in enumerate(entries):
        if value == 1:
            positions[row, column] = entry
    chosen = np.zeros(len(labels.values), bool)

    with naming_errors(path, DataError, remedy="write lines such as a.jpg,3 41"):
        for line in read_lines(path):
            name, _, columns = line.partition(",")
            if name not in rows:
                continue
            row = rows.pop(name)
            for column in columns.split():
                if (row, int(column)) not in positions:
                    raise ValueError(f"{abbreviate(name)} has no positive label of class {column}")
                chosen[positions[row, int(column)]] = True
        if rows:
            raise ValueError(f"{len(rows):,} images are missing, such as {next(iter(rows))}")
    return chosen
