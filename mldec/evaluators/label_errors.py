"""Detection of probable label errors with the scores of a model on held-out images.

This is confident learning (Northcutt et al., arXiv 1911.00068) for several labels per image. Each
class is a separate binary problem with the labels present and absent.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from mldec.evaluators.platt import platt


@dataclass(frozen=True)
class Ranking:
    """All M annotated pairs of an image and a class, most suspicious first."""

    images: np.ndarray  # image indices, int64 [M]
    classes: np.ndarray  # class indices, int64 [M]
    present: np.ndarray  # whether the label is "present", bool [M]
    probabilities: np.ndarray  # calibrated probabilities of "present", float64 [M]
    suspected: np.ndarray  # suspected label errors, see `suspected_labels`, bool [M]

    def __len__(self) -> int:
        return len(self.images)


def rank(logits: np.ndarray, labels: np.ndarray) -> Ranking:
    """Rank all annotated pairs by the calibrated probability of their label, lowest first.

    The arguments are logits [N, K] and labels, int8 [N, K] of 1, 0 or -1 (not annotated).
    """
    probabilities = calibrated(logits, labels)

    # A stable sort keeps the order of the images for equal probabilities.
    images, classes = np.nonzero(labels >= 0)
    present = labels[images, classes] == 1
    of_class = probabilities[images, classes]
    order = np.argsort(np.where(present, of_class, 1 - of_class), kind="stable")

    suspected = suspected_labels(probabilities, labels)[images, classes]
    return Ranking(images[order], classes[order], present[order], of_class[order], suspected[order])


def suspected_labels(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the mask [N, K] of the suspected label errors.

    The threshold of a label is its mean probability over the images with this label (equation 2
    of the paper). A label is suspected if the probability of the opposite label reaches the
    threshold of the opposite label. We also require that the opposite label is more probable. A
    class without images of the opposite label has no threshold and no suspected labels.
    """
    of_present = _mean(probabilities, labels == 1)
    of_absent = _mean(1 - probabilities, labels == 0)

    # Comparisons with NaN return False.
    likely_present = (probabilities >= of_present) & (probabilities > 0.5)
    likely_absent = (1 - probabilities >= of_absent) & (probabilities < 0.5)
    return np.where(labels == 1, likely_absent, likely_present & (labels == 0))


def _mean(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the mean of the chosen values per class, float64 [K]; NaN without chosen values."""
    counts = chosen.sum(0)
    sums = np.where(chosen, values, 0).sum(0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def calibrated(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return probabilities, float64 [N, K], by Platt scaling of each class on its labels.

    The asymmetric loss does not give calibrated probabilities. Uncalibrated scores of different
    classes are not comparable.
    """
    probabilities = np.zeros(logits.shape)
    for column in range(logits.shape[1]):
        annotated = labels[:, column] >= 0
        present = labels[annotated, column] == 1
        slope, offset = platt(logits[annotated, column], present)
        probabilities[:, column] = expit(slope * logits[:, column] + offset)
    return probabilities
