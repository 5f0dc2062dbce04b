"""Scenes of coloured handwritten digits: a class is a colour and a digit, such as "red three".

`coloured_digits` is a closed set of up to 140 classes. `digits_zsl` never shows some of the
combinations in training. A model that has learnt the colours and the digits can still recognise
them, because the vector of a class is made of its two attributes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mldec.data.base import Classes, DataModule, Split
from mldec.data.digits.scenes import (
    NAMES,
    SceneSettings,
    Writings,
    boxes,
    check_minimum,
    how_many,
    make_splits,
    noisy,
    scenes_module,
    tilted,
)
from mldec.data.task import MultiLabel
from mldec.data.transforms import EvalTransform
from mldec.evaluators.zero_shot import ZeroShotEvaluator

# The first colours differ most from each other, so that fewer colours are easier.
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

# Grey value of the whole background; no colour above is near it.
BACKGROUND = (75, 115)

# Side of a digit's square, as a fraction of the side of the scene. Zero-shot scenes hold as many
# digits as fit, in a narrower range.
SIDES = (0.38, 0.62)
LARGE = (0.45, 0.55)

SHADING = 15  # largest distance of a digit's channel from its colour
VECTOR_WIDTH = 300  # that of common word vectors

SCENES = SceneSettings()


def coloured_digits(
    scenes: SceneSettings = SCENES,
    *,
    max_digits: int = 2,
    colours: int = 12,
    threshold: float = 0.5,
) -> DataModule:
    """Return scenes with 10 classes per colour, all of them in both splits.

    Args:
        scenes: number and size of the scenes.
        max_digits: largest number of digits in a scene.
        colours: number of colours, 2 to 14.
        threshold: see `MultiLabel`.

    Raises:
        ValueError: An argument is out of range.
    """
    check_minimum("max_digits", max_digits, 1)
    names = class_names(colours)
    task = MultiLabel(threshold)

    draw = partial(draw_coloured, classes=tuple(range(len(names))), max_digits=max_digits)
    return scenes_module(scenes, draw, Classes(names), task)


def digits_zsl(
    scenes: SceneSettings = SCENES,
    *,
    max_digits: int = 2,
    colours: int = 12,
    unseen: int = 24,
    vectors: Literal["words", "one_hot"] = "words",
) -> DataModule:
    """Return zero-shot scenes: training shows the seen classes only, validation all classes.

    Every colour and every digit is seen, but not every pair of them. Validation evaluates all
    classes at once, as in `mldec.data.zero_shot`. The task is to bind the attributes: a red three
    beside a blue five has the colours and the digits of a red five beside a blue three. Therefore
    digits are large, and most scenes show two.

    Args:
        scenes: number and size of the scenes; the seed also decides which classes are unseen.
        max_digits: number of digits in a scene, if they fit: with 2, a third of the scenes has room
            for only one.
        colours: number of colours, 2 to 14.
        unseen: number of classes that training never shows.
        vectors: form of the class vectors, see `class_queries`.

    Raises:
        ValueError: An argument is out of range, or so many classes are unseen that a colour or a
            digit is never seen.
    """
    check_minimum("max_digits", max_digits, 1)

    # Seen classes keep the order of all classes.
    names = class_names(colours)
    queries = class_queries(colours, vectors)
    hidden = choose_unseen(colours, unseen, scenes.seed)
    seen = sorted(set(range(len(names))) - set(hidden))
    seen_classes = Classes(tuple(names[number] for number in seen), queries=queries[seen])

    # Validation scenes show all classes.
    draw = partial(draw_coloured, max_digits=max_digits, full=True)
    train, val = make_splits(
        scenes,
        train=partial(draw, classes=tuple(seen)),
        val=partial(draw, classes=tuple(range(len(names)))),
    )

    return DataModule(
        load_train=lambda: Split(train, seen_classes),
        load_val=lambda: Split(val, Classes(names, queries=queries)),
        make_evaluator=lambda classes: ZeroShotEvaluator(len(classes), unseen=hidden),
        transform=EvalTransform(image_size=scenes.image_size),
    )


def class_names(colours: int) -> tuple[str, ...]:
    """Return the names of all classes; class 10 c + d is digit d in colour c.

    Raises:
        ValueError: The number of colours is not from 2 to 14.
    """
    if not 2 <= colours <= len(COLOURS):
        raise ValueError(f"colours is {colours}: it must be from 2 to {len(COLOURS)}")

    names = []
    for colour in list(COLOURS)[:colours]:
        names += [f"{colour} {digit}" for digit in NAMES]
    return tuple(names)


def class_queries(colours: int, vectors: str) -> Tensor:
    """Return the vectors of all classes, made of their attributes: float32 [10 colours, D].

    Args:
        colours: number of colours.
        vectors: "words": each colour and each digit has a fixed random vector of width 300, and a
            class has the sum of its two over sqrt(2), as names of two words have with common word
            vectors. "one_hot": a 1 for the colour and a 1 for the digit, D = colours + 10.
    """
    numbers = torch.arange(10 * colours)
    colour, digit = numbers.div(10, rounding_mode="floor"), numbers % 10
    if vectors == "one_hot":
        return torch.cat([torch.eye(colours)[colour], torch.eye(10)[digit]], 1)

    # The vocabulary is fixed, whatever the seed of the data and the number of colours: a colour and
    # a digit have the same vectors in every run.
    generator = torch.Generator().manual_seed(0)
    word_vectors = torch.randn(10 + len(COLOURS), VECTOR_WIDTH, generator=generator)
    return (word_vectors[digit] + word_vectors[10 + colour]) / 2**0.5


def choose_unseen(colours: int, count: int, seed: int) -> list[int]:
    """Return the classes that training never shows, in ascending order.

    They are spread evenly: about as many of each colour and of each digit.

    Raises:
        ValueError: The count is below 1, or a colour or a digit would never be seen.
    """
    if count < 1:
        raise ValueError(f"unseen is {count}: it must be at least 1")

    rng = np.random.default_rng(seed)
    colour_order, digit_order = rng.permutation(colours), rng.permutation(10)

    # Walk along the diagonals of the table of shuffled colours (rows) and digits (columns): each
    # diagonal has every colour once.
    unseen = set()
    for number in range(min(count, 10 * colours)):
        diagonal, row = divmod(number, colours)
        column = (row + diagonal) % 10
        unseen.add(10 * int(colour_order[row]) + int(digit_order[column]))

    seen = set(range(10 * colours)) - unseen
    seen_colours = {number // 10 for number in seen}
    seen_digits = {number % 10 for number in seen}
    if len(seen_colours) < colours or len(seen_digits) < 10:
        raise ValueError(
            f"unseen is {count}: of {10 * colours} classes it leaves a colour or a digit unseen; "
            "set fewer"
        )
    return sorted(unseen)


def draw_coloured(
    rng: np.random.Generator,
    *,
    writings: Writings,
    classes: Sequence[int],
    size: int,
    max_digits: int,
    full: bool = False,
) -> tuple[Image.Image, Tensor]:
    """Draw a scene and its target.

    Args:
        rng: source of all random choices.
        writings: the digits to draw from.
        classes: the K classes that may be shown, see `class_names`.
        size: side of the scene in pixels.
        max_digits: largest number of digits in the scene.
        full: place `max_digits` large digits, as far as they fit, instead of a random number.

    Returns:
        The RGB scene of `size` x `size` pixels, and int8 [K]: 1 for the classes that it shows, else
        0, in the order of `classes`.
    """
    grey = round(rng.uniform(*BACKGROUND))
    scene = Image.new("RGB", (size, size), (grey, grey, grey))
    if full:
        count, sides = max_digits, LARGE
    else:
        count, sides = how_many(rng, max_digits), SIDES

    target = torch.zeros(len(classes), dtype=torch.int8)
    for box in boxes(rng, size, count, sides):
        column = int(rng.integers(len(classes)))
        number = classes[column]
        row = rng.choice(np.flatnonzero(writings.labels == number % 10))

        # Each digit has a shade of its own, near the pure colour.
        pure_colour = np.array(list(COLOURS.values())[number // 10])
        shade = pure_colour + rng.uniform(-SHADING, SHADING, 3)
        red, green, blue = np.clip(shade, 0, 255).astype(int).tolist()

        scene.paste((red, green, blue), box, tilted(rng, writings.masks[row], box[2] - box[0]))
        target[column] = 1

    return noisy(rng, scene), target
