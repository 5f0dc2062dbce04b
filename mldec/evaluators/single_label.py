"""The metrics of papers on single-label classification, from one pass over the predictions."""

import torch
from torch import Tensor

from mldec.errors import ConfigError, DataError
from mldec.evaluators.average_precision import check_finite
from mldec.evaluators.multi_label import top_k as mark_top_k
from mldec.runtime import distributed

# Probabilities are stored as multiples of 2**-30: sums of whole numbers do not depend on the order.
FIXED_POINT = 2**30


class SingleLabelEvaluator:
    """Accuracy at top-1 and top-k, accuracy per class, calibration error, and confused classes.

    The prediction is the highest logit; of equal ones the lowest class. It is right if the target
    has a 1 there: one-hot rows are the rule, and rows with several 1 (the ReaL labels of ImageNet)
    accept each of them. Rows without a 1 are left out.

    Args:
        num_classes: K.
        top_k: for the second accuracy, where the label is among the k highest logits; None is 5,
            left out for fewer classes than that.
        bins: number of bins of the confidence, for the calibration error.
        suffix: of the metrics' names, for other labels than the dataset's own, such as "_real".
    """

    def __init__(
        self, num_classes: int, *, top_k: int | None = None, bins: int = 15, suffix: str = ""
    ) -> None:
        if top_k is not None and not 2 <= top_k <= num_classes:
            raise ConfigError(
                f"data.top_k {top_k} needs as many classes; there are {num_classes}, and top-1 is "
                f"reported in any case"
            )

        self.top_k, self.bins, self.suffix = top_k, bins, suffix
        self.num_classes = num_classes
        # Per batch int64 [5, n]: label, prediction, right, right within top-k, and the confidence
        # times FIXED_POINT.
        self.rows: list[Tensor] = [torch.zeros(5, 0, dtype=torch.int64)]

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: finite logits float [B, K]; targets [B, K] of 1 and 0."""
        logits, valid = logits.float().cpu(), targets.cpu() == 1
        check_finite(logits.numpy(), "top-1")
        logits, valid = logits[valid.any(1)], valid[valid.any(1)]

        # The label of a wrong answer is the first valid one.
        predicted = logits.argmax(1)
        right = valid.gather(1, predicted[:, None])[:, 0]
        label = torch.where(right, predicted, valid.int().argmax(1))
        within = (mark_top_k(logits, self._k()) & valid).any(1)

        confidence = logits.double().softmax(1).amax(1)
        fixed = (confidence * FIXED_POINT).round().long()
        self.rows.append(torch.stack([label, predicted, right.long(), within.long(), fixed]))

    def compute(self) -> dict[str, float]:
        """Return percentages: top1 first, top-k, the mean of the accuracies per class, and ECE.

        ECE is the expected calibration error of Guo et al. 2017 (arXiv 1706.04599, equation 3). The
        confidence (softmax of the prediction) puts each image into one of `bins` intervals of equal
        width, (low, high]; ECE is the mean over the images of |accuracy - mean confidence| of their
        interval. Classes without an image are left out of the mean accuracy.
        """
        rows = torch.cat(distributed.gather(torch.cat(self.rows, dim=1)), dim=1)
        if not rows.shape[1]:
            raise DataError("top-1 is undefined: no validation image that can be read has a label")

        label, predicted, right = rows[:3]
        self._counts = label.bincount(minlength=self.num_classes)
        self._hits = label[right == 1].bincount(minlength=self.num_classes)
        self._mistakes = (label * self.num_classes + predicted)[right == 0]
        return self.metrics(rows, torch.ones(len(label), dtype=torch.float64))

    def metrics(self, rows: Tensor, weights: Tensor) -> dict[str, float]:
        """Return the metrics of `compute` from its rows, int64 [5, n], with weights float64 [n]."""
        label, _, right, within, confidence = rows
        images = weights.sum()

        values = {"top1": (weights * right).sum() / images}
        if self.top_k is not None or self.num_classes >= self._k():
            values[f"top{self._k()}"] = (weights * within).sum() / images

        # A class without an image is 0 / 0, which nanmean leaves out.
        per_class = label.bincount(weights, self.num_classes)
        hits = label.bincount(weights * right, self.num_classes)
        values["class_accuracy"] = (hits / per_class).nanmean()
        values["ECE"] = self._calibration_error(weights, right, confidence) / images
        return {name + self.suffix: 100 * value.item() for name, value in values.items()}

    def per_class(self) -> dict[str, list[float]]:
        """Return accuracy in percent and the number of images per class, after `compute`."""
        return {
            "accuracy": (100 * self._hits.double() / self._counts).tolist(),
            "images": self._counts.tolist(),
        }

    def pairs(self, limit: int = 20) -> list[tuple[int, int, int]]:
        """Return the most frequent mistakes, after `compute`: label, prediction, number of images.

        Of equally frequent pairs the lower class comes first.
        """
        mistakes, counts = self._mistakes.unique(return_counts=True)
        order = counts.argsort(descending=True, stable=True)[:limit]

        # A mistake is stored as label * K + prediction.
        labels = mistakes[order] // self.num_classes
        predictions = mistakes[order] % self.num_classes
        return list(zip(labels.tolist(), predictions.tolist(), counts[order].tolist(), strict=True))

    def _k(self) -> int:
        """Return the k of the second accuracy."""
        return 5 if self.top_k is None else self.top_k

    def _calibration_error(self, weights: Tensor, right: Tensor, confidence: Tensor) -> Tensor:
        """Return the sum over the bins of |right answers - confidence|, in images."""
        # Less one step, because an interval holds its upper bound.
        bins = ((confidence * self.bins - 1) // FIXED_POINT).clamp(0, self.bins - 1)

        # With weights of 1, these are sums of whole numbers below 2**53, which are exact.
        gap = torch.zeros(self.bins, dtype=torch.float64).index_add(
            0, bins, weights * (right * FIXED_POINT - confidence)
        )
        return gap.abs().sum() / FIXED_POINT
