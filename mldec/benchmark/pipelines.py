"""Ways from an image file to a training image of S x S pixels, as named steps: ours and others'.

Nothing of ours is in those of others, so that they can be compared.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from timm.data import create_transform
from torchvision import io, transforms
from torchvision.transforms import v2

from mldec.data.images import open_image
from mldec.data.official_augment import cutout
from mldec.data.randomness import SampleRandom
from mldec.data.transforms import RESIZES, TrainTransform, as_pillow, to_tensor

# torchvision would say at every image that its decoder moves to torchcodec.
warnings.filterwarnings("ignore", message="The image decoding and encoding capabilities")

PARTS = ("decode", "resize", "cutout", "operations", "tensor")

# What the step before returned (the first takes the path of the file) -> what the next one takes.
Step = Callable[[Any, SampleRandom], Any]


@dataclass(frozen=True)
class Pipeline:
    """A way from a file to a training image.

    Attributes:
        steps: by the names in `PARTS`, in this order; a part may be missing.
        seeds: every image has a generator of its own, which takes time too.
    """

    steps: dict[str, Step]
    seeds: bool = False

    def __call__(self, path: str, rng: SampleRandom) -> Any:
        """Return the training image of a file."""
        value: Any = path
        for step in self.steps.values():
            value = step(value, rng)
        return value


def ours(size: int, *, decoder: str = "pillow", resize: str = "pillow") -> Pipeline:
    """Return the steps of `TrainTransform` with the settings of the official recipe."""
    transform = TrainTransform(image_size=size, decoder=decoder, resize=resize)
    resized, prepared = transform.resizes[0], RESIZES[resize]
    return Pipeline(
        {
            "decode": lambda path, _: open_image(path, decoder=decoder),
            "resize": lambda image, _: as_pillow(resized(prepared(image))),
            "cutout": lambda image, rng: cutout(image, transform.cutout, rng),
            "operations": transform.augment,
            "tensor": lambda image, _: to_tensor(image),
        },
        seeds=True,
    )


# The official transform


def official(size: int) -> Pipeline:
    """Return the official transform, made of Pillow and torchvision: float32 [3, S, S].

    It is written from the description of train.py, helper_functions.py and the package
    `randaugment` 1.0.2, which needs an older numpy. Unlike there, the random numbers come from an
    argument, in the order of ours; with them it returns the same pixels.
    """
    resize, tensor = transforms.Resize((size, size)), transforms.ToTensor()
    return Pipeline(
        {
            "decode": lambda path, _: _open(path),
            "resize": lambda image, _: resize(image),
            "cutout": _official_cutout,
            "operations": _official_operations,
            "tensor": lambda image, _: tensor(image),
        }
    )


def _open(path: str) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def _official_cutout(image: Image.Image, rng: Random) -> Image.Image:
    """Draw a rectangle of half the side on the image itself."""
    half_width, half_height = (int(0.5 * side + 0.5) // 2 for side in image.size)
    x, y = (rng.randrange(side) for side in image.size)
    colour = (rng.randrange(256), rng.randrange(256), rng.randrange(256))

    corners = (x - half_width, y - half_height, x + half_width, y + half_height)
    ImageDraw.Draw(image).rectangle(corners, fill=colour)
    return image


def _official_operations(image: Image.Image, rng: Random) -> Image.Image:
    """Apply two of fifteen operations, of magnitude 1 to 9, each with probability 0.5."""
    names = list(RANGES)
    pair = [(rng.choice(names), rng.randrange(1, 10)) for _ in range(2)]
    for name, level in pair:
        if rng.random() < 0.5:
            image = _operate(image, name, level, rng)
    return image


# The magnitudes of level 0 and of level 9, between which the others are evenly spaced.
RANGES = {
    "shearX": (0, 0.3),
    "shearY": (0, 0.3),
    "translateX": (0, 150 / 331),
    "translateY": (0, 150 / 331),
    "rotate": (0, 30),
    "color": (0, 0.9),
    "contrast": (0, 0.9),
    "brightness": (0, 0.9),
    "sharpness": (0, 0.9),
    "posterize": (8, 4),
    "solarize": (256, 0),
    "cutout": (0, 20),
    "autocontrast": (0, 0),
    "equalize": (0, 0),
    "invert": (0, 0),
}
_ENHANCEMENTS = {
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "brightness": ImageEnhance.Brightness,
    "sharpness": ImageEnhance.Sharpness,
}
_GREY = (128, 128, 128)


def _operate(image: Image.Image, name: str, level: int, rng: Random) -> Image.Image:
    """Apply an operation of the package with one of its ten levels."""
    weakest, strongest = RANGES[name]
    magnitude = weakest + (strongest - weakest) * level / 9
    if name in _ENHANCEMENTS:
        return _ENHANCEMENTS[name](image).enhance(1 + magnitude * rng.choice([-1, 1]))
    if name == "rotate":
        return image.rotate(magnitude, fillcolor=_GREY)
    if name == "posterize":
        return ImageOps.posterize(image, round(magnitude))
    if name == "solarize":
        return ImageOps.solarize(image, magnitude)  # type: ignore[arg-type]
    if name == "cutout":
        return _small_cutout(image, round(magnitude), rng)
    if name in ("autocontrast", "equalize", "invert"):
        operation: Callable[[Image.Image], Image.Image] = getattr(ImageOps, name)
        return operation(image)

    # Pillow takes the colour of pixel (x, y) from (ax + by + c, dx + ey + f).
    signed = magnitude * rng.choice([-1, 1])
    matrices = {
        "shearX": (1, signed, 0, 0, 1, 0),
        "shearY": (1, 0, 0, signed, 1, 0),
        "translateX": (1, 0, signed * image.width, 0, 1, 0),
        "translateY": (1, 0, 0, 0, 1, signed * image.height),
    }
    resample = Image.Resampling.NEAREST
    if name.startswith("shear"):
        resample = Image.Resampling.BICUBIC
    return image.transform(
        image.size, Image.Transform.AFFINE, matrices[name], resample, fillcolor=_GREY
    )


def _small_cutout(image: Image.Image, side: int, rng: Random) -> Image.Image:
    """Cover a square of at most 20 pixels per side."""
    x, y = rng.randrange(image.width), rng.randrange(image.height)
    left, top = max(0, x - side // 2), max(0, y - side // 2)
    right, bottom = min(image.width, x + side // 2), min(image.height, y + side // 2)

    values = np.array(image)
    values[top:bottom, left:right] = (125, 122, 113)
    return Image.fromarray(values)


# Other libraries


def torchvision_v2(size: int) -> Pipeline:
    """Return what torchvision's version 2 has nearest to it, on tensors: uint8 [3, S, S].

    Its RandAugment always applies its two operations. A square of half the side is covered.
    """
    resize, augment = v2.Resize((size, size), antialias=True), v2.RandAugment(num_ops=2)
    covered = v2.RandomErasing(1.0, scale=(0.25, 0.25), ratio=(1.0, 1.0), value=128)
    return Pipeline(
        {
            "decode": lambda path, _: io.decode_image(path, mode=io.ImageReadMode.RGB),
            "resize": lambda image, _: resize(image),
            "cutout": lambda image, _: covered(image),
            "operations": lambda image, _: augment(image),
            "tensor": lambda image, _: image.contiguous(),
        }
    )


def timms(size: int) -> Pipeline:
    """Return timm's training transform with two operations of probability 0.5: uint8 [3, S, S].

    As in its loader, images are opened by Pillow and become float on the device. Erasing works on
    float tensors there, so that no cutout is part of it.
    """
    composed = create_transform(
        size,
        is_training=True,
        scale=(1.0, 1.0),
        hflip=0.0,
        auto_augment="rand-m9-n2-p0.5-mstd101-inc1",  # a deviation above 100: a uniform magnitude
        interpolation="bilinear",
        use_prefetcher=True,
    )
    resize, augment, tensor = composed.transforms
    return Pipeline(
        {
            "decode": lambda path, _: _open(path),
            "resize": lambda image, _: resize(image),
            "operations": lambda image, _: augment(image),
            "tensor": lambda image, _: torch.as_tensor(tensor(image)),
        }
    )
