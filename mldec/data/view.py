"""How an image file becomes the model's input: the settings that every data set of image files shares."""

from dataclasses import dataclass

from mldec.data.transforms import EvalTransform, TrainTransform


@dataclass(frozen=True, kw_only=True)
class View:
    """The image settings of a `data` node; every reader of image files takes them, and documents none of them.

    The defaults are those of the official COCO recipe. An option file under `configs/data` names what is usual for its
    data set where that differs.

    Attributes:
        image_size: side of the square input in pixels.
        augment: "official", "randaugment", "none", or a RandAugment of timm's such as "rand-m7-mstd0.5-inc1"; see
            `TrainTransform`, also for the next five.
        cutout: side of the covered square as a fraction of the image side, in [0, 1]; 0 turns it off.
        flip: mirror half of the training images left to right.
        crop: smallest area of a random crop as a fraction of the image, in (0, 1]; 1 turns it off.
        interpolation: of the training images: "bilinear", "bicubic", or "random": one of the two at each draw.
        erase: probability in [0, 1] that a rectangle of a training image is erased.
        test_crop: side of the evaluated centre as a fraction of the image's shorter side, in (0, 1]; None squashes the
            whole image, as the official code does.
        test_size: side of the evaluated square in pixels; None is `image_size`.
        test_interpolation: "bilinear" or "bicubic"; None is `interpolation`, and bicubic where that is "random".

    Raises:
        ConfigError: for a value out of its range.
    """

    image_size: int = 448
    augment: str = "official"
    cutout: float = 0.5
    flip: bool = False
    crop: float = 1.0
    interpolation: str = "bilinear"
    erase: float = 0.0
    test_crop: float | None = None
    test_size: int | None = None
    test_interpolation: str | None = None

    def __post_init__(self) -> None:
        # The transforms hold the rules: a wrong value is refused now, not when the first image is read.
        self.train()
        self.eval()

    def train(self) -> TrainTransform:
        """Return what a training image goes through: RGB image -> uint8 [3, S, S]."""
        return TrainTransform(
            image_size=self.image_size,
            augment=self.augment,
            cutout=self.cutout,
            flip=self.flip,
            crop=self.crop,
            interpolation=self.interpolation,
            erase=self.erase,
        )

    def eval(self) -> EvalTransform:
        """Return what an evaluated image goes through: RGB image -> uint8 [3, S, S]."""
        interpolation = self.test_interpolation
        if interpolation is None:
            interpolation = "bicubic" if self.interpolation == "random" else self.interpolation

        return EvalTransform(
            image_size=self.image_size if self.test_size is None else self.test_size,
            crop=self.test_crop,
            interpolation=interpolation,
        )
