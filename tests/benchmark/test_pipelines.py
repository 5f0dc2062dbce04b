"""The ways to a training image that are compared: the official one has the same pixels as ours."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import picture, saved

from mldec.benchmark import pipelines
from mldec.benchmark.pipelines import PARTS, RANGES, official, ours, timms, torchvision_v2
from mldec.data.official_augment import OPERATIONS
from mldec.data.randomness import SampleRandom
from mldec.data.transforms import TrainTransform, read_image


@pytest.fixture
def photo(tmp_path: Path) -> str:
    return str(saved(picture(120, 90), tmp_path / "photo.jpg", quality=90))


def test_the_official_transform_has_our_pixels(photo: str) -> None:
    theirs, our_own = official(64), ours(64)
    assert tuple(theirs.steps) == tuple(our_own.steps) == PARTS
    for seed in range(150):
        image = theirs(photo, SampleRandom(seed))
        assert image.dtype == torch.float32
        expected = our_own(photo, SampleRandom(seed))
        assert torch.equal((255 * image).round().to(torch.uint8), expected), seed


@pytest.mark.parametrize(("theirs", "name"), [*zip(RANGES, OPERATIONS, strict=True)])
def test_an_operation_of_the_package_is_ours(theirs: str, name: str) -> None:
    image = picture(70, 60)
    operation, levels = OPERATIONS[name]
    for level in (1, 4, 9):
        for seed in range(4):
            expected = operation(image, levels[level], SampleRandom(seed))
            actual = pipelines._operate(image, theirs, level, SampleRandom(seed))
            assert np.array_equal(actual, expected)


@pytest.mark.parametrize("resize", ["pillow", "tensor"])
def test_our_steps_are_those_of_the_transform(photo: str, resize: str) -> None:
    transform = TrainTransform(image_size=64, resize=resize)
    for seed in range(20):
        expected = transform(read_image(photo), SampleRandom(seed))
        assert torch.equal(ours(64, resize=resize)(photo, SampleRandom(seed)), expected)


def test_those_of_other_libraries_end_with_an_image(photo: str) -> None:
    for pipeline in (torchvision_v2(64), timms(64)):
        assert set(pipeline.steps) <= set(PARTS)
        image = pipeline(photo, SampleRandom(0))
        assert (image.shape, image.dtype) == ((3, 64, 64), torch.uint8)
