"""Statistics and faults of the labels of a split."""

from typing import Any

import numpy as np

from mldec.data.base import Split
from mldec.data.labels import Labels

CHUNK = 65_536  # images whose labels are made dense at a time


def split_statistics(split: Split, labels: Labels) -> dict[str, Any]:
    """Return the counts of a split as plain values, under the keys of the JSON report."""
    counts, per_image = labels.counts(), labels.counts_per_image()
    names = split.classes.names
    return {
        "images": len(split.dataset),
        "classes": len(names),
        "positives": int(counts.sum()),
        "negatives_stated": int(labels.counts(0).sum()),
        "images_per_class": {
            "min": int(counts.min()),
            "median": float(np.median(counts)),
            "max": int(counts.max()),
        },
        "labels_per_image": {
            "min": int(per_image.min()),
            "mean": float(per_image.mean()),
            "max": int(per_image.max()),
        },
        "images_without_label": int((per_image == 0).sum()),
        "classes_without_positive": [
            name for name, count in zip(names, counts, strict=True) if not count
        ],
    }


def label_faults(split: Split, labels: Labels, *, several: bool = False) -> list[str]:
    """Return one phrase per kind of impossible labels in a split.

    Args:
        split: the classes and images.
        labels: of the split.
        several: allow several labels per image although the classes are exclusive, as ImageNet's
            ReaL labels have.
    """
    faults = []
    if labels.num_classes != len(split.classes.names) or len(labels) != len(split.dataset):
        faults.append(f"labels are of {len(labels):,} images and {labels.num_classes} classes")

    wrong_class = (labels.classes < 0) | (labels.classes >= labels.num_classes)
    out_of_range = wrong_class | ~np.isin(labels.values, (-1, 0, 1))
    if out_of_range.any():
        # The image whose entries of the sparse labels include the first wrong one.
        entry = np.flatnonzero(out_of_range)[0]
        first = int(np.searchsorted(labels.starts, entry, "right")) - 1
        name = split.dataset.name(first)
        faults.append(f"{out_of_range.sum():,} labels out of range, the first of {name}")
    elif split.classes.exclusive and not several:
        not_single = np.flatnonzero(labels.counts_per_image() != 1)
        if len(not_single):
            name = split.dataset.name(int(not_single[0]))
            faults.append(
                f"{len(not_single):,} images without exactly one label, the first is {name}"
            )
    return faults


def co_occurrence(labels: Labels, classes: np.ndarray) -> np.ndarray:
    """Return how often classes are shown together.

    Args:
        labels: of all images.
        classes: k class indices, ascending.

    Returns:
        [k, k], in the order of `classes`: the fraction of the images with the row's class that
        have the column's class too.
    """
    pairs = np.zeros((len(classes), len(classes)))
    for start in range(0, len(labels), CHUNK):
        chunk = labels.select(np.arange(start, min(start + CHUNK, len(labels))))

        # Make the positives of these classes dense: [images, k].
        wanted = (chunk.values == 1) & np.isin(chunk.classes, classes)
        images = np.repeat(np.arange(len(chunk)), np.diff(chunk.starts))[wanted]
        present = np.zeros((len(chunk), len(classes)), np.float32)
        present[images, np.searchsorted(classes, chunk.classes[wanted])] = 1
        pairs += present.T @ present

    # A class without images has a row of zeros.
    return pairs / np.maximum(np.diag(pairs)[:, None], 1)
