"""Mixup and cutmix of a micro-batch, applied while it is collated."""

from torch import Tensor

from mldec.config.schema import Mix


class Mixing:
    """Mix image i of a micro-batch with image b - 1 - i (timm's FastCollateMixup).

    Random numbers come from numpy's global generator.

    Args:
        mix: the settings of mixup and cutmix.
        num_classes: number of classes K.
    """

    def __init__(self, mix: Mix, num_classes: int) -> None:
        # timm is slow to import, and few recipes mix images.
        from timm.data.mixup import FastCollateMixup

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

        timm needs an even number b. If b is odd, the image in the middle is mixed with itself,
        which does not change it.

        Returns:
            images uint8 [b, 3, H, W] and targets float32 [b, K], from 0 to 1.
        """
        pairs = list(zip(images.clone(), targets.argmax(1).tolist(), strict=True))
        if len(pairs) % 2 == 0:
            return self.timm(pairs)

        # A copy, because timm writes into the images that it mixes.
        middle = len(pairs) // 2
        image, label = pairs[middle]
        copy = (image.clone(), label)
        mixed, soft_targets = self.timm([*pairs[:middle], copy, *pairs[middle:]])

        positions = [position for position in range(len(mixed)) if position != middle]
        return mixed[positions], soft_targets[positions]
