"""Word vectors of class names: text files, arrays, encoders, and lists of names."""

import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import normalize

from mldec.errors import CheckpointError, ConfigError, DataError, refusing
from mldec.files.text import open_binary, read_json, read_lines
from mldec.files.torch_files import read_torch, sha256_of
from mldec.names import as_name, listed, names_fault, unknown_class
from mldec.words.encoder import PLACE, ClipSource, encode_names
from mldec.words.types import DIGITS_PREFIX, PREFIX, PROMPT, VectorOrigin, WordVectors

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section Word vectors"
_SEE_LISTS = "see docs/zero_shot.md, section Any class list"
_TORCH_FILES = (".pth", ".pt", ".pickle", ".pkl")


def _look_up(
    path: Path, names: Sequence[str], optional: Sequence[str], order: Sequence[str] | None
) -> dict[str, np.ndarray]:
    """Return the word vectors, float32 [D] each, of the names and of the optional ones it has."""
    with refusing(path, DataError, remedy=_SEE):
        if path.suffix in (*_TORCH_FILES, ".npy"):
            vectors = _by_name(path, names, optional, order)
        else:
            vectors = _read_text(path, names, optional)

    missing = [name for name in names if name not in vectors]
    if missing:
        raise DataError(
            f"{path}: {len(missing):,} of {len(names):,} names have no vector: {listed(missing)}; "
            f"{_SEE}"
        )

    # A vector of zeros cannot be scaled to length 1, as the zero-shot heads and `nearest` do.
    for name, vector in vectors.items():
        if not np.isfinite(vector).all() or not vector.any():
            fault = "is all zeros, or has NaN or infinite numbers"
            raise DataError(f"{path}: the vector of {name!r} {fault}; {_SEE}")
    return vectors


def _by_name(
    path: Path, names: Sequence[str], optional: Sequence[str], order: Sequence[str] | None
) -> dict[str, np.ndarray]:
    """Return the vectors of the names that an array file has; its own names are `order`."""
    order = read_lines(path.with_suffix(".txt"), _SEE) if order is None else order
    if fault := names_fault(order):
        raise DataError(f"the names of {path}: {fault}; {_SEE}")

    if path.suffix == ".npy":
        array: np.ndarray = np.load(path, allow_pickle=False)
    else:
        # SDL, the earlier work of the authors, wraps the tensor in a dictionary.
        loaded = read_torch(path)
        if isinstance(loaded, dict) and len(loaded) == 1:
            loaded = next(iter(loaded.values()))
        array = loaded.float().numpy()

    # An array file may have a leading dimension of size 1, as [1, D, N].
    shape = array.shape
    if array.ndim == 3 and shape[0] == 1:
        array = array[0]

    # A square array fits both ways, and a wrong guess would train on the wrong vectors.
    if array.ndim != 2 or array.shape.count(len(order)) != 1:
        raise DataError(
            f"{path} has shape {list(shape)}, of which exactly one dimension must be that of the "
            f"{len(order):,} names; {_SEE}"
        )
    if array.shape[0] != len(order):
        array = array.T

    row_of = {name: row for row, name in enumerate(order)}
    present = [name for name in (*names, *optional) if name in row_of]
    rows = np.ascontiguousarray(array[[row_of[name] for name in present]], np.float32)
    return dict(zip(present, rows, strict=True))


def _read_text(path: Path, names: Sequence[str], optional: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the vectors of the names that have one in lines of "word number number ..."."""
    # The single words of a name are needed for the mean.
    all_names = (*names, *optional)
    texts = set(all_names).union(*map(_words, all_names))
    spellings = {text: _spellings(text) for text in texts}
    vector_of_word = _scan(path, set(chain.from_iterable(spellings.values())))

    # Each text has the vector of its first spelling that has one.
    vector_of_text = {}
    for text, words in spellings.items():
        present = [word for word in words if word in vector_of_word]
        if present:
            vector_of_text[text] = vector_of_word[present[0]]

    vectors: dict[str, np.ndarray] = {}
    means = []
    for name in all_names:
        words_of_name = _words(name)
        if name in vector_of_text:
            vectors[name] = vector_of_text[name]
        # With a word missing, the mean would stand for another name.
        elif len(words_of_name) > 1 and all(word in vector_of_text for word in words_of_name):
            vectors[name] = np.mean([vector_of_text[word] for word in words_of_name], axis=0)
            means.append(name)

    if wanted_means := [name for name in means if name in set(names)]:
        log.warning("%s: the mean of their words' vectors serves %s", path, listed(wanted_means))
    return vectors


def _words(name: str) -> list[str]:
    return re.split(r"[ _-]+", name.strip())


def _spellings(name: str) -> list[bytes]:
    """Return the spellings under which a name is looked up, in the order of preference."""
    spellings = [name, *(separator.join(_words(name)) for separator in " _-")]
    # Bytes are compared, as some files have words in no encoding.
    return [text.encode() for text in (*spellings, *map(str.lower, spellings))]


def _scan(path: Path, wanted: Collection[bytes]) -> dict[bytes, np.ndarray]:
    """Return the vectors of the wanted words, float32 [D] each; the first line of a word counts."""
    # Splitting a line is slow, and millions of them are not wanted.
    first_words = {word.split()[0] for word in wanted if word.split()}

    vectors: dict[bytes, np.ndarray] = {}
    with open_binary(path) as file:
        # Count the numbers from the end, because a word may contain blanks. The first field is
        # always the word, even if it is a number.
        header = file.readline().split()
        if len(header) == 2 and all(field.isdigit() for field in header):
            width = int(header[1])
        else:
            numbers = list(takewhile(_is_number, reversed(header)))
            width = min(len(numbers), len(header) - 1)
        if width < 1:
            raise ValueError("it is not a text file with a word and its numbers in each line")

        file.seek(0)
        for line in file:
            first_word = line.split(None, 1)[:1]
            if not first_word or first_word[0] not in first_words:
                continue

            fields = line.split()
            word = b" ".join(fields[:-width])
            if word in wanted and word not in vectors:
                vectors[word] = np.array(fields[-width:]).astype(np.float32)
    return vectors


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def word_vectors(
    source: str,
    names: Sequence[str],
    *,
    optional: Sequence[str] = (),
    order: Sequence[str] | None = None,
    templates: Sequence[str] = (PROMPT,),
    cache_dir: str | None = None,
    keep: bool = True,
) -> WordVectors:
    """Return the word vectors of names from a file or a text encoder.

    In a text file the first line may be "count width". A name is looked up as it is, then with
    blanks, '_' and '-' between its words, then in lower case. If it is not in the file, a name of
    several words gets the mean of their vectors, with a warning. If a word has several lines, the
    first counts.

    Args:
        source: a text encoder, see `ClipSource.parse`; "digits:words", the vectors of
            `data=digits_zsl`; a `.pth` or `.npy` file of an array [N, D],
            [D, N] or [1, D, N]; or a text file with "word number number ..." in each line.
        names: the K wanted names, each once.
        optional: names that need not have a vector in a file.
        order: the N names of an array file; None: the lines of the text file beside it.
        templates: into which a text encoder fills the names.
        cache_dir: folder for the vectors of a text encoder; see `cache_folder`.
        keep: write the vectors of new names to that folder.

    Raises:
        DataError: if a name is missing or listed twice, counts or widths differ, a vector is all
            zeros or has NaN or infinite numbers, or the file has another format.
    """
    all_names = (*names, *optional)
    if fault := names_fault(all_names):
        raise DataError(f"the class names: {fault}; {_SEE}")

    if source.startswith(PREFIX):
        queries, sha256 = encode_names(source, all_names, templates, cache_dir, keep=keep)
        origin = VectorOrigin(ClipSource.parse(source).anywhere, sha256, tuple(templates))
        return WordVectors(all_names, queries, origin)
    if source.startswith(DIGITS_PREFIX):
        from mldec.words.digits import named_vectors

        return named_vectors(source, names, optional)

    path = Path(source)
    vectors = _look_up(path, names, optional, order)
    queries = torch.from_numpy(np.stack(list(vectors.values())))
    return WordVectors(tuple(vectors), queries, VectorOrigin(path.name, sha256_of(path)))


def described(
    vectors: WordVectors, source: str, path: Path, *, cache_dir: str | None = None
) -> WordVectors:
    """Replace the word vectors of classes by those of sentences about them.

    The file is JSON, a list of sentences by the name of the class: {"zebra": ["a striped horse"]}.
    The vector of a class is the mean over its sentences, each of length 1, made of length 1 again.
    Classes that it does not describe keep theirs. Raises a `DataError` for another content.
    """
    content = read_json(path, _SEE)
    sentences_of = content if isinstance(content, dict) else {}
    for name, sentences in sentences_of.items():
        is_list = isinstance(sentences, list) and len(sentences) > 0
        if not is_list or not all(isinstance(text, str) and text.strip() for text in sentences):
            raise DataError(f"{path}: {name!r} has no list of sentences; {_SEE}")
    rows = [row for row, name in enumerate(vectors.names) if name in sentences_of]
    if not rows:
        raise DataError(f"{path} describes no class of the data, by name -> sentences; {_SEE}")
    if missing := [name for name in vectors.names if name not in sentences_of]:
        log.info(f"{path} describes {len(rows):,} classes; prompts serve {listed(missing)}")

    sentences = [text for row in rows for text in sentences_of[vectors.names[row]]]
    known = list(dict.fromkeys(sentences))
    encoded, _ = encode_names(source, known, (PLACE,), cache_dir)
    vector_of = dict(zip(known, encoded, strict=True))
    queries = vectors.queries.clone()
    for row in rows:
        own = torch.stack([vector_of[text] for text in sentences_of[vectors.names[row]]])
        queries[row] = normalize(own.mean(0), dim=0)

    origin = replace(vectors.origin, descriptions=f"{path.name} (sha256 {sha256_of(path)})")
    return vectors._replace(queries=queries, origin=origin)


def made_alike(
    names: Sequence[str], origin: VectorOrigin, *, where: str, remedy: str, keep: bool = True
) -> WordVectors:
    """Make the word vectors of other names as those of a checkpoint were made, without a file.

    Messages begin with `where` and end with `remedy`: how to give the weights of the encoder.
    Raises a `ConfigError` if it cannot be had, and a `CheckpointError` if it has other weights now.
    """
    maker = f"{where}: the checkpoint makes word vectors by {origin.described()}"
    try:
        made = word_vectors(origin.source, names, templates=origin.templates, keep=keep)
    except ConfigError as error:
        raise ConfigError(f"{maker}, which cannot be had here: {error}; or {remedy}") from error

    if made.origin.sha256 != origin.sha256:
        now = f"the weights there now have the sha256 {made.origin.sha256[:12]}"
        raise CheckpointError(f"{maker}, and {now}; {remedy}")
    return made


@dataclass(frozen=True)
class ClassList:
    """Classes and their names; the first of a class is that of the data set, then synonyms."""

    path: Path
    classes: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, class by class."""
        return tuple(chain.from_iterable(self.classes))

    @property
    def class_of_name(self) -> list[int]:
        """For each of `names` the index of its class, ascending."""
        indices: list[int] = []
        for index, names in enumerate(self.classes):
            indices += [index] * len(names)
        return indices

    def columns(self, known: Sequence[str]) -> list[int]:
        """Return the index of each class among the classes of a data set."""
        column_of = {name: column for column, name in enumerate(known)}
        for own_name, *_ in self.classes:
            if own_name not in column_of:
                raise unknown_class(own_name, known, str(self.path), _SEE_LISTS)
        return [column_of[own_name] for own_name, *_ in self.classes]


def read_class_list(path: Path) -> ClassList:
    """Read a class list: a class per line, its name in the data and synonyms, split by semicolons.

    Upper and lower case make no different names.
    """
    classes: list[tuple[str, ...]] = []
    class_of: dict[str, str] = {}  # folded name -> the class in whose line it was
    for line in read_lines(path, _SEE_LISTS):
        names = tuple(name.strip() for name in line.split(";"))
        for name in names:
            as_name(name, path, _SEE_LISTS)
            if other := class_of.get(name.casefold()):
                raise DataError(
                    f"{path}: the name '{name}' is there twice, for '{other}' and for "
                    f"'{names[0]}'; leave one out, {_SEE_LISTS}"
                )
            class_of[name.casefold()] = names[0]
        classes.append(names)

    return ClassList(path, tuple(classes))
