"""Evaluators: metrics in percent from logits and targets."""

from typing import Any, Protocol

from torch import Tensor


class Evaluator(Protocol):
    """Collect predictions batch by batch, then compute all metrics.

    The constructor takes the number of classes K and further keyword arguments. With several
    ranks, each rank updates with its share of the images, which may be empty. `compute` exchanges
    data through `mldec.runtime.distributed` and returns the same metrics on all ranks.
    """

    # A class is predicted if its logit is above this threshold: a float for all classes, or
    # float64 [K]. None if the evaluator has no threshold.
    logit_threshold: Any

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits [B, K], targets [B, K] of 1, 0 or -1 (not annotated)."""

    def compute(self) -> dict[str, float]:
        """Compute the metrics in percent. Metrics named "classes_..." are numbers of classes.

        The first metric selects the best checkpoint. The caller raises `DataError` if it is NaN.
        """

    def per_class(self) -> dict[str, list[float]]:
        """Return the columns of the JSON and CSV reports, K values each. Call `compute` first."""
