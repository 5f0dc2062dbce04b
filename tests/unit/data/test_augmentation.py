"""The official augmentation, compared with Pillow and the official code, and its random numbers."""

import platform
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from pictures import picture
from PIL import Image, ImageDraw, ImageEnhance

from mldec.data.official_augment import (
    GRAY,
    OPERATIONS,
    PATCH,
    augment_by_pair,
    cutout,
)
from mldec.data.sampling import SampleRandom, sample_seed, seeded
from mldec.data.transforms import TrainTransform, View


def official_cutout(image, fraction, rng):
    """CutoutPIL of the official helper_functions.py."""
    side = image.width
    patch = int(fraction * side + 0.5)
    x_c, y_c = rng.randrange(side), rng.randrange(side)
    x1, x2 = np.clip([x_c - patch // 2, x_c + patch // 2], 0, side)
    y1, y2 = np.clip([y_c - patch // 2, y_c + patch // 2], 0, side)
    color = tuple(rng.randint(0, 255) for _ in range(3))
    covered = image.copy()
    ImageDraw.Draw(covered).rectangle([x1, y1, x2, y2], fill=color)
    return covered


@pytest.mark.parametrize(("side", "widest"), [(448, 225), (31, 17), (33, 17), (5, 3)])
def test_cutout_equals_official_code_bitwise(side, widest):
    image = picture(side, side)
    ours, officials = [], []
    for function, results in ((cutout, ours), (official_cutout, officials)):
        rng = random.Random(0)
        results += [np.asarray(function(image.copy(), 0.5, rng)) for _ in range(60)]
    assert np.array_equal(ours, officials)
    black = [np.asarray(cutout(Image.new("RGB", (side, side)), 0.5, rng)).any(2) for _ in range(60)]
    assert max(int(covered.any(0).sum()) for covered in black) == widest


def test_operations_have_published_ranges():
    levels = {name: row for name, (_, row) in OPERATIONS.items()}
    ranges = {
        "shear_x": 0.3,
        "shear_y": 0.3,
        "translate_x": 150 / 331,
        "translate_y": 150 / 331,
        **dict.fromkeys(("color", "contrast", "brightness", "sharpness"), 0.9),
        "rotate": 30,
    }
    for name, largest in ranges.items():
        assert levels[name] == pytest.approx(np.linspace(0, largest, 10))
    assert levels["solarize"] == pytest.approx(np.linspace(256, 0, 10))
    assert levels["posterize"] == (8, 8, 7, 7, 6, 6, 5, 5, 4, 4)
    assert levels["cutout"] == (0, 2, 4, 7, 9, 11, 13, 16, 18, 20)
    others = {"solarize", "posterize", "cutout", "autocontrast", "equalize", "invert"}
    assert set(levels) - set(ranges) == others


def test_operations_are_drawn_before_probabilities():
    image, applied = picture(), 0
    for seed in range(200):
        rng = random.Random(seed)
        expected = image
        pairs = [(rng.choice(list(OPERATIONS)), rng.randrange(1, 10)) for _ in range(2)]
        for name, row in pairs:
            if rng.random() < 0.5:
                operation, levels = OPERATIONS[name]
                expected = operation(expected, levels[row], rng)
                applied += 1
        ours = augment_by_pair(image, random.Random(seed))
        assert np.array_equal(np.asarray(ours), np.asarray(expected))
    assert 160 < applied < 240


def results_of(name, image, row=9, draws=40, seed=0):
    rng = random.Random(seed)
    operation, levels = OPERATIONS[name]
    return [np.asarray(operation(image, levels[row], rng)).astype(int) for _ in range(draws)]


def edge(width=100, height=100):
    """Return an image with a white left and a black right half."""
    values = np.zeros((height, width, 3), np.uint8)
    values[:, : width // 2] = 255
    return Image.fromarray(values)


def test_translation_has_both_signs_and_uncovers_gray():
    results = results_of("translate_x", edge(height=60))
    # 150 / 331 of 100 pixels is 45.3. A move to the right loses no white pixel.
    assert {int((result[30] == 255).all(1).sum()) for result in results} == {5, 50}
    assert {int((result[30] == GRAY).all(1).sum()) for result in results} == {45}
    rotated = results_of("translate_y", edge(height=60).transpose(Image.Transpose.ROTATE_90))
    assert {int((result[:, 30] == 255).all(1).sum()) for result in rotated} == {5, 50}


def test_shear_has_both_signs_and_rotation_is_counterclockwise():
    sheared = results_of("shear_x", edge())
    corners = {tuple(result[99, 2]) + tuple(result[99, 97]) for result in sheared}
    assert corners == {(255, 255, 255, *GRAY), (*GRAY, 0, 0, 0)}
    upright = edge().transpose(Image.Transpose.TRANSPOSE)
    transposed = [result.transpose(1, 0, 2) for result in results_of("shear_y", upright)]
    assert np.array_equal(transposed, sheared)

    for result in results_of("rotate", edge(), row=3, draws=10):  # 10 degrees
        assert (result[2, 46] == 0).all()
        assert (result[97, 53] == 255).all()
        assert (result[0, 0] == GRAY).all()


@pytest.mark.parametrize("size", [(300, 100), (70, 33), (2, 40), (1, 1)])
def test_shear_equals_pillow(size):
    # Compilers fuse multiplications and additions of Pillow on other processors.
    tolerance = 0 if platform.machine() in ("x86_64", "AMD64") else 1
    image, affine, bicubic = picture(*size), Image.Transform.AFFINE, Image.Resampling.BICUBIC
    for name in ("shear_x", "shear_y"):
        for row in range(1, 10):
            rng = random.Random(row)
            slope = OPERATIONS[name][1][row] * rng.choice((-1, 1))
            matrix = (1, slope, 0, 0, 1, 0) if name == "shear_x" else (1, 0, 0, slope, 1, 0)
            expected = np.asarray(image.transform(size, affine, matrix, bicubic, fillcolor=GRAY))
            (ours,) = results_of(name, image, row, draws=1, seed=row)
            assert np.abs(ours - expected).max() <= tolerance


def test_posterize_solarize_and_the_small_cutout():
    (kept,) = results_of("posterize", Image.new("RGB", (1, 1), (255, 129, 17)), draws=1)
    assert kept.ravel().tolist() == [240, 128, 16]
    image = Image.new("RGB", (1, 1), (200, 228, 10))
    for row, expected in ((1, [200, 27, 10]), (9, [55, 27, 245])):  # the first threshold is 227.6
        assert results_of("solarize", image, row, draws=1)[0].ravel().tolist() == expected

    # In pixels. As in the official package, 7 means three on each side of the center.
    for row, side in ((9, 20), (3, 6)):
        results = results_of("cutout", Image.new("RGB", (100, 100)), row, draws=200)
        areas = [(result == PATCH).all(2).sum() for result in results]
        assert side**2 / 4 <= min(areas) < max(areas) == side**2


@pytest.mark.parametrize("name", ["color", "contrast", "brightness", "sharpness"])
@pytest.mark.parametrize("row", [1, 9])
def test_enhancement_equals_pillow_with_one_plus_or_minus_magnitude(name, row):
    image, enhance = picture(), getattr(ImageEnhance, name.capitalize())
    factors = (1 + row / 10, 1 - row / 10)
    expected = {np.asarray(enhance(image).enhance(f)).astype(int).tobytes() for f in factors}
    assert {result.tobytes() for result in results_of(name, image, row)} == expected


# Random numbers of samples


def draws():
    return torch.rand(()).item(), random.random(), np.random.rand()


def test_seeds_are_unique_and_seed_the_python_generator():
    numbers = [(s, epoch, i) for s in range(10) for epoch in range(10) for i in range(100)]
    seeds = {sample_seed(*three) for three in numbers}
    assert len(seeds) == 10_000
    assert 0 <= min(seeds) < 2**62 < max(seeds) < 2**63
    assert sample_seed(3, 1) == sample_seed(3, 1, 0)

    rng = SampleRandom(2**62 + 5)
    with seeded(rng.initial_seed):
        expected = [random.random(), random.randrange(1000), random.getrandbits(64)]
    assert [rng.random(), rng.randrange(1000), rng.getrandbits(64)] == expected


def test_global_generators_are_seeded_and_restored():
    with seeded(3):
        before = draws()
        with seeded(7):
            inner = draws()
        after = draws()
        with pytest.raises(ValueError, match="inside"), seeded(5):
            raise ValueError("inside")
        last = draws()
    with seeded(3):
        assert [draws() for _ in range(3)] == [before, after, last]
    with seeded(7):
        assert draws() == inner
    assert len({*before, *after, *inner}) == 9


def test_threads_draw_the_same_numbers_as_one_thread():
    augment = {"augment": "rand-m7-mstd0.5-inc1", "erase": 0.5, "flip": True}
    transform = TrainTransform(View(image_size=40, crop=0.3, interpolation="random", **augment))
    image = picture(60, 50)

    def load(seed):
        return transform(image, SampleRandom(seed)).numpy().tobytes()

    alone = [load(seed) for seed in range(60)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(load, range(60))) == alone
    assert len(set(alone)) > 40
    assert alone == [load(seed) for seed in range(60)]
