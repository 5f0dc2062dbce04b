"""Simulations of missing training labels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from mldec.data.labels import Labels, from_dense
from mldec.data.types import StoredImages
from mldec.errors import ConfigError, DataError, log, naming_errors
from mldec.files.text import expand_user, read_lines
from mldec.names import abbreviate

MAX_CELLS = 10**9  # largest number of labels that become a matrix, of one byte each


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Settings of a `data` node that simulate missing training labels.

    They are shared by all readers of multi-label data. Set at most one of the first three and of
    `drop_labels` and `keep_per_class`. The first three select positives, see `random_positives` and
    `listed_positives`. The other two set labels to -1 (not annotated), which not every loss
    accepts, see `random_drop` and `fixed_per_class`.
    """

    single_positive: int | None = None  # seed; one random positive per image is observed
    observed: float | None = None  # fraction of observed positives, in (0, 1]
    observed_list: str | None = None  # file that lists the observed positives

    observed_seed: int = 0  # seed of `observed`

    # Value of all other labels: 0, or -1 (not annotated).
    unobserved: Literal["negative", "unknown"] = "negative"

    drop_labels: float = 0.0  # probability that a label becomes -1, in [0, 1)
    # Number of positives and negatives of each class that are kept. All other labels become -1.
    keep_per_class: int | None = None
    labels_seed: int = 0  # seed of `drop_labels` and `keep_per_class`, 0 or more

    def __post_init__(self) -> None:
        if not 0 <= self.drop_labels < 1:
            raise ValueError(f"drop_labels is {self.drop_labels}; it must be in [0, 1)")
        if self.keep_per_class is not None and self.keep_per_class < 1:
            raise ValueError(
                f"keep_per_class is {self.keep_per_class}; it must be at least 1, or null for all "
                f"labels"
            )
        if self.observed is not None and not 0 < self.observed <= 1:
            raise ValueError(f"observed is {self.observed}; it must be in (0, 1]")
        if self.single_positive is not None and self.single_positive < 0:
            raise ValueError(f"single_positive is {self.single_positive}; a seed is 0 or more")
        if len(self.given) > 1:
            raise ValueError(f"{self.given[0]} and {self.given[1]} exclude each other; remove one")

    @property
    def given(self) -> list[str]:
        """Names of the settings that select the observed labels."""
        names = ("single_positive", "observed", "observed_list", "keep_per_class")
        given = [name for name in names if getattr(self, name) is not None]
        if self.drop_labels:
            given.append("drop_labels")
        return given

    def apply(self, images: StoredImages, split_name: str) -> StoredImages:
        """Return training images with their observed labels only."""
        labels = images.labels
        if self.keep_per_class is not None or self.drop_labels:
            return replace(images, labels=self._partly_annotated(labels, split_name))
        if self.observed_list is not None:
            # The list names files, so that it does not depend on the order of the images.
            files = [images.name(index) for index in range(len(images))]
            chosen = listed_positives(labels, files, expand_user(self.observed_list))
        elif self.observed is not None:
            chosen = random_positives(labels, self.observed_seed, self.observed)
        elif self.single_positive is not None:
            chosen = random_positives(labels, self.single_positive)
        else:
            return images

        counts = f"{chosen.sum():,} of {labels.counts().sum():,} positives"
        log.info(
            f"{split_name}: {counts} are observed, all other labels count as {self.unobserved}"
        )
        # The unlisted entries get the value of unobserved labels, so that only the chosen ones are
        # stored.
        default = 0 if self.unobserved == "negative" else -1
        return replace(images, labels=replace(labels.select_entries(chosen), default=default))

    def _partly_annotated(self, labels: Labels, split_name: str) -> Labels:
        """Return the labels with -1 where `drop_labels` or `keep_per_class` removes a label."""
        # Each pair of image and class has a random number, so the labels become a matrix.
        cells = len(labels) * labels.num_classes
        if cells > MAX_CELLS:
            raise ConfigError(
                f"data.{self.given[0]}: {len(labels):,} images and {labels.num_classes:,} classes "
                f"have more than {MAX_CELLS:,} labels; pass data.observed instead"
            )
        if self.keep_per_class is not None:
            kept = fixed_per_class(labels, self.keep_per_class, self.labels_seed)
        else:
            kept = random_drop(labels, self.drop_labels, self.labels_seed)
        annotated = kept.all_counts(1).sum() + kept.all_counts(0).sum()
        share = f"{annotated / cells:.2%} of the labels are kept"
        log.info(f"{split_name}: {share}, the others count as not annotated")
        return kept


ALL_OBSERVED = Observed()


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

    # One generator draws for all classes in turn, so that the result depends on the seed only.
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
    # The first positive of each image in the random order is a uniform choice among its positives.
    _, first = np.unique(labels.images()[shuffled], return_index=True)
    chosen = np.zeros(len(labels.values), bool)
    chosen[shuffled[first]] = True

    if share is not None:
        others = np.delete(shuffled, first)
        # Every image keeps a positive, so that the share may be exceeded if it is small.
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
