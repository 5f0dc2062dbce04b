"""Zero-shot and generalised zero-shot metrics, from one pass over the logits of all classes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mldec.errors import ConfigError
from mldec.evaluators.average_precision import Predictions, average_precision_of_all
from mldec.evaluators.multi_label import Counts, logit_of, on_device, top_k
from mldec.runtime import distributed
from mldec.runtime.devices import moved

TOP_K = (3, 5)  # of table 6 of the paper


class ZeroShotEvaluator:
    """mAP, and precision, recall and F1 at a threshold and overall at 3 and 5, for zero-shot.

    Metrics named zsl are among the unseen classes, those named gzsl among all classes. Each query
    is decoded by itself, so the logits of the unseen classes are the same in both cases. Papers
    differ in which images they evaluate:

    - "unseen", the official code: images with an unseen label. All others are left out everywhere.
    - "all", as LESA and BiAM: gzsl, seen and harmonic are over all images. zsl stays over the
      images with an unseen label, so that it means the same as above; zsl_all is among the unseen
      classes over all images.

    Source: official train_zsl_nus.py for zsl_mAP; it has none of the other metrics.

    Args:
        num_classes: number of all classes K.
        unseen: indices of the classes that training did not see. If they are none, the metrics of
            the unseen classes and the harmonic mean are left out; if they are all, those of the
            seen classes and the harmonic mean.
        images: "unseen" or "all".
        threshold: see `MultiLabelEvaluator`.
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
            raise ConfigError("images is 'unseen', and no class is unseen: choose all")

        self.all_images = images == "all"
        self.is_unseen = torch.zeros(num_classes, dtype=torch.bool).index_fill(0, self.unseen, True)
        self.predictions = Predictions(num_classes)
        self._columns = self.unseen  # the same, on the device of the logits

        # Number of classes of each kind of metric. The first kind gives the metric to follow.
        widths = {"zsl": len(self.unseen)} if len(unseen) else {}
        widths["gzsl"] = num_classes
        if self.all_images and len(unseen):
            widths["zsl_all"] = len(self.unseen)
        self.counts = {(kind, k): Counts(width) for kind, width in widths.items() for k in TOP_K}
        self.at_threshold = {kind: Counts(width) for kind, width in widths.items()}

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits float [B, K]; targets [B, K] of 1, 0 or -1 (not annotated)."""
        if not self.all_images:
            # By the targets in main memory: a device would have to be waited for.
            targets = targets.cpu()
            [keep] = self._has_unseen(targets).nonzero(as_tuple=True)
            logits, targets = logits[moved(keep, logits.device)], targets[keep]
        logits, targets = self.predictions.add(logits, targets)
        self._columns = self._columns.to(logits.device)
        self.logit_threshold = on_device(self.logit_threshold, logits.device)

        # Labels of -1 are left out: with them an image without an unseen label does not count.
        unseen_logits, unseen_targets = logits[:, self._columns], targets[:, self._columns]
        has_unseen = (unseen_targets == 1).any(1, keepdim=True)
        views = {
            "zsl": (unseen_logits, unseen_targets.where(has_unseen, -1)),
            "gzsl": (logits, targets),
            "zsl_all": (unseen_logits, unseen_targets),
        }
        for (kind, k), counts in self.counts.items():
            scores, labels = views[kind]
            counts.update(top_k(scores, k), labels)
        for kind, counts in self.at_threshold.items():
            scores, labels = views[kind]
            counts.update(scores > self.logit_threshold, labels)

    def _has_unseen(self, targets: Tensor) -> Tensor:
        """Tell which images have an unseen label: targets [B, K] -> bool [B]."""
        return (targets[:, self.unseen] == 1).any(1)

    def _images_with_unseen_label(self) -> Predictions:
        """Return the predictions of zsl: of unseen classes, on images with an unseen label."""
        predictions = Predictions(len(self.unseen))
        for logits, targets in self.predictions.blocks():
            keep = self._has_unseen(targets)
            predictions.add(logits[keep][:, self.unseen], targets[keep][:, self.unseen])
        return predictions

    def compute(self) -> dict[str, float]:
        """Return percentages: mAP of each kind, seen_mAP, harmonic_mAP, then P, R and F1.

        Without an unseen or without a seen class, the numbers that need one are left out.

        A class without a positive counts as 0, as in the official code, or is left out
        (`_skip_empty`). harmonic_mAP is 2 s u / (s + u) of seen_mAP and the mAP of the unseen
        classes over the same images: zsl_mAP or zsl_all_mAP. At the threshold, P, R and F1 are per
        class (C) and overall (O), as those of `MultiLabelEvaluator`. At k they are overall, and the
        k highest logits of an image (all, if there are fewer classes) are predicted.
        """
        every = _per_class_ap(self.predictions)
        unseen = every[self.unseen]
        self._per_class = {"AP": 100 * every, "unseen": self.is_unseen.double()}

        # For each kind, the AP of the classes that its mAP is the mean of.
        per_class_ap = {"zsl": unseen} if len(unseen) else {}
        per_class_ap["gzsl"] = every
        if self.all_images and len(unseen):
            per_class_ap["zsl"] = _per_class_ap(self._images_with_unseen_label())
            per_class_ap["zsl_all"] = unseen

            # The column of the report has all K classes; the seen ones have no AP of this kind.
            undefined = torch.full_like(every, torch.nan)
            self._per_class["AP_zsl"] = undefined.index_copy(
                0, self.unseen, 100 * per_class_ap["zsl"]
            )

        targets = torch.cat([targets for _, targets in self.predictions.blocks()])
        self._per_class["positives"] = distributed.total(targets.eq(1).sum(0))

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
        for (kind, k), counts in self.counts.items():
            overall = counts.over_processes().summary()
            metrics |= {f"{kind}_{name}@{k}": overall[f"O{name}"] for name in ("P", "R", "F1")}
        for kind, counts in self.at_threshold.items():
            summary = counts.over_processes().summary()
            metrics |= {f"{kind}_{name}": value for name, value in summary.items()}
        return metrics

    def per_class(self) -> dict[str, list[float]]:
        """Return AP in percent, 1 for an unseen class, and the positives, after `compute`."""
        return {name: column.tolist() for name, column in self._per_class.items()}


def _per_class_ap(predictions: Predictions) -> Tensor:
    """Return the AP per class over all images: float64 [K] in [0, 1], NaN without a positive."""
    logits, targets = predictions.shared_by_classes()
    return average_precision_of_all(logits, targets)["none"]
