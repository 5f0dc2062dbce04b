"""Evaluators: logits and targets in, named percentages out."""

from typing import Protocol

from torch import Tensor


class Evaluator(Protocol):
    """Gather predictions batch by batch, then compute every number at once.

    The constructor takes the number of classes K and keywords of its own, and refuses what does not fit them. Under
    several processes each process gets its share of the images, down to none. `compute` then exchanges what it needs,
    with `mldec.runtime.distributed`, and returns the same on every process.
    """

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits float [B, K]; targets [B, K] of 1, 0 or -1 (not annotated)."""
        ...

    def compute(self) -> dict[str, float]:
        """Return the metrics in percent; the first key is the one that "best" follows, and so a number.

        Names that start with "classes_" are no percentages but numbers of classes.

        Raises:
            DataError: if there is no such number on these images.
        """
        ...

    def per_class(self) -> dict[str, list[float]]:
        """Return, after `compute`, a column name -> K values: one row a class for the JSON and CSV reports."""
        ...
