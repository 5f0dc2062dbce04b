import dataclasses
import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import picture, pixels, saved, seed_everything
from PIL import Image

from mldec.data.images import load_image, read_image
from mldec.data.official_augment import PairAugment, cutout
from mldec.data.randomness import SampleRandom
from mldec.data.transforms import MAX_RESIZED, EvalTransform, TrainTransform, to_tensor
from mldec.errors import ConfigError, DataError
from mldec.runtime.devices import MAX_IMAGE_SIZE

# Tensors and the evaluation transform


def test_to_tensor_keeps_values_and_places():
    values = pixels(5, 7, 3)
    tensor = to_tensor(Image.fromarray(values))
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (3, 5, 7)
    assert tensor.is_contiguous()
    assert np.array_equal(tensor.numpy(), values.transpose(2, 0, 1))


@pytest.mark.parametrize(("width", "height"), [(500, 333), (333, 500), (20, 30), (64, 64), (1, 1)])
def test_eval_transform_equals_pillow_to_the_bit(width, height):
    image = picture(width, height)
    expected = np.asarray(image.resize((64, 64), Image.Resampling.BILINEAR))
    result = EvalTransform(image_size=64)(image)
    assert result.dtype == torch.uint8
    assert np.array_equal(result.numpy(), expected.transpose(2, 0, 1))


@pytest.mark.parametrize("crop", [None, 0.5, 0.875, 1])
@pytest.mark.parametrize(("width", "height"), [(500, 333), (333, 500), (64, 64), (21, 700)])
def test_the_visible_part_is_what_the_square_shows(width, height, crop):
    # Two images whose colours are the positions of their pixels.
    ramps = np.zeros((2, height, width, 3), np.uint8)
    ramps[0] += np.linspace(0, 255, width).astype(np.uint8)[None, :, None]
    ramps[1] += np.linspace(0, 255, height).astype(np.uint8)[:, None, None]
    transform = EvalTransform(image_size=32, crop=crop)
    left, top, right, bottom = transform.visible_part((width, height))
    for ramp, axis, first, last, side in (
        (ramps[0], 1, left, right, width),
        (ramps[1], 0, top, bottom, height),
    ):
        shown = transform(Image.fromarray(ramp))[0].float().mean(1 - axis)
        centres = first + (torch.arange(32) + 0.5) * (last - first) / 32 - 0.5
        expected = 255 * centres / (side - 1)
        inner = slice(3, -3)  # interpolation flattens the borders of an image
        torch.testing.assert_close(shown[inner], expected[inner], rtol=0, atol=3)


def test_eval_transform_on_real_images(sample_data):
    for path in sorted((sample_data / "coco2014_mini" / "val2014").glob("*.jpg"))[:3]:
        with Image.open(path) as image:
            expected = np.asarray(
                image.convert("RGB").resize((448, 448), Image.Resampling.BILINEAR)
            )
        assert np.array_equal(
            EvalTransform(image_size=448)(read_image(path)).permute(1, 2, 0).numpy(), expected
        )


def test_eval_transform_travels_as_plain_values():
    transform = EvalTransform(image_size=96)
    assert dataclasses.asdict(transform) == {
        "image_size": 96,
        "crop": None,
        "interpolation": "bilinear",
        "decoder": "pillow",
        "resize": "pillow",
    }
    assert EvalTransform(**dataclasses.asdict(transform)) == transform
    assert (
        EvalTransform(**{"image_size": 96}) == transform
    )  # of a checkpoint from before there was more


@pytest.mark.parametrize(
    ("width", "height"),
    # In floating point, 64 / 98 times 147 is below 96.
    [(500, 333), (333, 500), (100, 90), (64, 64), (20, 400), (147, 98)],
)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop", [0.875, 0.95, 1.0])
def test_the_test_crop_is_timms(width, height, interpolation, crop):
    from timm.data.transforms_factory import transforms_imagenet_eval

    image = picture(width, height)
    timms = transforms_imagenet_eval(
        64, crop_pct=crop, interpolation=interpolation, use_prefetcher=True
    )
    ours = EvalTransform(image_size=64, crop=crop, interpolation=interpolation)(image)
    assert np.array_equal(ours.numpy(), timms(image))


def test_squashing_with_another_interpolation():
    image = picture(100, 60)
    expected = to_tensor(image.resize((48, 48), Image.Resampling.BICUBIC))
    assert torch.equal(EvalTransform(image_size=48, interpolation="bicubic")(image), expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"crop": 0.0}, "test crop: 0.0"),
        ({"crop": 1.1}, "test crop: 1.1"),
        ({"interpolation": "random"}, "interpolation: 'random'"),
        ({"decoder": "x"}, "decoder: 'x'.*pillow, torchcodec"),
        ({"resize": "x"}, "resize: 'x'.*pillow, tensor"),
    ],
)
def test_eval_transform_refuses_wrong_values(arguments, expected):
    with pytest.raises(ConfigError, match=expected):
        EvalTransform(image_size=64, **arguments)


# The training transform


def test_without_augmentation_train_equals_eval():
    image = picture(100, 60)
    train = TrainTransform(image_size=48, augment="none", cutout=0)
    assert torch.equal(train(image, SampleRandom(0)), EvalTransform(image_size=48)(image))


@pytest.mark.parametrize("augment", ["official", "randaugment"])
def test_random_choices_follow_the_seed_of_the_sample(augment):
    image = picture(100, 60)
    transform = TrainTransform(image_size=48, augment=augment, flip=True, crop=0.3)

    def draw(seed):
        return [transform(image, SampleRandom(seed + sample)) for sample in range(6)]

    first, again, other = draw(10), draw(10), draw(20)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert all(image.shape == (3, 48, 48) and image.dtype == torch.uint8 for image in first)


def test_randaugment_is_torchvisions():
    from torchvision.transforms import v2

    image = picture(48, 48)
    ours = TrainTransform(image_size=48, augment="randaugment", cutout=0)(image, SampleRandom(1))
    seed_everything(1)
    assert torch.equal(
        ours, to_tensor(v2.RandAugment(num_ops=2, magnitude=9, num_magnitude_bins=31)(image))
    )


def test_the_order_is_resize_cutout_pair():
    image = picture(100, 60)
    for seed in range(20):
        ours = TrainTransform(image_size=48)(image, SampleRandom(seed))
        rng = random.Random(seed)
        small = image.resize((48, 48), Image.Resampling.BILINEAR)
        step = PairAugment()(cutout(small, 0.5, rng), rng)
        assert torch.equal(ours, to_tensor(step))


@pytest.mark.parametrize(
    ("text", "interpolation"),
    [
        ("rand-m7-mstd0.5-inc1", "bicubic"),  # the published recipe of ImageNet
        ("rand-m9-n3-p0.4", "bilinear"),
        ("rand-m5-mstd101-mmax8-inc1", "random"),
    ],
)
def test_rand_augment_is_that_of_timms_pipeline(text, interpolation):
    from timm.data.transforms_factory import transforms_imagenet_train

    image = picture(48, 48)
    options = {"auto_augment": text, "interpolation": interpolation, "use_prefetcher": True}
    _, timms, _ = transforms_imagenet_train(48, separate=True, hflip=0.0, **options)
    (timms,) = timms.transforms
    transform = TrainTransform(
        image_size=48, augment=text, cutout=0, interpolation=interpolation, crop=1.0
    )
    changed = 0
    for seed in range(10):
        ours = transform(image, SampleRandom(seed))
        seed_everything(seed)
        # Our resize draws its interpolation first.
        if interpolation == "random":
            random.choice([0, 1])
        assert torch.equal(ours, to_tensor(timms(image)))
        changed += not torch.equal(ours, to_tensor(image))
    assert changed > 2


@pytest.mark.parametrize("text", ["rand-m10-p1-inc1", "rand-m0-p1-inc0"])
def test_the_strongest_posterize_does_not_end_the_run(text):
    transform = TrainTransform(image_size=16, augment=text, cutout=0)
    image = picture(16, 16)
    shapes = {transform(image, SampleRandom(seed)).shape for seed in range(100)}
    assert shapes == {(3, 16, 16)}


def test_erasing_covers_a_rectangle_with_the_mean_colour():
    image = Image.new("RGB", (64, 64), (255, 255, 255))
    transform = TrainTransform(image_size=64, augment="none", cutout=0, erase=0.5)
    shares = []
    for result in (transform(image, SampleRandom(seed)) for seed in range(300)):
        assert result.dtype == torch.uint8
        covered = (result == torch.tensor([124, 116, 104], dtype=torch.uint8)[:, None, None]).all(0)
        rows, columns = covered.any(1), covered.any(0)
        assert covered.sum() == rows.sum() * columns.sum()
        assert (result[:, ~covered] == 255).all()
        shares.append(covered.float().mean().item())
    hit = [share for share in shares if share]
    assert 110 < len(hit) < 190
    assert 0.01 < min(hit) < 0.06
    assert 0.28 < max(hit) < 0.36


def test_interpolations_of_the_crop():
    from torchvision.transforms import v2

    image = picture(100, 60)

    def crops(interpolation):
        transform = TrainTransform(
            image_size=32, augment="none", cutout=0, crop=0.08, interpolation=interpolation
        )
        return transform(image, SampleRandom(5))

    for name, how in (
        ("bilinear", Image.Resampling.BILINEAR),
        ("bicubic", Image.Resampling.BICUBIC),
    ):
        seed_everything(5)
        plain = v2.RandomResizedCrop((32, 32), scale=(0.08, 1), interpolation=how)(image)
        assert torch.equal(crops(name), to_tensor(plain))
    plain = TrainTransform(image_size=32, augment="none", cutout=0, interpolation="random")
    found = {plain(image, SampleRandom(seed)).numpy().tobytes() for seed in range(40)}
    assert found == {
        EvalTransform(image_size=32, interpolation=name)(image).numpy().tobytes()
        for name in ("bilinear", "bicubic")
    }


def test_flip_mirrors_half_of_the_images():
    image = picture(32, 32)
    transform = TrainTransform(image_size=32, augment="none", cutout=0, flip=True)
    plain = to_tensor(image)
    results = [transform(image, SampleRandom(seed)) for seed in range(300)]
    flipped = sum(torch.equal(result, plain.flip(2)) for result in results)
    assert flipped + sum(torch.equal(result, plain) for result in results) == 300
    assert 110 < flipped < 190


def test_crop_takes_areas_and_ratios_from_its_range():
    ramp = np.arange(256, dtype=np.uint8)
    image = Image.fromarray(np.stack([*np.meshgrid(ramp, ramp), np.zeros((256, 256), np.uint8)], 2))
    transform = TrainTransform(image_size=256, augment="none", cutout=0, crop=0.25)
    crops = torch.stack([transform(image, SampleRandom(seed)) for seed in range(60)]).float()
    width = crops[:, 0].amax((1, 2)) - crops[:, 0].amin((1, 2)) + 1
    height = crops[:, 1].amax((1, 2)) - crops[:, 1].amin((1, 2)) + 1
    area, ratio = width * height / 256**2, width / height
    assert area.min() > 0.22
    assert area.min() < 0.5 < 0.8 < area.max()
    assert ratio.min() > 0.72
    assert ratio.max() < 1.38
    assert ratio.std() > 0.05


def test_crop_one_is_a_plain_resize_whatever_the_ratio():
    image = picture(120, 30)  # 4 to 1: a crop would be cut to 4 to 3
    transform = TrainTransform(image_size=32, augment="none", cutout=0, crop=1.0)
    assert torch.equal(transform(image, SampleRandom(0)), EvalTransform(image_size=32)(image))


# Resized by torch


def both(image: Image.Image) -> tuple[Image.Image, torch.Tensor, torch.Tensor]:
    """Return an image in the forms that decoders return: with either order of memory."""
    channels = to_tensor(image)
    colours = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert colours.stride() != channels.stride()
    return image, channels, colours


@pytest.mark.parametrize("resize", ["pillow", "tensor"])
def test_the_form_of_an_image_changes_no_pixel(resize: str) -> None:
    evaluate = EvalTransform(image_size=48, crop=0.8, resize=resize)
    train = TrainTransform(image_size=48, resize=resize, crop=0.5)
    for transform in (evaluate, train):
        results = [transform(image, SampleRandom(3)) for image in both(picture(100, 60))]
        assert all(torch.equal(result, results[0]) for result in results)
        assert all(result.is_contiguous() for result in results)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(500, 333), (40, 30), (64, 64), (3, 200)])
def test_torch_resizes_like_pillow_within_two_levels(
    size: tuple[int, int], interpolation: str
) -> None:
    image = picture(*size)
    for crop in (None, 0.875):
        settings: dict[str, Any] = {"crop": crop, "interpolation": interpolation}
        pillows = EvalTransform(image_size=64, **settings)(image)
        torchs = EvalTransform(image_size=64, resize="tensor", **settings)(image)
        difference = (torchs.int() - pillows.int()).abs()
        assert difference.max() <= 2
        assert difference.float().mean() < 0.3


def test_torch_resizes_photos_like_pillow_within_a_level(sample_data: Path) -> None:
    for path in sorted((sample_data / "coco2014_mini" / "val2014").glob("*.jpg"))[:5]:
        image = read_image(path)
        torchs = EvalTransform(image_size=448, resize="tensor")(image).int()
        assert (torchs - EvalTransform(image_size=448)(image).int()).abs().max() == 1


def test_random_choices_do_not_depend_on_who_resizes() -> None:
    image = picture(100, 60)
    settings: dict[str, Any] = {"image_size": 48, "flip": True, "crop": 0.5, "augment": "none"}
    for seed in range(20):
        pillows, torchs = (
            TrainTransform(resize=resize, **settings)(image, SampleRandom(seed))
            for resize in ("pillow", "tensor")
        )
        assert (torchs.int() - pillows.int()).abs().max() <= 2


def test_torch_refuses_thin_images_too() -> None:
    thin = torch.zeros(3, 1_000_000, 1, dtype=torch.uint8)
    with pytest.raises(DataError, match="its 1 x 1,000,000 pixels need 448,000,000 pixels"):
        EvalTransform(image_size=448, resize="tensor")(thin)


def test_the_argument_is_not_changed():
    image = picture(32, 32)  # of the final size, so that the resize has nothing to do
    before = np.array(image)
    transform = TrainTransform(image_size=32)
    for seed in range(50):
        transform(image, SampleRandom(seed))
    assert np.array_equal(np.asarray(image), before)


def test_transforms_travel_to_spawned_workers():
    for transform in (
        TrainTransform(image_size=32, crop=0.5),
        TrainTransform(image_size=32, augment="rand-m7-mstd0.5-inc1", erase=0.5),
        EvalTransform(image_size=32),
    ):
        again = pickle.loads(pickle.dumps(transform))
        assert again(picture(), SampleRandom(0)).shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"image_size": 0}, "image_size: 0"),
        ({"image_size": 4097}, "image_size: 4097 is above 4,096 pixels a side"),
        ({"image_size": 44.8}, "image_size: 44.8"),
        ({"image_size": True}, "image_size: True"),
        ({"augment": "oficial"}, "augment: 'oficial'.*did you mean 'official'"),
        ({"augment": "x"}, "augment: 'x'.*none, official, randaugment"),
        ({"cutout": 1.5}, "cutout: 1.5.*0 .*to 1"),
        ({"cutout": -0.1}, "cutout: -0.1"),
        ({"cutout": float("nan")}, "cutout: nan"),
        ({"crop": 0.0}, "crop: 0.0.*above 0 to 1"),
        ({"crop": 1.01}, "crop: 1.01"),
        ({"erase": 1.5}, "erase: 1.5"),
        ({"interpolation": "lanczos"}, "interpolation: 'lanczos'.*bicubic, bilinear, random"),
        ({"decoder": "x"}, "decoder: 'x'.*pillow, torchcodec"),
        ({"resize": "x"}, "resize: 'x'.*pillow, tensor"),
        (
            {"augment": "rand-m7-mstd"},
            "augment: 'rand-m7-mstd' is no RandAugment of timm's; write for example",
        ),
        ({"augment": "rand-x7"}, "augment: 'rand-x7'"),
        ({"augment": "rand-"}, "augment: 'rand-'"),
    ],
)
def test_wrong_values_are_refused(arguments, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        TrainTransform(**{"image_size": 64, **arguments})
    assert "\n" not in str(caught.value)


def test_eval_transform_refuses_a_wrong_size():
    for size in (-3, MAX_IMAGE_SIZE + 1, 10**12):
        with pytest.raises(ConfigError, match=f"image_size: {size}"):
            EvalTransform(image_size=size)
    assert EvalTransform(image_size=MAX_IMAGE_SIZE).image_size == MAX_IMAGE_SIZE


# Thin images


THIN = [(1, 100_000), (100_000, 1), (1, 1_000_000), (3, 1_000_000)]


@pytest.mark.parametrize("size", THIN)
def test_a_thin_image_is_refused_before_it_fills_the_memory(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    path = saved(Image.new("RGB", size), tmp_path / "thin.png")
    with pytest.raises(DataError) as caught:
        load_image(path, EvalTransform(image_size=224, crop=0.875))
    message = str(caught.value)
    assert message.startswith(f"{path}: its {size[0]:,} x {size[1]:,} pixels need ")
    assert f"and the limit is {MAX_RESIZED:,}; restore the file or leave it out" in message
    cropped = partial(TrainTransform(image_size=32, crop=0.08), rng=SampleRandom(0))
    assert load_image(path, cropped).shape == (3, 32, 32)


@pytest.mark.parametrize("make", [EvalTransform, partial(TrainTransform, augment="none", cutout=0)])
def test_a_thin_image_is_refused_where_it_is_squashed(make: Callable[..., Any]) -> None:
    """Pillow changes the width first: 448 x a million pixels, from a file of a few kilobytes."""
    rng = SampleRandom(0)
    with pytest.raises(
        DataError,
        match=r"its 1 x 1,000,000 pixels need 448,000,000 pixels to be resized to 448 x 448",
    ):
        make(image_size=448)(Image.new("RGB", (1, 1_000_000)), rng)
    assert make(image_size=448)(Image.new("RGB", (1_000_000, 1)), rng).shape == (3, 448, 448)
    assert make(image_size=448)(Image.new("RGB", (40, 60_000)), rng).shape == (3, 448, 448)


def test_no_ordinary_image_is_refused() -> None:
    for width, height in [
        (640, 480),
        (12_000, 400),
        (400, 12_000),
        (13_000, 13_000),
        (1, 1),
        (2_000, 40_000),
    ]:
        image = ImageOfSize((width, height))
        for size in (224, 448, 1344):
            for crop in (None, 0.875, 0.95):
                with pytest.raises(Resizing):
                    EvalTransform(image_size=size, crop=crop)(image)  # type: ignore[arg-type]


class Resizing(Exception):
    """The image would be resized now."""


class ImageOfSize:
    """Something of the size of an image, without its pixels."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = self.width, self.height = size

    def resize(self, *_: object) -> None:
        raise Resizing


@pytest.mark.parametrize(("size", "crop"), [(4096, 0.3), (4096, 0.1), (1338, 0.1)])
def test_a_crop_that_no_image_could_be_resized_for(size: int, crop: float | None) -> None:
    with pytest.raises(ConfigError, match="resizes images to more than 13,377 pixels a side"):
        EvalTransform(image_size=size, crop=crop)


def test_squashing_is_that_of_torchvision() -> None:
    from torchvision.transforms import v2

    for size in ((640, 480), (16, 16), (3, 50)):
        image = picture(*size)
        transform = TrainTransform(image_size=16, augment="none", cutout=0)
        ours = transform(image, SampleRandom(0))
        assert torch.equal(ours, to_tensor(v2.Resize((16, 16))(image)))
