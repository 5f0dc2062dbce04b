"""Photos given from Python: paths, file contents, PIL images, arrays, tensors and folders."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from mldec.data.images import FIX, from_array, upright
from mldec.errors import brief
from mldec.tools.predict.decode import Item
from mldec.tools.predict.inputs import Inputs, is_tar


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

    image = photo if isinstance(photo, Image.Image) else from_array(photo, name)
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
