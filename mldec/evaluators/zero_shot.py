"""Zero-shot and generalized zero-shot metrics, computed in one pass over the predictions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mldec.errors import ConfigError
from mldec.evaluators.average_precision import Predictions, average_precision_of_all
from mldec.evaluators.multi_label import Counts, logit_of, on_device, top_k
from mldec.runtime import distributed
from mldec.runtime.devices import to_device

TOP_K = (3, 5)  # as in table 6 of the paper


class ZeroShotEvaluator:
    """Zero-shot mAP, and precision, recall and F1 at a threshold and at top-3 and top-5.

    The zsl metrics use the unseen classes, the gzsl metrics all classes. Each query is decoded
    independently, so the logits of the unseen classes are the same in both cases. Papers differ
    in the images that they evaluate:

    - "unseen", as in the official code, uses only the images with an unseen label.
    - "all", as in LESA and BiAM, uses all images for gzsl, seen and harmonic. zsl still uses the
      images with an unseen label. zsl_all uses the unseen classes and all images.

    Source: official train_zsl_nus.py for zsl_mAP. It has none of the other metrics.

    Args:
        num_classes: Number of all classes K.
        unseen: Indices of the unseen classes. Without unseen classes, their metrics are omitted.
            Without seen classes, their metrics are omitted. The harmonic mean requires both.
        images: "unseen" or "all".
        threshold: See `MultiLabelEvaluator`.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        unseen: Sequence[int],
        images: str = "unseen",
        threshold: float = 0.5,
    ) -> None:
        self.logit_threshold: float | Tensor = logit_of(threshold)
        self.unseen = torch.as_tensor(sorted(unseen), dtype=torch.int64)
        if images == "unseen" and not len(unseen):
            raise ConfigError("data: no class is unseen; evaluate all images instead")

        self.all_images = images == "all"
        self.is_unseen = torch.zeros(num_classes, dtype=torch.bool).index_fill(0, self.unseen, True)
        self.predictions = Predictions(num_classes)
        self._columns = self.unseen  # a copy on the device of the logits

        # Number of classes per kind of metrics. The mAP of the first kind is the first metric.
        widths = {}
        if len(unseen):
            widths["zsl"] = len(self.unseen)
        widths["gzsl"] = num_classes
        if self.all_images and len(unseen):
            widths["zsl_all"] = len(self.unseen)
        self.at_top_k: dict[tuple[str, int], Counts] = {}
        self.at_threshold: dict[str, Counts] = {}
        for kind, width in widths.items():
            self.at_threshold[kind] = Counts(width)
            for k in TOP_K:
                self.at_top_k[kind, k] = Counts(width)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits [B, K], targets [B, K] of 1, 0 or -1 (not annotated)."""
        if not self.all_images:
            # Select the images on the CPU, which avoids a device sync.
            targets = targets.cpu()
            [keep] = self._has_unseen(targets).nonzero(as_tuple=True)
            logits = logits[to_device(keep, logits.device)]
            targets = targets[keep]
        logits, targets = self.predictions.add(logits, targets)
        self._columns = self._columns.to(logits.device)
        self.logit_threshold = on_device(self.logit_threshold, logits.device)

        # "zsl" masks the images without an unseen label with targets of -1, which are ignored.
        unseen_logits = logits[:, self._columns]
        unseen_targets = targets[:, self._columns]
        has_unseen = (unseen_targets == 1).any(1, keepdim=True)
        by_kind = {
            "zsl": (unseen_logits, unseen_targets.where(has_unseen, -1)),
            "gzsl": (logits, targets),
            "zsl_all": (unseen_logits, unseen_targets),
        }
        for (kind, k), counts in self.at_top_k.items():
            scores, labels = by_kind[kind]
            counts.update(top_k(scores, k), labels)
        for kind, counts in self.at_threshold.items():
            scores, labels = by_kind[kind]
            counts.update(scores > self.logit_threshold, labels)

    def _has_unseen(self, targets: Tensor) -> Tensor:
        """Return whether each image has an unseen label: targets [B, K] -> bool [B]."""
        return (targets[:, self.unseen] == 1).any(1)

    def _images_with_unseen_label(self) -> Predictions:
        """Return the predictions of the unseen classes on the images with an unseen label."""
        predictions = Predictions(len(self.unseen))
        for logits, targets in zip(*self.predictions.blocks(), strict=True):
            keep = self._has_unseen(targets)
            predictions.add(logits[keep][:, self.unseen], targets[keep][:, self.unseen])
        return predictions

    def compute(self) -> dict[str, float]:
        """Compute mAP of each kind, seen_mAP, harmonic_mAP, then P, R and F1, in percent.

        - Classes without positives count as 0, as in the official code. They are ignored in the
          metrics with `_skip_empty`.
        - harmonic_mAP is 2 s u / (s + u), where s is seen_mAP and u the mAP of the unseen classes
          on the same images: zsl_mAP or zsl_all_mAP.
        - P, R and F1 at the threshold are per class (C) and overall (O), as in
          `MultiLabelEvaluator`.
        - P, R and F1 at top-k are overall. The k highest logits of an image are predicted, or all
          of them if there are fewer classes.
        """
        every = _per_class_ap(self.predictions)
        unseen = every[self.unseen]
        self._per_class = {"AP": (100 * every).tolist(), "unseen": self.is_unseen.double().tolist()}

        # AP of the classes of each kind.
        per_class_ap = {}
        if len(unseen):
            per_class_ap["zsl"] = unseen
        per_class_ap["gzsl"] = every
        if self.all_images and len(unseen):
            per_class_ap["zsl"] = _per_class_ap(self._images_with_unseen_label())
            per_class_ap["zsl_all"] = unseen

            # Report columns have K rows. The zsl AP of seen classes is NaN.
            undefined = torch.full_like(every, torch.nan)
            of_unseen = undefined.index_copy(0, self.unseen, 100 * per_class_ap["zsl"])
            self._per_class["AP_zsl"] = of_unseen.tolist()

        _, targets = self.predictions.blocks()
        self._per_class["positives"] = distributed.total(torch.cat(targets).eq(1).sum(0)).tolist()

        values = {}
        for kind, kind_ap in per_class_ap.items():
            values[f"{kind}_mAP"] = kind_ap.nan_to_num(0).mean()
            values[f"{kind}_mAP_skip_empty"] = kind_ap.nanmean()

        if not self.is_unseen.all():
            values["seen_mAP"] = every[~self.is_unseen].nan_to_num(0).mean()
        if "seen_mAP" in values and len(unseen):
            unseen_map = unseen.nan_to_num(0).mean()
            values["harmonic_mAP"] = 2 / (1 / values["seen_mAP"] + 1 / unseen_map)

        metrics = {name: 100 * value.item() for name, value in values.items()}
        for (kind, k), counts in self.at_top_k.items():
            overall = counts.over_ranks().summary()
            for name in ("P", "R", "F1"):
                metrics[f"{kind}_{name}@{k}"] = overall[f"O{name}"]
        for kind, counts in self.at_threshold.items():
            summary = counts.over_ranks().summary()
            for name, value in summary.items():
                metrics[f"{kind}_{name}"] = value
        return metrics

    def per_class(self) -> dict[str, list[float]]:
        """Return AP in percent, whether a class is unseen (1 or 0), and the positives."""
        return self._per_class


def _per_class_ap(predictions: Predictions) -> Tensor:
    """Return the AP per class, float64 [K] in [0, 1]; NaN for classes without positives."""
    logits, targets = predictions.shared_by_classes()
    return average_precision_of_all(logits, targets)["none"]
