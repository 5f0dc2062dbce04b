"""Mixup and cutmix of a micro-batch, applied during collation."""

import torch
from torch import Tensor

from mldec.data.types import Classes

# Minimum share of a visible image. A smaller share changes no 8-bit pixel in mixup.
VISIBLE = 0.5 / 255


class Mixing:
    """Mix image i of a micro-batch with image b - 1 - i (timm's FastCollateMixup).

    The share of an image is its weight in the pixel values (mixup) or its part of the area
    (cutmix). An image is visible if its share is at least 1/510. There are two kinds of labels:

    - "weighted": mean of the labels of both images, weighted by their shares. The label is -1 (not
      annotated) if it is -1 in a visible image.
    - "union": 1 if a visible image has 1, otherwise -1 if a visible image has -1, otherwise 0.

    Label smoothing moves 0 and 1 towards 1/K, or towards 1/2 for multi-label targets. Random
    numbers are drawn from numpy's global generator and do not depend on `labels`.

    Args:
        classes: The classes of the targets.
        mixup: Alpha of the beta distribution of the mixup share. 0 disables mixup.
        cutmix: Alpha of the beta distribution of the cutmix share. 0 disables cutmix.
        prob: Probability that a batch, pair or image is mixed, in [0, 1].
        switch_prob: Probability of cutmix instead of mixup if both are enabled, in [0, 1].
        mode: Draw a share per "batch", per "pair" or per image ("elem").
        labels: "weighted" or "union".
        smoothing: Label smoothing, in [0, 1).
    """

    def __init__(
        self,
        classes: Classes,
        *,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        prob: float = 1.0,
        switch_prob: float = 0.5,
        mode: str = "batch",
        labels: str = "weighted",
        smoothing: float = 0.0,
    ) -> None:
        # timm is slow to import and rarely needed.
        from timm.data.mixup import FastCollateMixup

        self.timm = FastCollateMixup(
            mixup_alpha=mixup,
            cutmix_alpha=cutmix,
            prob=prob,
            switch_prob=switch_prob,
            mode=mode,
            label_smoothing=0.0,
            num_classes=2,
        )
        self.timm.mixup_enabled = mixup > 0 or cutmix > 0
        self.union = labels == "union"

        # Smoothed values of 0 and 1, as in timm.
        num_outcomes = len(classes) if classes.exclusive else 2
        self.off = smoothing / num_outcomes
        self.on = 1 - smoothing + self.off

    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix images uint8 [b, 3, H, W] with targets [b, K] of 1, 0 and -1 (not annotated).

        Returns:
            The mixed images, uint8 [b, 3, H, W], and targets, float32 [b, K], in [0, 1] or -1.
        """
        # timm requires an even batch size. If b is odd, the image in the middle is mixed with
        # itself, which does not change it.
        if len(images) % 2 == 0:
            return self._mix_pairs(images.clone(), targets)

        middle = len(images) // 2
        positions = list(range(middle + 1)) + list(range(middle, len(images)))
        mixed, labels = self._mix_pairs(images[positions], targets[positions])

        kept = torch.arange(len(positions)) != middle
        return mixed[kept], labels[kept]

    def _mix_pairs(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # timm also mixes labels. Label the first half of the images 0 and the second half 1: each
        # image and its partner have different labels, so that the mixed labels are the shares.
        half = len(images) // 2
        markers = [0] * half + [1] * half
        mixed, shares = self.timm(list(zip(images, markers, strict=True)))

        # Swap the columns of the second half, so that column 0 is each image's own share.
        shares[half:] = shares[half:].flip(1)
        return mixed, self._labels(targets, shares[:, :1], shares[:, 1:])

    def _labels(self, targets: Tensor, own_share: Tensor, partner_share: Tensor) -> Tensor:
        """Mix the targets [b, K] of each image and its partner, whose shares [b, 1] sum to 1."""
        own_visible = own_share >= VISIBLE
        partner_visible = partner_share >= VISIBLE
        positive = targets == 1
        unknown = targets == -1
        is_unknown = unknown & own_visible | unknown.flip(0) & partner_visible

        if self.union:
            is_positive = positive & own_visible | positive.flip(0) & partner_visible
            labels = torch.where(is_positive, self.on, self.off)
            return labels.masked_fill(is_unknown & ~is_positive, -1)

        labels = torch.where(positive, self.on, self.off)
        labels = labels * own_share + labels.flip(0) * partner_share
        return labels.masked_fill(is_unknown, -1)
