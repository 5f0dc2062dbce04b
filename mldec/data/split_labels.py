"""The labels of all images of a split, wherever they come from."""

import numpy as np

from mldec.data.base import DataModule, Split, StoredImages
from mldec.data.digits.scenes import Scenes
from mldec.data.labels import Labels, from_dense
from mldec.data.randomness import SampleRandom, sample_seed


def labels_of(split: Split, seed: int = 0) -> Labels:
    """Return the labels of a split; where no table holds them, image by image.

    Args:
        split: of a dataset.
        seed: where every access draws a new image, it decides whose labels these are.
    """
    dataset = split.dataset
    if isinstance(dataset, StoredImages):
        return dataset.labels

    rng = SampleRandom(sample_seed(seed))
    # The labels of a scene are known before it is painted, which takes longer.
    if isinstance(dataset, Scenes):
        targets = [dataset.target(index, rng) for index in range(len(dataset))]
    else:
        targets = [dataset.load(index, rng)[1] for index in range(len(dataset))]
    return from_dense(np.stack([target.numpy() for target in targets]))


def training_labels(data: DataModule, seed: int) -> Labels:
    """Return the labels of the training images.

    Args:
        data: the dataset.
        seed: of the run; where every access draws a new image, it decides whose labels these are.
    """
    return labels_of(data.train, seed)
