"""Labels that are probably wrong, by the scores of a model that was not trained on the images.

Confident learning (Northcutt et al., arXiv 1911.00068) for several labels per image: every class is
a binary problem of its own, with two labels, present and absent.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

TOLERANCE = 1e-8  # of the gradient of a mean loss
LEAST_SCALE = 0.01  # of calibrated logits: their least standard deviation


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


def rank(logits: np.ndarray, labels: np.ndarray) -> Ranking:
    """Rank all annotated pairs by the calibrated probability of their label, lowest first.

    Logits are [N, K], labels int8 [N, K] of 1, 0 or -1 (not annotated).
    """
    probabilities = calibrated(logits, labels)

    # Equal probabilities keep the order of the images.
    images, classes = np.nonzero(labels >= 0)
    present = labels[images, classes] == 1
    of_class = probabilities[images, classes]
    order = np.argsort(np.where(present, of_class, 1 - of_class), kind="stable")

    suspected = suspected_labels(probabilities, labels)[images, classes]
    return Ranking(images[order], classes[order], present[order], of_class[order], suspected[order])


def suspected_labels(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return which labels are counted as wrong, bool [N, K]; the arguments are as for `rank`.

    The threshold of a label is the mean probability of that label among the images of the class
    that have it (equation 2 of the paper). A label is counted as wrong if the opposite label
    reaches the threshold of that one, and is the more probable of the two. The second condition is
    ours: the positives of a class that the model hardly knows have a low threshold, which many
    negatives reach. A class without images of the opposite label has no threshold, and no suspects.
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


def calibrated(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the probability of each class by Platt scaling, float64 [N, K].

    After training with the asymmetric loss, scores are no probabilities, and those of different
    classes cannot be compared. A logistic regression per class on its annotated images mends that;
    its two numbers cannot learn the labels by heart.
    """
    probabilities = np.zeros(logits.shape)
    for column in range(logits.shape[1]):
        annotated = labels[:, column] >= 0
        present = labels[annotated, column] == 1
        slope, offset = platt(logits[annotated, column], present)
        probabilities[:, column] = expit(slope * logits[:, column] + offset)
    return probabilities


def platt(logits: np.ndarray, present: np.ndarray) -> tuple[float, float]:
    """Fit slope and offset of the probability sigmoid(slope * logit + offset) of one class.

    The targets are not 1 and 0 but those that Platt (1999) derives from a uniform prior, so that a
    class with few images, or one that the logits separate, has a finite slope. The slope is always
    positive, so that the order of the images stays: where a model is hardly better than chance, all
    probabilities are near the frequency. It is 0 only if all logits are equal.
    """
    positives, negatives = int(present.sum()), int((~present).sum())
    targets = np.where(present, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    prior = np.log((positives + 1) / (negatives + 1))

    # In units of their spread, so that the two parameters are of the same size.
    scores = logits.astype(np.float64)
    spread = scores.std() if len(scores) else 0.0
    if spread == 0:
        return 0.0, float(prior)
    mean = scores.mean()
    inputs = np.stack([(scores - mean) / spread, np.ones_like(scores)])

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the mean cross-entropy with the soft targets, and its gradient."""
        scaled = weights @ inputs
        losses = np.logaddexp(0, scaled) - targets * scaled
        return float(losses.mean()), inputs @ (expit(scaled) - targets) / len(scaled)

    def hessian(weights: np.ndarray) -> np.ndarray:
        probabilities = expit(weights @ inputs)
        return (inputs * (probabilities * (1 - probabilities))) @ inputs.T / len(probabilities)

    start = np.array([0.0, prior])
    options = {"gtol": TOLERANCE}
    weights = minimize(loss, start, jac=True, hess=hessian, method="trust-exact", options=options).x

    scale, level = weights
    if scale < LEAST_SCALE:
        scale, level = LEAST_SCALE, prior
    slope = scale / spread
    return float(slope), float(level - slope * mean)
