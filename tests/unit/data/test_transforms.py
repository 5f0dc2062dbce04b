"""Transforms from images to tensors, compared with Pillow, torchvision and timm."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from pictures import picture, saved, seed_everything
from PIL import Image
from torchvision.transforms import v2

from mldec.data.images import load_image
from mldec.data.labels import from_dense
from mldec.data.official_augment import augment_by_pair, cutout
from mldec.data.sampling import SampleRandom
from mldec.data.transforms import EvalTransform, TrainTransform, View, to_tensor
from mldec.data.types import ImageFiles, StoredImages
from mldec.errors import ConfigError, DataError

PLAIN = {"augment": "none", "cutout": 0}


def training(**settings):
    return TrainTransform(View(**settings))


def forms(image):
    """Return an image in the formats of the decoders."""
    channels_last = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    four_channels = torch.from_numpy(np.array(image.convert("RGBA"))).permute(2, 0, 1)
    return image, to_tensor(image), channels_last, four_channels


# Evaluation


@pytest.mark.parametrize("size", [(500, 333), (333, 500), (20, 30), (64, 64), (1, 1)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation_equals_pillow_bitwise(size, interpolation):
    image, how = picture(*size), Image.Resampling[interpolation.upper()]
    expected = to_tensor(image.resize((64, 64), how))
    assert torch.equal(EvalTransform(image_size=64, interpolation=interpolation)(image), expected)

    # So do training without augmentation and torchvision.
    train = training(image_size=64, interpolation=interpolation, **PLAIN)
    assert torch.equal(train(image, SampleRandom(0)), expected)
    assert torch.equal(to_tensor(v2.Resize((64, 64), how)(image)), expected)


# In floating point, 64 / 98 times 147 is below 96.
@pytest.mark.parametrize("size", [(500, 333), (100, 90), (64, 64), (20, 400), (147, 98)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop", [0.875, 0.95, 1.0])
def test_test_crop_equals_timm(size, interpolation, crop):
    from timm.data.transforms_factory import transforms_imagenet_eval

    how = {"interpolation": interpolation}
    timms = transforms_imagenet_eval(64, crop_pct=crop, use_prefetcher=True, **how)
    ours = EvalTransform(image_size=64, crop=crop, **how)
    assert np.array_equal(ours(picture(*size)).numpy(), timms(picture(*size)))


# Training


def test_order_is_resize_cutout_pair():
    image = picture(100, 60)
    for seed in range(20):
        ours = training(image_size=48)(image, SampleRandom(seed))
        rng = random.Random(seed)
        small = image.resize((48, 48), Image.Resampling.BILINEAR)
        assert torch.equal(ours, to_tensor(augment_by_pair(cutout(small, 0.5, rng), rng)))


def test_randaugment_equals_torchvision():
    image = picture(48, 48)
    transform = training(image_size=48, augment="randaugment", cutout=0)
    for seed in range(5):
        ours = transform(image, SampleRandom(seed))
        seed_everything(seed)
        theirs = v2.RandAugment(num_ops=2, magnitude=9, num_magnitude_bins=31)(image)
        assert torch.equal(ours, to_tensor(theirs))


@pytest.mark.parametrize(
    ("text", "interpolation"),
    [
        ("rand-m7-mstd0.5-inc1", "bicubic"),  # the published recipe of ImageNet
        ("rand-m9-n3-p0.4", "bilinear"),
        ("rand-m5-mstd101-mmax8-inc1", "random"),
    ],
)
def test_rand_augment_equals_timm(text, interpolation):
    from timm.data.transforms_factory import transforms_imagenet_train

    image = picture(48, 48)
    options = {"auto_augment": text, "interpolation": interpolation}
    _, timms, _ = transforms_imagenet_train(
        48, separate=True, hflip=0.0, use_prefetcher=True, **options
    )
    (timms,) = timms.transforms
    transform = training(image_size=48, augment=text, cutout=0, interpolation=interpolation)
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
def test_strongest_posterize_keeps_one_bit(text):
    transform = training(image_size=16, augment=text, cutout=0)
    shapes = {transform(picture(16, 16), SampleRandom(seed)).shape for seed in range(100)}
    assert shapes == {(3, 16, 16)}


def test_erasing_covers_rectangle_with_mean_color():
    image = Image.new("RGB", (64, 64), (255, 255, 255))
    transform = training(image_size=64, erase=0.5, **PLAIN)
    color = torch.tensor([124, 116, 104], dtype=torch.uint8)[:, None, None]
    shares = []
    for seed in range(300):
        result = transform(image, SampleRandom(seed))
        covered = (result == color).all(0)
        assert covered.sum() == covered.any(1).sum() * covered.any(0).sum()
        assert (result[:, ~covered] == 255).all()
        shares.append(covered.float().mean().item())
    erased = [share for share in shares if share]
    assert 110 < len(erased) < 190
    assert 0.01 < min(erased) < 0.06
    assert 0.28 < max(erased) < 0.36


def test_crop_equals_torchvision_and_interpolation_is_random():
    image = picture(100, 60)
    for name in ("bilinear", "bicubic"):
        ours = training(image_size=32, crop=0.08, interpolation=name, **PLAIN)
        how = Image.Resampling[name.upper()]
        seed_everything(5)
        theirs = v2.RandomResizedCrop((32, 32), scale=(0.08, 1), interpolation=how)(image)
        assert torch.equal(ours(image, SampleRandom(5)), to_tensor(theirs))

    plain = training(image_size=32, interpolation="random", **PLAIN)
    found = {plain(image, SampleRandom(seed)).numpy().tobytes() for seed in range(40)}
    assert found == {
        EvalTransform(image_size=32, interpolation=name)(image).numpy().tobytes()
        for name in ("bilinear", "bicubic")
    }


def test_flip_mirrors_half_of_images():
    image = picture(32, 32)
    transform = training(image_size=32, flip=True, **PLAIN)
    results = [transform(image, SampleRandom(seed)) for seed in range(300)]
    flipped = sum(torch.equal(result, to_tensor(image).flip(2)) for result in results)
    assert flipped + sum(torch.equal(result, to_tensor(image)) for result in results) == 300
    assert 110 < flipped < 190


# Formats of images and resizing with torch


@pytest.mark.parametrize("resize", ["pillow", "tensor"])
def test_format_of_image_changes_no_pixel(resize):
    evaluate = EvalTransform(image_size=48, crop=0.8, resize=resize)
    train = training(image_size=48, resize=resize, crop=0.5)
    for transform in (evaluate, train):
        results = [transform(image, SampleRandom(3)) for image in forms(picture(100, 60))]
        assert all(torch.equal(result, results[0]) for result in results)
        assert all(result.is_contiguous() for result in results)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(500, 333), (40, 30), (3, 200)])
def test_torch_resize_differs_from_pillow_by_two_levels(size, interpolation):
    evaluate = partial(EvalTransform, image_size=64, interpolation=interpolation)
    train = partial(training, image_size=64, flip=True, crop=0.5, augment="none")
    for make in (evaluate, partial(evaluate, crop=0.875), train):
        for seed in range(5):
            pillows = make(resize="pillow")(picture(*size), SampleRandom(seed)).int()
            torchs = make(resize="tensor")(picture(*size), SampleRandom(seed)).int()
            assert (torchs - pillows).abs().max() <= 2


# Faults


@pytest.mark.parametrize(
    ("make", "arguments", "name"),
    [
        (training, {"image_size": 4097}, "image_size: 4097"),
        (training, {"augment": "oficial"}, "augment: .*'official'"),
        (training, {"augment": "rand-m7-mstd"}, "augment: 'rand-m7-mstd'"),
        (training, {"cutout": 1.5}, "cutout: 1.5"),
        (training, {"interpolation": "lanczos"}, "interpolation: 'lanczos'"),
        (training, {"decoder": "x"}, "decoder: 'x'"),
        (EvalTransform, {"crop": 0.0}, "test crop: 0.0"),
        (EvalTransform, {"draft": 0}, "draft: 0"),
    ],
)
def test_setting_out_of_range_is_named(make, arguments, name):
    with pytest.raises(ConfigError, match=name):
        make(**{"image_size": 64, **arguments})


@pytest.mark.parametrize(
    ("draft", "decoded"), [(None, (1800, 1200)), (1, (450, 300)), (2, (900, 600))]
)
def test_draft_of_transform_is_the_smallest_size_above_the_input(tmp_path, draft, decoded):
    path = saved(picture(900, 600).resize((1800, 1200)), tmp_path / "x.jpg", quality=95)
    transform = EvalTransform(image_size=224, crop=0.875, draft=draft)
    files = ImageFiles(tmp_path, np.array([b"x.jpg"]))
    images = StoredImages(files, from_dense(np.ones((1, 1), np.int8)), ("a",), transform)

    with Image.open(path) as image:
        image.draft(None, decoded)
        assert image.size == decoded
        expected = transform(image.convert("RGB"))
    assert torch.equal(images.load(0, SampleRandom(0))[0], expected)


def test_thin_image_raises_before_it_fills_memory(tmp_path):
    path = saved(Image.new("RGB", (1, 100_000)), tmp_path / "thin.png")
    with pytest.raises(DataError, match=f"^{path}: .*1 x 100,000"):
        load_image(path, EvalTransform(image_size=224, crop=0.875))
    cropped = partial(training(image_size=32, crop=0.08), rng=SampleRandom(0))
    assert load_image(path, cropped).shape == (3, 32, 32)

    # The width is resized first: 448 x 1,000,000 pixels, from a file of a few kilobytes.
    for resize in ("pillow", "tensor"):
        transform = EvalTransform(image_size=448, resize=resize)
        with pytest.raises(DataError, match="448,000,000"):
            transform(Image.new("RGB", (1, 1_000_000)))
