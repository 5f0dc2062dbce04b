"""Built-in datasets of generated scenes with handwritten digits."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from mldec.data.tasks import multi_label, single_label
from mldec.data.transforms import EvalTransform, to_tensor
from mldec.data.types import Classes, DataModule, Split
from mldec.evaluators import Evaluator
from mldec.evaluators.zero_shot import ZeroShotEvaluator
from mldec.words.digits import COLORS, NAMES, class_names, named_vectors
from mldec.words.types import DIGITS_PREFIX

# The test set of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI
# Machine Learning Repository, 1998, doi 10.24432/C50P49, license CC BY 4.0. The file is a copy of
# scikit-learn's: one row per writing, with the ink of 8 x 8 pixels, 0 to 16, and the digit.
WRITINGS = "digits.csv.gz"
VAL_FRACTION = 0.25  # fraction of held-out writings of each digit

EMPTY = 0.05  # fraction of scenes without a digit
SIZES = (0.28, 0.6)  # side of a digit box as a fraction of the scene side
OVERLAP = 0.1  # maximum overlap of two boxes as a fraction of the smaller box
TRIES = 40  # maximum number of tries to place a digit
TILT = 12  # maximum rotation in degrees, in both directions
NOISE = 16  # maximum absolute noise

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels, right and bottom exclusive


@dataclass(frozen=True, kw_only=True)
class SceneSettings:
    """Settings of a `data` node, shared by all datasets of digit scenes."""

    image_size: int = 64  # side of a scene in pixels, at least 16
    train_images: int = 8192  # scenes per epoch; each epoch has new scenes
    val_images: int = 2048  # scenes of the validation split
    seed: int = 0  # seed of the held-out writings and of the validation scenes

    def __post_init__(self) -> None:
        check_minimum("image_size", self.image_size, 16)
        check_minimum("train_images", self.train_images, 1)
        check_minimum("val_images", self.val_images, 1)
        check_minimum("seed", self.seed, 0)


def check_minimum(name: str, value: int, minimum: int) -> None:
    """Raise ValueError if the value of a setting is below the minimum."""
    if value < minimum:
        raise ValueError(f"{name} is {value}; it must be at least {minimum}")


@dataclass(frozen=True)
class Writings:
    """N handwritten digits."""

    # Ink from 0 to 255, uint8 [N, 10, 10]. The border of one pixel is empty, so that a rotation
    # does not crop the digit.
    masks: np.ndarray

    labels: np.ndarray  # the digits, 0 to 9, [N]
    rows: np.ndarray  # row in the file, [N]


def split_writings(seed: int) -> tuple[Writings, Writings]:
    """Split the writings of each digit into training and validation (`VAL_FRACTION`)."""
    table = np.loadtxt(str(files("mldec.data") / WRITINGS), delimiter=",")
    ink = table[:, :-1].reshape(-1, 8, 8)
    labels = table[:, -1].astype(np.int64)
    masks = np.round(ink * (255 / 16)).astype(np.uint8)
    masks = np.pad(masks, ((0, 0), (1, 1), (1, 1)))

    # Writings are divided, not scenes, so that no writing is in both splits.
    shuffled = np.random.default_rng(seed).permutation(len(masks))
    train: list[int] = []
    val: list[int] = []
    for digit in range(len(NAMES)):
        rows = shuffled[labels[shuffled] == digit].tolist()
        num_val = round(len(rows) * VAL_FRACTION)
        val += rows[:num_val]
        train += rows[num_val:]

    train_writings = Writings(masks[train], labels[train], np.array(train))
    return train_writings, Writings(masks[val], labels[val], np.array(val))


@dataclass(frozen=True)
class Scenes:
    """Dataset of generated scenes, see `mldec.data.types.ImageDataset`.

    A scene depends on the seed and the index only. Without a seed, it depends on the generator
    passed to `load`.
    """

    # Maps a generator to an RGB scene and its target, int8 [K] of 1 and 0.
    draw: Callable[[np.random.Generator], tuple[Image.Image, Tensor]]
    num_images: int
    seed: int | None = None

    def __len__(self) -> int:
        return self.num_images

    def load(self, index: int, rng: random.Random) -> tuple[Tensor, Tensor]:
        """Return the scene, uint8 [3, S, S], and its target, int8 [K] of 1 and 0."""
        seed = rng.getrandbits(64) if self.seed is None else (self.seed, index)
        scene, target = self.draw(np.random.default_rng(seed))
        return to_tensor(scene), target

    def name(self, index: int) -> str:
        """Return the name of the scene for messages."""
        if self.seed is None:
            return f"digit scene {index} (drawn anew each time)"
        return f"digit scene {index} of seed {self.seed}"


def _scenes_module(
    settings: SceneSettings,
    make_evaluator: Callable[[Classes], Evaluator],
    *,
    train: tuple[Callable[..., Any], Classes],
    val: tuple[Callable[..., Any], Classes],
) -> DataModule:
    """Return the data module of scenes. `train` and `val` are a draw function and the classes."""
    size = settings.image_size
    train_writings, val_writings = split_writings(settings.seed)
    draw_train = partial(train[0], writings=train_writings, size=size)
    draw_val = partial(val[0], writings=val_writings, size=size)
    train_split = Split(Scenes(draw_train, settings.train_images), train[1])
    val_split = Split(Scenes(draw_val, settings.val_images, settings.seed), val[1])

    transform = EvalTransform(image_size=size)
    return DataModule(lambda: train_split, lambda: val_split, make_evaluator, transform)


def boxes(
    rng: np.random.Generator, size: int, count: int, sizes: tuple[float, float] = SIZES
) -> list[Box]:
    """Draw up to `count` square boxes with a small overlap. `sizes` are fractions of `size`."""
    smallest, largest = sizes
    placed: list[Box] = []
    for _ in range(count):
        # Each try draws a new side and position, because a smaller box may fit.
        for share, across, down in rng.random((TRIES, 3)).tolist():
            side = round((smallest + share * (largest - smallest)) * size)
            room = size - side + 1
            left = int(across * room)
            top = int(down * room)
            box = (left, top, left + side, top + side)

            if all(_overlap(box, other) <= OVERLAP for other in placed):
                placed.append(box)
                break
    return placed


def _overlap(one: Box, other: Box) -> float:
    left, top, right, bottom = one
    other_left, other_top, other_right, other_bottom = other

    width = min(right, other_right) - max(left, other_left)
    height = min(bottom, other_bottom) - max(top, other_top)
    smaller = min(right - left, other_right - other_left)
    return max(width, 0) * max(height, 0) / smaller**2


def tilted(rng: np.random.Generator, mask: np.ndarray, side: int) -> Image.Image:
    """Resize a writing, uint8 [M, M], to `side` pixels and rotate it by up to `TILT` degrees."""
    angle = np.deg2rad(rng.uniform(-TILT, TILT))
    scale = len(mask) / side  # source pixels per target pixel
    cos = scale * np.cos(angle)
    sin = scale * np.sin(angle)

    # The matrix maps target to source coordinates, and the center (s, s) of the box to the center
    # (m, m) of the mask.
    m = len(mask) / 2
    s = side / 2
    matrix = (cos, sin, m - (cos + sin) * s, -sin, cos, m - (cos - sin) * s)
    affine = Image.Transform.AFFINE
    bicubic = Image.Resampling.BICUBIC
    return Image.fromarray(mask).transform((side, side), affine, matrix, bicubic)


def noisy(rng: np.random.Generator, scene: Image.Image) -> Image.Image:
    """Add independent uniform noise in [-NOISE, NOISE] to each value."""
    shape = (scene.height, scene.width, 3)
    noise = rng.integers(-NOISE, NOISE, shape, dtype=np.int8, endpoint=True)

    # The sum does not fit in 8 bits.
    values = np.add(np.asarray(scene), noise, dtype=np.int16)
    return Image.fromarray(np.clip(values, 0, 255, out=values).astype(np.uint8))


SIZES_ALONE = (0.6, 1.0)  # as `SIZES`, for a single digit

# Gray values from 0 to 255.
CONTRAST = (90, 190)  # difference between a digit and the mean of the background
TINT = 20  # maximum difference between a color channel and the gray value
CLUTTER = 30  # maximum difference between background, blobs and strokes and the mean

BLOBS = 2  # maximum number of blobs in a scene
STROKES = 3  # maximum number of strokes in a scene

SCENES = SceneSettings()
SMALL_SCENES = SceneSettings(image_size=32)


def digits(
    scenes: SceneSettings = SCENES, *, max_digits: int = 4, threshold: float = 0.5
) -> DataModule:
    """Return scenes of up to `max_digits` handwritten digits with ten classes, "zero" to "nine".

    A digit may occur several times in a scene.

    Args:
        scenes: Number and size of the scenes.
        max_digits: Maximum number of digits in a scene.
        threshold: See `multi_label`.
    """
    check_minimum("max_digits", max_digits, 1)
    evaluator = multi_label(threshold)
    split = (partial(draw_scene, max_digits=max_digits), Classes(NAMES))
    return _scenes_module(scenes, evaluator, train=split, val=split)


def digit(scenes: SceneSettings = SMALL_SCENES, *, top_k: int | None = None) -> DataModule:
    """Return scenes of one handwritten digit: single-label with ten classes."""
    evaluator = single_label(top_k)
    draw = partial(draw_scene, max_digits=1, empty=0.0, sizes=SIZES_ALONE)
    split = (draw, Classes(NAMES, exclusive=True))
    return _scenes_module(scenes, evaluator, train=split, val=split)


def draw_scene(
    rng: np.random.Generator, *, writings: Writings, size: int, **options: Any
) -> tuple[Image.Image, Tensor]:
    """Return an RGB scene and its target, int8 [10] of 1 and 0. See `compose` for options."""
    scene, placed = compose(rng, writings, size=size, **options)
    target = torch.zeros(len(NAMES), dtype=torch.int8)
    for row, _ in placed:
        target[writings.labels[row]] = 1
    return scene, target


def compose(
    rng: np.random.Generator,
    writings: Writings,
    *,
    size: int,
    max_digits: int,
    empty: float = EMPTY,
    sizes: tuple[float, float] = SIZES,
) -> tuple[Image.Image, list[tuple[int, Box]]]:
    """Draw an RGB scene of `size` pixels per side; for `sizes` see `boxes`.

    Returns the scene, and the row in `writings` and the box of each digit. With the probability
    `empty`, a scene has no digits.
    """
    # All digits of a scene are either darker or lighter than the background.
    is_dark = rng.random() < 0.5
    contrast = rng.uniform(*CONTRAST)
    if is_dark:
        mean = rng.uniform(contrast, 255)
        ink = mean - contrast
    else:
        mean = rng.uniform(0, 255 - contrast)
        ink = mean + contrast

    scene = _background(rng, size, mean)
    count = 0
    if rng.random() >= empty:
        count = int(rng.integers(1, max_digits + 1))
    placed = []
    for box in boxes(rng, size, count, sizes):
        row = int(rng.integers(len(writings.masks)))
        scene.paste(_shade(rng, ink), box, tilted(rng, writings.masks[row], box[2] - box[0]))
        placed.append((row, box))

    return noisy(rng, scene), placed


def _background(rng: np.random.Generator, size: int, mean: float) -> Image.Image:
    """Return a color gradient with blobs and strokes, within CLUTTER of the mean gray."""
    corners = [_clutter(rng, mean) for _ in range(4)]
    # Resizing 2 x 2 pixels interpolates between the colors of the corners.
    gradient = Image.fromarray(np.array(corners, np.uint8).reshape(2, 2, 3))
    scene = gradient.resize((size, size), Image.Resampling.BILINEAR)

    draw = ImageDraw.Draw(scene)
    for _ in range(rng.integers(BLOBS + 1)):
        left, top = rng.uniform(-0.2, 0.9, 2) * size
        width, height = rng.uniform(0.1, 0.4, 2) * size
        draw.ellipse((left, top, left + width, top + height), fill=_clutter(rng, mean))

    # A stroke has two segments (three points). The scenes of a seed depend on the order of the
    # draws: points, color, thickness.
    for _ in range(rng.integers(STROKES + 1)):
        points = (rng.uniform(0, 1, 6) * size).tolist()
        fill = _clutter(rng, mean)
        thickness = max(1, round(rng.uniform(0.015, 0.04) * size))
        draw.line(points, fill=fill, width=thickness)

    return scene


def _clutter(rng: np.random.Generator, mean: float) -> tuple[int, int, int]:
    return _shade(rng, mean + rng.uniform(-CLUTTER, CLUTTER))


def _shade(
    rng: np.random.Generator, color: float | np.ndarray, most: float = TINT
) -> tuple[int, int, int]:
    """Return a random RGB color near a color or gray value. Channels differ by at most `most`."""
    red, green, blue = np.clip(color + rng.uniform(-most, most, 3), 0, 255).astype(int).tolist()
    return red, green, blue


BACKGROUND = (75, 115)  # gray value of the background; it differs from all colors
LARGE = (0.45, 0.55)  # as `SIZES`, for zero-shot scenes
SHADING = 15  # maximum difference between a digit channel and its color


def digits_zsl(
    scenes: SceneSettings = SCENES,
    *,
    max_digits: int = 2,
    colours: int = 12,
    unseen: int = 24,
    vectors: Literal["words", "one_hot"] = "words",
    threshold: float = 0.5,
) -> DataModule:
    """Return zero-shot scenes: training with seen classes only, validation with all classes.

    Each color and each digit is seen, but not each pair. The task is to bind attributes: a red
    three and a blue five have the same colors and digits as a red five and a blue three. Digits are
    therefore large, and each scene has `max_digits` digits if they fit. With 2, a third of the
    scenes has room for only one digit.

    Args:
        scenes: Number and size of the scenes. The seed also determines the unseen classes.
        max_digits: Number of digits in a scene.
        colours: Number of colors, 2 to 14.
        unseen: Number of unseen classes.
        vectors: Kind of the word vectors, see `class_queries`.
        threshold: See `multi_label`.
    """
    check_minimum("max_digits", max_digits, 1)

    names = class_names(colours)
    source = f"{DIGITS_PREFIX}{vectors}"
    if vectors == "one_hot":
        source += f":{colours}"
    _, word_vectors, origin = named_vectors(source, names)
    hidden = choose_unseen(colours, unseen, scenes.seed)
    seen = sorted(set(range(len(names))) - set(hidden))
    seen_names = tuple(names[number] for number in seen)
    seen_classes = Classes(seen_names, word_vectors=word_vectors[seen], origin=origin)

    all_classes = Classes(names, word_vectors=word_vectors, origin=origin)

    def evaluator(classes: Classes) -> Evaluator:
        return ZeroShotEvaluator(len(classes), unseen=hidden, threshold=threshold)

    # Validate the threshold now, not after an epoch.
    evaluator(all_classes)

    draw = partial(draw_colored, max_digits=max_digits)
    train = (partial(draw, classes=seen), seen_classes)
    val = (partial(draw, classes=range(len(names))), all_classes)
    return _scenes_module(scenes, evaluator, train=train, val=val)


def choose_unseen(colors: int, count: int, seed: int) -> list[int]:
    """Return the sorted unseen classes, spread over colors and digits."""
    check_minimum("unseen", count, 1)
    rng = np.random.default_rng(seed)
    color_order = rng.permutation(colors)
    digit_order = rng.permutation(10)

    # Select along the diagonals of the table of shuffled colors and digits.
    unseen = set()
    for number in range(count):
        diagonal, row = divmod(number, colors)
        column = (row + diagonal) % 10
        unseen.add(10 * int(color_order[row]) + int(digit_order[column]))
    return sorted(unseen)


def draw_colored(
    rng: np.random.Generator,
    *,
    writings: Writings,
    classes: Sequence[int],
    size: int,
    max_digits: int,
) -> tuple[Image.Image, Tensor]:
    """Return an RGB scene of colored digits and its target, int8 [K] of 1 and 0.

    The digits are from `classes` (10 * color + digit), which are the columns of the target. A scene
    has `max_digits` large digits if they fit.
    """
    gray = round(rng.uniform(*BACKGROUND))
    scene = Image.new("RGB", (size, size), (gray, gray, gray))

    target = torch.zeros(len(classes), dtype=torch.int8)
    for box in boxes(rng, size, max_digits, LARGE):
        column = int(rng.integers(len(classes)))
        number = classes[column]
        row = rng.choice(np.flatnonzero(writings.labels == number % 10))

        color = _shade(rng, np.array(list(COLORS.values())[number // 10]), SHADING)
        scene.paste(color, box, tilted(rng, writings.masks[row], box[2] - box[0]))
        target[column] = 1

    return noisy(rng, scene), target
