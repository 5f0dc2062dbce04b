"""Metrics for partial labels. Only annotated labels count."""

import torch
from torch import Tensor

from mldec.errors import DataError
from mldec.evaluators.average_precision import average_precision_of_all
from mldec.evaluators.multi_label import Counts, MultiLabelEvaluator


class PartialLabelEvaluator(MultiLabelEvaluator):
    """mAP, precision, recall and F1 over the annotated labels (1 and 0).

    mAP_naive treats labels of -1 as negative, for comparison.

    Source: Alibaba-MIIL/PartialLabelingCSL, AP_partial. The paper reports `mAP_partial` on Open
    Images.

    For the arguments see `MultiLabelEvaluator`; `skip_empty` has no effect. Unannotated labels are
    ignored after the selection of the top k.
    """

    def compute(self) -> dict[str, float]:
        """Compute the metrics in percent, then numbers of classes.

        A class is valid if it has an annotated positive and an annotated negative. Each invalid
        class is counted once: without labels, else without positives, else without negatives.

        - mAP_partial is the mean AP over the valid classes.
        - mAP_weighted weights each valid class by its number of positives.
        - mAP_naive treats labels of -1 as negative. Classes without positives count as 0.
        - P, R and F1 at the threshold and at top-k, and N+, use the annotated labels of the valid
          classes.

        Raises:
            DataError: If no class is valid, or a logit is not finite.
        """
        logits, targets = self.predictions.shared_by_classes()
        per_class_ap = average_precision_of_all(logits, targets)["none"]
        naive = average_precision_of_all(logits, [block.clamp(min=0) for block in targets])["none"]

        counts = self.at_threshold.over_ranks()
        positives = counts.positives
        negatives = counts.negatives
        valid = self.valid_classes(counts)
        self._columns = {
            "AP": torch.where(valid, 100 * per_class_ap, torch.nan).tolist(),
            "AP_naive": (100 * naive).tolist(),
            "positives": positives.tolist(),
            "negatives": negatives.tolist(),
        }

        if not valid.any():
            raise DataError(
                "mAP_partial: no class has both a positive and a negative validation image; "
                "use more images or more annotations"
            )

        weighted = (per_class_ap * positives)[valid].sum() / positives[valid].sum()
        return {
            "mAP_partial": 100 * per_class_ap[valid].mean().item(),
            "mAP_weighted": 100 * weighted.item(),
            "mAP_naive": 100 * naive.nan_to_num(0).mean().item(),
            **self.summary(counts),
            **self.at_top_k.over_ranks().of_classes(valid).summary_at(self.top_k),
            "classes_valid": float(valid.sum()),
            "classes_without_labels": float(((positives == 0) & (negatives == 0)).sum()),
            "classes_without_positives": float(((positives == 0) & (negatives > 0)).sum()),
            "classes_without_negatives": float(((positives > 0) & (negatives == 0)).sum()),
        }

    def valid_classes(self, counts: Counts) -> Tensor:
        """Return the classes with an annotated positive and an annotated negative, bool [K]."""
        return (counts.positives > 0) & (counts.negatives > 0)

    def per_class(self) -> dict[str, list[float]]:
        """Return AP (NaN if invalid) and AP_naive in percent, and the label counts, per class."""
        return self._columns
