"""Pretend that a fully annotated training split were only partly annotated (arXiv 2110.10955).

Both simulations are functions of the labels and the seed: the same on every process and at every start.
"""

import numpy as np

from mldec.data.labels import Labels, from_dense


def random_drop(labels: Labels, p: float, seed: int) -> Labels:
    """Return labels of which each entry, independently, is not annotated (-1) with probability p.

    Source: Alibaba-MIIL/PartialLabelingCSL, coco_simulation.py ("rps").

    Args:
        labels: of any values; an entry of -1 stays.
        p: in [0, 1].
        seed: decides which entries go.
    """
    matrix = labels.dense()
    matrix[np.random.default_rng(seed).random(matrix.shape, np.float32) < p] = -1
    return from_dense(matrix, default=labels.default)


def fixed_per_class(labels: Labels, n: int, seed: int) -> Labels:
    """Return labels that keep n random positives and n random negatives of each class, or all if there are fewer.

    Everything else is not annotated (-1); an image may lose every label.

    Source: Alibaba-MIIL/PartialLabelingCSL, coco_simulation.py ("fpc").

    Args:
        labels: of 1, 0 and -1.
        n: 0 or more.
        seed: decides which entries stay.
    """
    matrix = labels.dense()
    kept = np.full_like(matrix, -1)
    rng = np.random.default_rng(seed)
    for column in range(labels.num_classes):
        for value in (1, 0):
            images = np.flatnonzero(matrix[:, column] == value)
            kept[rng.choice(images, min(n, len(images)), replace=False), column] = value
    return from_dense(kept, default=-1)
