import random

import numpy as np
import pytest
import torch
from pictures import picture
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from mldec.data.official_augment import GREY, OPERATIONS, PATCH, PairAugment, cutout
from mldec.data.randomness import SampleRandom
from mldec.data.transforms import TrainTransform


def test_cutout_covers_one_square_of_one_colour():
    rng = random.Random(0)
    black = Image.new("RGB", (60, 60))
    areas, colours = [], []
    for _ in range(300):
        covered = np.asarray(cutout(black.copy(), 0.5, rng)).reshape(60, 60, 3)
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
    rng = random.Random(0)
    sizes = set()
    for _ in range(300):
        covered = np.asarray(cutout(Image.new("RGB", (31, 11)), 0.5, rng)).any(2)
        sizes.add((int(covered.any(0).sum()), int(covered.any(1).sum())))
    assert max(width for width, _ in sizes) == 17  # int(15.5 + 0.5), and one more
    assert max(height for _, height in sizes) == 7


def official_cutout(image, fraction, rng):
    """CutoutPIL of the official helper_functions.py, which gives both corners to Pillow."""
    side = image.width
    patch = int(fraction * side + 0.5)
    x_c, y_c = rng.randrange(side), rng.randrange(side)
    x1, x2 = np.clip([x_c - patch // 2, x_c + patch // 2], 0, side)
    y1, y2 = np.clip([y_c - patch // 2, y_c + patch // 2], 0, side)
    colour = tuple(rng.randint(0, 255) for _ in range(3))
    covered = image.copy()
    ImageDraw.Draw(covered).rectangle([x1, y1, x2, y2], fill=colour)
    return covered


@pytest.mark.parametrize(("side", "widest"), [(448, 225), (224, 113), (31, 17), (33, 17), (5, 3)])
def test_cutout_equals_the_official_one_to_the_bit(side, widest):
    image = picture(side, side)
    ours, officials = [], []
    for function, results in ((cutout, ours), (official_cutout, officials)):
        rng = random.Random(0)
        results += [np.asarray(function(image.copy(), 0.5, rng)) for _ in range(60)]
    assert np.array_equal(ours, officials)
    black = [np.asarray(cutout(Image.new("RGB", (side, side)), 0.5, rng)).any(2) for _ in range(60)]
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
    rng = random.Random(0)
    operation, levels = OPERATIONS[name]
    image = picture(45, 33)
    before = np.array(image)
    for level in levels:
        result = operation(image, level, rng)
        assert (result.mode, result.size) == ("RGB", (45, 33))
    assert np.array_equal(np.asarray(image), before)
    assert not np.array_equal(np.asarray(operation(image, levels[-1], rng)), before)


def test_draws_are_uniform_over_operations_and_levels_one_to_nine():
    rng = random.Random(0)
    draws = [PairAugment.draw(rng) for _ in range(27_000)]
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
            name: (lambda image, level, rng: applied.append(level) or image, levels)
            for name, (_, levels) in OPERATIONS.items()
        },
    )
    rng = random.Random(0)
    image = Image.new("RGB", (4, 4))
    counts = [0, 0, 0]
    for _ in range(4000):
        applied.clear()
        PairAugment()(image, rng)
        counts[len(applied)] += 1
    assert np.array(counts) / 4000 == pytest.approx([0.25, 0.5, 0.25], abs=0.03)


def test_a_quarter_of_the_images_or_a_few_more_stay_as_they_are():
    rng = random.Random(0)
    image = picture(24, 24)
    before = np.asarray(image)
    same = np.mean(
        [np.array_equal(np.asarray(PairAugment()(image, rng)), before) for _ in range(1500)]
    )
    assert (
        0.23 < same < 0.33
    )  # some operations change nothing: posterize to 8 bits, autocontrast of a full range


def edge(width=100, height=100):
    """White left half, black right half."""
    values = np.zeros((height, width, 3), np.uint8)
    values[:, : width // 2] = 255
    return Image.fromarray(values)


def results_of(name, image, row=9, draws=40):
    rng = random.Random(0)
    operation, levels = OPERATIONS[name]
    return [np.asarray(operation(image, levels[row], rng)).astype(int) for _ in range(draws)]


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


def test_no_state_outside_the_generator_of_the_sample():
    transform, image = TrainTransform(image_size=16), picture()
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()
    rng = SampleRandom(0)
    before = rng.getstate()
    transform(image, rng)
    assert rng.getstate() != before
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.array_equal(np.random.get_state()[1], states[2])


@pytest.mark.parametrize(
    ("name", "enhance"),
    [
        ("color", ImageEnhance.Color),
        ("contrast", ImageEnhance.Contrast),
        ("brightness", ImageEnhance.Brightness),
        ("sharpness", ImageEnhance.Sharpness),
    ],
)
@pytest.mark.parametrize("row", [1, 4, 9])
def test_an_enhancement_is_pillows_with_one_plus_or_minus_the_magnitude(name, enhance, row):
    image = picture()
    expected = {
        np.asarray(enhance(image).enhance(factor)).astype(int).tobytes()
        for factor in (1 + row / 10, 1 - row / 10)
    }
    assert {result.tobytes() for result in results_of(name, image, row)} == expected


@pytest.mark.parametrize("row", [2, 9])
def test_a_shear_maps_each_pixel_as_its_slope_says(row):
    """Pillow's transform, written out: the pixel (x, y) is that of (x + slope y, y) before."""
    ramp = np.tile(np.arange(100, dtype=np.uint8)[None, :, None], (40, 1, 3))
    expected = set()
    for slope in (row / 30, -row / 30):
        x, y = np.meshgrid(np.arange(100) + 0.5, np.arange(40) + 0.5)
        expected.add(tuple(np.where(abs(x + slope * y - 50) < 40, x + slope * y - 0.5, -1)[20]))
    for result in results_of("shear_x", Image.fromarray(ramp), row, draws=10):
        line = result[20, :, 0]
        assert any(
            all(abs(got - want) <= 1 for got, want in zip(line, wanted, strict=True) if want >= 0)
            for wanted in expected
        )


def test_equalize_autocontrast_and_invert_are_pillows():
    image = picture()
    for name in ("equalize", "autocontrast", "invert"):
        expected = np.asarray(getattr(ImageOps, name)(image))
        assert np.array_equal(results_of(name, image, draws=1)[0], expected)


def test_two_draws_come_before_the_two_probabilities():
    """The order of the random numbers, which decides what a seed means."""
    image = picture()
    for seed in range(20):
        ours = PairAugment()(image, random.Random(seed))

        rng = random.Random(seed)
        expected = image
        pairs = [(rng.choice(list(OPERATIONS)), rng.randrange(1, 10)) for _ in range(2)]
        for name, row in pairs:
            if rng.random() < 0.5:
                operation, levels = OPERATIONS[name]
                expected = operation(expected, levels[row], rng)
        assert np.array_equal(np.asarray(ours), np.asarray(expected))
