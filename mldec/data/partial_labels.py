"""Simulate partial annotation on a fully annotated training split (arXiv 2110.10955).

Both simulations are pure functions of the labels and the seed, so that all processes and every
restart see the same labels.
"""

import numpy as np

from mldec.data.table import Labels, from_dense


def random_drop(labels: Labels, p: float, seed: int) -> Labels:
    """Return labels with each entry independently set to -1 (not annotated) with probability p.

    Source: Alibaba-MIIL/PartialLabelingCSL, coco_simulation.py ("rps").

    Args:
        labels: of N images and K classes; entries of -1 stay.
        p: probability in [0, 1].
        seed: decides which entries are dropped.
    """
    matrix = labels.dense()
    rng = np.random.default_rng(seed)
    matrix[rng.random(matrix.shape, np.float32) < p] = -1
    return from_dense(matrix, default=labels.default)


def fixed_per_class(labels: Labels, n: int, seed: int) -> Labels:
    """Return labels that keep n random positives and n random negatives per class.

    All of them are kept if there are fewer than n. All other entries become -1 (not annotated); an
    image may lose all its labels.

    Source: Alibaba-MIIL/PartialLabelingCSL, coco_simulation.py ("fpc").

    Args:
        labels: of 1, 0 and -1.
        n: number of positives and of negatives to keep per class, 0 or more.
        seed: decides which entries are kept.
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
