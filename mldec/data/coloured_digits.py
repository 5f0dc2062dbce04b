"""Scenes of handwritten digits in colours: a class is a colour and a digit, such as "red three".

The writings are those of `mldec.data.digits`, so nothing is downloaded. `coloured_digits` is a closed set of a hundred
classes and more. `digits_zsl` never shows a part of the combinations in training: whoever has learnt what a colour and
what a digit is knows them nevertheless, because a class's vector is made of its two attributes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mldec.data.base import Classes, DataModule, Split
from mldec.data.digits import NAMES, Writings, check_whole, how_many, noisy, places, split_writings, tilted
from mldec.data.transforms import EvalTransform, to_tensor
from mldec.errors import ConfigError
from mldec.evaluators import Evaluator
from mldec.evaluators.multi_label import MultiLabelEvaluator

# The first ones are farthest from each other, so that fewer colours are easier.
COLOURS = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "cyan": (0, 255, 255),
    "magenta": (255, 0, 255),
    "white": (255, 255, 255),
    "black": (0, 0, 0),
    "orange": (255, 128, 0),
    "azure": (0, 128, 255),
    "violet": (128, 0, 255),
    "rose": (255, 0, 128),
    "lime": (128, 255, 0),
    "jade": (0, 255, 128),
}
BACKGROUND = (75, 115)  # grey value, the same all over a scene: no colour above is near it
SIDES = (0.38, 0.62)  # of a digit's square, as a fraction of the side of the scene
LARGE = (0.45, 0.55)  # likewise, of zero-shot scenes: every one shows as many digits as fit
SHADING = 15  # largest distance of a digit's channel from its colour
VECTOR_WIDTH = 300  # as that of common word vectors
VECTORS = ("words", "one_hot")


def coloured_digits(
    *,
    image_size: int = 64,
    train_images: int = 8192,
    val_images: int = 2048,
    max_digits: int = 2,
    colours: int = 12,
    threshold: float = 0.5,
    seed: int = 0,
) -> DataModule:
    """Return scenes with 10 classes a colour, all of them in both splits.

    Args:
        image_size: side of a scene in pixels.
        train_images: scenes an epoch; there is no end of different ones.
        val_images: scenes of the validation split.
        max_digits: largest number of digits in a scene.
        colours: number of colours, 2 to 14.
        threshold: probability from which on a class counts as predicted, for precision, recall and F1.
        seed: decides which writings are held out, and the validation scenes.

    Raises:
        ConfigError: A value is out of range.
    """
    names = class_names(colours)
    evaluator = partial(MultiLabelEvaluator, threshold=threshold)
    evaluator()  # refuses a wrong threshold now, not after the first epoch
    everything = range(len(names))
    train, val = _scenes(everything, everything, image_size, train_images, val_images, max_digits, seed)
    return DataModule(
        load_train=lambda: Split(train, Classes(names)),
        load_val=lambda: Split(val, Classes(names)),
        evaluator=evaluator,
        transform=EvalTransform(image_size=image_size),
    )


def digits_zsl(
    *,
    image_size: int = 64,
    train_images: int = 8192,
    val_images: int = 2048,
    max_digits: int = 2,
    colours: int = 12,
    unseen: int = 24,
    vectors: str = "words",
    seed: int = 0,
) -> DataModule:
    """Return zero-shot scenes: training shows the seen classes only, validation all.

    Every colour and every digit is seen, but not every pair of them. Validation has all classes in one pass, as
    `mldec.data.zero_shot` has. Digits are large, and most scenes show two, which makes binding the task: a red three
    beside a blue five has the colours and the digits of a red five beside a blue three.

    Args:
        image_size: side of a scene in pixels.
        train_images: scenes an epoch; there is no end of different ones.
        val_images: scenes of the validation split.
        max_digits: digits of a scene, as far as they fit: of two a third of the scenes has room for one only.
        colours: number of colours, 2 to 14.
        unseen: number of classes that training never shows.
        vectors: of the classes; see `class_queries`.
        seed: decides which classes are unseen, which writings are held out, and the validation scenes.

    Raises:
        ConfigError: A value is out of range, or so many classes are unseen that a colour or a digit is.
    """
    names = class_names(colours)
    queries = class_queries(colours, vectors)
    hidden = choose_unseen(colours, unseen, seed)
    seen = sorted(set(range(len(names))) - set(hidden))
    everything = range(len(names))
    train, val = _scenes(seen, everything, image_size, train_images, val_images, max_digits, seed, full=True)

    def evaluator() -> Evaluator:
        from mldec.evaluators.zero_shot import ZeroShotEvaluator

        return ZeroShotEvaluator(hidden, num_classes=len(names))

    return DataModule(
        load_train=lambda: Split(train, Classes(tuple(names[place] for place in seen), queries=queries[seen])),
        load_val=lambda: Split(val, Classes(names, queries=queries)),
        evaluator=evaluator,
        transform=EvalTransform(image_size=image_size),
    )


def class_names(colours: int) -> tuple[str, ...]:
    """Return the names of all classes; class 10 c + d is digit d in colour c."""
    check_whole(colours=colours, minimum=2)
    if colours > len(COLOURS):
        raise ConfigError(f"colours: {colours} is more than the {len(COLOURS)} that there are")
    return tuple(f"{colour} {digit}" for colour in list(COLOURS)[:colours] for digit in NAMES)


def class_queries(colours: int, vectors: str) -> Tensor:
    """Return the vectors of all classes, made of their attributes: float32 [10 colours, D].

    Args:
        colours: number of colours.
        vectors: "words": each colour and each digit has a fixed random vector of width 300, and a class the sum of its
            two over sqrt(2), as names of two words get theirs from common word vectors. "one_hot": a 1 for the colour
            and a 1 for the digit, D = colours + 10.

    Raises:
        ConfigError: unknown vectors.
    """
    if vectors not in VECTORS:
        raise ConfigError(f"data.vectors {vectors!r} is not known: choose words or one_hot")
    colour, digit = torch.arange(10 * colours).div(10, rounding_mode="floor"), torch.arange(10 * colours) % 10
    if vectors == "one_hot":
        return torch.cat([torch.eye(colours)[colour], torch.eye(10)[digit]], 1)
    generator = torch.Generator().manual_seed(0)  # a vocabulary does not change with the data's seed
    words = torch.randn(10 + len(COLOURS), VECTOR_WIDTH, generator=generator)
    return (words[digit] + words[10 + colour]) / 2**0.5


def choose_unseen(colours: int, count: int, seed: int) -> list[int]:
    """Return the classes that training never shows, ascending: about as many of each colour and of each digit.

    Raises:
        ConfigError: if a colour or a digit would not be seen at all.
    """
    check_whole(unseen=count, minimum=1)
    check_whole(seed=seed, minimum=0)
    rng = np.random.default_rng(seed)
    colour_order, digit_order = rng.permutation(colours), rng.permutation(10)
    # Along the diagonals of the table of shuffled colours and digits: each has every colour once.
    pairs = [(place, (place + diagonal) % 10) for diagonal in range(10) for place in range(colours)][:count]
    chosen = sorted(10 * int(colour_order[row]) + int(digit_order[column]) for row, column in pairs)
    seen = set(range(10 * colours)) - set(chosen)
    if len({place // 10 for place in seen}) < colours or len({place % 10 for place in seen}) < 10:
        raise ConfigError(f"unseen: {count} of {10 * colours} classes leave a colour or a digit unseen; set fewer")
    return chosen


def _scenes(
    learnt: Sequence[int],
    all_classes: Sequence[int],
    image_size: int,
    train_images: int,
    val_images: int,
    max_digits: int,
    seed: int,
    full: bool = False,
) -> tuple["ColouredScenes", "ColouredScenes"]:
    check_whole(image_size=image_size, minimum=16)
    check_whole(train_images=train_images, val_images=val_images, max_digits=max_digits, minimum=1)
    check_whole(seed=seed, minimum=0)
    train, val = split_writings(seed)
    return (
        ColouredScenes(train, tuple(learnt), train_images, image_size, max_digits, full=full),
        ColouredScenes(val, tuple(all_classes), val_images, image_size, max_digits, seed, full),
    )


@dataclass(frozen=True)
class ColouredScenes:
    """Scenes of the given classes; see `mldec.data.base.ImageDataset`.

    Without a seed a scene is drawn anew at every call, from Python's global generator, which the loader seeds for each
    (seed, epoch, index). With a seed it is a function of the seed and the index.
    """

    writings: Writings
    classes: tuple[int, ...]  # that are shown, in the order of the target's columns; 10 c + d, see `class_names`
    num_images: int
    image_size: int
    max_digits: int
    seed: int | None = None
    full: bool = False  # always as many digits as there may be, and large ones

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the scene uint8 [3, S, S] and its target int8 [K] of 1 and 0."""
        if not 0 <= index < self.num_images:
            raise IndexError(f"scene {index} of {self.num_images}")
        rng = np.random.default_rng(random.getrandbits(64) if self.seed is None else (self.seed, index))
        scene, shown = compose_coloured(
            rng, self.writings, self.classes, size=self.image_size, max_digits=self.max_digits, full=self.full
        )
        return to_tensor(scene), torch.tensor([place in shown for place in self.classes], dtype=torch.int8)

    def name(self, index: int) -> str:
        """Return a phrase for the scene."""
        drawn = " (drawn anew each time)" if self.seed is None else f" of seed {self.seed}"
        return f"coloured digit scene {index}{drawn}"


def compose_coloured(
    rng: np.random.Generator,
    writings: Writings,
    classes: Sequence[int],
    *,
    size: int,
    max_digits: int,
    full: bool = False,
) -> tuple[Image.Image, set[int]]:
    """Return an RGB scene of `size` x `size` pixels, and which of the classes it shows; see `ColouredScenes`."""
    grey = round(rng.uniform(*BACKGROUND))
    scene = Image.new("RGB", (size, size), (grey, grey, grey))
    shown = set()
    count, sides = (max_digits, LARGE) if full else (how_many(rng, max_digits), SIDES)
    for box in places(rng, size, count, sides):
        place = classes[int(rng.integers(len(classes)))]
        row = rng.choice(np.flatnonzero(writings.labels == place % 10))
        colour = np.array(list(COLOURS.values())[place // 10]) + rng.uniform(-SHADING, SHADING, 3)
        red, green, blue = np.clip(colour, 0, 255).astype(int).tolist()
        scene.paste((red, green, blue), box, tilted(rng, writings.masks[row], box[2] - box[0]))
        shown.add(place)
    return noisy(rng, scene), shown
