"""Reading of image files: formats, size limits and error messages."""

import importlib.util
import io
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, PngImagePlugin, TiffImagePlugin
from torch import Tensor

from mldec.errors import ConfigError, DataError, brief, visible
from mldec.files.text import read_bytes

# Formats to read. Pillow supports about forty, and starts an external program for EPS.
FORMATS: tuple[str, ...] = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")

# Lowercase suffixes of supported image files, and of unsupported ones: newer formats, camera raw
# files, formats of graphics programs, and of medical and scientific images.
_READ = (
    ".jpg .jpeg .jpe .jfif .mpo .png .apng .webp .bmp .gif .tif .tiff .ppm .pgm .pbm .pnm "
    ".avif .avifs"
)
_NOT_READ = """
    .jxl .jxr .jp2 .j2k .jpx
    .dng .cr2 .cr3 .crw .nef .nrw .arw .srf .sr2 .raf .orf .ori .rw2 .pef .srw .x3f .raw
    .3fr .fff .iiq .rwl .mrw .dcr .kdc .erf .mef .mos .gpr
    .psd .tga .exr .hdr .pfm .ico .eps .svg
    .dcm .dicom .nii .npy
"""
READ = frozenset(_READ.split())
NOT_READ = frozenset(_NOT_READ.split())

# HEIC files need the package pillow-heif. It rotates them by their `irot` property, and reduces 10
# and 12 bits per channel to 8.
HEIF = frozenset((".heic", ".heics", ".heif", ".hif"))
try:
    import pillow_heif
except ImportError:
    NOT_READ |= HEIF
else:
    pillow_heif.register_heif_opener()
    READ |= HEIF
    FORMATS += ("HEIF",)

DECODERS = ("pillow", "simplejpeg")

# Photos that Python accepts.
ACCEPTED = (
    "pass a path, the bytes of an image file, a PIL image, a uint8 numpy array [H, W, 3] or a "
    "uint8 torch tensor [3, H, W]"
)

# Bit depths of gray values in files of 16 and 32 bits. Cameras and scanners store 10 and 12 bits in
# such files, and other programs 8 bits. The smallest depth that holds the largest value is used: an
# image of 16 bits whose values are all below 4,096 would be nearly black.
BIT_DEPTHS = (8, 10, 12, 16)

FIX = "restore the file or leave it out"
INSTALL_HEIF = "pip install -e '.[heic]'"

# Major brands of ISO media files, at byte 8 after "ftyp". Source: mp4ra.org.
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"crx ": "CR3", b"mif1": "HEIF", b"msf1": "HEIF"}
_BRANDS |= dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"), "HEIC")


# Pillow rejects PNG files with more than 1 MB of text or color profile in one chunk. Programs store
# edit histories and prompts there, and the pixels of such a file are valid.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY

# Pillow warns about images above its pixel limit. Only images above twice the limit are errors.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def read_image(
    path: str | Path,
    content: bytes | None = None,
    *,
    draft: int | None = None,
    max_pixels: int | None = None,
) -> Image.Image:
    """Read an image file as upright RGB with 8 bits per channel.

    Alpha is dropped, as in torchvision's loader. Gray values of 16 and 32 bits are scaled, not
    clipped, see `BIT_DEPTHS`. The EXIF orientation is applied, which torchvision's loader ignores.

    Args:
        path: Path of the file. With `content` it is only used in messages.
        content: Content of the file, for example from a tar shard.
        draft: Downscale a JPEG file by 2, 4 or 8 while decoding, as long as both sides keep this
            number of pixels. It is faster and changes the pixels slightly.
        max_pixels: Maximum width times height, checked before decoding. None means Pillow's limit.

    Raises:
        DataError: If the file is missing, empty, truncated, too large or not an image.
    """
    if content is None:
        content = read_bytes(Path(path))

    try:
        # Pass a file object: Pillow memory-maps an uncompressed TIFF given by its path, and then
        # corrupts rotated images.
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if max_pixels is not None and image.width * image.height > max_pixels:
                raise ValueError(
                    f"{image.width:,} x {image.height:,} pixels, above {max_pixels / 1e6:g} million"
                )
            if draft is not None:
                image.draft(None, (draft, draft))
            return upright(image)
    except MemoryError:
        # The file may be valid. A DataError could skip the image.
        raise
    except Exception as error:
        # Decoders raise many types for a damaged file, such as SyntaxError and struct.error.
        raise DataError(f"{visible(str(path))}: {_fault(path, content, error)}") from error


def _fault(path: str | Path, content: bytes, error: Exception) -> str:
    if not content:
        return f"an empty file (0 bytes); {FIX}"
    if isinstance(error, Image.DecompressionBombError):
        return f"too large an image (more than twice PIL.Image.MAX_IMAGE_PIXELS); {FIX}"
    if not isinstance(error, Image.UnidentifiedImageError):
        return f"it cannot be read as an image ({brief(error)}); {FIX}"

    kind = ""
    suffix = PurePath(path).suffix.lower()
    if content[4:8] == b"ftyp":
        kind = _BRANDS.get(content[8:12], "")
    elif suffix in NOT_READ:
        kind = suffix[1:].upper()
    if kind in ("HEIC", "HEIF") and "HEIF" not in FORMATS:
        return f"the format {kind} needs pillow-heif; run {INSTALL_HEIF}, or convert it to JPEG"
    if kind and kind not in (*FORMATS, "HEIC"):
        return f"the format {kind} is not supported; convert it to JPEG or leave it out"
    if content.startswith(b"PK\3\4"):
        return "a ZIP archive; unpack it"
    bands = _tiff_bands(content)
    if bands not in (None, 1, 3, 4):
        return f"{bands} bands per pixel, not 1, 3 or 4; select the bands of an RGB image"
    return f"not an image, or none of {', '.join(FORMATS)}; convert it to JPEG or leave it out"


def _tiff_bands(content: bytes) -> int | None:
    """Return the number of values per pixel of a TIFF file, or None if it cannot be read."""
    file = io.BytesIO(content)
    with suppress(Exception):
        directory = TiffImagePlugin.ImageFileDirectory_v2(file.read(8))
        file.seek(directory.next)
        directory.load(file)
        return directory.get(TiffImagePlugin.SAMPLESPERPIXEL)
    return None


def upright(image: Image.Image) -> Image.Image:
    """Convert an image to RGB and apply its EXIF orientation in place; see `read_image`."""
    # Load it first. Pillow rotates TIFF files itself during loading.
    image.load()
    # The image may be valid even if its EXIF block is damaged. Do not rotate it.
    with suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)
    return _to_rgb(image)


def from_array(photo: Any, name: str) -> Image.Image:
    """Convert an array [H, W], [H, W, C] or a tensor [H, W], [C, H, W] of uint8 values.

    `name` is used in messages. Raises DataError for other types, shapes and values.
    """
    if not isinstance(photo, np.ndarray | Tensor):
        raise DataError(f"{name}: {type(photo).__name__} is not a photo; {ACCEPTED}")

    kind = f"{type(photo).__name__} {list(photo.shape)} of {photo.dtype}"
    if str(photo.dtype).removeprefix("torch.") != "uint8":
        # The range of other values is ambiguous: 0 to 1, 0 to 255, or normalized.
        raise DataError(f"{name}: {kind} is not a photo; scale it to uint8 values from 0 to 255")

    if isinstance(photo, Tensor):
        channels_last = photo.movedim(0, -1) if photo.ndim == 3 else photo
        photo = channels_last.cpu().numpy()
    if photo.ndim == 3 and photo.shape[2] == 1:
        photo = photo[:, :, 0]
    is_color = photo.ndim == 3 and photo.shape[2] in (3, 4)  # RGB, and RGB with alpha
    if not (is_color or photo.ndim == 2) or photo.size == 0:
        raise DataError(f"{name}: {kind} is not a photo; {ACCEPTED}")
    return Image.fromarray(np.ascontiguousarray(photo))


def as_file(photo: Any, name: str) -> bytes:
    """Return the bytes of an image file with the pixels of a photo, see `ACCEPTED`."""
    if isinstance(photo, bytes):
        return photo
    if isinstance(photo, str | os.PathLike):
        return read_bytes(Path(photo))
    image = photo if isinstance(photo, Image.Image) else from_array(photo, name)
    # PPM is lossless, and about as fast as a copy.
    buffer = io.BytesIO()
    upright(image).save(buffer, "PPM")
    return buffer.getvalue()


def load_image(
    path: str | Path,
    transform: Callable[[Any], Tensor],
    content: bytes | None = None,
    *,
    draft: int | None = None,
    decoder: str = "pillow",
) -> Tensor:
    """Read an image file as `read_image`, and transform it to uint8 [3, S, S].

    All `DECODERS` return the same pixels. "simplejpeg" decodes JPEG files to uint8 [4, H, W] with
    an unused last channel, and uses Pillow for other files.
    """
    if content is None:
        content = read_bytes(Path(path))
    image: Image.Image | Tensor | None = None
    if decoder == "simplejpeg" and draft is None:
        image = _by_simplejpeg(content)
    if image is None:
        image = read_image(path, content, draft=draft)
    try:
        return transform(image)
    except DataError as error:
        raise DataError(f"{path}: {error}; {FIX}") from error


def check_decoder(decoder: str) -> None:
    """Raise ConfigError if the package of a decoder is not installed."""
    if decoder != "pillow" and importlib.util.find_spec(decoder) is None:
        raise ConfigError(f"data.decoder: {decoder} is not installed; pip install -e '.[fast]'")


def _by_simplejpeg(content: bytes) -> Tensor | None:
    """Decode an upright RGB or gray JPEG file with simplejpeg. Returns None for other files."""
    from simplejpeg import decode_jpeg

    # Pillow reads the mode from the header. It also decodes damaged files, for its error message.
    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            is_rotated = image.getexif().get(ExifTags.Base.Orientation) in range(2, 9)
            if image.mode not in ("RGB", "L") or is_rotated:
                return None
        # Resizing and conversion to Pillow are faster with four bytes per pixel than with three.
        return torch.from_numpy(decode_jpeg(content, "RGBX")).permute(2, 0, 1)
    except MemoryError:
        raise
    except Exception:
        return None


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to RGB. Raises ValueError if its range is unknown."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"pixel values {values.min()} to {values.max()} do not fit 16 bits")

        # Keep the eight highest bits, as Pillow does for 16-bit color files. For gray files it
        # would clip the values at 255.
        bits = next(bits for bits in BIT_DEPTHS if values.max() < 2**bits)
        image = Image.fromarray((values >> (bits - 8)).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no known range")
    elif image.mode == "P":
        # Same colors as a direct conversion, without its warning about transparency.
        image = image.convert("RGBA")

    # A conversion from RGB to RGB would copy the image.
    if image.mode == "RGB":
        return image
    return image.convert("RGB")
