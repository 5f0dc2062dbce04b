"""Word vectors of colored digits, the classes of `data=digits_zsl`."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from mldec.errors import DataError
from mldec.words.types import DIGITS_PREFIX, VectorOrigin, WordVectors

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


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


VECTOR_WIDTH = 300  # that of common word vectors


def class_names(colours: int) -> tuple[str, ...]:
    """Return the names of all classes; class 10 c + d is digit d in colour c."""
    if not 2 <= colours <= len(COLOURS):
        raise ValueError(f"colours is {colours}: it must be from 2 to {len(COLOURS)}")

    names = []
    for colour in list(COLOURS)[:colours]:
        names += [f"{colour} {digit}" for digit in NAMES]
    return tuple(names)


def class_queries(colours: int, vectors: str) -> Tensor:
    """Return the vectors of all classes, made of their attributes: float32 [10 colours, D].

    "words": each colour and each digit has a fixed random vector of width 300, and a class has the
    sum of its two over sqrt(2). "one_hot": a 1 for the colour and a 1 for the digit.
    """
    numbers = torch.arange(10 * colours)
    colour, digit = numbers.div(10, rounding_mode="floor"), numbers % 10
    if vectors == "one_hot":
        return torch.cat([torch.eye(colours)[colour], torch.eye(10)[digit]], 1)

    # A colour and a digit have the same vectors in every run, whatever the seed of the data.
    generator = torch.Generator().manual_seed(0)
    word_vectors = torch.randn(10 + len(COLOURS), VECTOR_WIDTH, generator=generator)
    return (word_vectors[digit] + word_vectors[10 + colour]) / 2**0.5


def named_vectors(source: str, names: Sequence[str], optional: Sequence[str] = ()) -> WordVectors:
    """Return the vectors of classes by names such as "red six"; see `class_queries`.

    Args:
        source: "digits:words", or "digits:one_hot:N" for the first N colours.
        names: the classes; another one is a `DataError`.
        optional: names that are left out if they are none of these classes.
    """
    number_of_colours = {f"{DIGITS_PREFIX}words": len(COLOURS)}
    for count in range(2, len(COLOURS) + 1):
        number_of_colours[f"{DIGITS_PREFIX}one_hot:{count}"] = count
    if source not in number_of_colours:
        raise DataError(f"{source}: there are no such word vectors; pass {DIGITS_PREFIX}words")

    colours = number_of_colours[source]
    known = class_names(colours)
    for name in names:
        if name not in known:
            raise DataError(
                f"{source}: it has no vector of {name!r}; write a color and a digit, such as "
                f"'red six' (colors: {', '.join(list(COLOURS)[:colours])})"
            )

    found = (*names, *(name for name in optional if name in known))
    rows = [known.index(name) for name in found]
    kind = source.split(":")[1]
    origin = VectorOrigin(source, hashlib.sha256(source.encode()).hexdigest())
    return WordVectors(found, class_queries(colours, kind)[rows], origin)
