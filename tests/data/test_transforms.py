import dataclasses
import os
import pickle
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from mldec.config.schema import MAX_IMAGE_SIZE
from mldec.data.official_augment import GREY, OPERATIONS, PATCH, PairAugment, cutout
from mldec.data.transforms import (
    MAX_RESIZED,
    EvalTransform,
    TrainTransform,
    load_image,
    read_image,
    to_tensor,
)
from mldec.errors import ConfigError, DataError


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def picture(width=40, height=30, seed=0):
    """A smooth picture with texture, not of full range, so that every operation changes it."""
    coarse = Image.fromarray(pixels(5, 6, 3, seed=seed)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noise = np.random.default_rng(seed + 1).integers(-20, 21, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(coarse) + noise, 20, 230).astype(np.uint8))


def saved(image, path, **options):
    image.save(path, **options)
    return path


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed)


# Reading


def test_rgb_is_unchanged(tmp_path):
    values = pixels(7, 9, 3)
    image = read_image(saved(Image.fromarray(values), tmp_path / "a.png"))
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), values)


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif", "jpg"])
def test_grey_becomes_three_equal_channels(tmp_path, suffix):
    values = np.full((8, 8), 77, np.uint8)
    read = np.asarray(read_image(saved(Image.fromarray(values), tmp_path / f"a.{suffix}")))
    assert np.array_equal(read, np.repeat(values[..., None], 3, axis=2))


def test_grey_with_alpha_drops_the_alpha(tmp_path):
    values = pixels(6, 5, 2)
    read = np.asarray(read_image(saved(Image.fromarray(values, "LA"), tmp_path / "a.png")))
    assert np.array_equal(read, np.repeat(values[..., :1], 3, axis=2))


def test_rgba_drops_the_alpha(tmp_path):
    values = pixels(6, 5, 4)
    assert np.array_equal(
        np.asarray(read_image(saved(Image.fromarray(values), tmp_path / "a.png"))), values[..., :3]
    )


@pytest.mark.parametrize("transparency", [None, 1, bytes([0, 128, 255])])
def test_palette_gives_its_colours_without_a_warning(tmp_path, transparency):
    colours = np.array([[10, 20, 30], [200, 100, 0], [5, 250, 90]], np.uint8)
    indices = pixels(6, 5) % 3
    image = Image.fromarray(indices, "P")
    image.putpalette(colours.tobytes())
    options = {} if transparency is None else {"transparency": transparency}
    path = saved(image, tmp_path / "a.png", **options)
    with Image.open(path) as stored:
        assert stored.mode == "P"
        assert ("transparency" in stored.info) == (transparency is not None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = np.asarray(read_image(path))
    assert np.array_equal(read, colours[indices])


def test_cmyk(tmp_path):
    image = Image.new(
        "CMYK", (4, 4), (255, 0, 102, 51)
    )  # cyan in full, no magenta, 40 % yellow, 20 % black
    read = np.asarray(read_image(saved(image, tmp_path / "a.tif")))
    red, green, blue = (round(255 * (1 - ink) * 0.8) for ink in (1, 0, 0.4))
    assert np.abs(read.astype(int) - [red, green, blue]).max() <= 1


def test_cmyk_jpeg_is_not_inverted(tmp_path):
    read = np.asarray(
        read_image(saved(Image.new("CMYK", (16, 16), (0, 0, 0, 0)), tmp_path / "a.jpg"))
    )
    assert read.min() >= 253  # no ink is white


def test_one_bit(tmp_path):
    values = pixels(6, 5) > 127
    read = np.asarray(read_image(saved(Image.fromarray(values), tmp_path / "a.png")))
    assert np.array_equal(read, np.repeat(values[..., None], 3, axis=2) * np.uint8(255))


@pytest.mark.parametrize("kind", ["png", "tif", "32 bits", "big endian"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path, kind):
    gradient = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    path = tmp_path / ("a.png" if kind == "png" else "a.tif")
    if kind == "32 bits":
        Image.fromarray(gradient.astype(np.int32)).save(path)
    elif kind == "big endian":
        Image.frombytes("I;16B", (32, 32), gradient.astype(">u2").tobytes()).save(path)
    else:
        Image.fromarray(gradient).save(path)
    with Image.open(path) as stored:
        assert stored.mode == {"32 bits": "I", "big endian": "I;16B"}.get(kind, "I;16")
    read = np.asarray(read_image(path))
    assert np.abs(read[..., 1].astype(float) - gradient / 257).max() <= 1
    assert len(np.unique(read)) == 256


def test_more_than_sixteen_bits_have_no_known_range(tmp_path):
    path = saved(Image.fromarray(np.array([[0, 70000]], np.int32)), tmp_path / "a.tif")
    with pytest.raises(DataError, match=r"a\.tif.*70000"):
        read_image(path)
    path = saved(Image.fromarray(np.array([[0.5, 0.7]], np.float32)), tmp_path / "f.tif")
    with pytest.raises(DataError, match=r"f\.tif.*floating-point"):
        read_image(path)


UPRIGHT = np.arange(1, 7, dtype=np.uint8).reshape(2, 3) * 40  # three wide, two high
# How a camera that writes this orientation stores the upright picture (TIFF 6.0: where row 0 and
# column 0 are).
STORED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.T,  # row 0 is the left side, column 0 the top
    6: np.rot90(UPRIGHT),  # row 0 is the right side, column 0 the top
    7: UPRIGHT[::-1, ::-1].T,  # row 0 is the right side, column 0 the bottom
    8: np.rot90(UPRIGHT, -1),  # row 0 is the left side, column 0 the bottom
}


@pytest.mark.parametrize("orientation", sorted(STORED))
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_exif_orientation(tmp_path, orientation, suffix):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(STORED[orientation]))
    read = np.asarray(read_image(saved(image, tmp_path / f"a.{suffix}", exif=exif)))
    assert np.array_equal(read[..., 0], UPRIGHT)


def test_exif_orientation_of_a_jpeg(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = saved(Image.new("RGB", (30, 20)), tmp_path / "a.jpg", exif=exif)
    assert read_image(path).size == (20, 30)


@pytest.mark.parametrize("value", [0, 9, 77])
def test_a_meaningless_orientation_is_ignored(tmp_path, value):
    exif = Image.Exif()
    exif[0x0112] = value
    assert read_image(saved(Image.new("RGB", (30, 20)), tmp_path / "a.jpg", exif=exif)).size == (
        30,
        20,
    )


def test_a_damaged_exif_block_does_not_cost_the_picture(tmp_path):
    path = saved(picture(), tmp_path / "a.jpg", exif=b"Exif\0\0" + b"nonsense" * 4)
    assert read_image(path).size == (40, 30)


def test_every_sample_image_can_be_read(sample_data):
    paths = sorted((sample_data / "coco2014_mini").rglob("*.jpg"))
    assert len(paths) == 100
    assert {read_image(path).mode for path in paths[::10]} == {"RGB"}


def one_line_about(path):
    with pytest.raises(DataError) as caught:
        read_image(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    assert message.endswith("restore the file or leave it out")
    return message


def test_missing_file(tmp_path):
    assert "no such file" in one_line_about(tmp_path / "a.jpg")
    assert "no such file" in one_line_about(saved(picture(), tmp_path / "b.png") / "a.jpg")


def test_folder(tmp_path):
    assert "a folder" in one_line_about(tmp_path)


def test_empty_file(tmp_path):
    path = tmp_path / "a.jpg"
    path.touch()
    assert "0 bytes" in one_line_about(path)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("kept", [0.5, 0.95])
def test_truncated_file(tmp_path, suffix, kept):
    path = saved(Image.fromarray(pixels(64, 64, 3)), tmp_path / f"a.{suffix}")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    one_line_about(path)


def test_truncated_jpeg_says_so(tmp_path):
    path = saved(Image.fromarray(pixels(64, 64, 3)), tmp_path / "a.jpg")
    path.write_bytes(path.read_bytes()[:-1000])
    assert "truncated" in one_line_about(path)


def test_text_in_place_of_an_image(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_text("404: Not Found\nsorry\n")
    assert "not an image" in one_line_about(path)


def test_decompression_bomb(tmp_path, monkeypatch):
    path = saved(picture(), tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    assert "too large" in one_line_about(path)


def test_unreadable_file(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.jpg").touch()
    monkeypatch.setattr(os, "open", refuse)
    assert "no permission" in one_line_about(tmp_path / "a.jpg")


def test_running_out_of_memory_is_not_the_files_fault(tmp_path, monkeypatch):
    def exhaust(path, **_):
        raise MemoryError

    monkeypatch.setattr(Image, "open", exhaust)
    with pytest.raises(MemoryError):
        read_image(saved(picture(), tmp_path / "a.jpg"))


def test_damaged_bytes_give_an_image_or_one_line(tmp_path):
    random.seed(0)
    path = saved(picture(), tmp_path / "a.png")
    whole = path.read_bytes()
    outcomes = set()
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[random.randrange(100)] = random.randrange(256)
        path.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large sizes
            try:
                outcomes.add(read_image(path).mode)
            except DataError as error:
                outcomes.add("\n" in str(error))
    assert outcomes <= {"RGB", False}
    assert False in outcomes


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
    }
    assert EvalTransform(**dataclasses.asdict(transform)) == transform
    assert (
        EvalTransform(**{"image_size": 96}) == transform
    )  # of a checkpoint from before there was more


@pytest.mark.parametrize(
    ("width", "height"), [(500, 333), (333, 500), (100, 90), (64, 64), (20, 400)]
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
    ],
)
def test_eval_transform_refuses_wrong_values(arguments, expected):
    with pytest.raises(ConfigError, match=expected):
        EvalTransform(image_size=64, **arguments)


# The training transform


def test_without_augmentation_train_equals_eval():
    image = picture(100, 60)
    train = TrainTransform(image_size=48, augment="none", cutout=0)
    assert torch.equal(train(image), EvalTransform(image_size=48)(image))


@pytest.mark.parametrize("augment", ["official", "randaugment"])
def test_random_choices_follow_the_global_seeds(augment):
    image = picture(100, 60)
    transform = TrainTransform(image_size=48, augment=augment, flip=True, crop=0.3)

    def draw(seed):
        seed_everything(seed)
        return [transform(image) for _ in range(6)]

    first, again, other = draw(3), draw(3), draw(4)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert all(image.shape == (3, 48, 48) and image.dtype == torch.uint8 for image in first)


def test_randaugment_is_torchvisions():
    from torchvision.transforms import v2

    image = picture(48, 48)
    seed_everything(1)
    ours = TrainTransform(image_size=48, augment="randaugment", cutout=0)(image)
    seed_everything(1)
    assert torch.equal(
        ours, to_tensor(v2.RandAugment(num_ops=2, magnitude=9, num_magnitude_bins=31)(image))
    )


def test_the_order_is_resize_cutout_pair():
    image = picture(100, 60)
    for seed in range(20):
        seed_everything(seed)
        ours = TrainTransform(image_size=48)(image)
        seed_everything(seed)
        step = PairAugment()(cutout(image.resize((48, 48), Image.Resampling.BILINEAR), 0.5))
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
        seed_everything(seed)
        ours = transform(image)
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
    seed_everything(0)
    assert {transform(picture(16, 16)).shape for _ in range(100)} == {(3, 16, 16)}


def test_erasing_covers_a_rectangle_with_the_mean_colour():
    image = Image.new("RGB", (64, 64), (255, 255, 255))
    transform = TrainTransform(image_size=64, augment="none", cutout=0, erase=0.5)
    seed_everything(0)
    shares = []
    for result in (transform(image) for _ in range(300)):
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
        seed_everything(5)
        return transform(image)

    for name, how in (
        ("bilinear", Image.Resampling.BILINEAR),
        ("bicubic", Image.Resampling.BICUBIC),
    ):
        seed_everything(5)
        plain = v2.RandomResizedCrop((32, 32), scale=(0.08, 1), interpolation=how)(image)
        assert torch.equal(crops(name), to_tensor(plain))
    plain = TrainTransform(image_size=32, augment="none", cutout=0, interpolation="random")
    seed_everything(0)
    found = {plain(image).numpy().tobytes() for _ in range(40)}
    assert found == {
        EvalTransform(image_size=32, interpolation=name)(image).numpy().tobytes()
        for name in ("bilinear", "bicubic")
    }


def test_flip_mirrors_half_of_the_images():
    seed_everything(0)
    image = picture(32, 32)
    transform = TrainTransform(image_size=32, augment="none", cutout=0, flip=True)
    plain = to_tensor(image)
    results = [transform(image) for _ in range(300)]
    flipped = sum(torch.equal(result, plain.flip(2)) for result in results)
    assert flipped + sum(torch.equal(result, plain) for result in results) == 300
    assert 110 < flipped < 190


def test_crop_takes_areas_and_ratios_from_its_range():
    seed_everything(0)
    ramp = np.arange(256, dtype=np.uint8)
    image = Image.fromarray(np.stack([*np.meshgrid(ramp, ramp), np.zeros((256, 256), np.uint8)], 2))
    transform = TrainTransform(image_size=256, augment="none", cutout=0, crop=0.25)
    crops = torch.stack([transform(image) for _ in range(60)]).float()
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
    assert torch.equal(transform(image), EvalTransform(image_size=32)(image))


def test_the_argument_is_not_changed():
    seed_everything(0)
    image = picture(32, 32)  # of the final size, so that the resize has nothing to do
    before = np.array(image)
    transform = TrainTransform(image_size=32)
    for _ in range(50):
        transform(image)
    assert np.array_equal(np.asarray(image), before)


def test_transforms_travel_to_spawned_workers():
    for transform in (
        TrainTransform(image_size=32, crop=0.5),
        TrainTransform(image_size=32, augment="rand-m7-mstd0.5-inc1", erase=0.5),
        EvalTransform(image_size=32),
    ):
        assert pickle.loads(pickle.dumps(transform))(picture()).shape == (3, 32, 32)


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


# The cutout


def test_cutout_covers_one_square_of_one_colour():
    random.seed(0)
    black = Image.new("RGB", (60, 60))
    areas, colours = [], []
    for _ in range(300):
        covered = np.asarray(cutout(black, 0.5)).reshape(60, 60, 3)
        rows, columns = covered.any(2).any(1).nonzero()[0], covered.any(2).any(0).nonzero()[0]
        inside = covered[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].reshape(-1, 3)
        assert (inside == inside[0]).all()
        areas.append(len(inside))
        colours.append(inside[0])
    # Half of the centres lie within 15 of a border and lose 7.5 on average, which leaves 27.25 of
    # each side of 31.
    assert max(areas) == 31 * 31
    assert min(areas) >= 16 * 16
    assert np.mean(areas) == pytest.approx(27.25**2, rel=0.05)
    assert np.mean(colours, axis=0) == pytest.approx([127.5] * 3, abs=15)
    assert len({tuple(colour) for colour in colours}) > 290


def test_cutout_rounds_its_side_and_takes_each_side_by_itself():
    random.seed(0)
    sizes = set()
    for _ in range(300):
        covered = np.asarray(cutout(Image.new("RGB", (31, 11)), 0.5)).any(2)
        sizes.add((int(covered.any(0).sum()), int(covered.any(1).sum())))
    assert max(width for width, _ in sizes) == 17  # int(15.5 + 0.5), and one more
    assert max(height for _, height in sizes) == 7


def official_cutout(image, fraction):
    """CutoutPIL of the official helper_functions.py, which gives both corners to Pillow."""
    side = image.width
    patch = int(fraction * side + 0.5)
    x_c, y_c = random.randrange(side), random.randrange(side)
    x1, x2 = np.clip([x_c - patch // 2, x_c + patch // 2], 0, side)
    y1, y2 = np.clip([y_c - patch // 2, y_c + patch // 2], 0, side)
    colour = tuple(random.randint(0, 255) for _ in range(3))
    covered = image.copy()
    ImageDraw.Draw(covered).rectangle([x1, y1, x2, y2], fill=colour)
    return covered


@pytest.mark.parametrize(("side", "widest"), [(448, 225), (224, 113), (31, 17), (33, 17), (5, 3)])
def test_cutout_equals_the_official_one_to_the_bit(side, widest):
    image = picture(side, side)
    ours, officials = [], []
    for function, results in ((cutout, ours), (official_cutout, officials)):
        random.seed(0)
        results += [np.asarray(function(image, 0.5)) for _ in range(60)]
    assert np.array_equal(ours, officials)
    black = [np.asarray(cutout(Image.new("RGB", (side, side)), 0.5)).any(2) for _ in range(60)]
    assert max(int(covered.any(0).sum()) for covered in black) == widest


# The pairs of operations


def test_fifteen_operations_with_the_ranges_of_the_description():
    assert len(OPERATIONS) == 15
    levels = {name: row for name, (_, row) in OPERATIONS.items()}
    assert all(len(row) == 10 for row in levels.values())
    for name in ("shear_x", "shear_y"):
        assert levels[name] == pytest.approx(np.linspace(0, 0.3, 10))
    for name in ("translate_x", "translate_y"):
        assert levels[name] == pytest.approx(np.linspace(0, 150 / 331, 10))
    for name in ("color", "contrast", "brightness", "sharpness"):
        assert levels[name] == pytest.approx(np.linspace(0, 0.9, 10))
    assert levels["rotate"] == pytest.approx(np.linspace(0, 30, 10))
    assert levels["solarize"] == pytest.approx(np.linspace(256, 0, 10))
    assert levels["posterize"] == (8, 8, 7, 7, 6, 6, 5, 5, 4, 4)
    assert levels["cutout"] == (0, 2, 4, 7, 9, 11, 13, 16, 18, 20)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_operation_at_every_magnitude(name):
    random.seed(0)
    operation, levels = OPERATIONS[name]
    image = picture(45, 33)
    before = np.array(image)
    for level in levels:
        result = operation(image, level)
        assert (result.mode, result.size) == ("RGB", (45, 33))
    assert np.array_equal(np.asarray(image), before)
    assert not np.array_equal(np.asarray(operation(image, levels[-1])), before)


def test_draws_are_uniform_over_operations_and_levels_one_to_nine():
    random.seed(0)
    draws = [PairAugment.draw() for _ in range(27_000)]
    counts = {draw: draws.count(draw) for draw in set(draws)}
    assert {name for name, _ in counts} == set(OPERATIONS)
    assert {row for _, row in counts} == set(range(1, 10))
    assert len(counts) == 135
    assert min(counts.values()) > 130  # 200 expected, standard deviation 14
    assert max(counts.values()) < 270


def test_each_of_two_operations_is_applied_half_the_time(monkeypatch):
    applied = []
    monkeypatch.setattr(
        "mldec.data.official_augment.OPERATIONS",
        {
            name: (lambda image, level: applied.append(level) or image, levels)
            for name, (_, levels) in OPERATIONS.items()
        },
    )
    random.seed(0)
    image = Image.new("RGB", (4, 4))
    counts = [0, 0, 0]
    for _ in range(4000):
        applied.clear()
        PairAugment()(image)
        counts[len(applied)] += 1
    assert np.array(counts) / 4000 == pytest.approx([0.25, 0.5, 0.25], abs=0.03)


def test_a_quarter_of_the_images_or_a_few_more_stay_as_they_are():
    random.seed(0)
    image = picture(24, 24)
    before = np.asarray(image)
    same = np.mean([np.array_equal(np.asarray(PairAugment()(image)), before) for _ in range(1500)])
    assert (
        0.23 < same < 0.33
    )  # some operations change nothing: posterize to 8 bits, autocontrast of a full range


def edge(width=100, height=100):
    """White left half, black right half."""
    values = np.zeros((height, width, 3), np.uint8)
    values[:, : width // 2] = 255
    return Image.fromarray(values)


def results_of(name, image, row=9, draws=40):
    random.seed(0)
    operation, levels = OPERATIONS[name]
    return [np.asarray(operation(image, levels[row])).astype(int) for _ in range(draws)]


def test_translation_goes_both_ways_by_its_fraction_and_uncovers_grey():
    results = results_of("translate_x", edge(height=60))
    # 150 / 331 of 100 pixels is 45.3: a move to the left loses as much of the white, a move to the
    # right none.
    assert {int((result[30] == 255).all(1).sum()) for result in results} == {5, 50}
    assert {int((result[30] == GREY).all(1).sum()) for result in results} == {45}
    turned = results_of("translate_y", edge(height=60).transpose(Image.Transpose.ROTATE_90))
    assert {int((result[:, 30] == 255).all(1).sum()) for result in turned} == {5, 50}
    assert {int((result[:, 30] == GREY).all(1).sum()) for result in turned} == {45}


def test_shear_has_both_signs():
    image = edge().convert("RGB")
    corners = {
        tuple(result[99, 2]) + tuple(result[99, 97]) for result in results_of("shear_x", image)
    }
    assert corners == {(255, 255, 255, *GREY), (*GREY, 0, 0, 0)}


def test_rotation_turns_anticlockwise_only():
    for result in results_of("rotate", edge(), row=3, draws=10):  # 10 degrees
        assert (result[2, 46] == 0).all()  # the top of the edge leans to the left
        assert (result[97, 53] == 255).all()
        assert (result[0, 0] == GREY).all()


@pytest.mark.parametrize("name", ["color", "contrast", "brightness", "sharpness"])
def test_enhancements_have_both_signs(name):
    assert len({result.tobytes() for result in results_of(name, picture())}) == 2


def test_brightness_is_one_plus_or_minus_the_magnitude():
    means = {
        round(result.mean())
        for result in results_of("brightness", Image.new("RGB", (8, 8), (100,) * 3))
    }
    assert means == {10, 190}


def test_posterize_and_solarize():
    (kept,) = {
        result.tobytes()
        for result in results_of("posterize", Image.new("RGB", (1, 1), (255, 129, 17)), draws=2)
    }
    assert np.frombuffer(kept, int).tolist() == [240, 128, 16]
    image = Image.new("RGB", (1, 1), (200, 228, 10))
    assert results_of("solarize", image, row=1, draws=1)[0].ravel().tolist() == [
        200,
        27,
        10,
    ]  # threshold 227.6
    assert results_of("solarize", image, row=9, draws=1)[0].ravel().tolist() == [55, 27, 245]


def test_small_cutout_is_in_pixels():
    areas = [
        (result == PATCH).all(2).sum()
        for result in results_of("cutout", Image.new("RGB", (100, 100)), draws=200)
    ]
    assert max(areas) == 20 * 20
    assert min(areas) >= 10 * 10
    # As in the package: 7 pixels are three on each side of the centre.
    odd = results_of("cutout", Image.new("RGB", (100, 100)), row=3, draws=50)
    assert max((result == PATCH).all(2).sum() for result in odd) == 6 * 6


def test_invert_equalize_autocontrast():
    image = Image.fromarray(
        np.tile(np.arange(64, 128, dtype=np.uint8)[:, None], (64, 1, 3)).reshape(64, 64, 3)
    )
    assert np.array_equal(
        results_of("invert", image, draws=1)[0], 255 - np.asarray(image).astype(int)
    )
    for name in ("equalize", "autocontrast"):
        result = results_of(name, image, draws=1)[0]
        assert (result.min(), result.max()) == (0, 255)


def test_no_state_outside_the_global_generators():
    transform = TrainTransform(image_size=16)
    seed_everything(0)
    state = random.getstate()
    transform(picture())
    assert random.getstate() != state
    numpy_state = np.random.get_state()[1].copy()
    transform(picture())
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_paths_may_be_strings(tmp_path):
    path = saved(picture(), tmp_path / "a.png")
    assert np.array_equal(np.asarray(read_image(str(path))), np.asarray(read_image(Path(path))))


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
    assert load_image(path, TrainTransform(image_size=32, crop=0.08)).shape == (3, 32, 32)


@pytest.mark.parametrize("make", [EvalTransform, partial(TrainTransform, augment="none", cutout=0)])
def test_a_thin_image_is_refused_where_it_is_squashed(make: Callable[..., Any]) -> None:
    """Pillow changes the width first: 448 x a million pixels, from a file of a few kilobytes."""
    with pytest.raises(
        DataError,
        match=r"its 1 x 1,000,000 pixels need 448,000,000 pixels to be resized to 448 x 448",
    ):
        make(image_size=448)(Image.new("RGB", (1, 1_000_000)))
    assert make(image_size=448)(Image.new("RGB", (1_000_000, 1))).shape == (3, 448, 448)
    assert make(image_size=448)(Image.new("RGB", (40, 60_000))).shape == (3, 448, 448)


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
        ours = TrainTransform(image_size=16, augment="none", cutout=0)(image)
        assert torch.equal(ours, to_tensor(v2.Resize((16, 16))(image)))
