"""Word vectors of colored digits, the classes of `data=digits_zsl`."""

import hashlib
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from mldec.errors import DataError
from mldec.words.types import DIGITS_PREFIX, VectorOrigin, WordVectors

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# The first colors differ most from each other, so that fewer colors are easier.
COLORS = {
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

VECTOR_WIDTH = 300  # as in common word vectors


def class_names(colors: int) -> tuple[str, ...]:
    """Return 10 class names for each of 2 to 14 colors. Class 10 c + d is digit d in color c."""
    if not 2 <= colors <= len(COLORS):
        raise ValueError(f"colours: {colors} is not from 2 to {len(COLORS)}")

    names = []
    for color in list(COLORS)[:colors]:
        names += [f"{color} {digit}" for digit in NAMES]
    return tuple(names)


def class_queries(colors: int, vectors: str) -> Tensor:
    """Return the word vectors of all classes, float32 [10 * colors, D].

    "words" uses fixed random vectors of width 300 for colors and digits. A class has the sum of its
    two vectors, divided by sqrt(2). "one_hot" concatenates the one-hot vectors of color and digit.
    """
    numbers = torch.arange(10 * colors)
    color = numbers.div(10, rounding_mode="floor")
    digit = numbers % 10
    if vectors == "one_hot":
        return torch.cat([torch.eye(colors)[color], torch.eye(10)[digit]], 1)

    # The vectors do not depend on the seed of the data.
    generator = torch.Generator().manual_seed(0)
    word_vectors = torch.randn(10 + len(COLORS), VECTOR_WIDTH, generator=generator)
    return (word_vectors[digit] + word_vectors[10 + color]) / 2**0.5


def named_vectors(source: str, names: Sequence[str], optional: Sequence[str] = ()) -> WordVectors:
    """Return the word vectors of classes such as "red six" and of the known optional names.

    `source` is "digits:words", or "digits:one_hot:N" for the first N colors; see `class_queries`.
    Raises DataError if the source or a name is unknown.
    """
    form = re.fullmatch(rf"{DIGITS_PREFIX}(words|one_hot:(\d+))", source)
    if form is None:
        raise DataError(f"{source}: unknown word vectors; pass {DIGITS_PREFIX}words")

    colors = int(form[2] or len(COLORS))
    known = class_names(colors)
    for name in names:
        if name not in known:
            raise DataError(
                f"{source}: no vector of {name!r}; write a color and a digit, such as 'red six' "
                f"(colors: {', '.join(list(COLORS)[:colors])})"
            )

    found = tuple(names) + tuple(name for name in optional if name in known)
    rows = [known.index(name) for name in found]
    word_vectors = class_queries(colors, source.split(":")[1])[rows]
    origin = VectorOrigin(source, hashlib.sha256(source.encode()).hexdigest())
    return WordVectors(found, word_vectors, origin)
