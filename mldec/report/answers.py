"""What a model says of the validation images, and what it thereby decides."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.special import expit, logsumexp
from torch import Tensor

from mldec.evaluators import Evaluator, Thresholded

ROWS = 1_000  # images that are read at a time

# Some of the classes, in the order of the rows of a block.
Columns = slice | np.ndarray


@dataclass(frozen=True, kw_only=True)
class Answers:
    """The scores of N images and K classes, beside their labels.

    Attributes:
        logits: float32 [N, K]; if an image has one label, log-probabilities, see `normalise`.
        labels: 1 (present), 0 (absent) or -1 (not annotated), int8 [N, K].
        exclusive: whether an image has one label.
        lowest: a class is predicted if its logit is above this number, one for all classes or
            float64 [K]; None if an image has one label, where the highest logit is predicted, or if
            the evaluator of the data knows no thresholds, where 0 is the number.
    """

    logits: np.ndarray
    labels: np.ndarray
    exclusive: bool
    lowest: float | Tensor | None

    @cached_property
    def predicted(self) -> np.ndarray:
        """The class of the highest logit of each image, int64 [N]; of equal ones the first."""
        return self.logits.argmax(1)

    def thresholds(self) -> np.ndarray | None:
        """Return the threshold of each class from 0 to 1, float64 [K]; None if there are none."""
        if self.lowest is None:
            return None
        return np.broadcast_to(expit(np.asarray(self.lowest)), self.logits.shape[1])

    def decided(self, columns: Columns, scores: np.ndarray) -> np.ndarray:
        """Return which images some classes are predicted for, bool [k, N].

        Args:
            columns: the k classes.
            scores: their logits [k, N].
        """
        if self.exclusive:
            classes = np.arange(self.logits.shape[1])[columns]
            return self.predicted == classes[:, None]

        lowest = 0.0 if self.lowest is None else self.lowest
        if isinstance(lowest, Tensor):
            lowest = lowest.expand(self.logits.shape[1])[columns][:, None]
        return (torch.from_numpy(scores) > lowest).numpy()

    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        """Return the scores from 0 to 1 of some logits, float64 of any shape."""
        return np.exp(scores, dtype=np.float64) if self.exclusive else expit(scores.astype(float))

    def has_label(self) -> np.ndarray:
        """Return which images have a label, bool [N]."""
        return (self.labels == 1).any(1)


def metrics(evaluator: Evaluator, logits: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Return the metrics of an evaluator, which `mldec.evaluate` would print.

    Args:
        evaluator: without images; its values per class can be asked for afterwards.
        logits: float32 [N, K].
        targets: as the evaluator takes them, int8 [N, K].
    """
    for first in range(0, len(logits), ROWS):
        rows = slice(first, first + ROWS)
        evaluator.update(torch.from_numpy(logits[rows]), torch.from_numpy(targets[rows]))
    return evaluator.compute()


def lowest_logit(evaluator: Evaluator) -> float | Tensor | None:
    """Return the logit above which an evaluator predicts a class; None if it has none."""
    return evaluator.logit_threshold if isinstance(evaluator, Thresholded) else None


def normalise(logits: np.ndarray) -> None:
    """Turn logits [N, K] into the logarithms of their softmax, in place: memory is short.

    The order of the classes of an image and its softmax stay as they are, and the scores of a class
    become comparable between images.
    """
    for first in range(0, len(logits), ROWS):
        rows = logits[first : first + ROWS]
        rows -= logsumexp(rows, axis=1, keepdims=True)
