"""Text files of word vectors (GloVe, word2vec, fastText).

They may have gigabytes: they are read line by line, and only the vectors of the wanted words are
kept.
"""

import logging
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np

from mldec.errors import DataError
from mldec.files.text import open_binary

log = logging.getLogger("mldec")

_SHOWN = 10  # names in a message


def read_text(
    path: Path, names: Sequence[str], see: str, *, optional: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Return the vectors of names from lines of "word number number ...".

    The first line may be "count width" instead. A name is looked up as it is, then with blanks, '_'
    and '-' between its words, then in lower case. If it is not in the file, a name of several words
    gets the mean of their vectors, with a warning. If a word has several lines, the first counts.

    Args:
        path: of the file.
        names: the K wanted names.
        see: pointer to the documentation, for messages.
        optional: further names, which may have no vector.

    Returns:
        float32 [D] by name: the K, and those of the optional ones that have a vector.

    Raises:
        DataError: if one of the K has no vector, a wanted line has another width, or the file has
            another format.
        OSError: if the file cannot be read.
    """
    # The single words of a name are needed for the mean.
    wanted: set[bytes] = set()
    for name in (*names, *optional):
        for text in (name, *_words(name)):
            wanted.update(spelling.encode() for spelling in _spellings(text))

    word_vectors = _scan(path, wanted, see)
    vectors: dict[str, np.ndarray] = {}
    by_mean = set()
    for name in (*names, *optional):
        vector = _look_up(name, word_vectors)
        if vector is None and len(_words(name)) > 1:
            vector = _mean(name, word_vectors)
            by_mean.add(name)
        if vector is not None:
            vectors[name] = vector

    missing = [name for name in names if name not in vectors]
    if missing:
        raise DataError(f"{path}: {lacking(missing, len(names))}; {see}")
    if means := [name for name in names if name in by_mean]:
        log.warning("%s: the mean of their words' vectors serves %s", path, listed(means))
    return vectors


def lacking(missing: Sequence[str], total: int) -> str:
    """Return the message that some of the names have no vector."""
    return f"{len(missing):,} of {total:,} names have no vector: {listed(missing)}"


def listed(names: Sequence[str]) -> str:
    """Return up to ten names and the number of the others, for a message."""
    shown = ", ".join(names[:_SHOWN])
    if len(names) <= _SHOWN:
        return shown

    return f"{shown} and {len(names) - _SHOWN:,} more"


def _words(name: str) -> list[str]:
    return re.split(r"[ _-]+", name.strip())


def _spellings(name: str) -> list[str]:
    """Return the spellings under which a name is looked up, in the order of preference."""
    spellings = [name]
    for separator in (" ", "_", "-"):
        spellings.append(separator.join(_words(name)))
    spellings += [spelling.lower() for spelling in spellings]

    return list(dict.fromkeys(spellings))  # without repetitions


def _look_up(name: str, word_vectors: dict[bytes, np.ndarray]) -> np.ndarray | None:
    for spelling in _spellings(name):
        vector = word_vectors.get(spelling.encode())
        if vector is not None:
            return vector
    return None


def _mean(name: str, word_vectors: dict[bytes, np.ndarray]) -> np.ndarray | None:
    """Return the mean over the words of a name; None if one of them has no vector."""
    # Otherwise the mean would stand for another name.
    parts = [_look_up(word, word_vectors) for word in _words(name)]
    known_parts = [part for part in parts if part is not None]
    return np.mean(known_parts, axis=0) if len(known_parts) == len(parts) else None


def _scan(path: Path, wanted: set[bytes], see: str) -> dict[bytes, np.ndarray]:
    """Return the vectors of the wanted words, float32 [D] each."""
    # Splitting a line is slow, and millions of them are not wanted: only those whose first word
    # begins a wanted word are split.
    first_words = {word.split()[0] for word in wanted if word.split()}

    vectors: dict[bytes, np.ndarray] = {}
    repeated = []
    with open_binary(path) as file:
        width, blank = _layout(path, file.readline(), file.readline(), see)
        file.seek(0)

        for number, line in enumerate(file, 1):
            if line[: line.find(blank)] not in first_words:
                continue

            word, vector = _parse(line, width, f"{path}, line {number:,}", see)
            if word in vectors:
                repeated.append(word.decode())
            elif word in wanted:
                vectors[word] = vector

    if repeated:
        log.warning(
            "%s: the first line counts of the words that have several: %s", path, listed(repeated)
        )
    return vectors


def _layout(path: Path, first: bytes, second: bytes, see: str) -> tuple[int, bytes]:
    """Return the count of numbers per line and their separator, from the first two lines."""
    header = first.split()
    if len(header) == 2 and all(field.isdigit() for field in header):
        # More digits are no width, and Python would refuse to convert thousands of them.
        first = second
        width = int(header[1]) if len(header[1]) < 10 else 0

    else:
        # Count the numbers from the end, because a word may contain blanks. The first field is
        # always the word, even if it is a number.
        fields = first.split()
        numbers = list(takewhile(_is_number, reversed(fields)))
        width = min(len(numbers), len(fields) - 1)

    # A null byte is a sign of a binary file.
    if width < 1 or b"\0" in first:
        raise DataError(
            f"{path} is not a text file with a word and its numbers in each line; {see}"
        )
    return width, b"\t" if b"\t" in first else b" "


def _parse(line: bytes, width: int, where: str, see: str) -> tuple[bytes, np.ndarray]:
    """Return the word and the vector of a line."""
    fields = line.split()
    word, numbers = fields[:-width], fields[-width:]

    # With one number too many, "dog 0.1 ..." would be read as the word "dog 0.1".
    if not word or any(b"." in part and _is_number(part) for part in word[1:]):
        count = len(fields) - 1
        raise DataError(f"{where}: {count} numbers where the file has {width} in a line; {see}")

    try:
        return b" ".join(word), np.array(numbers).astype(np.float32)
    except ValueError as error:
        raise DataError(f"{where}: {error}; {see}") from error


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True
