"""The mAP of small, medium and large objects, beside the usual multi-label metrics."""

import torch
from torch import Tensor

from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.predictions import Predictions, average_precision_of_all

SIZES = {"small": 1, "medium": 2, "large": 4}  # their bits in a target


class SizesEvaluator:
    """A `MultiLabelEvaluator` whose targets hold the sizes of the objects of a class.

    For the usual metrics a class with an object of any size is positive. For mAP_small only a class
    with a small object is positive, and all others are negative, also those with larger objects:
    these are the rows of the official loader's target [3, K]. So even a model that finds every
    object stays below 100.

    Args:
        num_classes: K.
        threshold: of the usual metrics; `MultiLabelEvaluator` checks it.
    """

    def __init__(self, num_classes: int, *, threshold: float = 0.5) -> None:
        self.union = MultiLabelEvaluator(num_classes, threshold=threshold)
        self.with_sizes = Predictions(num_classes)

    @property
    def logit_threshold(self) -> float | Tensor:
        """The threshold of the usual metrics; see `mldec.evaluators.Thresholded`."""
        return self.union.logit_threshold

    @logit_threshold.setter
    def logit_threshold(self, threshold: float | Tensor) -> None:
        self.union.logit_threshold = threshold

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch.

        Args:
            logits: float [B, K].
            targets: [B, K] of sums of `SIZES`, 0 (absent) or -1 (not annotated).
        """
        self.union.update(logits, targets.clamp(max=1))
        self.with_sizes.add(logits, targets)

    def compute(self) -> dict[str, float]:
        """Return the metrics of `MultiLabelEvaluator`, then the mAP of each size, in percent.

        mAP_small, mAP_medium and mAP_large are means over the classes that have an object of the
        size; NaN if none has.
        """
        metrics = self.union.compute()
        logits, sizes = self.with_sizes.shared_by_classes()

        self._per_class = {}
        for name, bit in SIZES.items():
            # 1 for an object of this size, 0 for none, and -1 as it is.
            targets = [torch.where(block < 0, block, (block & bit).clamp(max=1)) for block in sizes]
            per_class_ap = average_precision_of_all(logits, targets)["none"]

            self._per_class[f"AP_{name}"] = (100 * per_class_ap).tolist()
            metrics[f"mAP_{name}"] = 100 * per_class_ap.nanmean().item()
        return metrics

    def per_class(self) -> dict[str, list[float]]:
        """Return the columns of `MultiLabelEvaluator`, then the AP of each size in percent."""
        return {**self.union.per_class(), **self._per_class}
