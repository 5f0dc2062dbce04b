"""Turn logits into probabilities: a temperature per model, or Platt scaling per class."""

import numpy as np
from scipy.optimize import brentq, minimize
from scipy.special import expit, softmax

TOLERANCE = 1e-8  # of the gradient of a mean loss
TEMPERATURES = (0.05, 20.0)  # beyond, the scores would be 0, 0.5 and 1


def temperature(logits: np.ndarray, labels: np.ndarray, *, exclusive: bool) -> float | None:
    """Fit the temperature T that minimises the log loss of the scores of logits / T.

    The scores are a softmax if an image has one label (Guo et al. 2017, arXiv 1706.04599, section
    4.2), else a sigmoid per class. The loss is convex in 1 / T, so that its derivative has one
    zero.

    Args:
        logits: [N, K].
        labels: 1 (present), 0 (absent) or -1 (not annotated), [N, K].
        exclusive: whether an image has one label; images without one are left out.

    Returns:
        The temperature, None if the best one is outside `TEMPERATURES`.
    """
    logits = logits.astype(np.float64)
    if exclusive:
        has_label = (labels == 1).any(1)
        logits, present = logits[has_label], labels[has_label] == 1
        targets = present / present.sum(1, keepdims=True)
    else:
        annotated = labels >= 0
        logits, targets = logits[annotated], (labels == 1)[annotated]

    def derivative(log_temperature: float) -> float:
        """Return the derivative of the loss with respect to 1 / T."""
        scaled = logits * np.exp(-log_temperature)
        scores = softmax(scaled, axis=1) if exclusive else expit(scaled)
        return float(np.sum((scores - targets) * logits))

    lowest, highest = np.log(TEMPERATURES)
    if not derivative(lowest) > 0 > derivative(highest):
        return None
    return float(np.exp(brentq(derivative, lowest, highest)))


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
        probabilities[:, column] = expit(slope * logits[:, column] + offset)
    return probabilities


def platt(logits: np.ndarray, present: np.ndarray) -> tuple[float, float]:
    """Fit the probability sigmoid(slope * logit + offset) of one class.

    Its targets are not 1 and 0 but those that Platt (1999) derives from a uniform prior, so that a
    class with few images, or one that the logits separate, has a finite slope. The slope is never
    negative: a model that is worse than chance says nothing about a class.

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

    slope = weights[0] / spread
    if slope < 0:
        return 0.0, float(prior)
    return float(slope), float(weights[1] - slope * mean)
