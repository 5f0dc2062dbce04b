"""Reading image files: which formats, how large, and how a damaged one is reported."""

import importlib.util
import io
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from mldec.errors import ConfigError, DataError, brief, visible
from mldec.files.text import read_bytes

# The formats of data sets. Pillow reads some forty, and for one of them, EPS, it starts another
# program.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")

# Suffixes of image files, in lower case. Files with the first ones are read. The others are images
# that are not: newer formats, raw files of cameras, and formats of graphics programs.
_READ = ".jpg .jpeg .jpe .jfif .png .apng .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .pnm"
_NOT_READ = """
    .heic .heif .hif .avif .avifs .jxl .jxr .jp2 .j2k .jpx
    .dng .cr2 .cr3 .crw .nef .nrw .arw .srf .sr2 .raf .orf .ori .rw2 .pef .srw .x3f .raw
    .3fr .fff .iiq .rwl .mrw .dcr .kdc .erf .mef .mos .gpr
    .psd .tga .exr .hdr .pfm .ico .eps .svg
"""
READ = frozenset(_READ.split())
NOT_READ = frozenset(_NOT_READ.split())

DECODERS = ("pillow", "torchcodec", "simplejpeg")

FIX = "restore the file or leave it out"
CONVERT = "convert it to JPEG or leave it out"

# Major brands of ISO media files, at byte 8, after "ftyp". Source: the registry at mp4ra.org.
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"crx ": "CR3"}
_BRANDS |= dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"), "HEIC")
_BRANDS |= dict.fromkeys((b"mif1", b"msf1"), "HEIF")


class UnsupportedFiles:
    """Number of image files that cannot be read, by suffix, with an example of each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, path: str) -> None:
        """Count a file if its suffix is one of `NOT_READ`."""
        suffix = PurePath(path).suffix.lower()
        if suffix in NOT_READ:
            self.counts[suffix] += 1
            self.examples.setdefault(suffix, path)

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __str__(self) -> str:
        kinds = []
        for suffix, count in self.counts.most_common():
            kinds.append(f"{count:,} {suffix} (such as {visible(self.examples[suffix])})")
        return (
            f"{self.counts.total():,} image files of unsupported formats are left out: "
            f"{', '.join(kinds)}; convert them to JPEG"
        )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return number and example by suffix, for JSON."""
        return {
            suffix: {"files": count, "example": self.examples[suffix]}
            for suffix, count in self.counts.most_common()
        }


# Pillow reads images up to twice its limit and refuses larger ones; its warning in between is of no
# use here.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

# EXIF orientation -> operation that turns the stored picture upright. 1 is upright; other values
# are undefined.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_image(
    path: str | Path,
    content: bytes | None = None,
    *,
    draft: int | None = None,
    max_pixels: int | None = None,
) -> Image.Image:
    """Read an image file as upright RGB, 8 bits per channel.

    Alpha is dropped, as torchvision's loader does; 16-bit values are scaled, not clipped; the EXIF
    orientation is applied (torchvision's loader ignores it).

    Args:
        path: of the file; with `content` only a name for messages.
        content: bytes of the file, if they come from elsewhere, such as a tar shard.
        draft: let the decoder shrink a JPEG file by 2, 4 or 8 as long as both sides keep this many
            pixels, which is faster and changes the pixels a little.
        max_pixels: width times height at most, seen before the image is decoded; None for the
            limit of Pillow.

    Raises:
        DataError: if the file is missing, empty, truncated, too large or no image.
    """
    if content is None:
        content = read_bytes(Path(path), FIX)

    try:
        # Pillow maps an uncompressed TIFF that is given by its path into memory, and then garbles
        # rotated ones: it gets a file object.
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if max_pixels is not None and image.width * image.height > max_pixels:
                raise ValueError(
                    f"{image.width:,} x {image.height:,} pixels, above {max_pixels / 1e6:g} million"
                )
            if draft is not None:
                image.draft(None, (draft, draft))
            return upright(image)
    except MemoryError:
        # The file may be fine: this must not become an error that skips the image.
        raise
    except Exception as error:
        # Decoders raise almost anything for a damaged file, even SyntaxError and struct.error.
        fault = f"it cannot be read as an image ({brief(error)})"
        fix = FIX
        if not content:
            fault = "an empty file (0 bytes)"
        elif isinstance(error, Image.UnidentifiedImageError):
            fault = f"not an image, or none of {', '.join(FORMATS)}"
            if name := _unsupported_format(path, content):
                fault = f"a file in the format {name}, which is not supported"
                fix = CONVERT
        elif isinstance(error, Image.DecompressionBombError):
            fault = "too large an image (more than twice PIL.Image.MAX_IMAGE_PIXELS)"
        raise DataError(f"{visible(str(path))}: {fault}; {fix}") from error


def _unsupported_format(path: str | Path, content: bytes) -> str | None:
    """Return the name of an image format that is recognized but not read, or None."""
    if content[4:8] == b"ftyp" and content[8:12] in _BRANDS:
        return _BRANDS[content[8:12]]
    suffix = PurePath(path).suffix.lower()
    return suffix[1:].upper() if suffix in NOT_READ else None


def upright(image: Image.Image) -> Image.Image:
    """Return an image in RGB, turned as its EXIF block says; see `read_image`."""
    # First: Pillow turns TIFF files by itself when it loads them.
    image.load()
    rgb = _to_rgb(image)
    turn = _UPRIGHT.get(_orientation(image))
    return rgb if turn is None else rgb.transpose(turn)


def open_image(
    path: str | Path,
    content: bytes | None = None,
    *,
    draft: int | None = None,
    decoder: str = "pillow",
) -> Image.Image | Tensor:
    """Read an image file with a decoder of choice, see `read_image`; the pixels are the same.

    "torchcodec" decodes JPEG files into uint8 [3, H, W], "simplejpeg" into [4, H, W], the last a
    filler, and both leave all others to Pillow.
    """
    content = read_bytes(Path(path), FIX) if content is None else content
    picture = None
    if decoder != "pillow" and draft is None:
        picture = _by_other(decoder, content)
    return read_image(path, content, draft=draft) if picture is None else picture


def load_image(
    path: str | Path,
    transform: Callable[[Image.Image | Tensor], Tensor],
    content: bytes | None = None,
    *,
    draft: int | None = None,
    decoder: str = "pillow",
) -> Tensor:
    """Read an image file, see `open_image`, and apply a transform: uint8 [3, S, S]."""
    image = open_image(path, content, draft=draft, decoder=decoder)
    try:
        return transform(image)
    except DataError as error:
        raise DataError(f"{path}: {error}; {FIX}") from error


def check_decoder(decoder: str) -> None:
    """Raise a `ConfigError` if the package of a decoder is not installed."""
    if decoder != "pillow" and importlib.util.find_spec(decoder) is None:
        raise ConfigError(
            f"data.decoder: {decoder} is not installed; run pip install -e '.[fast]', "
            "or set data.decoder=pillow"
        )


def _by_other(decoder: str, content: bytes) -> Image.Image | Tensor | None:
    """Decode a JPEG file of colour or grey pixels without Pillow, upright; None for any other."""
    # Pillow knows the kind of an image before it decodes it, and what is wrong with a damaged one.
    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            if image.mode not in ("RGB", "L"):
                return None
            turn = _UPRIGHT.get(_orientation(image))
        return _by_torchcodec(content) if decoder == "torchcodec" else _by_simplejpeg(content, turn)
    except MemoryError:
        raise
    except Exception:
        return None


def _by_torchcodec(content: bytes) -> Tensor:
    from torchcodec.decoders import decode_jpeg

    # A copy, because torch warns of memory that cannot be written to.
    pixels: Tensor = decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return pixels


def _by_simplejpeg(content: bytes, turn: Image.Transpose | None) -> Image.Image | Tensor:
    from simplejpeg import decode_jpeg

    if turn is not None:
        return Image.fromarray(decode_jpeg(content, "RGB")).transpose(turn)
    # Four bytes per pixel are resized and made into an image of Pillow's faster than three.
    return torch.from_numpy(decode_jpeg(content, "RGBX")).permute(2, 0, 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB; raise a `ValueError` if its range is unknown."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"pixel values {values.min()} to {values.max()} do not fit 16 bits")

        # Pillow would clip grey values at 255. Of 16-bit colour files it keeps the high byte; this
        # does the same for grey ones.
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    elif image.mode == "P":
        # The same colours as a direct conversion, but without its warning about transparency.
        image = image.convert("RGBA")

    # A conversion from RGB to RGB would copy the image.
    return image if image.mode == "RGB" else image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 (upright) if there is none."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:
        # The picture may be fine even if its EXIF block is damaged: take it as it is stored.
        return 1
