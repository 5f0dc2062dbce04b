"""Pictures for tests of image files and transforms."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """Return a smooth image with texture and values from 20 to 230, which all operations change."""
    coarse = Image.fromarray(pixels(5, 6, 3, seed=seed)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noise = np.random.default_rng(seed + 1).integers(-20, 21, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(coarse) + noise, 20, 230).astype(np.uint8))


def saved(image: Image.Image, path: Path, **options: Any) -> Path:
    image.save(path, **options)
    return path


def seed_everything(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed)


def png(seed: int = 0, width: int = 40, height: int = 30) -> bytes:
    """Return the bytes of an image file that depends on the seed."""
    content = io.BytesIO()
    picture(width, height, seed).save(content, "PNG")
    return content.getvalue()
