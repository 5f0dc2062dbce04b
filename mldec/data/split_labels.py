"""The labels of all images of a split, wherever they come from."""

import numpy as np

from mldec.data.base import DataModule, Split, StoredImages
from mldec.data.digits.scenes import Scenes
from mldec.data.labels import Labels, from_dense
from mldec.data.loader import sample_seed, seeded


def labels_of(split: Split) -> Labels:
    """Return the labels of a split; where no table holds them, image by image."""
    dataset = split.dataset
    if isinstance(dataset, StoredImages):
        return dataset.labels

    # The labels of a scene are known before it is painted, which takes longer.
    if isinstance(dataset, Scenes):
        targets = [dataset.target(index) for index in range(len(dataset))]
    else:
        targets = [dataset[index][1] for index in range(len(dataset))]
    return from_dense(np.stack([target.numpy() for target in targets]))


def training_labels(data: DataModule, seed: int) -> Labels:
    """Return the labels of the training images.

    Args:
        data: the dataset.
        seed: of the run; where every access draws a new image, it decides whose labels these are.
    """
    with seeded(sample_seed(seed)):
        return labels_of(data.train)
