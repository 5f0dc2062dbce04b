"""Rank (image, class) pairs by how likely their label is wrong, given what a model says of them.

Confident learning (Northcutt et al., arXiv 1911.00068) for several labels per image: every class is
a binary problem of its own, with two labels, present and absent.
"""

from dataclasses import dataclass

import numpy as np

MAX_STEPS = 100  # of Newton's method; some five are usual
TOLERANCE = 1e-8  # of the gradient, per image
RIDGE = 1e-12  # keeps the Hessian invertible where all scores are far from the threshold
SHORTEST_STEP = 1e-10  # as a fraction of a Newton step


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


def calibrated(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the probability of each class by Platt scaling, float64 [N, K].

    After training with the asymmetric loss, scores are no probabilities, and those of different
    classes cannot be compared. A logistic regression per class on its annotated images mends that;
    its two numbers cannot learn the labels by heart.

    Args:
        logits: [N, K].
        labels: 1 (present), 0 (absent) or -1 (not annotated), [N, K].
    """
    probabilities = np.zeros(logits.shape)
    for column in range(logits.shape[1]):
        annotated = labels[:, column] >= 0
        present = labels[annotated, column] == 1
        slope, offset = platt(logits[annotated, column], present)
        probabilities[:, column] = _sigmoid(slope * logits[:, column] + offset)
    return probabilities


def platt(logits: np.ndarray, present: np.ndarray) -> tuple[float, float]:
    """Fit the probability sigmoid(slope * logit + offset) of one class.

    Its targets are not 1 and 0 but those that Platt (1999) derives from a uniform prior, so that a
    class with few images, or one that the logits separate, has a finite slope. Newton's method with
    backtracking, after Lin, Lin and Weng (2007), A note on Platt's probabilistic outputs. The slope
    is never negative: a model that is worse than chance says nothing about a class.

    Args:
        logits: of n images.
        present: whether their label says that they show the class, bool [n].

    Returns:
        The slope and the offset.
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

    weights = np.array([0.0, prior])
    loss = _log_loss(weights @ inputs, targets)
    for _ in range(MAX_STEPS):
        probabilities = _sigmoid(weights @ inputs)
        gradient = inputs @ (probabilities - targets)
        if np.abs(gradient).max() < TOLERANCE * len(scores):
            break

        curvature = probabilities * (1 - probabilities)
        hessian = (inputs * curvature) @ inputs.T + RIDGE * np.eye(2)
        direction = np.linalg.solve(hessian, gradient)

        # Halve the step until it lowers the loss as much as the gradient promises in part.
        step = 1.0
        while step > SHORTEST_STEP:
            shorter = weights - step * direction
            lower = _log_loss(shorter @ inputs, targets)
            if lower <= loss - 1e-4 * step * (gradient @ direction):
                break
            step /= 2
        else:
            break
        weights, loss = shorter, lower

    slope = weights[0] / spread
    if slope < 0:
        return 0.0, float(prior)
    return float(slope), float(weights[1] - slope * mean)


def _log_loss(logits: np.ndarray, targets: np.ndarray) -> float:
    """Return the summed cross-entropy of probabilities sigmoid(logits) with soft targets."""
    return float(np.sum(np.logaddexp(0, logits) - targets * logits))


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    # Without an overflow for large negative numbers.
    return np.exp(-np.logaddexp(0, -logits))


def _mean(values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the mean of the chosen values per class, float64 [K]; NaN where none is chosen."""
    counts = chosen.sum(0)
    sums = np.where(chosen, values, 0).sum(0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
