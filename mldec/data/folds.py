"""Folds: divide the training images into N parts, and hold one of them out for validation."""

import re
from dataclasses import dataclass

import numpy as np

from mldec.data.table import path_hash


@dataclass(frozen=True, kw_only=True)
class Folds:
    """The fold of a `data` node, which every reader of image files has.

    Attributes:
        fold: "i/N": the training images are divided into N folds, of which fold i, from 1 to N, is
            the validation split of the run, and the others are trained on. The validation split of
            the data set is not read. None uses both splits as they are.

    Raises:
        ValueError: for another form, or a number out of its range.
    """

    fold: str | None = None

    def __post_init__(self) -> None:
        if self.fold is not None:
            parse_fold(self.fold)

    def held_out(self, keys: np.ndarray) -> np.ndarray:
        """Return which training images the fold holds out, bool [M]; none without a fold.

        Args:
            keys: what identifies each image, [M, ...], see `Storage.keys`.
        """
        if self.fold is None:
            return np.zeros(len(keys), bool)

        number, count = parse_fold(self.fold)
        return fold_numbers(keys, count) == number


# Both splits as they are.
UNDIVIDED = Folds()


def parse_fold(fold: str) -> tuple[int, int]:
    """Return i and N of "i/N".

    Raises:
        ValueError: unless 1 <= i <= N and N is at least 2.
    """
    form = re.fullmatch(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", fold)
    number, count = map(int, form.groups()) if form else (0, 0)
    if not 1 <= number <= count or count < 2:
        raise ValueError(
            f"fold is {fold!r}: it must be i/N, fold i of N from 1 to N, N at least 2, such as 1/5"
        )
    return number, count


def fold_numbers(keys: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Return the fold of each image, int64 [M] from 1 to `count`.

    A hash of its key decides on an image, so that it stays in its fold whatever the order is and
    whichever images are added or removed.

    Args:
        keys: what identifies each image, [M, ...], see `Storage.keys`.
        count: the number of folds.
        seed: of the hash; the images of one fold are spread evenly by another seed.
    """
    is_text = keys.dtype.kind == "S"
    texts = keys.tolist() if is_text else [key.tobytes() for key in keys]

    # The remainder, as the images may be those that `hold_out` left: their hashes have the same
    # seed, and only the highest of them remain.
    remainders = (path_hash(text, seed) % count for text in texts)
    return 1 + np.fromiter(remainders, np.int64, len(texts))
