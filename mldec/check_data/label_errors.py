"""Rank (image, class) pairs by how likely their label is wrong, given what a model says of them.

Confident learning (Northcutt et al., arXiv 1911.00068) for several labels per image: every class is
a binary problem of its own, with two labels, present and absent.
"""

from dataclasses import dataclass

import numpy as np

from mldec.calibration.scaling import calibrated


@dataclass(frozen=True)
class Ranking:
    """All M annotated pairs of an image and a class, most suspicious first.

    Attributes:
        images: index of the image, int64 [M].
        classes: index of the class, int64 [M].
        present: whether the label says that the image shows the class, bool [M].
        probabilities: that the image shows the class, calibrated, float64 [M].
        suspected: whether the label is counted as wrong, see `suspected_labels`, bool [M].
    """

    images: np.ndarray
    classes: np.ndarray
    present: np.ndarray
    probabilities: np.ndarray
    suspected: np.ndarray

    def __len__(self) -> int:
        return len(self.images)


def rank(logits: np.ndarray, labels: np.ndarray, models: np.ndarray) -> Ranking:
    """Rank all annotated pairs by the calibrated probability of their label, lowest first.

    Args:
        logits: of models that were not trained on the images, [N, K].
        labels: 1 (present), 0 (absent) or -1 (not annotated), [N, K].
        models: which model scored each image, [N]: their scores are calibrated apart.
    """
    probabilities = np.zeros(logits.shape)
    for model in np.unique(models):
        own = models == model
        probabilities[own] = calibrated(logits[own], labels[own])

    # Equal probabilities keep the order of the images.
    images, classes = np.nonzero(labels >= 0)
    present = labels[images, classes] == 1
    of_class = probabilities[images, classes]
    order = np.argsort(np.where(present, of_class, 1 - of_class), kind="stable")

    suspected = suspected_labels(probabilities, labels)[images, classes]
    return Ranking(images[order], classes[order], present[order], of_class[order], suspected[order])


def suspected_labels(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return which labels are counted as wrong, bool [N, K].

    The threshold of a label is the mean probability of that label among the images of the class
    that have it (equation 2 of the paper). A label is counted as wrong if the opposite label
    reaches the threshold of that one, and is the more probable of the two. The second condition is
    ours: the positives of a class that the model hardly knows have a low threshold, which many
    negatives reach. A class without images of the opposite label has no threshold, and no suspects.

    Args:
        probabilities: that the image shows the class, [N, K].
        labels: 1 (present), 0 (absent) or -1 (not annotated), [N, K].
    """
    of_present = _mean(probabilities, labels == 1)
    of_absent = _mean(1 - probabilities, labels == 0)

    # A comparison with NaN is false.
    rather_present = (probabilities >= of_present) & (probabilities > 0.5)
    rather_absent = (1 - probabilities >= of_absent) & (probabilities < 0.5)
    return np.where(labels == 1, rather_absent, rather_present & (labels == 0))


def _mean(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the mean of the chosen values per class, float64 [K]; NaN where none is chosen."""
    counts = chosen.sum(0)
    sums = np.where(chosen, values, 0).sum(0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
