"""Photos given from Python: paths, file contents, PIL images, arrays, tensors and folders."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from mldec.data.images import FIX, upright
from mldec.errors import DataError, brief
from mldec.tools.predict.decode import Item
from mldec.tools.predict.inputs import Inputs, is_tar

CHANNELS = (1, 3, 4)  # gray, RGB, and RGB with alpha
ACCEPTED = (
    "pass a path, the bytes of an image file, a PIL image, a uint8 numpy array [H, W, 3] or a "
    "uint8 torch tensor [3, H, W]"
)


def is_photo(value: Any) -> bool:
    """Return True for one photo, and False for a folder, a batch or another iterable."""
    if isinstance(value, str | os.PathLike):
        return not _is_container(str(value))
    if isinstance(value, np.ndarray | Tensor):
        return value.ndim != 4
    return isinstance(value, bytes | Image.Image | Mapping) or not isinstance(value, Iterable)


def items(photos: Any) -> Iterator[Item]:
    """Yield the items of one or more photos, and all images of folders and tar files."""
    if is_photo(photos) or isinstance(photos, str | os.PathLike):
        photos = [photos]
    for number, photo in enumerate(photos):
        if isinstance(photo, str | os.PathLike) and _is_container(str(photo)):
            inputs = Inputs([str(photo)])
            yield from inputs
            inputs.skipped.log(str(photo))
        else:
            yield to_item(photo, f"image {number}")


def to_item(photo: Any, name: str) -> Item:
    """Return the item of one photo; `name` is used if the photo has no path."""
    if isinstance(photo, str | os.PathLike):
        return Item(str(photo), str(photo))
    if isinstance(photo, bytes):
        return Item(name, name, content=photo)

    image = photo if isinstance(photo, Image.Image) else _to_image(photo, name)
    name = getattr(photo, "filename", None) or name
    try:
        return Item(name, name, content=upright(image))
    except MemoryError:
        raise
    except Exception as error:
        # PIL decodes lazily, so a damaged file is found here.
        fault = f"{name}: it cannot be read as an image ({brief(error)}); {FIX}"
        return Item(name, name, fault=fault)


def _is_container(path: str) -> bool:
    """Return True for a folder or a tar file."""
    if is_tar(path) or not path:
        return bool(path)
    with suppress(OSError):  # such as a name that is too long
        return Path(path).is_dir()
    return False


def _to_image(photo: Any, name: str) -> Image.Image:
    """Convert an array [H, W], [H, W, C] or a tensor [H, W], [C, H, W] of uint8 values."""
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
    is_color = photo.ndim == 3 and photo.shape[2] in CHANNELS
    if not (is_color or photo.ndim == 2) or photo.size == 0:
        raise DataError(f"{name}: {kind} is not a photo; {ACCEPTED}")
    return Image.fromarray(np.ascontiguousarray(photo))
