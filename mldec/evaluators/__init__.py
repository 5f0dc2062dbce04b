"""Evaluators: logits and targets in, named percentages out."""

from typing import Protocol, runtime_checkable

from torch import Tensor


class Evaluator(Protocol):
    """Gather predictions batch by batch, then compute every number at once.

    The constructor takes the number of classes K and keywords of its own. With several processes
    each gets its share of the images, possibly none; `compute` exchanges what it needs, with
    `mldec.runtime.distributed`, and returns the same on every process.
    """

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits float [B, K]; targets [B, K] of 1, 0 or -1 (not annotated)."""

    def compute(self) -> dict[str, float]:
        """Return the metrics in percent, and numbers of classes as "classes_...".

        The first metric decides which checkpoint is the best; it is a `DataError` if it is NaN.
        """

    def per_class(self) -> dict[str, list[float]]:
        """Return K values per column, after `compute`, for the JSON and CSV reports."""


@runtime_checkable
class Thresholded(Protocol):
    """An evaluator that counts a class as predicted if its logit is above a threshold.

    The threshold is one for all classes, or one per class, float64 [K].
    """

    logit_threshold: float | Tensor
