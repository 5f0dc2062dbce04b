"""From an image file to the uint8 tensor that the model takes: read, resize, and (in training) augment.

Images stay uint8 until the backbone, which scales them to [0, 1] and normalises on the device.
"""

import errno
import io
import math
import random
import re
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from mldec.config.schema import MAX_IMAGE_SIZE
from mldec.data.official_augment import PairAugment, cutout
from mldec.errors import ConfigError, DataError, suggest, visible
from mldec.files.text import open_binary

# Pillow reads some forty formats; one of them, EPS, starts another program. These are the ones data sets come in.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MIN_TEST_CROP = 0.1  # more would be enlarged than is kept: 1/100 of the area
AUGMENTS = ("official", "randaugment", "none")
INTERPOLATIONS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
MEAN_COLOUR = (
    124,
    116,
    104,
)  # of ImageNet, as timm fills what an operation or the erasing leaves bare
_FIX = "restore the file or leave it out"

# No resizing may need more pixels than Pillow takes from a file: a picture of 1 x 100,000 pixels, a few hundred bytes,
# would take gigabytes. Square inputs of up to 13,377 pixels a side are below it, whatever the file.
MAX_RESIZED = 178_956_970
MAX_SIDE = math.isqrt(MAX_RESIZED)

MAX_FILE = 2**30  # bytes of an image file

# Up to twice Pillow's limit of pixels an image is read, beyond it refused: its warning in between helps nobody.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

# EXIF orientation -> what turns the stored picture upright. 1 is upright; other values mean nothing.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_image(path: str | Path, content: bytes | None = None) -> Image.Image:
    """Read an image file as upright RGB, 8 bits a channel.

    Alpha is dropped, as torchvision's loader does; 16-bit values are scaled, not clipped; the EXIF orientation is
    applied (torchvision's loader ignores it).

    Args:
        path: of the file; only a name for messages if there is a content.
        content: bytes of the file, where they come from elsewhere, such as a tar shard.

    Raises:
        DataError: The file is missing, empty, cut short, too large or no image; one line with path, fault and fix.
    """
    if content is None:
        content = read_content(path)
    try:
        # A file object, not a path: Pillow maps an uncompressed TIFF given by path, and then garbles turned ones.
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            image.load()
            rgb = _to_rgb(image)
            turn = _UPRIGHT.get(_orientation(image))
    except MemoryError:
        raise
    except (
        Exception
    ) as error:  # decoders raise almost anything on a damaged file: SyntaxError, struct.error
        raise DataError(f"{visible(str(path))}: {_fault(Path(path), error)}; {_FIX}") from error
    return rgb if turn is None else rgb.transpose(turn)


def read_content(path: str | Path) -> bytes:
    """Return the bytes of an image file.

    Raises:
        DataError: The file is missing, empty, no regular file, or larger than `MAX_FILE`; one line with path, fault
            and fix.
    """
    try:
        with open_binary(path) as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise DataError(f"{path}: {_fault(Path(path), error)}; {_FIX}") from error
    if len(content) > MAX_FILE:
        raise DataError(f"{path}: more than {MAX_FILE:,} bytes are no image; {_FIX}")
    return content


def load_image(
    path: str | Path, transform: Callable[[Image.Image], Tensor], content: bytes | None = None
) -> Tensor:
    """Read an image file and put it through a transform: uint8 [3, S, S].

    Args:
        path: see `read_image`.
        transform: such as an `EvalTransform`.
        content: see `read_image`.

    Raises:
        DataError: The file cannot be read, or not be resized; one line with path, fault and fix.
    """
    image = read_image(path, content)
    try:
        return transform(image)
    except DataError as error:
        raise DataError(f"{path}: {error}; {_FIX}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"pixel values {values.min()} to {values.max()} do not fit 16 bits")
        # Pillow would clip at 255. The high byte is what it keeps of 16-bit colour files, so grey agrees with them.
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    elif image.mode == "P":
        image = image.convert(
            "RGBA"
        )  # the same colours as a direct conversion, without its warning on transparency
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except (
        Exception
    ):  # a damaged EXIF block beside a whole picture: take the picture as it is stored
        return 1


def _fault(path: Path, error: Exception) -> str:
    """Say in a phrase what is wrong with an image file."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "no such file"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if path.is_dir():
        return "a folder, not an image"
    if isinstance(error, OSError) and error.errno == errno.EINVAL:
        return str(error.strerror)
    if path.is_file() and path.stat().st_size == 0:
        return "an empty file (0 bytes)"
    if isinstance(error, Image.UnidentifiedImageError):
        return f"not an image, or none of {', '.join(FORMATS)}"
    if isinstance(error, Image.DecompressionBombError):
        return "too large an image (more than twice PIL.Image.MAX_IMAGE_PIXELS)"
    return f"it cannot be read as an image ({' '.join(str(error).split()) or type(error).__name__})"


def resized(image: Image.Image, size: tuple[int, int], how: Image.Resampling) -> Image.Image:
    """Return what Pillow's own resize does, to the bit, unless that would fill the memory.

    Raises:
        DataError: It would need more than `MAX_RESIZED` pixels: for the result, or for the step before it, in which
            Pillow has changed the width and not yet the height.
    """
    width, height = size
    needed = width * max(height, image.height)
    if needed > MAX_RESIZED:
        raise DataError(
            f"its {image.width:,} x {image.height:,} pixels need {needed:,} pixels to be resized to "
            f"{width:,} x {height:,}, and the limit is {MAX_RESIZED:,}"
        )
    return image.resize(size, how)


def to_tensor(image: Image.Image) -> Tensor:
    """Return an RGB image as uint8 [3, H, W], values 0 to 255, contiguous."""
    return torch.from_numpy(
        np.stack([np.asarray(band) for band in image.split()])
    )  # half the time of a transpose


@dataclass(frozen=True, kw_only=True)
class EvalTransform:
    """Make a square of an RGB image: squash it, as the official code does, or cut out its centre, as for ImageNet.

    Plain values only, so that `dataclasses.asdict` can travel in a checkpoint; every value but the size has a default,
    so that older checkpoints load.

    Source: official train.py and validate.py, Resize((S, S)); with `crop`: timm's transforms_imagenet_eval.

    Attributes:
        image_size: side S of the square in pixels.
        crop: the square's side as a fraction of the image's shorter side, from 0.1 to 1; None squashes the whole
            image, and its aspect ratio is lost.
        interpolation: "bilinear" or "bicubic".

    Raises:
        ConfigError: A value is out of range, or even a square image would be resized to more than `MAX_RESIZED`.
    """

    image_size: int
    crop: float | None = None
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        _check_size(self.image_size)
        if self.crop is not None:
            valid = type(self.crop) in (int, float) and MIN_TEST_CROP <= self.crop <= 1
            _check_fraction("test crop", self.crop, lowest=str(MIN_TEST_CROP), valid=valid)
        if self.image_size > MAX_SIDE * (self.crop or 1):
            crop = "" if self.crop is None else f" with a test crop of {self.crop}"
            raise ConfigError(
                f"image_size: {self.image_size}{crop} resizes images to more than {MAX_SIDE:,} pixels a side"
            )
        _check_known("interpolation", self.interpolation, INTERPOLATIONS)

    def __call__(self, image: Image.Image) -> Tensor:
        """Return uint8 [3, S, S]; without `crop` equal to Pillow's own resize to the bit.

        Raises:
            DataError: The image is so thin that its resizing would fill the memory, see `resized`.
        """
        size, how = self.image_size, INTERPOLATIONS[self.interpolation]
        if self.crop is None:
            return to_tensor(resized(image, (size, size), how))
        width, height = image.size
        scale = math.floor(size / self.crop) / min(width, height)
        image = resized(image, (max(size, int(width * scale)), max(size, int(height * scale))), how)
        left, top = round((image.width - size) / 2), round((image.height - size) / 2)
        return to_tensor(image.crop((left, top, left + size, top + size)))


class TrainTransform:
    """Resize (or crop), flip, cover a square, augment, erase: in this order, on Pillow images, the last on the tensor.

    The defaults are those of the official COCO recipe: no crop and no flip. `cutout` is a switch of its own: no
    augmentation at all is `augment="none"` and `cutout=0`.

    Random choices come from the global generators of `random`, numpy and torch, which the loader seeds for every
    sample.

    Source: official train.py, Resize -> CutoutPIL(0.5) -> RandAugment -> ToTensor; for ImageNet timm's
    transforms_imagenet_train: crop 0.08, flip, "rand-...", erase.
    """

    def __init__(
        self,
        *,
        image_size: int,
        augment: str = "official",
        cutout: float = 0.5,
        flip: bool = False,
        crop: float = 1.0,
        interpolation: str = "bilinear",
        erase: float = 0.0,
    ) -> None:
        """Check the values and build the steps.

        Args:
            image_size: side S of the result in pixels.
            augment: "official" (pairs of operations with p = 0.5 each, see `pair_augment`), "randaugment"
                (torchvision's: two operations of magnitude 9 on a scale of 31), "none", or a text of timm's such as
                "rand-m7-mstd0.5-inc1" (see timm.data.auto_augment.rand_augment_transform).
            cutout: side of the covered square as a fraction of the image side, in [0, 1]; 0 turns it off.
            flip: mirror half of the images left to right.
            crop: smallest area of a random crop as a fraction of the image, in (0, 1], with a ratio of the sides from
                3/4 to 4/3; 1 turns it off.
            interpolation: "bilinear", "bicubic", or "random": one of the two at each draw, as timm.
            erase: probability in [0, 1] that a rectangle of 2 to 33 % of the area, with a ratio of the sides from 0.3
                to 3.3, becomes the mean colour of ImageNet (timm's RandomErasing in its mode "const").
        """
        _check_size(image_size)
        _check_fraction("cutout", cutout, lowest="0 (off)", valid=0 <= cutout <= 1)
        _check_fraction("crop", crop, lowest="above 0", valid=0 < crop <= 1)
        _check_fraction("erase", erase, lowest="0 (off)", valid=0 <= erase <= 1)
        _check_known("interpolation", interpolation, [*INTERPOLATIONS, "random"])
        names = list(INTERPOLATIONS) if interpolation == "random" else [interpolation]
        self.resizes = [_resize(image_size, crop, INTERPOLATIONS[name]) for name in names]
        self.flip = flip
        self.cutout = cutout
        self.augment = _augment(augment, image_size)
        self.erase = _erasing(erase) if erase else None

    def __call__(self, image: Image.Image) -> Tensor:
        """Return uint8 [3, S, S] of an RGB image, which is not changed.

        Raises:
            DataError: The image is so thin that its resizing would fill the memory, see `resized`.
        """
        image = (self.resizes[0] if len(self.resizes) == 1 else random.choice(self.resizes))(image)
        if self.flip and random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.cutout:
            image = cutout(image, self.cutout)
        tensor = to_tensor(self.augment(image))
        return self.erase(tensor) if self.erase else tensor


# torchvision takes a second to import, which evaluation and the digits do without: it is imported where it is used.


def _erasing(probability: float) -> Callable[[Tensor], Tensor]:
    from torchvision.transforms import v2

    return v2.RandomErasing(probability, scale=(0.02, 0.33), ratio=(0.3, 3.3), value=MEAN_COLOUR)


def _resize(size: int, crop: float, how: Image.Resampling) -> Callable[[Image.Image], Image.Image]:
    from torchvision.transforms import v2

    if crop == 1:  # torchvision's crop at (1, 1) would still cut the longer side to its ratio
        return partial(resized, size=(size, size), how=how)
    return v2.RandomResizedCrop(
        (size, size), scale=(crop, 1.0), ratio=(3 / 4, 4 / 3), interpolation=how
    )


def _augment(name: str, size: int) -> Callable[[Image.Image], Image.Image]:
    if name.startswith("rand-"):
        return _timm_augment(name, size)
    _check_known("augment", name, AUGMENTS)
    from torchvision.transforms import v2

    return {"official": PairAugment, "randaugment": v2.RandAugment, "none": v2.Identity}[name]()


def _timm_augment(text: str, size: int) -> Callable[[Image.Image], Image.Image]:
    """Build timm's RandAugment; its operations are bounded and filled as in timm's own pipeline."""
    # timm ignores words without a number and fails on others only later, or with an assertion.
    if not re.fullmatch(
        r"rand(-(m\d+|n\d+|p(0\.\d+|1|1\.0)|mstd\d+(\.\d+)?|mmax\d+|inc[01]))+", text
    ):
        raise ConfigError(
            f"augment: {text!r} is no RandAugment of timm's; write for example rand-m7-mstd0.5-inc1"
        )
    from timm.data.auto_augment import (
        rand_augment_transform,
    )  # seconds to import, and few recipes want it

    transform = rand_augment_transform(
        text, {"translate_const": int(size * 0.45), "img_mean": MEAN_COLOUR}
    )
    for operation in transform.ops:
        if operation.name.startswith("Posterize"):
            operation.aug_fn = _posterize
    return transform


def _posterize(image: Image.Image, bits: int, **_: object) -> Image.Image:
    """Do as timm's operation, which at its strongest keeps 0 bits: Pillow refuses that, in the middle of a run."""
    return image if bits >= 8 else ImageOps.posterize(image, max(1, bits))


def _check_size(size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(
            f"image_size: {size!r} is not a positive whole number of pixels; set for example 448"
        )
    if size > MAX_IMAGE_SIZE:
        raise ConfigError(
            f"image_size: {size} is above {MAX_IMAGE_SIZE:,} pixels a side; set for example 448"
        )


def _check_fraction(name: str, value: float, *, lowest: str, valid: bool) -> None:
    if not valid:
        raise ConfigError(f"{name}: {value!r} is not a fraction; set a number from {lowest} to 1")


def _check_known(name: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name}: {value!r} is not known{suggest(str(value), list(known))}")
