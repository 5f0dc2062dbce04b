"""What all scenes of handwritten digits share: the writings, where they are put, and how a scene is drawn anew.

The digits are real: 1,797 writings of 8 x 8 pixels, part of scikit-learn (UCI "Optical Recognition of Handwritten
Digits"), so nothing is downloaded. Training and validation share no writing. Training scenes are new at every draw;
validation scenes never change.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

from mldec.data.transforms import to_tensor

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VAL_FRACTION = 0.25  # of the writings of each digit

EMPTY = 0.05  # fraction of scenes without a digit
SIZES = (0.28, 0.6)  # of a digit's square, as a fraction of the side of the scene
OVERLAP = 0.1  # largest part of a digit's square that may lie in another square
TRIES = 40  # positions tried for a digit before it is left out
TILT = 12  # degrees to either side
NOISE = 16  # largest change of a value by noise

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels, right and bottom exclusive


@dataclass(frozen=True)
class Writings:
    """N handwritten digits."""

    masks: (
        np.ndarray
    )  # [N, 10, 10] uint8: ink, 0 to 255; the border is empty, so that a turn cuts nothing off
    labels: np.ndarray  # [N]: 0 to 9
    rows: np.ndarray  # [N]: row in scikit-learn's data set


def split_writings(seed: int) -> tuple[Writings, Writings]:
    """Return the writings for training and for validation: disjoint, the same share of every digit in each."""
    from sklearn.datasets import load_digits  # slow to import

    data = load_digits()
    masks = np.pad(
        np.round(data.images * (255 / 16)).astype(np.uint8), ((0, 0), (1, 1), (1, 1))
    )  # stored as 0 to 16
    shuffled = np.random.default_rng(seed).permutation(len(masks))
    by_digit = [shuffled[data.target[shuffled] == digit] for digit in range(len(NAMES))]
    held_out = [round(len(rows) * VAL_FRACTION) for rows in by_digit]
    val = np.concatenate([rows[:count] for rows, count in zip(by_digit, held_out, strict=True)])
    train = np.concatenate([rows[count:] for rows, count in zip(by_digit, held_out, strict=True)])
    return (
        Writings(masks[train], data.target[train], train),
        Writings(masks[val], data.target[val], val),
    )


@dataclass(frozen=True)
class Scenes:
    """Scenes that are drawn while they are needed; see `mldec.data.base.ImageDataset`.

    Without a seed a scene is drawn anew at every call, from Python's global generator, which the loader seeds for each
    (seed, epoch, index). With a seed it is a function of the seed and the index.

    Args:
        draw: generator -> RGB scene, and its target int8 [K] of 1 and 0.
        num_images: number of scenes.
        seed: of scenes that never change.
        draw_target: generator -> the target of a scene that is not painted, for counting labels in scenes that are
            drawn anew; None paints them.
    """

    draw: Callable[[np.random.Generator], tuple[Image.Image, Tensor]]
    num_images: int
    seed: int | None = None
    draw_target: Callable[[np.random.Generator], Tensor] | None = None

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the scene uint8 [3, S, S] and its target int8 [K] of 1 and 0."""
        if not 0 <= index < self.num_images:
            raise IndexError(f"scene {index} of {self.num_images}")
        rng = np.random.default_rng(
            random.getrandbits(64) if self.seed is None else (self.seed, index)
        )
        scene, target = self.draw(rng)
        return to_tensor(scene), target

    def target(self, index: int) -> Tensor:
        """Return a target alone: that of the scene, or where scenes are drawn anew, one of the same distribution."""
        if self.seed is not None or self.draw_target is None:
            return self[index][1]
        return self.draw_target(np.random.default_rng(random.getrandbits(64)))

    def name(self, index: int) -> str:
        """Describe the scene in messages: it has no path."""
        return f"digit scene {index}" + (
            " (drawn anew each time)" if self.seed is None else f" of seed {self.seed}"
        )


def how_many(rng: np.random.Generator, max_digits: int, empty: float = EMPTY) -> int:
    """Draw the number of digits of a scene: now and then 0, else 1 to `max_digits`."""
    return 0 if rng.random() < empty else int(rng.integers(1, max_digits + 1))


def boxes(
    rng: np.random.Generator, size: int, count: int, sizes: tuple[float, float] = SIZES
) -> list[Box]:
    """Draw up to `count` squares with little overlap; one that finds no room is left out."""
    boxes: list[Box] = []
    for _ in range(count):
        for share, across, down in rng.random((TRIES, 3)).tolist():
            side = round(
                (sizes[0] + share * (sizes[1] - sizes[0])) * size
            )  # anew at each try: a small one may fit
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
    return Image.fromarray(mask).transform(
        (side, side), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC
    )


def noisy(rng: np.random.Generator, scene: Image.Image) -> Image.Image:
    """Add independent uniform noise to every value."""
    noise = rng.integers(
        -NOISE, NOISE, (scene.height, scene.width, 3), dtype=np.int8, endpoint=True
    )
    return Image.fromarray(
        np.clip(np.asarray(scene) + noise.astype(np.int16), 0, 255).astype(np.uint8)
    )


def check_sizes(
    *, image_size: int, train_images: int, val_images: int, max_digits: int = 1, seed: int
) -> None:
    """Raise a `ValueError` that names the first setting of the scenes that is out of its range."""
    values = {
        "image_size": (image_size, 16),
        "train_images": (train_images, 1),
        "val_images": (val_images, 1),
    }
    values |= {"max_digits": (max_digits, 1), "seed": (seed, 0)}
    for name, (value, minimum) in values.items():
        if value < minimum:
            raise ValueError(f"{name} is {value}: it must be at least {minimum}")
