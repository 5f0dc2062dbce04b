"""The image settings that every data set of image files shares."""

from dataclasses import dataclass

from mldec.data.images import check_decoder
from mldec.data.transforms import EvalTransform, TrainTransform

# With these values a training image is the same in every epoch.
NO_AUGMENTATION = {"augment": "none", "cutout": 0.0, "flip": False, "crop": 1.0, "erase": 0.0}


@dataclass(frozen=True, kw_only=True)
class View:
    """The image settings of a `data` node, which are the same for every reader of image files.

    The defaults are those of the official COCO recipe. The option files under `configs/data` set
    other values where these are usual for a data set.

    Attributes:
        image_size: side of the square input in pixels.
        augment: "official", "randaugment", "none", or a RandAugment of timm such as
            "rand-m7-mstd0.5-inc1"; see `TrainTransform`, also for the next five settings.
        cutout: side of the covered rectangle as a fraction of the image side, in [0, 1]; 0 turns it
            off.
        flip: mirror half of the training images left to right.
        crop: smallest area of a random crop as a fraction of the image, in (0, 1]; 1 turns it off.
        interpolation: of the training images: "bilinear", "bicubic", or "random": one of the two
            for each image.
        erase: probability in [0, 1] that a rectangle of a training image is erased.
        test_crop: side of the evaluated centre as a fraction of the image's shorter side, from 0.1
            to 1; None resizes the whole image, as the official code does.
        test_size: side of the evaluated square in pixels; None is `image_size`.
        test_interpolation: "bilinear" or "bicubic"; None is `interpolation`, and bicubic where that
            is "random".
        decoder: of image files, "pillow" or "torchcodec"; see `EvalTransform`, also for the next.
        resize: "pillow" or "tensor", in training and evaluation.

    Raises:
        ConfigError: for a value out of its range, or a decoder that is not installed.
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
    decoder: str = "pillow"
    resize: str = "pillow"

    def __post_init__(self) -> None:
        # The transforms check the values: a wrong one must fail now, not at the first image.
        self.train()
        self.eval()
        check_decoder(self.decoder)

    def train(self) -> TrainTransform:
        """Return the transform of training images: RGB image -> uint8 [3, S, S]."""
        return TrainTransform(
            image_size=self.image_size,
            augment=self.augment,
            cutout=self.cutout,
            flip=self.flip,
            crop=self.crop,
            interpolation=self.interpolation,
            erase=self.erase,
            decoder=self.decoder,
            resize=self.resize,
        )

    def eval(self) -> EvalTransform:
        """Return the transform of evaluated images: RGB image -> uint8 [3, S, S]."""
        # Evaluation must not draw its interpolation at random.
        interpolation = self.test_interpolation
        if interpolation is None:
            interpolation = "bicubic" if self.interpolation == "random" else self.interpolation

        return EvalTransform(
            image_size=self.image_size if self.test_size is None else self.test_size,
            crop=self.test_crop,
            interpolation=interpolation,
            decoder=self.decoder,
            resize=self.resize,
        )
