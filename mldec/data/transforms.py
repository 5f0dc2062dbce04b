"""From an image file to the uint8 tensor that the model takes: read, resize, and (in training) augment.

Images stay uint8 until the backbone, which scales them to [0, 1] and normalises on the device.
"""

import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor
from torchvision.transforms import v2

from mldec.data.pair_augment import PairAugment, cutout
from mldec.errors import ConfigError, DataError, suggest

AUGMENTS = ("official", "randaugment", "none")
_BILINEAR = Image.Resampling.BILINEAR
_FIX = "restore the file or leave it out"

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
    try:
        # A file object, not a path: Pillow maps an uncompressed TIFF given by path, and then garbles turned ones.
        with Path(path).open("rb") if content is None else io.BytesIO(content) as file, Image.open(file) as image:
            image.load()
            rgb = _to_rgb(image)
            turn = _UPRIGHT.get(_orientation(image))
    except (
        Exception
    ) as error:  # decoders raise almost anything on a damaged file: SyntaxError, IndexError, struct.error
        if isinstance(error, MemoryError):
            raise
        raise DataError(f"{path}: {_fault(Path(path), error)}; {_FIX}") from error
    return rgb if turn is None else rgb.transpose(turn)


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
        image = image.convert("RGBA")  # the same colours as a direct conversion, without its warning on transparency
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # a damaged EXIF block beside a whole picture: take the picture as it is stored
        return 1


def _fault(path: Path, error: Exception) -> str:
    """Say in a phrase what is wrong with an image file."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "no such file"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if path.is_dir():
        return "a folder, not an image"
    if path.is_file() and path.stat().st_size == 0:
        return "an empty file (0 bytes)"
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image, or of an unknown format"
    if isinstance(error, Image.DecompressionBombError):
        return "too large an image (more than twice PIL.Image.MAX_IMAGE_PIXELS)"
    return f"it cannot be read as an image ({' '.join(str(error).split()) or type(error).__name__})"


def to_tensor(image: Image.Image) -> Tensor:
    """Return an RGB image as uint8 [3, H, W], values 0 to 255, contiguous."""
    return torch.from_numpy(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)))


@dataclass(frozen=True, kw_only=True)
class EvalTransform:
    """Squash an RGB image to a square with bilinear interpolation; the aspect ratio is lost, as in the official code.

    Plain values only, so that `dataclasses.asdict` can travel in a checkpoint.

    Source: official train.py and validate.py, Resize((S, S)).

    Attributes:
        image_size: side S of the square in pixels.
    """

    image_size: int

    def __post_init__(self) -> None:
        _check_size(self.image_size)

    def __call__(self, image: Image.Image) -> Tensor:
        """Return uint8 [3, S, S], equal to Pillow's own resize to the bit."""
        return to_tensor(image.resize((self.image_size, self.image_size), _BILINEAR))


class TrainTransform:
    """Resize (or crop), flip, cover a square, augment: in this order, on Pillow images.

    The defaults are those of the official COCO recipe: no crop and no flip. `cutout` is a switch of its own: no
    augmentation at all is `augment="none"` and `cutout=0`.

    Random choices come from the global generators of `random` and torch, which the loader seeds for every sample.

    Source: official train.py, Resize -> CutoutPIL(0.5) -> RandAugment -> ToTensor.
    """

    def __init__(
        self,
        *,
        image_size: int,
        augment: str = "official",
        cutout: float = 0.5,
        flip: bool = False,
        crop: float = 1.0,
    ) -> None:
        """Check the values and build the steps.

        Args:
            image_size: side S of the result in pixels.
            augment: "official" (pairs of operations with p = 0.5 each, see `pair_augment`), "randaugment"
                (torchvision's: two operations of magnitude 9 on a scale of 31) or "none".
            cutout: side of the covered square as a fraction of the image side, in [0, 1]; 0 turns it off.
            flip: mirror half of the images left to right.
            crop: smallest area of a random crop as a fraction of the image, in (0, 1], with a ratio of the sides from
                3/4 to 4/3; 1 turns it off.
        """
        _check_size(image_size)
        _check_fraction("cutout", cutout, lowest="0 (off)", valid=0 <= cutout <= 1)
        _check_fraction("crop", crop, lowest="above 0", valid=0 < crop <= 1)
        self.resize = _resize(image_size, crop)
        self.flip = flip
        self.cutout = cutout
        self.augment = _augment(augment)

    def __call__(self, image: Image.Image) -> Tensor:
        """Return uint8 [3, S, S] of an RGB image, which is not changed."""
        image = self.resize(image)
        if self.flip and random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.cutout:
            image = cutout(image, self.cutout)
        return to_tensor(self.augment(image))


def _resize(size: int, crop: float) -> Callable[[Image.Image], Image.Image]:
    if crop == 1:  # torchvision's crop at (1, 1) would still cut the longer side to its ratio
        return v2.Resize((size, size))
    return v2.RandomResizedCrop((size, size), scale=(crop, 1.0), ratio=(3 / 4, 4 / 3))


def _augment(name: str) -> Callable[[Image.Image], Image.Image]:
    if name not in AUGMENTS:
        raise ConfigError(f"augment: {name!r} is not known{suggest(str(name), list(AUGMENTS))}")
    return {"official": PairAugment, "randaugment": v2.RandAugment, "none": v2.Identity}[name]()


def _check_size(size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"image_size: {size!r} is not a positive whole number of pixels; set for example 448")


def _check_fraction(name: str, value: float, *, lowest: str, valid: bool) -> None:
    if not valid:
        raise ConfigError(f"{name}: {value!r} is not a fraction; set a number from {lowest} to 1")
