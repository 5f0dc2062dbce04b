"""Zero-shot and generalised zero-shot numbers, from one pass over the logits of all classes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mldec.errors import ConfigError
from mldec.evaluators.multi_label import Counts, top_k
from mldec.evaluators.predictions import Predictions, average_precision_of_all
from mldec.runtime import distributed

IMAGES = ("unseen", "all")
TOP_K = (3, 5)  # of table 6 of the paper


class ZeroShotEvaluator:
    """mAP, and overall precision, recall and F1 at 3 and 5, among the unseen classes (zsl) and among all (gzsl).

    Each query is decoded by itself, so the logits of the unseen classes among all are those of a pass of their own.
    Papers differ in which images they evaluate:

    - "unseen", the official code: images with an unseen label. All others are left out of every number.
    - "all", as LESA and BiAM: gzsl, seen and harmonic are over all images. zsl stays over the images with an unseen
      label, so that it means the same as above; zsl_all is among the unseen classes over all images.

    Source: official train_zsl_nus.py for zsl_mAP; it has none of the other numbers.

    Args:
        num_classes: number of all classes K.
        unseen: indices of the classes that training did not know.
        images: "unseen" or "all".

    Raises:
        ConfigError: for unseen classes that are none of the K, all of them, or named twice, or other `images`.
    """

    def __init__(self, num_classes: int, *, unseen: Sequence[int], images: str = "unseen") -> None:
        self.unseen = torch.as_tensor(sorted(set(unseen)), dtype=torch.int64)
        if (
            len(self.unseen) != len(unseen)
            or not set(unseen) < set(range(num_classes))
            or not len(unseen)
        ):
            raise ConfigError(
                f"unseen classes {list(unseen)[:10]} are not some of {num_classes} classes, each once"
            )
        if images not in IMAGES:
            raise ConfigError(f"images {images!r} is not known: choose unseen or all")
        self.all_images = images == "all"
        self.is_unseen = torch.zeros(num_classes, dtype=torch.bool).index_fill(0, self.unseen, True)
        self.predictions = Predictions(num_classes)
        widths = {"zsl": len(self.unseen), "gzsl": num_classes}
        if self.all_images:
            widths["zsl_all"] = len(self.unseen)
        self.counts = {(kind, k): Counts(width) for kind, width in widths.items() for k in TOP_K}

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits float [B, K]; targets [B, K] of 1, 0 or -1 (not annotated)."""
        logits, targets = logits.cpu(), targets.cpu()
        if not self.all_images:
            keep = self._has_unseen(targets)
            logits, targets = logits[keep], targets[keep]
        logits, targets = self.predictions.add(logits, targets)

        chosen = self._among_unseen(logits, targets)
        everything = (logits[:, self.unseen], targets[:, self.unseen])
        views = {"zsl": chosen, "gzsl": (logits, targets), "zsl_all": everything}
        for (kind, k), counts in self.counts.items():
            scores, labels = views[kind]
            counts.update(top_k(scores, k), labels)

    def _has_unseen(self, targets: Tensor) -> Tensor:
        return (targets[:, self.unseen] == 1).any(1)

    def _among_unseen(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of the unseen classes of the images with an unseen label."""
        keep = self._has_unseen(targets)
        return logits[keep][:, self.unseen], targets[keep][:, self.unseen]

    def _images_with_unseen_label(self) -> Predictions:
        """Return the logits and targets of the unseen classes, of the images with an unseen label."""
        chosen = Predictions(len(self.unseen))
        for logits, targets in zip(self.predictions.logits, self.predictions.targets, strict=True):
            chosen.add(*self._among_unseen(logits, targets))
        return chosen

    def compute(self) -> dict[str, float]:
        """Return percentages: zsl_mAP, gzsl_mAP, seen_mAP, harmonic_mAP, then P, R and F1 of each kind at each k.

        A class without a positive counts as 0, as in the official code, or is left out (`_skip_empty`). harmonic_mAP
        is 2 s u / (s + u) of seen_mAP and the mAP of the unseen classes over the same images: zsl_mAP or zsl_all_mAP.
        At k, the k highest logits of an image (all, if the classes are fewer) are predictions: P is true ones /
        predictions, R true ones / positives.
        """
        every = _precision(self.predictions)
        unseen = every[self.unseen]
        self._per_class = {"AP": 100 * every, "unseen": self.is_unseen.double()}

        # Which AP of which classes each kind of number is the mean of.
        per_class_ap = {"zsl": unseen, "gzsl": every}
        if self.all_images:
            per_class_ap["zsl"] = _precision(self._images_with_unseen_label())
            per_class_ap["zsl_all"] = unseen
            nothing = torch.full_like(every, torch.nan)
            self._per_class["AP_zsl"] = nothing.index_copy(
                0, self.unseen, 100 * per_class_ap["zsl"]
            )
        targets = torch.cat(self.predictions.targets)
        self._per_class["positives"] = distributed.total(targets.eq(1).sum(0))

        values = {}
        for kind, precision in per_class_ap.items():
            values[f"{kind}_mAP"] = precision.nan_to_num(0).mean()
            values[f"{kind}_mAP_skip_empty"] = precision.nanmean()
        seen = values["seen_mAP"] = every[~self.is_unseen].nan_to_num(0).mean()
        values["harmonic_mAP"] = 2 / (1 / seen + 1 / unseen.nan_to_num(0).mean())

        metrics = {name: 100 * value.item() for name, value in values.items()}
        for (kind, k), counts in self.counts.items():
            overall = counts.over_processes().summary()
            metrics |= {f"{kind}_{name}@{k}": overall[f"O{name}"] for name in ("P", "R", "F1")}
        return metrics

    def per_class(self) -> dict[str, list[float]]:
        """Return, after `compute`, AP in percent, 1 for an unseen class, and positives, over the evaluated images.

        With "all", AP_zsl is that of an unseen class over the images with an unseen label.
        """
        return {name: column.tolist() for name, column in self._per_class.items()}


def _precision(predictions: Predictions) -> Tensor:
    """Return the AP of each class over all processes' images: float64 [K] in [0, 1], NaN without a positive."""
    logits, targets = predictions.shared_by_classes()
    return average_precision_of_all(logits, targets)["none"]
