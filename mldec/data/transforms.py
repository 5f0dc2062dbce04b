"""Transforms from images to uint8 tensors for training and evaluation.

Images stay uint8 up to the backbone, which scales them to [0, 1] and normalizes them on the device.
"""

import math
import random
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from mldec.data.images import DECODERS, check_decoder
from mldec.data.images import read_image as read_image  # for users, see docs/predicting.md
from mldec.data.official_augment import augment_by_pair, channels, cutout
from mldec.data.sampling import SampleRandom, seeded
from mldec.errors import ConfigError, DataError, suggest
from mldec.runtime.devices import MAX_IMAGE_SIZE

MIN_TEST_CROP = 0.1  # 1/100 of the area; a smaller crop wastes most of the resized pixels
AUGMENTS = ("official", "randaugment", "none")
# Settings of `View` without random augmentation: a training image is the same in every epoch.
NO_AUGMENTATION = {"augment": "none", "cutout": 0.0, "flip": False, "crop": 1.0, "erase": 0.0}
INTERPOLATIONS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

# ImageNet mean color, the fill color of uncovered and erased areas, as in timm.
MEAN_COLOR = (124, 116, 104)

# Maximum number of pixels of a resized image; Pillow's limit for image files. Without it, a small
# file with 1 x 100,000 pixels could need gigabytes.
MAX_RESIZED = 178_956_970

# RGB image of Pillow, or uint8 [3, H, W], or [4, H, W] with an unused last channel.
Picture = Image.Image | Tensor


def resized(image: Picture, size: tuple[int, int], interpolation: str) -> Picture:
    """Resize a Pillow image with Pillow, or a tensor with torch.

    `size` is width and height in pixels. `interpolation` is a key of `INTERPOLATIONS`. Raises
    DataError if the resize needs more than `MAX_RESIZED` pixels.
    """
    # Pillow resizes the width first.
    width, height = size
    image_width, image_height = size_of(image)
    needed = width * max(height, image_height)
    if needed > MAX_RESIZED:
        raise DataError(
            f"resizing {image_width:,} x {image_height:,} to {width:,} x {height:,} pixels needs "
            f"{needed:,} pixels, above the limit of {MAX_RESIZED:,}"
        )

    if not isinstance(image, Tensor):
        return image.resize(size, INTERPOLATIONS[interpolation])

    # These strides let torch detect channels-last memory, which takes half the time.
    batch = image.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    return torch.nn.functional.interpolate(
        batch, size=(height, width), mode=interpolation, antialias=True
    )[0]


def size_of(image: Picture) -> tuple[int, int]:
    """Return width and height of an image in pixels."""
    if not isinstance(image, Tensor):
        return image.size
    return image.shape[2], image.shape[1]


def as_pillow(image: Picture) -> Image.Image:
    """Convert an image to Pillow."""
    if not isinstance(image, Tensor):
        return image

    mode = "RGB" if len(image) == 3 else "RGBX"
    pixels = image.permute(1, 2, 0).contiguous().numpy()
    return Image.frombytes("RGB", size_of(image), pixels, "raw", mode)


def as_torch(image: Picture) -> Tensor:
    """Convert an image to uint8 [3, H, W]. A Pillow image becomes a channels-last tensor."""
    if isinstance(image, Tensor):
        return image
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


# Maps the resize library to the conversion of its input.
RESIZES: dict[str, Callable[[Picture], Picture]] = {"pillow": as_pillow, "tensor": as_torch}


def to_tensor(image: Picture) -> Tensor:
    """Convert an RGB image to a contiguous tensor, uint8 [3, H, W], values 0 to 255."""
    if isinstance(image, Tensor):
        return image[:3].contiguous()

    return torch.from_numpy(channels(image))


@dataclass(frozen=True, kw_only=True)
class EvalTransform:
    """Resize an RGB image to a square, or resize it and crop its center, as for ImageNet.

    All attributes are plain values, so that a checkpoint can store them.

    Source: official train.py and validate.py, Resize((S, S)). With `crop`: timm's
    transforms_imagenet_eval.

    Raises:
        ConfigError: If an attribute is out of range.
    """

    image_size: int  # side S of the square in pixels

    # Side of the square as a fraction of the shorter image side, in [0.1, 1]. None resizes the
    # whole image and does not keep the aspect ratio.
    crop: float | None = None

    interpolation: str = "bilinear"  # or "bicubic"
    decoder: str = "pillow"  # one of DECODERS; all return the same pixels
    resize: str = "pillow"  # or "tensor" (torch), which differs by at most 1 of 255

    # Decode JPEG files at 1/2, 1/4 or 1/8 of their size, as long as both sides keep `draft` times
    # the pixels of the resized image. Large photos are decoded several times as fast, and their
    # pixels change slightly. None decodes the whole image.
    draft: int | None = None

    def __post_init__(self) -> None:
        _check_size(self.image_size)
        if self.draft is not None and (type(self.draft) is not int or self.draft < 1):
            raise ConfigError(f"draft: {self.draft!r} is not a positive integer or null")
        if self.crop is not None:
            _check_fraction("test crop", self.crop, MIN_TEST_CROP)
        _check_known("interpolation", self.interpolation, INTERPOLATIONS)
        _check_known("decoder", self.decoder, DECODERS)
        _check_known("resize", self.resize, RESIZES)

    def __call__(self, image: Picture, rng: SampleRandom | None = None) -> Tensor:
        """Transform an RGB image to uint8 [3, S, S]. `rng` is not used."""
        size = self.image_size
        image = RESIZES[self.resize](image)
        if self.crop is None:
            return to_tensor(resized(image, (size, size), self.interpolation))

        width, height, left, top = self._placed(size_of(image))
        whole = to_tensor(resized(image, (width, height), self.interpolation))
        return whole[:, top : top + size, left : left + size].contiguous()

    @property
    def shorter_side(self) -> int:
        """Shorter side of a resized image in pixels, before the crop."""
        if self.crop is None:
            return self.image_size
        return math.floor(self.image_size / self.crop)

    @property
    def min_side(self) -> int | None:
        """Minimum number of pixels per side of a decoded JPEG file, see `draft`."""
        if self.draft is None:
            return None
        return self.draft * self.shorter_side

    def visible_part(self, image_size: tuple[int, int]) -> tuple[float, float, float, float]:
        """Return the visible box of an image: left, top, right, bottom in pixels."""
        if self.crop is None:
            return (0, 0, *image_size)

        # Both scales are equal except for rounding.
        width, height, left, top = self._placed(image_size)
        across = image_size[0] / width
        down = image_size[1] / height
        right = left + self.image_size
        bottom = top + self.image_size
        return left * across, top * down, right * across, bottom * down

    def _placed(self, image_size: tuple[int, int]) -> tuple[int, int, int, int]:
        """Return width and height of the resized image, and left and top of the crop."""
        assert self.crop is not None

        # Resize the shorter side to S / crop, rounded down as in timm.
        shorter = min(image_size)
        width = self.shorter_side * image_size[0] // shorter
        height = self.shorter_side * image_size[1] // shorter

        left = round((width - self.image_size) / 2)
        top = round((height - self.image_size) / 2)
        return width, height, left, top


@dataclass(frozen=True, kw_only=True)
class View:
    """Image settings of a `data` node, shared by all readers of image files.

    The defaults are the settings of the official COCO recipe.

    Raises:
        ConfigError: If a value is out of range or the decoder is not installed.
    """

    image_size: int = 448  # side S of a training image in pixels

    # "official" (see `augment_by_pair`), "randaugment" (torchvision: two operations of magnitude 9
    # of 31), "none", or timm's RandAugment such as "rand-m7-mstd0.5-inc1" (see
    # timm.data.auto_augment.rand_augment_transform).
    augment: str = "official"

    cutout: float = 0.5  # side of the rectangle as a fraction of the image side, in [0, 1]
    flip: bool = False  # flip horizontally with probability 0.5

    # Minimum area of a random crop as a fraction of the image, in (0, 1]. The aspect ratio is from
    # 3/4 to 4/3. 1 disables it.
    crop: float = 1.0

    # "bilinear", "bicubic", or "random" (a random choice per image, as in timm). timm's RandAugment
    # also uses it.
    interpolation: str = "bilinear"

    # Probability of random erasing, in [0, 1], as timm's RandomErasing in mode "const". The erased
    # rectangle has 2 to 33 % of the area and an aspect ratio from 0.3 to 3.3.
    erase: float = 0.0

    # Settings of evaluation, see `EvalTransform`.

    # Side of the center crop as a fraction of the shorter image side, in [0.1, 1]. None resizes the
    # whole image.
    test_crop: float | None = None
    test_size: int | None = None  # side in pixels; None: `image_size`
    test_interpolation: str | None = None  # None: `interpolation`, or "bicubic" if it is "random"

    decoder: str = "pillow"  # see `EvalTransform`
    resize: str = "pillow"  # see `EvalTransform`
    draft: int | None = None  # see `EvalTransform`; training images are decoded at full size

    def __post_init__(self) -> None:
        _check_size(self.image_size)
        _check_fraction("cutout", self.cutout)
        _check_fraction("crop", self.crop, 1e-6)
        _check_fraction("erase", self.erase)
        _check_known("interpolation", self.interpolation, (*INTERPOLATIONS, "random"))

        # Validate the other settings now, not at the first image.
        self.eval()
        check_decoder(self.decoder)
        TrainTransform(self)

    def eval(self) -> EvalTransform:
        """Return the transform for evaluation."""
        interpolation = self.test_interpolation
        if interpolation is None:
            interpolation = "bicubic" if self.interpolation == "random" else self.interpolation

        return EvalTransform(
            image_size=self.image_size if self.test_size is None else self.test_size,
            crop=self.test_crop,
            interpolation=interpolation,
            decoder=self.decoder,
            resize=self.resize,
            draft=self.draft,
        )


class TrainTransform:
    """Resize or crop, flip, cut out, augment and erase, in this order.

    Source: official train.py, Resize -> CutoutPIL(0.5) -> RandAugment -> ToTensor. For ImageNet:
    timm's transforms_imagenet_train: crop 0.08, flip, "rand-...", erase.
    """

    min_side = None  # a random crop may need the pixels of the whole image

    def __init__(self, view: View) -> None:
        self.view = view
        self.decoder = view.decoder
        self.operation = _library_operation(view.augment, view.image_size, view.interpolation)
        self.crop: Any = None
        self.erase: Callable[[Tensor], Tensor] | None = None
        # torchvision takes a second to import and is rarely needed. Even with a scale of 1, its
        # crop would change the aspect ratio.
        if view.crop < 1:
            from torchvision.transforms.v2 import RandomResizedCrop

            self.crop = RandomResizedCrop(view.image_size, (view.crop, 1.0), (3 / 4, 4 / 3))
        if view.erase:
            from torchvision.transforms.v2 import RandomErasing

            self.erase = RandomErasing(view.erase, (0.02, 0.33), (0.3, 3.3), value=MEAN_COLOR)

        # Random crop, erasing and the augmentations of libraries do not accept a generator.
        self.draws_globally = view.crop < 1 or view.erase > 0 or self.operation is not None

    def __call__(self, image: Picture, rng: SampleRandom) -> Tensor:
        """Transform an RGB image to uint8 [3, S, S] with a newly seeded `rng`."""
        if not self.draws_globally:
            return self._transform(image, rng)
        with seeded(rng.initial_seed):
            return self._transform(image, rng)

    def _transform(self, picture: Picture, rng: SampleRandom) -> Tensor:
        view = self.view
        interpolation = view.interpolation
        # Do not draw a number for a single choice. It would change all later random numbers.
        if interpolation == "random":
            interpolation = rng.choice(list(INTERPOLATIONS))
        picture = RESIZES[view.resize](picture)
        if self.crop is not None:
            picture = self._cropped(picture)
        size = (view.image_size, view.image_size)
        image = as_pillow(resized(picture, size, interpolation))

        if view.flip and rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        # Cutout works in place. The resize always returns a new image.
        if view.cutout:
            image = cutout(image, view.cutout, rng)

        if view.augment == "official":
            image = augment_by_pair(image, rng)
        elif self.operation is not None:
            # The libraries draw from the global generators.
            random.setstate(rng.getstate())
            image = self.operation(image)
        tensor = to_tensor(image)
        return self.erase(tensor) if self.erase else tensor

    def _cropped(self, image: Picture) -> Picture:
        """Return a random part of an image. Resizing it in torchvision is slower for tensors."""
        place = self.crop.make_params([image])
        top = place["top"]
        left = place["left"]
        bottom = top + place["height"]
        right = left + place["width"]
        if isinstance(image, Tensor):
            return image[:, top:bottom, left:right]
        return image.crop((left, top, right, bottom))


Transform = EvalTransform | TrainTransform


def _library_operation(name: str, size: int, interpolation: str) -> Any:
    """Return the augmentation of timm or torchvision, or None for "official" and "none"."""
    if not name.startswith("rand-"):
        _check_known("augment", name, AUGMENTS)
        if name != "randaugment":
            return None
        from torchvision.transforms.v2 import RandAugment

        return RandAugment()

    # timm ignores parts without a number, and raises assertion errors or late errors for others.
    if not re.fullmatch(
        r"rand(-(m\d+|n\d+|p(0\.\d+|1|1\.0)|mstd\d+(\.\d+)?|mmax\d+|inc[01]))+", name
    ):
        raise ConfigError(
            f"augment: {name!r} is not a RandAugment of timm, such as rand-m7-mstd0.5-inc1"
        )

    from timm.data.auto_augment import rand_augment_transform

    settings = {"translate_const": int(size * 0.45), "img_mean": MEAN_COLOR}
    # Without this setting each operation draws an interpolation.
    if interpolation != "random":
        settings["interpolation"] = INTERPOLATIONS[interpolation]

    transform = rand_augment_transform(name, settings)
    for operation in transform.ops:
        if operation.name.startswith("Posterize"):
            operation.aug_fn = _posterize
    return transform


def _posterize(image: Image.Image, bits: int, **_: object) -> Image.Image:
    """Posterize as in timm, but keep at least 1 bit, because Pillow does not accept 0 bits."""
    if bits >= 8:
        return image
    return ImageOps.posterize(image, max(1, bits))


def _check_size(size: int) -> None:
    if type(size) is not int or not 1 <= size <= MAX_IMAGE_SIZE:
        raise ConfigError(f"image_size: {size!r} is not an integer from 1 to {MAX_IMAGE_SIZE}")


def _check_fraction(name: str, value: float, lowest: float = 0.0) -> None:
    if type(value) not in (int, float) or not lowest <= value <= 1:
        raise ConfigError(f"{name}: {value!r} is not a number from {lowest} to 1")


def _check_known(name: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name}: {value!r} is unknown{suggest(str(value), list(known))}")
