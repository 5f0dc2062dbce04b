"""Platt scaling, which converts the logits of a class to calibrated probabilities.

Source: Platt 1999, Probabilistic outputs for support vector machines.
"""

import numpy as np
from scipy.special import expit

TOLERANCE = 1e-8  # gradient tolerance of the fit
MAX_STEPS = 60  # maximum number of Newton steps
MIN_SCALE = 0.01  # minimum standard deviation of calibrated logits
DEVIATION = 0.5  # prior standard deviation of a slope, relative to the common slope


def soft_targets(present: np.ndarray, absent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the soft targets of Platt (1999), which follow from a uniform prior.

    They give a finite slope to classes with few images and to separable classes. The masks of
    positive and negative labels are [N] or [N, K]. Returns targets of the same shape in (0, 1), and
    the log odds [] or [K] of the classes.
    """
    positives = present.sum(0)
    negatives = absent.sum(0)
    targets = np.where(present, (positives + 1) / (positives + 2), 1 / (negatives + 2))
    return targets, np.log((positives + 1) / (negatives + 1))


def common_slope(logits: np.ndarray, labels: np.ndarray) -> float:
    """Fit a common slope, above 0, for K classes with one offset per class; arguments as in `rank`.

    The slope is 1 if all logits of each class are equal.
    """
    annotated = labels >= 0
    targets, offsets = soft_targets(labels == 1, labels == 0)
    means = np.where(annotated, logits, 0).sum(0) / np.maximum(annotated.sum(0), 1)
    inputs = np.where(annotated, logits - means, 0.0)
    spread = np.sqrt((inputs**2).sum() / max(annotated.sum(), 1))
    if spread == 0:
        return 1.0
    inputs /= spread

    # Newton's method with bounded steps. The Hessian is diagonal except for the row and the
    # column of the slope.
    slope = 0.0
    for _ in range(MAX_STEPS):
        scores = expit(slope * inputs + offsets)
        wrong = np.where(annotated, scores - targets, 0)
        weights = np.where(annotated, scores * (1 - scores), 0) + TOLERANCE
        mixed = (weights * inputs).sum(0)
        of_offsets = weights.sum(0)
        wrong_offsets = wrong.sum(0)
        gradient = (wrong * inputs).sum() - (mixed * wrong_offsets / of_offsets).sum()
        step = gradient / ((weights * inputs**2).sum() - (mixed**2 / of_offsets).sum())
        step = np.clip(step, -1, 1)
        slope = max(slope - step, MIN_SCALE)
        offsets = offsets - np.clip((wrong_offsets - mixed * step) / of_offsets, -2, 2)
        if abs(step) < 1e-6:
            break
    return float(slope / spread)


def platt(
    logits: np.ndarray, present: np.ndarray, prior_slope: float | None = None
) -> tuple[float, float]:
    """Fit the probability sigmoid(slope * logit + offset) of one class.

    The slope is never negative, so that the order of the images is kept. If the model is hardly
    better than chance, all probabilities are close to the class frequency.

    Args:
        logits: Float [N].
        present: Labels, bool [N].
        prior_slope: Mean of a normal prior of the slope, such as the `common_slope`. The prior
            has a large effect only with few images. None for no prior.

    Returns:
        Slope and offset. The slope is 0 if all logits are equal.
    """
    from scipy.optimize import minimize  # slow import, not needed for predictions

    targets, prior = soft_targets(present, ~present)

    # Standardize the logits, so that both parameters have the same scale.
    scores = logits.astype(np.float64)
    spread = scores.std() if len(scores) else 0.0
    if spread == 0:
        return 0.0, float(prior)
    mean = scores.mean()
    inputs = np.stack([(scores - mean) / spread, np.ones_like(scores)])

    # Mean and inverse variance (per image) of the prior of both parameters.
    center = np.zeros(2)
    strength = np.zeros(2)
    if prior_slope is not None:
        center[0] = prior_slope * spread
        strength[0] = 1 / (DEVIATION * center[0]) ** 2 / len(scores)

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the mean cross-entropy plus the penalty of the prior, and its gradient."""
        scaled = weights @ inputs
        losses = np.logaddexp(0, scaled) - targets * scaled
        pull = strength * (weights - center)
        loss = losses.mean() + pull @ (weights - center) / 2
        return float(loss), inputs @ (expit(scaled) - targets) / len(scaled) + pull

    def hessian(weights: np.ndarray) -> np.ndarray:
        probabilities = expit(weights @ inputs)
        curvature = (inputs * (probabilities * (1 - probabilities))) @ inputs.T
        return curvature / len(probabilities) + np.diag(strength)

    start = np.array([center[0], prior])
    options = {"gtol": TOLERANCE}
    weights = minimize(loss, start, jac=True, hess=hessian, method="trust-exact", options=options).x

    scale, level = weights
    if scale < MIN_SCALE:
        scale = MIN_SCALE
        level = prior
    slope = scale / spread
    return float(slope), float(level - slope * mean)
