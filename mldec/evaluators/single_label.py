"""Metrics for single-label classification, computed in one pass over the predictions."""

import torch
from torch import Tensor

from mldec.errors import DataError
from mldec.evaluators.average_precision import check_finite
from mldec.evaluators.multi_label import checked_top_k
from mldec.evaluators.multi_label import top_k as mark_top_k
from mldec.runtime import distributed
from mldec.runtime.devices import as_float64, to_device

# Probabilities are stored as multiples of 2**-30. Sums of integers do not depend on the order.
FIXED_POINT = 2**30
BINS = 15  # confidence bins of the calibration error


class SingleLabelEvaluator:
    """Accuracy at top-1 and top-k, accuracy per class, calibration error, and confused classes.

    The prediction is the class with the highest logit. Ties go to the lower class index. It is
    correct if the target of this class is 1. Targets are usually one-hot. Rows with several 1 (the
    ReaL labels of ImageNet) accept each of these classes. Rows without a 1 are ignored.

    Args:
        num_classes: Number of classes K.
        top_k: k of the top-k accuracy, from 2 to K. None selects 5, or no top-k accuracy if K is
            smaller.
        suffix: Appended to the names of the metrics, such as "_real" for alternative labels.
    """

    logit_threshold = None

    def __init__(self, num_classes: int, *, top_k: int | None = None, suffix: str = "") -> None:
        self.k = checked_top_k(top_k, num_classes, default=5, lowest=2)
        self.num_classes = num_classes
        self.suffix = suffix
        # Int64 [5, n] per batch, on its device. The rows are the label (-1 without a label), the
        # prediction, 1 if it is correct, 1 if a top-k class is correct, and the confidence times
        # FIXED_POINT (-1 if a logit is not finite).
        self.rows: list[Tensor] = [torch.zeros(5, 0, dtype=torch.int64)]

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits [B, K], targets [B, K] of 1 and 0."""
        logits = logits.float()
        valid = to_device(targets, logits.device) == 1

        # The label of a wrong prediction is the first valid class.
        predicted = logits.argmax(1)
        right = valid.gather(1, predicted[:, None])[:, 0]
        label = torch.where(right, predicted, valid.int().argmax(1))
        label = label.where(valid.any(1), -1)
        within = (mark_top_k(logits, self.k) & valid).any(1)

        confidence = as_float64(logits).softmax(1).amax(1)
        fixed = (confidence * FIXED_POINT).round().long().to(logits.device)
        fixed = fixed.where(logits.isfinite().all(1), -1)
        self.rows.append(torch.stack([label, predicted, right.long(), within.long(), fixed]))

    def compute(self) -> dict[str, float]:
        """Compute top1, top-k, class_accuracy and ECE in percent.

        class_accuracy is the mean accuracy of the classes with images.

        ECE is the expected calibration error of Guo et al. 2017 (arXiv 1706.04599, equation 3).
        The confidence is the softmax probability of the prediction. It is divided into `BINS`
        intervals (low, high] of equal width. ECE is the mean of |accuracy - mean confidence| of
        the intervals, weighted by their number of images.

        Raises:
            DataError: If a logit is not finite, or no image has a label.
        """
        own_rows = torch.cat([rows.cpu() for rows in self.rows], dim=1)
        rows = torch.cat(distributed.gather(own_rows), dim=1)
        check_finite(bool((rows[4] >= 0).all()), "top1")
        rows = rows[:, rows[0] >= 0]
        if not rows.shape[1]:
            raise DataError("top1: no readable validation image has a label; check the data")

        label, predicted, right, within, confidence = rows
        self._counts = label.bincount(minlength=self.num_classes)
        self._hits = label[right == 1].bincount(minlength=self.num_classes)
        # A mistake is stored as label * K + prediction.
        self._mistakes = (label * self.num_classes + predicted)[right == 0]

        values = {"top1": right.double().mean()}
        if self.num_classes >= self.k:
            values[f"top{self.k}"] = within.double().mean()
        # Classes without images are 0 / 0, which nanmean ignores.
        values["class_accuracy"] = (self._hits.double() / self._counts).nanmean()

        # An interval includes its upper bound, so subtract one fixed-point step. Float64 sums of
        # integers are exact below 2**53.
        bins = ((confidence * BINS - 1) // FIXED_POINT).clamp(0, BINS - 1)
        gaps = (right * FIXED_POINT - confidence).double()
        per_bin = torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, gaps)
        values["ECE"] = per_bin.abs().sum() / FIXED_POINT / len(right)
        return {name + self.suffix: 100 * value.item() for name, value in values.items()}

    def per_class(self) -> dict[str, list[float]]:
        """Return the accuracy in percent and the number of images per class."""
        return {
            "accuracy": (100 * self._hits.double() / self._counts).tolist(),
            "images": self._counts.tolist(),
        }

    def pairs(self, limit: int = 20) -> list[tuple[int, int, int]]:
        """Return the most frequent confusions as (label, prediction, number of images).

        Call `compute` first. Ties are sorted by label and prediction.
        """
        mistakes, counts = self._mistakes.unique(return_counts=True)
        order = counts.argsort(descending=True, stable=True)[:limit]
        labels = mistakes[order] // self.num_classes
        predictions = mistakes[order] % self.num_classes
        return list(zip(labels.tolist(), predictions.tolist(), counts[order].tolist(), strict=True))
