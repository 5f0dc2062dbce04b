"""Mixup and cutmix, done while images are put together, so that neither the data sets nor the steps know of it."""

from torch import Tensor

from mldec.config.schema import Mix


class Mixing:
    """Mix the images of a micro-batch, each with its mirror place: the first with the last (timm's FastCollateMixup).

    Random numbers come from numpy's global generator.

    Args:
        mix: what to do.
        num_classes: K.
    """

    def __init__(self, mix: Mix, num_classes: int) -> None:
        from timm.data.mixup import FastCollateMixup  # slow to import, and few recipes want it

        self.timm = FastCollateMixup(
            mixup_alpha=mix.mixup,
            cutmix_alpha=mix.cutmix,
            prob=mix.prob,
            switch_prob=mix.switch_prob,
            mode=mix.mode.value,
            label_smoothing=mix.smoothing,
            num_classes=num_classes,
        )
        self.timm.mixup_enabled = mix.on

    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix images uint8 [b, 3, H, W] and their one-hot targets [b, K].

        timm wants an even number: where it is odd the image in the middle mixes with itself, which changes nothing.

        Returns:
            images uint8 [b, 3, H, W] and targets float32 [b, K], from 0 to 1.
        """
        pairs = list(zip(images.clone(), targets.argmax(1).tolist(), strict=True))
        if len(pairs) % 2 == 0:
            return self.timm(pairs)
        middle = len(pairs) // 2
        twin = (
            pairs[middle][0].clone(),
            pairs[middle][1],
        )  # timm writes into images that it mixes in pairs
        mixed, soft = self.timm([*pairs[:middle], twin, *pairs[middle:]])
        kept = [place for place in range(len(mixed)) if place != middle]
        return mixed[kept], soft[kept]
