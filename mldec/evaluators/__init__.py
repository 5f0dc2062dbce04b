"""Evaluators: metrics in percent from logits and targets."""

from typing import Protocol, runtime_checkable

from torch import Tensor


class Evaluator(Protocol):
    """Collect predictions batch by batch, then compute all metrics.

    The constructor takes the number of classes K and further keyword arguments. With several
    ranks, each rank updates with its share of the images, which may be empty. `compute` exchanges
    data through `mldec.runtime.distributed` and returns the same metrics on all ranks.
    """

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch.

        Args:
            logits: Float [B, K].
            targets: [B, K] of 1, 0 or -1 (not annotated).
        """

    def compute(self) -> dict[str, float]:
        """Compute the metrics.

        Returns:
            Metrics in percent, and numbers of classes as "classes_...". The first metric selects
            the best checkpoint; the caller raises `DataError` if it is NaN.
        """

    def per_class(self) -> dict[str, list[float]]:
        """Return the columns of the JSON and CSV reports, K values each. Call `compute` first."""


@runtime_checkable
class Thresholded(Protocol):
    """An evaluator that predicts a class if its logit is above a threshold.

    The threshold is a float for all classes, or a float64 tensor [K] with one value per class.
    """

    logit_threshold: float | Tensor
