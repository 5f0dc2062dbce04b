"""Scenes of handwritten digits, composed while they are needed: the data set that comes with the package.

The digits are real: 1,797 writings of 8 x 8 pixels, part of scikit-learn (UCI "Optical Recognition of Handwritten
Digits"), so nothing is downloaded. A scene shows a few of them in any size, place and colour before some clutter, and
is labelled with every digit that it shows: a small multi-label problem that a small network learns in minutes.

Training and validation share no writing. Training scenes are new at every draw; validation scenes never change.
"""

import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from PIL import Image, ImageDraw
from sklearn.datasets import load_digits
from torch import Tensor

from mldec.data.base import Classes, DataModule, Split
from mldec.data.transforms import EvalTransform, to_tensor
from mldec.errors import ConfigError
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VAL_FRACTION = 0.25  # of the writings of each digit

# The difficulty: seven plain convolutions and a maximum pool reach an mAP of about 95 from 22,000 scenes.
EMPTY = 0.05  # fraction of scenes without a digit
SIZES = (0.28, 0.6)  # of a digit's square, as a fraction of the side of the scene
SIZES_ALONE = (0.6, 1.0)  # likewise, of the only digit of an image
OVERLAP = 0.1  # largest part of a digit's square that may lie in another square
TRIES = 40  # places tried for a digit before it is left out
TILT = 12  # degrees to either side
CONTRAST = (90, 190)  # between a digit and the mean of the background, in grey values
TINT = 20  # largest distance of a colour channel from the grey value
CLUTTER = 30  # largest distance of the background, its blobs and strokes from its mean
BLOBS = 2  # at most
STROKES = 3  # at most
NOISE = 16  # largest change of a value by noise

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels, right and bottom exclusive


def digits(
    *,
    image_size: int = 64,
    train_images: int = 8192,
    val_images: int = 2048,
    max_digits: int = 4,
    threshold: float = 0.5,
    seed: int = 0,
) -> DataModule:
    """Return scenes of handwritten digits with ten classes, "zero" to "nine".

    Args:
        image_size: side of a scene in pixels.
        train_images: scenes an epoch; there is no end of different ones.
        val_images: scenes of the validation split.
        max_digits: largest number of digits in a scene; the same digit may come twice.
        threshold: probability from which on a class counts as predicted, for precision, recall and F1.
        seed: decides which writings are held out, and the validation scenes.

    Raises:
        ConfigError: A value is out of range.
    """
    check_whole(image_size=image_size, minimum=16)
    check_whole(train_images=train_images, minimum=1)
    check_whole(val_images=val_images, minimum=1)
    check_whole(max_digits=max_digits, minimum=1)
    check_whole(seed=seed, minimum=0)
    evaluator = partial(MultiLabelEvaluator, threshold=threshold)
    evaluator()  # refuses a wrong threshold now, not after the first epoch
    train, val = split_writings(seed)
    learn = DigitScenes(writings=train, num_images=train_images, image_size=image_size, max_digits=max_digits)
    check = DigitScenes(writings=val, num_images=val_images, image_size=image_size, max_digits=max_digits, seed=seed)
    return DataModule(
        load_train=lambda: Split(dataset=learn, classes=Classes(names=NAMES)),
        load_val=lambda: Split(dataset=check, classes=Classes(names=NAMES)),
        evaluator=evaluator,
        transform=EvalTransform(image_size=image_size),
    )


def digit(
    *,
    image_size: int = 32,
    train_images: int = 8192,
    val_images: int = 2048,
    top_k: int | None = None,
    seed: int = 0,
) -> DataModule:
    """Return scenes of a single handwritten digit: one label of ten an image.

    Args:
        image_size: side of a scene in pixels.
        train_images: scenes an epoch; there is no end of different ones.
        val_images: scenes of the validation split, of writings that training never shows.
        top_k: see `SingleLabelEvaluator`.
        seed: decides which writings are held out, and the validation scenes.

    Raises:
        ConfigError: A value is out of range.
    """
    check_whole(image_size=image_size, minimum=16)
    check_whole(train_images=train_images, val_images=val_images, minimum=1)
    check_whole(seed=seed, minimum=0)
    evaluator = partial(SingleLabelEvaluator, top_k=top_k)
    evaluator()
    train, val = split_writings(seed)
    one = partial(DigitScenes, image_size=image_size, max_digits=1, empty=0.0, sizes=SIZES_ALONE)
    classes = Classes(names=NAMES, exclusive=True)
    return DataModule(
        load_train=lambda: Split(one(writings=train, num_images=train_images), classes),
        load_val=lambda: Split(one(writings=val, num_images=val_images, seed=seed), classes),
        evaluator=evaluator,
        transform=EvalTransform(image_size=image_size),
    )


def check_whole(*, minimum: int, **named: int) -> None:
    """Raise a `ConfigError` naming the first value that is not a whole number from the minimum on."""
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigError(f"{name}: {value!r} is not a whole number from {minimum} on")


@dataclass(frozen=True)
class Writings:
    """N handwritten digits."""

    masks: np.ndarray  # [N, 10, 10] uint8: ink, 0 to 255; the border is empty, so that a turn cuts nothing off
    labels: np.ndarray  # [N]: 0 to 9
    rows: np.ndarray  # [N]: row in scikit-learn's data set


def split_writings(seed: int) -> tuple[Writings, Writings]:
    """Return the writings for training and for validation: disjoint, the same share of every digit in each."""
    data = load_digits()
    masks = np.pad(np.round(data.images * (255 / 16)).astype(np.uint8), ((0, 0), (1, 1), (1, 1)))  # stored as 0 to 16
    shuffled = np.random.default_rng(seed).permutation(len(masks))
    by_digit = [shuffled[data.target[shuffled] == digit] for digit in range(len(NAMES))]
    held_out = [round(len(rows) * VAL_FRACTION) for rows in by_digit]
    val = np.concatenate([rows[:count] for rows, count in zip(by_digit, held_out, strict=True)])
    train = np.concatenate([rows[count:] for rows, count in zip(by_digit, held_out, strict=True)])
    return (
        Writings(masks[train], data.target[train], train),
        Writings(masks[val], data.target[val], val),
    )


class DigitScenes:
    """Scenes of the given writings; see `mldec.data.base.ImageDataset`.

    Without a seed a scene is drawn anew at every call, from Python's global generator, which the loader seeds for each
    (seed, epoch, index). With a seed it is a function of the seed and the index.
    """

    def __init__(
        self,
        *,
        writings: Writings,
        num_images: int,
        image_size: int,
        max_digits: int,
        empty: float = EMPTY,
        sizes: tuple[float, float] = SIZES,
        seed: int | None = None,
    ) -> None:
        self.writings = writings
        self.num_images = num_images
        self.image_size = image_size
        self.max_digits = max_digits
        self.empty = empty
        self.sizes = sizes
        self.seed = seed

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the scene uint8 [3, S, S] and its target int8 [10] of 1 and 0."""
        if not 0 <= index < self.num_images:
            raise IndexError(f"scene {index} of {self.num_images}")
        rng = np.random.default_rng(random.getrandbits(64) if self.seed is None else (self.seed, index))
        scene, placed = compose(
            rng, self.writings, size=self.image_size, max_digits=self.max_digits, empty=self.empty, sizes=self.sizes
        )
        target = torch.zeros(len(NAMES), dtype=torch.int8)
        target[[int(self.writings.labels[row]) for row, _ in placed]] = 1
        return to_tensor(scene), target

    def target(self, index: int) -> Tensor:
        """Return a target alone: that of the scene, or where scenes are drawn anew, of a scene that is not painted."""
        if self.seed is not None:
            return self[index][1]
        rng = np.random.default_rng(random.getrandbits(64))
        count = len(places(rng, self.image_size, how_many(rng, self.max_digits, self.empty), self.sizes))
        rows = rng.integers(len(self.writings.labels), size=count)
        target = torch.zeros(len(NAMES), dtype=torch.int8)
        target[self.writings.labels[rows]] = 1
        return target

    def name(self, index: int) -> str:
        """Return a phrase for the scene."""
        return f"digit scene {index}" + (" (drawn anew each time)" if self.seed is None else f" of seed {self.seed}")


def compose(
    rng: np.random.Generator,
    writings: Writings,
    *,
    size: int,
    max_digits: int,
    empty: float = EMPTY,
    sizes: tuple[float, float] = SIZES,
) -> tuple[Image.Image, list[tuple[int, Box]]]:
    """Return an RGB scene of `size` x `size` pixels, and for each digit in it the row in `writings` and its square."""
    dark = rng.random() < 0.5  # the digits are darker than the background, or lighter
    contrast = rng.uniform(*CONTRAST)
    middle = rng.uniform(contrast, 255) if dark else rng.uniform(0, 255 - contrast)
    scene = _background(rng, size, middle)
    placed = []
    for box in places(rng, size, how_many(rng, max_digits, empty), sizes):
        row = int(rng.integers(len(writings.masks)))
        ink = middle - contrast if dark else middle + contrast
        scene.paste(_shade(rng, ink), box, tilted(rng, writings.masks[row], box[2] - box[0]))
        placed.append((row, box))
    return noisy(rng, scene), placed


def how_many(rng: np.random.Generator, max_digits: int, empty: float = EMPTY) -> int:
    """Draw the number of digits of a scene: now and then 0, else 1 to `max_digits`."""
    return 0 if rng.random() < empty else int(rng.integers(1, max_digits + 1))


def places(rng: np.random.Generator, size: int, count: int, sizes: tuple[float, float] = SIZES) -> list[Box]:
    """Draw up to `count` squares with little overlap; one that finds no room is left out."""
    boxes: list[Box] = []
    for _ in range(count):
        for share, across, down in rng.random((TRIES, 3)).tolist():
            side = round((sizes[0] + share * (sizes[1] - sizes[0])) * size)  # anew at each try: a small one may fit
            left, top = int(across * (size - side + 1)), int(down * (size - side + 1))
            box = (left, top, left + side, top + side)
            if all(_overlap(box, other) <= OVERLAP for other in boxes):
                boxes.append(box)
                break
    return boxes


def _overlap(one: Box, other: Box) -> float:
    """Return the common area of two squares as a fraction of the smaller one."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    smaller = min(one[2] - one[0], other[2] - other[0])
    return max(width, 0) * max(height, 0) / smaller**2


def tilted(rng: np.random.Generator, mask: np.ndarray, side: int) -> Image.Image:
    """Return a writing enlarged to `side` pixels and turned a little, as a mask of 0 to 255."""
    angle = np.deg2rad(rng.uniform(-TILT, TILT))
    scale = len(mask) / side  # source pixels a target pixel
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    # Keeps the centre (m, m) of the mask at the centre (s, s) of the square.
    m, s = len(mask) / 2, side / 2
    matrix = (cos, sin, m - (cos + sin) * s, -sin, cos, m - (cos - sin) * s)
    return Image.fromarray(mask).transform((side, side), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)


def _background(rng: np.random.Generator, size: int, middle: float) -> Image.Image:
    """Return a colour gradient with blobs and strokes, their grey values within CLUTTER of the middle."""
    corners = [_shade(rng, middle + rng.uniform(-CLUTTER, CLUTTER)) for _ in range(4)]
    gradient = Image.fromarray(np.array(corners, np.uint8).reshape(2, 2, 3))
    scene = gradient.resize((size, size), Image.Resampling.BILINEAR)
    draw = ImageDraw.Draw(scene)
    for _ in range(rng.integers(BLOBS + 1)):
        left, top = rng.uniform(-0.2, 0.9, 2) * size
        width, height = rng.uniform(0.1, 0.4, 2) * size
        draw.ellipse((left, top, left + width, top + height), fill=_clutter(rng, middle))
    for _ in range(rng.integers(STROKES + 1)):
        points = (rng.uniform(0, 1, 6) * size).tolist()  # two segments
        draw.line(points, fill=_clutter(rng, middle), width=max(1, round(rng.uniform(0.015, 0.04) * size)))
    return scene


def _clutter(rng: np.random.Generator, middle: float) -> tuple[int, int, int]:
    return _shade(rng, middle + rng.uniform(-CLUTTER, CLUTTER))


def _shade(rng: np.random.Generator, grey: float) -> tuple[int, int, int]:
    """Return an RGB colour near a grey value, clipped to 0 to 255."""
    red, green, blue = np.clip(grey + rng.uniform(-TINT, TINT, 3), 0, 255).astype(int).tolist()
    return red, green, blue


def noisy(rng: np.random.Generator, scene: Image.Image) -> Image.Image:
    """Add independent uniform noise to every value."""
    noise = rng.integers(-NOISE, NOISE, (scene.height, scene.width, 3), dtype=np.int8, endpoint=True)
    return Image.fromarray(np.clip(np.asarray(scene) + noise.astype(np.int16), 0, 255).astype(np.uint8))
