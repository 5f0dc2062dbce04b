"""Zero-shot and generalised zero-shot numbers, from one pass over the logits of all classes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mldec import distributed
from mldec.errors import ConfigError
from mldec.evaluators.average_precision import average_precision
from mldec.evaluators.multi_label import Counts, top_k

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
        unseen: indices of the classes that training did not know.
        num_classes: number of all classes K.
        images: "unseen" or "all".

    Raises:
        ConfigError: for unseen classes that are none of the K, all of them, or named twice, or other `images`.
    """

    def __init__(self, unseen: Sequence[int], *, num_classes: int, images: str = "unseen") -> None:
        self.unseen = torch.as_tensor(sorted(set(unseen)), dtype=torch.int64)
        if len(self.unseen) != len(unseen) or not set(unseen) < set(range(num_classes)) or not len(unseen):
            raise ConfigError(f"unseen classes {list(unseen)[:10]} are not some of {num_classes} classes, each once")
        if images not in IMAGES:
            raise ConfigError(f"images {images!r} is not known: choose unseen or all")
        self.all_images = images == "all"
        self.is_unseen = torch.zeros(num_classes, dtype=torch.bool).index_fill(0, self.unseen, True)
        self.logits: list[Tensor] = []
        self.targets: list[Tensor] = []
        kinds = ("zsl", "gzsl", "zsl_all") if self.all_images else ("zsl", "gzsl")
        self.counts = {(kind, k): Counts() for kind in kinds for k in TOP_K}

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits float [B, K], kept in float32; targets [B, K] of 1, 0 or -1 (not annotated)."""
        logits, targets = logits.float().cpu(), targets.to(torch.int8).cpu()
        chosen = self._among_unseen(logits, targets)
        if not self.all_images:
            keep = self._has_unseen(targets)
            logits, targets = logits[keep], targets[keep]
        self.logits.append(logits)
        self.targets.append(targets)
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

    def compute(self) -> dict[str, float]:
        """Return percentages: zsl_mAP, gzsl_mAP, seen_mAP, harmonic_mAP, then P, R and F1 of each kind at each k.

        A class without a positive counts as 0, as in the official code, or is left out (`_skip_empty`). harmonic_mAP
        is 2 s u / (s + u) of seen_mAP and the mAP of the unseen classes over the same images: zsl_mAP or zsl_all_mAP.
        At k, the k highest logits of an image (all, if the classes are fewer) are predictions: P is true ones /
        predictions, R true ones / positives.
        """
        every = _precision(self.logits, self.targets)
        unseen = every[self.unseen]
        self._per_class = {"AP": 100 * every, "unseen": self.is_unseen.double()}
        among = {"gzsl": every}
        if self.all_images:
            pairs = [self._among_unseen(*pair) for pair in zip(self.logits, self.targets, strict=True)]
            among = {"zsl": _precision([pair[0] for pair in pairs], [pair[1] for pair in pairs]), **among}
            among["zsl_all"] = unseen
            self._per_class["AP_zsl"] = torch.full_like(every, torch.nan).index_copy(0, self.unseen, 100 * among["zsl"])
        else:
            among = {"zsl": unseen, **among}
        self._per_class["positives"] = distributed.total(torch.cat(self.targets).eq(1).sum(0))
        values = {}
        for kind, precision in among.items():
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


def _precision(logits: list[Tensor], targets: list[Tensor]) -> Tensor:
    """Return the AP of each class over all processes' images: float64 [K] in [0, 1], NaN without a positive."""
    scores, labels = distributed.share_columns(logits), distributed.share_columns(targets)
    return distributed.join_columns(average_precision(scores, labels)["none"])
