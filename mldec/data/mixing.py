"""Mixup and cutmix of a micro-batch, applied while it is collated."""

import torch
from torch import Tensor

from mldec.data.types import Classes

# The smallest share of an image that counts: with a smaller one, mixup changes no 8-bit pixel.
VISIBLE = 0.5 / 255


class Mixing:
    """Mix image i of a micro-batch with image b - 1 - i (timm's FastCollateMixup).

    Each of the two has a share of the mixed image: of the pixels' values (mixup) or of the area
    (cutmix). It is visible if its share is at least 1/510. Labels, by `labels`:

    weighted: the mean of both images' labels, weighted by their shares; -1 (not annotated) if a
    visible image has -1.

    union: 1 if a visible image has 1; otherwise -1 if a visible image has -1; otherwise 0.

    Smoothing moves labels of 0 and 1 towards 1/K, or towards 1/2 for several labels per image.

    Random numbers come from numpy's global generator, and do not depend on the kind of labels.

    Args:
        classes: the classes of the targets.
        mixup: alpha of the beta distribution of a share of the pixels' values, or 0 for no mixup.
        cutmix: alpha of the beta distribution of a share of the area, or 0 for no cutmix.
        prob: probability that a batch, pair or image is mixed, in [0, 1].
        switch_prob: probability of cutmix instead of mixup if both are enabled, in [0, 1].
        mode: "batch", "pair" or "elem": whether a batch, a pair or an image has a share of its own.
        labels: "weighted" or "union", see above.
        smoothing: label smoothing, in [0, 1).
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
        # timm is slow to import, and few recipes mix images.
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

        # The values of smoothed labels of 0 and 1, as in timm.
        num_outcomes = len(classes) if classes.exclusive else 2
        self.off = smoothing / num_outcomes
        self.on = 1 - smoothing + self.off

    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix images uint8 [b, 3, H, W] and their targets [b, K] of 1, 0 and -1 (not annotated).

        The mixed targets are float32 [b, K], from 0 to 1, or -1. timm needs an even number b. If b
        is odd, the image in the middle is mixed with itself, which does not change it.
        """
        if len(images) % 2 == 0:
            return self._mix_pairs(images.clone(), targets)

        middle = len(images) // 2
        positions = [*range(middle + 1), *range(middle, len(images))]
        mixed, labels = self._mix_pairs(images[positions], targets[positions])

        kept = torch.arange(len(positions)) != middle
        return mixed[kept], labels[kept]

    def _mix_pairs(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix an even number of images, as above. timm may write into `images`."""
        # timm mixes labels, too. If the first half of the images is of class 0 and the second of
        # class 1, each image is of another class than its partner, and the mixed labels are shares.
        half = len(images) // 2
        markers = [0] * half + [1] * half
        mixed, shares = self.timm(list(zip(images, markers, strict=True)))

        first, second = shares.split(half)
        own_share, partner_share = torch.cat([first, second.flip(1)]).split(1, dim=1)
        return mixed, self._labels(targets, own_share, partner_share)

    def _labels(self, targets: Tensor, own_share: Tensor, partner_share: Tensor) -> Tensor:
        """Mix the targets [b, K] of each image and its partner, whose shares [b, 1] sum to 1."""
        own, partner = own_share >= VISIBLE, partner_share >= VISIBLE
        positive, unknown = targets == 1, targets == -1
        is_unknown = unknown & own | unknown.flip(0) & partner

        if self.union:
            is_positive = positive & own | positive.flip(0) & partner
            labels = torch.where(is_positive, self.on, self.off)
            return labels.masked_fill(is_unknown & ~is_positive, -1)

        labels = torch.where(positive, self.on, self.off)
        labels = labels * own_share + labels.flip(0) * partner_share
        return labels.masked_fill(is_unknown, -1)
