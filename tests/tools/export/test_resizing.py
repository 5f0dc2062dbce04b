"""The resize inside an exported file, beside Pillow's outside."""

from typing import Any

import numpy as np
import pytest
import torch
from pictures import picture
from PIL import Image

from mldec.data.transforms import EvalTransform, to_tensor
from mldec.export import Resize

SIZES = ((32, 32), (64, 48), (31, 90), (200, 33), (20, 30), (1, 1), (500, 333))
TRANSFORMS: list[dict[str, Any]] = [
    {},
    {"interpolation": "bicubic"},
    {"crop": 0.875, "interpolation": "bicubic"},
    {"crop": 1.0},
    {"crop": 0.3},
]


@pytest.mark.parametrize("settings", TRANSFORMS)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_it_is_pillows(settings: dict[str, Any], width: int, height: int) -> None:
    transform = EvalTransform(image_size=32, **settings)
    image = picture(width, height)
    expected = transform(image).int()
    resized = Resize(transform)(to_tensor(image)[None])
    assert resized.dtype == torch.uint8
    # Two roundings, each of which may fall to the other side.
    assert (resized[0].int() - expected).abs().max() <= 2
    assert (resized[0].int() - expected).float().abs().mean() < 0.3


def test_images_of_a_batch_are_resized_alike() -> None:
    transform = EvalTransform(image_size=32)
    images = torch.stack([to_tensor(picture(50, 40, seed)) for seed in range(3)])
    each = torch.cat([Resize(transform)(image[None]) for image in images])
    assert torch.equal(Resize(transform)(images), each)


def test_an_image_of_the_right_size_stays_as_it_is() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    image = to_tensor(Image.fromarray(pixels))
    for settings in ({}, {"interpolation": "bicubic"}, {"crop": 1.0}):
        transform = EvalTransform(image_size=32, **settings)
        assert torch.equal(Resize(transform)(image[None])[0], image)
