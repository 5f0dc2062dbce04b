"""Text files of word vectors (GloVe, word2vec, fastText), streamed: gigabytes are read, the wanted words are kept."""

import logging
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mldec.errors import DataError
from mldec.files.text import open_binary

log = logging.getLogger("mldec")

_SHOWN = 10  # names in a message


def read_text(path: Path, names: Sequence[str], see: str) -> Tensor:
    """Return the vectors of names from lines of "word number number ...", an optional "count width" line first.

    A name is looked up as it is, with blanks, '_' and '-' between its words, then in lower case. Failing that, a name
    of several words gets the mean of its words' vectors, and the log says so. Of a word with several lines the first
    counts.

    Args:
        path: of the file.
        names: the K names wanted.
        see: where help is.

    Returns:
        float32 [K, D].

    Raises:
        DataError: a name without a vector, a wanted line of another width, or a file that is no such text.
        OSError: the file cannot be read.
    """
    wanted = {
        form.encode()
        for name in names
        for text in [name, *_words(name)]
        for form in _spellings(text)
    }
    found = _scan(path, wanted, see)
    vectors = {name: _look_up(name, found) for name in names}
    by_mean = [name for name, vector in vectors.items() if vector is None and len(_words(name)) > 1]
    for name in by_mean:
        parts = [_look_up(word, found) for word in _words(name)]
        known = [part for part in parts if part is not None]
        vectors[name] = np.mean(known, axis=0) if len(known) == len(parts) else None
    missing = [name for name, vector in vectors.items() if vector is None]
    if missing:
        raise DataError(f"{path}: {lacking(missing, len(names))}; {see}")
    if by_mean:
        log.warning("%s: the mean of their words' vectors serves %s", path, listed(by_mean))
    return torch.from_numpy(np.stack([vector for vector in vectors.values() if vector is not None]))


def lacking(missing: Sequence[str], total: int) -> str:
    """Say which names have no vector."""
    return f"{len(missing):,} of {total:,} names have no vector: {listed(missing)}"


def listed(names: Sequence[str]) -> str:
    """Return up to ten names and the number of the others."""
    rest = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def _words(name: str) -> list[str]:
    return re.split(r"[ _-]+", name.strip())


def _spellings(name: str) -> list[str]:
    forms = [name, *(joint.join(_words(name)) for joint in (" ", "_", "-"))]
    return list(dict.fromkeys([*forms, *map(str.lower, forms)]))


def _look_up(name: str, found: dict[bytes, np.ndarray]) -> np.ndarray | None:
    return next((found[form.encode()] for form in _spellings(name) if form.encode() in found), None)


def _scan(path: Path, wanted: set[bytes], see: str) -> dict[bytes, np.ndarray]:
    """Return the vectors of the wanted words, float32 [D] each; a line is split only if its first word is wanted."""
    firsts = {word.split()[0] for word in wanted if word.split()}
    found: dict[bytes, np.ndarray] = {}
    repeated = []
    with open_binary(path) as file:
        width, blank = _layout(path, file.readline(), file.readline(), see)
        file.seek(0)
        for number, line in enumerate(file, 1):
            if line[: line.find(blank)] not in firsts:
                continue
            word, vector = _parse(line, width, f"{path}, line {number:,}", see)
            if word in found:
                repeated.append(word.decode())
            elif word in wanted:
                found[word] = vector
    if repeated:
        log.warning(
            "%s: the first line counts of the words that have several: %s", path, listed(repeated)
        )
    return found


def _layout(path: Path, first: bytes, second: bytes, see: str) -> tuple[int, bytes]:
    """Return the numbers in a line and what parts them, from the first two lines."""
    header = first.split()
    if len(header) == 2 and all(field.isdigit() for field in header):
        # A width of more digits is no width; Python would refuse to read it.
        first, width = second, int(header[1]) if len(header[1]) < 10 else 0
    else:
        fields = first.split()
        # Numbers counted from the end, because a word may hold blanks; the word itself may be a number.
        width = min(len(list(takewhile(_is_number, reversed(fields)))), len(fields) - 1)
    if width < 1 or b"\0" in first:
        raise DataError(
            f"{path} is not a text file with a word and its numbers in each line; {see}"
        )
    return width, b"\t" if b"\t" in first else b" "


def _parse(line: bytes, width: int, where: str, see: str) -> tuple[bytes, np.ndarray]:
    fields = line.split()
    word, numbers = fields[:-width], fields[-width:]
    # "dog 0.1 ..." with a number too many reads as the word "dog 0.1".
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
