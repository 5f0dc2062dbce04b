"""The parts of all scenes of handwritten digits: the writings, their positions, and the drawing.

The digits are real: 1,797 writings of 8 x 8 pixels, which scikit-learn ships (UCI "Optical
Recognition of Handwritten Digits"), so nothing is downloaded. Training and validation share no
writing. Training scenes are drawn anew at every access; validation scenes never change.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image
from torch import Tensor

from mldec.data.base import Classes, DataModule, Split
from mldec.data.task import Task
from mldec.data.transforms import EvalTransform, to_tensor

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VAL_FRACTION = 0.25  # of the writings of each digit

EMPTY = 0.05  # fraction of scenes without a digit
SIZES = (0.28, 0.6)  # side of a digit's square, as a fraction of the side of the scene
OVERLAP = 0.1  # largest part of a digit's square that may lie in another square
TRIES = 40  # positions tried for a digit before it is left out
TILT = 12  # degrees to either side
NOISE = 16  # largest change of a value by noise

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels, right and bottom exclusive


@dataclass(frozen=True, kw_only=True)
class SceneSettings:
    """The settings of a `data` node that all data sets of digit scenes share.

    Attributes:
        image_size: side of a scene in pixels, at least 16.
        train_images: scenes per epoch; every epoch has new ones.
        val_images: scenes of the validation split.
        seed: decides which writings are held out, and the validation scenes.

    Raises:
        ValueError: A value is out of range.
    """

    image_size: int = 64
    train_images: int = 8192
    val_images: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimum("image_size", self.image_size, 16)
        check_minimum("train_images", self.train_images, 1)
        check_minimum("val_images", self.val_images, 1)
        check_minimum("seed", self.seed, 0)


def check_minimum(name: str, value: int, minimum: int) -> None:
    """Raise a `ValueError` that names the setting if its value is too small."""
    if value < minimum:
        raise ValueError(f"{name} is {value}: it must be at least {minimum}")


@dataclass(frozen=True)
class Writings:
    """N handwritten digits.

    Attributes:
        masks: amount of ink from 0 to 255, uint8 [N, 10, 10]. The border of one pixel is empty, so
            that a rotation does not cut the digit off.
        labels: the digits, 0 to 9, [N].
        rows: row of each writing in scikit-learn's data set, [N].
    """

    masks: np.ndarray
    labels: np.ndarray
    rows: np.ndarray


def split_writings(seed: int) -> tuple[Writings, Writings]:
    """Return the writings of training and of validation.

    They are disjoint, and each digit is held out in the same proportion, `VAL_FRACTION`.
    """
    from sklearn.datasets import load_digits  # slow to import

    # scikit-learn stores the ink as 0 to 16.
    data = load_digits()
    masks = np.round(data.images * (255 / 16)).astype(np.uint8)
    masks = np.pad(masks, ((0, 0), (1, 1), (1, 1)))

    shuffled = np.random.default_rng(seed).permutation(len(masks))
    train_parts, val_parts = [], []
    for digit in range(len(NAMES)):
        rows = shuffled[data.target[shuffled] == digit]
        num_val = round(len(rows) * VAL_FRACTION)
        val_parts.append(rows[:num_val])
        train_parts.append(rows[num_val:])

    train, val = np.concatenate(train_parts), np.concatenate(val_parts)
    return (
        Writings(masks[train], data.target[train], train),
        Writings(masks[val], data.target[val], val),
    )


@dataclass(frozen=True)
class Scenes:
    """Scenes that are drawn on demand; see `mldec.data.base.ImageDataset`.

    Without a seed a scene depends on the generator that it is loaded with, with a seed on the seed
    and the index only.

    Args:
        draw: generator -> RGB scene and its target, int8 [K] of 1 and 0.
        num_images: number of scenes.
        seed: seed of scenes that never change; None draws new ones.
        draw_target: generator -> the target of a random scene without painting it, to count the
            labels of new scenes fast; None paints the scenes.
    """

    draw: Callable[[np.random.Generator], tuple[Image.Image, Tensor]]
    num_images: int
    seed: int | None = None
    draw_target: Callable[[np.random.Generator], Tensor] | None = None

    def __len__(self) -> int:
        return self.num_images

    def load(self, index: int, rng: random.Random) -> tuple[Tensor, Tensor]:
        """Return the scene, uint8 [3, S, S], and its target, int8 [K] of 1 and 0.

        Raises:
            IndexError: The index is not from 0 to `num_images` - 1.
        """
        if not 0 <= index < self.num_images:
            raise IndexError(f"scene {index} of {self.num_images}")

        scene, target = self.draw(self.generator(index, rng))
        return to_tensor(scene), target

    def generator(self, index: int, rng: random.Random) -> np.random.Generator:
        """Return the generator that a scene is drawn with: with a seed always in the same state.

        Whoever draws the scene again with it, as `grey.compose` does, also learns its squares.
        """
        seed = rng.getrandbits(64) if self.seed is None else (self.seed, index)
        return np.random.default_rng(seed)

    def target(self, index: int, rng: random.Random) -> Tensor:
        """Return the target of a scene, int8 [K].

        Without a seed it is a target of the same distribution.
        """
        if self.seed is not None or self.draw_target is None:
            return self.load(index, rng)[1]
        return self.draw_target(np.random.default_rng(rng.getrandbits(64)))

    def name(self, index: int) -> str:
        """Describe the scene in messages: it has no path."""
        origin = " (drawn anew each time)" if self.seed is None else f" of seed {self.seed}"
        return f"digit scene {index}{origin}"


def make_splits(
    settings: SceneSettings,
    *,
    train: Callable[..., tuple[Image.Image, Tensor]],
    val: Callable[..., tuple[Image.Image, Tensor]],
    train_target: Callable[..., Tensor] | None = None,
) -> tuple[Scenes, Scenes]:
    """Return the scenes of training and of validation.

    Only the validation scenes have a seed and therefore never change.

    Args:
        settings: number and size of the scenes.
        train: draws a training scene and its target from a generator, `writings` and `size`.
        val: likewise for validation; the splits share no writing.
        train_target: like `train`, without the scene; see `Scenes`.
    """
    train_writings, val_writings = split_writings(settings.seed)
    size = settings.image_size

    draw_target = None
    if train_target is not None:
        draw_target = partial(train_target, writings=train_writings, size=size)

    draw_train = partial(train, writings=train_writings, size=size)
    draw_val = partial(val, writings=val_writings, size=size)
    return (
        Scenes(draw_train, settings.train_images, draw_target=draw_target),
        Scenes(draw_val, settings.val_images, settings.seed),
    )


def scenes_module(
    settings: SceneSettings,
    draw: Callable[..., tuple[Image.Image, Tensor]],
    classes: Classes,
    task: Task,
    *,
    train_target: Callable[..., Tensor] | None = None,
) -> DataModule:
    """Return the data of scenes that show the same classes in training and in validation.

    Args:
        settings: number and size of the scenes.
        draw: draws a scene of either split, see `make_splits`.
        classes: of both splits.
        task: what the targets mean.
        train_target: see `make_splits`.
    """
    train, val = make_splits(settings, train=draw, val=draw, train_target=train_target)
    return DataModule(
        load_train=lambda: Split(train, classes),
        load_val=lambda: Split(val, classes),
        make_evaluator=task.evaluator,
        transform=EvalTransform(image_size=settings.image_size),
    )


def how_many(rng: np.random.Generator, max_digits: int, empty: float = EMPTY) -> int:
    """Draw the number of digits in a scene: 0 with probability `empty`, else 1 to `max_digits`."""
    return 0 if rng.random() < empty else int(rng.integers(1, max_digits + 1))


def boxes(
    rng: np.random.Generator, size: int, count: int, sizes: tuple[float, float] = SIZES
) -> list[Box]:
    """Draw squares with little overlap.

    Args:
        rng: source of all random choices.
        size: side of the scene in pixels.
        count: number of squares; one that finds no room after `TRIES` tries is left out.
        sizes: range of the side of a square, as fractions of `size`.
    """
    boxes: list[Box] = []
    for _ in range(count):
        # A try draws a new side as well as a new position, because a smaller square may fit.
        for share, across, down in rng.random((TRIES, 3)).tolist():
            side = round((sizes[0] + share * (sizes[1] - sizes[0])) * size)
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
    """Enlarge a writing and rotate it by up to `TILT` degrees.

    Args:
        rng: draws the angle.
        mask: ink of the writing, uint8 [M, M].
        side: side of the result in pixels.

    Returns:
        A mask of `side` x `side` pixels, 0 to 255.
    """
    angle = np.deg2rad(rng.uniform(-TILT, TILT))
    scale = len(mask) / side  # source pixels per target pixel
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)

    # Pillow wants the map from target to source. It moves the centre (s, s) of the square to the
    # centre (m, m) of the mask.
    m, s = len(mask) / 2, side / 2
    matrix = (cos, sin, m - (cos + sin) * s, -sin, cos, m - (cos - sin) * s)
    return Image.fromarray(mask).transform(
        (side, side), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC
    )


def noisy(rng: np.random.Generator, scene: Image.Image) -> Image.Image:
    """Add independent uniform noise of up to `NOISE` to every value."""
    noise = rng.integers(
        -NOISE, NOISE, (scene.height, scene.width, 3), dtype=np.int8, endpoint=True
    )

    # The sum does not fit into 8 bits.
    values = np.add(np.asarray(scene), noise, dtype=np.int16)
    return Image.fromarray(np.clip(values, 0, 255, out=values).astype(np.uint8))
