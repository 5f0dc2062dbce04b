"""What calibration adds to a checkpoint: thresholds, and how logits become calibrated scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mldec.data.base import Classes
from mldec.data.fingerprint import Fingerprint

SCOPES = ("class", "global")  # of a threshold


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Thresholds of K classes, fitted on validation images.

    The calibrated score of a class is sigmoid(slope * logit + offset), or the softmax over the
    classes if an image has one label. A class is present if its score is at least its threshold.

    Attributes:
        weights: "ema" or "raw": the set of weights that was calibrated.
        objective: that chose the thresholds, such as "f1"; None without thresholds.
        scope: "class" or "global"; None without thresholds.
        thresholds: from 0 to 1: K in the order of the classes, one for all of them, or none if an
            image has one label.
        slopes: K, or one for all classes, which is 1 / temperature.
        offsets: as many.
        images: the number of images that it was fitted on.
        data: the node of their data set.
        fingerprint: of these images and their labels.
        date: when it was fitted, in ISO 8601.
    """

    weights: str
    objective: str | None
    scope: str | None
    thresholds: tuple[float, ...]
    slopes: tuple[float, ...]
    offsets: tuple[float, ...]
    images: int
    data: dict[str, Any]
    fingerprint: Fingerprint
    date: str

    def scaled(self, logits: Tensor) -> Tensor:
        """Return the calibrated logits of all classes, in their order: float [B, K] -> [B, K]."""
        slopes = torch.tensor(self.slopes, dtype=logits.dtype, device=logits.device)
        offsets = torch.tensor(self.offsets, dtype=logits.dtype, device=logits.device)
        return logits * slopes + offsets

    def thresholds_of(self, trained: Sequence[str], names: Sequence[str]) -> list[float]:
        """Return the thresholds in the order of other names: one for all classes, or one per name.

        Args:
            trained: the names of the classes of the checkpoint.
            names: the same in any order; if one threshold serves all, of any classes.
        """
        if len(self.thresholds) < 2:
            return list(self.thresholds)

        threshold_of = dict(zip(trained, self.thresholds, strict=True))
        return [threshold_of[name] for name in names]


class Calibrated(nn.Module):
    """A model whose logits are calibrated."""

    def __init__(self, model: nn.Module, calibration: Calibration) -> None:
        super().__init__()
        self.model = model
        self.calibration = calibration

    def forward(self, images: Tensor, queries: Tensor | None = None) -> Tensor:
        """Return the calibrated logits, float32 [B, K], of images [B, 3, H, W]."""
        return self.calibration.scaled(self.model(images, queries).float())


def fits_classes(calibration: Calibration, classes: Classes) -> bool:
    """Tell whether a calibration has as many numbers as the classes of its checkpoint need."""
    # One label per image needs no threshold, and word vectors stand for any classes.
    if classes.exclusive:
        thresholds = 0
    elif classes.queries is not None or calibration.scope == "global":
        thresholds = 1
    else:
        thresholds = len(classes)

    scores = {1} if classes.exclusive or classes.queries is not None else {1, len(classes)}
    return (
        len(calibration.thresholds) == thresholds
        and len(calibration.slopes) in scores
        and len(calibration.offsets) in scores
        and (calibration.objective is None) == (calibration.scope is None) == classes.exclusive
    )
