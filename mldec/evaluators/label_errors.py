"""Labels that are probably wrong, by the scores of a model that was not trained on the images.

Confident learning (Northcutt et al., arXiv 1911.00068) for several labels per image: every class is
a binary problem of its own, with two labels, present and absent.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

TOLERANCE = 1e-8  # of the gradient of a mean loss
MOST_STEPS = 60
LEAST_SCALE = 0.01  # of calibrated logits: their least standard deviation
DEVIATION = 0.5  # of the slopes of classes, in units of the common one


@dataclass(frozen=True)
class Ranking:
    """All M annotated pairs of an image and a class, most suspicious first."""

    images: np.ndarray  # index of the image, int64 [M]
    classes: np.ndarray  # index of the class, int64 [M]
    present: np.ndarray  # whether the label says that the image shows the class, bool [M]
    probabilities: np.ndarray  # that the image shows the class, calibrated, float64 [M]
    suspected: np.ndarray  # whether the label counts as wrong, see `suspected_labels`, bool [M]

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
    reaches the threshold of that one, and is the more probable of the two, which is our condition.
    A class without images of the opposite label has no threshold, and no suspects.
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
    """Return the probability of each class by Platt scaling on its annotated images, [N, K].

    After training with the asymmetric loss, scores are no probabilities, and those of different
    classes cannot be compared.
    """
    probabilities = np.zeros(logits.shape)
    for column in range(logits.shape[1]):
        annotated = labels[:, column] >= 0
        present = labels[annotated, column] == 1
        slope, offset = platt(logits[annotated, column], present)
        probabilities[:, column] = expit(slope * logits[:, column] + offset)
    return probabilities


def soft_targets(present: np.ndarray, absent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return targets [N] or [N, K], and their log odds [] or [K], of labels bool of that shape.

    The targets are not 1 and 0 but those that Platt (1999) derives from a uniform prior, so that a
    class with few images, or one that the logits separate, has a finite slope.
    """
    positives, negatives = present.sum(0), absent.sum(0)
    targets = np.where(present, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    return targets, np.log((positives + 1) / (negatives + 1))


def common_slope(logits: np.ndarray, labels: np.ndarray) -> float:
    """Fit one slope for K classes that have an offset each; logits and labels are [N, K]."""
    annotated = labels >= 0
    targets, offsets = soft_targets(labels == 1, labels == 0)
    means = np.where(annotated, logits, 0).sum(0) / np.maximum(annotated.sum(0), 1)
    inputs = np.where(annotated, logits - means, 0.0)
    spread = np.sqrt((inputs**2).sum() / max(annotated.sum(), 1))
    if spread == 0:
        return 1.0
    inputs /= spread

    # Newton's method in bounded steps. The Hessian is diagonal but for the row of the slope.
    slope = 0.0
    for _ in range(MOST_STEPS):
        scores = expit(slope * inputs + offsets)
        wrong = np.where(annotated, scores - targets, 0)
        weights = np.where(annotated, scores * (1 - scores), 0) + TOLERANCE
        mixed, of_offsets, wrong_offsets = (weights * inputs).sum(0), weights.sum(0), wrong.sum(0)
        gradient = (wrong * inputs).sum() - (mixed * wrong_offsets / of_offsets).sum()
        step = gradient / ((weights * inputs**2).sum() - (mixed**2 / of_offsets).sum())
        step = np.clip(step, -1, 1)
        slope = max(slope - step, LEAST_SCALE)
        offsets = offsets - np.clip((wrong_offsets - mixed * step) / of_offsets, -2, 2)
        if abs(step) < 1e-6:
            break
    return float(slope / spread)


def platt(
    logits: np.ndarray, present: np.ndarray, common: float | None = None
) -> tuple[float, float]:
    """Fit slope and offset of the probability sigmoid(slope * logit + offset) of one class.

    A slope in common holds it back by a normal prior around it, which counts where images are few.
    The slope is always positive, so that the order of the images stays: where a model is hardly
    better than chance, all probabilities are near the frequency. It is 0 if all logits are equal.
    """
    targets, prior = soft_targets(present, ~present)

    # In units of their spread, so that the two parameters are of the same size.
    scores = logits.astype(np.float64)
    spread = scores.std() if len(scores) else 0.0
    if spread == 0:
        return 0.0, float(prior)
    mean = scores.mean()
    inputs = np.stack([(scores - mean) / spread, np.ones_like(scores)])
    centre = np.array([0.0 if common is None else common * spread, 0])
    strength = np.zeros(2)
    if common is not None:
        strength[0] = 1 / (DEVIATION * centre[0]) ** 2 / len(scores)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the mean cross-entropy with the soft targets and the prior, and its gradient."""
        scaled = weights @ inputs
        losses = np.logaddexp(0, scaled) - targets * scaled
        pull = strength * (weights - centre)
        loss = losses.mean() + pull @ (weights - centre) / 2
        return float(loss), inputs @ (expit(scaled) - targets) / len(scaled) + pull

    def hessian(weights: np.ndarray) -> np.ndarray:
        probabilities = expit(weights @ inputs)
        curvature = (inputs * (probabilities * (1 - probabilities))) @ inputs.T
        return curvature / len(probabilities) + np.diag(strength)

    start = np.array([centre[0], prior])
    options = {"gtol": TOLERANCE}
    weights = minimize(loss, start, jac=True, hess=hessian, method="trust-exact", options=options).x

    scale, level = weights
    if scale < LEAST_SCALE:
        scale, level = LEAST_SCALE, prior
    slope = scale / spread
    return float(slope), float(level - slope * mean)
