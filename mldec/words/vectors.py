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

from mldec.errors import CheckpointError, ConfigError, DataError, documented, naming_errors
from mldec.files.text import open_binary, read_json, read_lines
from mldec.files.torch_files import read_torch, sha256_of
from mldec.names import as_name, format_list, names_fault, unknown_class
from mldec.words.encoder import PLACE, ClipSource, encode_names
from mldec.words.types import DIGITS_PREFIX, PREFIX, PROMPT, VectorOrigin, WordVectors

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section Word vectors"
_TORCH_FILES = (".pth", ".pt", ".pickle", ".pkl")


def _look_up(
    path: Path, names: Sequence[str], optional: Sequence[str], order: Sequence[str] | None
) -> dict[str, np.ndarray]:
    """Return the vectors of a file, float32 [D] each, by name. Optional names may be missing."""
    with naming_errors(path, DataError, remedy=_SEE):
        if path.suffix == ".npy" or path.suffix in _TORCH_FILES:
            vectors = _by_name(path, names, optional, order)
        else:
            vectors = _read_text(path, names, optional)

    missing = [name for name in names if name not in vectors]
    if missing:
        raise DataError(
            f"{path}: {len(missing):,} of {len(names):,} names have no vector: "
            f"{format_list(missing)}; {_SEE}"
        )

    # The zero-shot heads and `nearest` normalize vectors, so zeros are not allowed.
    for name, vector in vectors.items():
        if not np.isfinite(vector).all() or not vector.any():
            fault = "is all zeros, or has NaN or infinite numbers"
            raise DataError(f"{path}: the vector of {name!r} {fault}; {_SEE}")
    return vectors


def _by_name(
    path: Path, names: Sequence[str], optional: Sequence[str], order: Sequence[str] | None
) -> dict[str, np.ndarray]:
    """Return the vectors of an array file by name. `order` lists the names of the array."""
    if order is None:
        order = read_lines(path.with_suffix(".txt"))
    if fault := names_fault(order):
        raise DataError(f"the names of {path}: {fault}; {_SEE}")

    if path.suffix == ".npy":
        array: np.ndarray = np.load(path, allow_pickle=False)
    else:
        # Files of SDL, an earlier work of the authors, are a dictionary with one tensor.
        loaded = read_torch(path)
        if isinstance(loaded, dict) and len(loaded) == 1:
            loaded = next(iter(loaded.values()))
        array = loaded.float().numpy()

    # Remove a leading dimension of size 1, as in [1, D, N].
    shape = array.shape
    if array.ndim == 3 and shape[0] == 1:
        array = array[0]

    # The orientation of a square array is ambiguous, which raises an error.
    if array.ndim != 2 or array.shape.count(len(order)) != 1:
        raise DataError(
            f"{path} has shape {list(shape)}, of which exactly one dimension must be that of the "
            f"{len(order):,} names; {_SEE}"
        )
    if array.shape[0] != len(order):
        array = array.T

    row_of = {name: row for row, name in enumerate(order)}
    present = [name for name in chain(names, optional) if name in row_of]
    rows = np.ascontiguousarray(array[[row_of[name] for name in present]], np.float32)
    return dict(zip(present, rows, strict=True))


def _read_text(path: Path, names: Sequence[str], optional: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the vectors of a text file with lines "word number number ..." by name."""
    # The words of a name are needed for the mean.
    all_names = tuple(names) + tuple(optional)
    texts = set(all_names).union(*map(_words, all_names))
    spellings = {text: _spellings(text) for text in texts}
    vector_of_word = _scan(path, set(chain.from_iterable(spellings.values())))

    # Use the first spelling with a vector.
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
        # The mean needs the vectors of all words.
        elif len(words_of_name) > 1 and all(word in vector_of_text for word in words_of_name):
            vectors[name] = np.mean([vector_of_text[word] for word in words_of_name], axis=0)
            means.append(name)

    if wanted_means := [name for name in means if name in set(names)]:
        log.warning(
            "%s: the mean of their words' vectors serves %s", path, format_list(wanted_means)
        )
    return vectors


def _words(name: str) -> list[str]:
    return re.split(r"[ _-]+", name.strip())


def _spellings(name: str) -> list[bytes]:
    """Return the spellings of a name in the order of preference."""
    spellings = [name]
    spellings += [separator.join(_words(name)) for separator in " _-"]
    spellings += [text.lower() for text in spellings]
    # Compare bytes, because some files have words without a valid encoding.
    return [text.encode() for text in spellings]


def _scan(path: Path, wanted: Collection[bytes]) -> dict[bytes, np.ndarray]:
    """Return the vectors of some words, float32 [D] each. The first line of a word counts."""
    # Splitting all fields is slow, so check the first word of each line before.
    first_words = {word.split()[0] for word in wanted if word.split()}

    vectors: dict[bytes, np.ndarray] = {}
    with open_binary(path) as file:
        # Count numbers from the end, because a word may contain spaces. The first field is always
        # the word, even if it is a number.
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


def load_word_vectors(
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

    The first line of a text file may be "count width". A name is looked up unchanged, then with
    spaces, '_' and '-' between its words, then in lower case. A missing name of several words gets
    the mean of their vectors, with a warning. If a word has several lines, the first counts.

    Args:
        source: A text encoder, see `ClipSource.parse`, or "digits:words", the vectors of
            `data=digits_zsl`, or a `.pth` or `.npy` file of an array [N, D], [D, N] or [1, D, N],
            or a text file with lines "word number number ...".
        names: K unique names.
        optional: Names that may be missing in a file.
        order: The N names of an array file. None reads the text file with the same stem.
        templates: Templates of a text encoder.
        cache_dir: Cache folder for the vectors of a text encoder; see `cache_folder`.
        keep: Write the vectors of new names to the cache.

    Returns:
        The word vectors and their origin.

    Raises:
        DataError: If a name is missing or repeated, counts or widths differ, a vector is all
            zeros or not finite, or the file has another format.
    """
    all_names = tuple(names) + tuple(optional)
    if fault := names_fault(all_names):
        raise DataError(f"the class names: {fault}; {_SEE}")

    if source.startswith(PREFIX):
        word_vectors, sha256 = encode_names(source, all_names, templates, cache_dir, keep=keep)
        origin = VectorOrigin(ClipSource.parse(source).anywhere, sha256, tuple(templates))
        return WordVectors(all_names, word_vectors, origin)
    if source.startswith(DIGITS_PREFIX):
        from mldec.words.digits import named_vectors

        return named_vectors(source, names, optional)

    path = Path(source)
    vectors = _look_up(path, names, optional, order)
    word_vectors = torch.from_numpy(np.stack(list(vectors.values())))
    return WordVectors(tuple(vectors), word_vectors, VectorOrigin(path.name, sha256_of(path)))


def described(
    vectors: WordVectors, source: str, path: Path, *, cache_dir: str | None = None
) -> WordVectors:
    """Replace the word vectors of classes by the vectors of class descriptions.

    The vector of a class is the normalized mean of the normalized vectors of its sentences.
    Classes without sentences keep their vectors.

    Args:
        vectors: Word vectors of the classes.
        source: The text encoder.
        path: JSON file of sentences by class name: {"zebra": ["a striped horse"]}.
        cache_dir: Cache folder; see `cache_folder`.

    Returns:
        The new word vectors.

    Raises:
        DataError: If the file has another content, or describes no class.
    """
    content = read_json(path)
    sentences_of = content if isinstance(content, dict) else {}
    for name, sentences in sentences_of.items():
        is_list = isinstance(sentences, list) and len(sentences) > 0
        if not is_list or not all(isinstance(text, str) and text.strip() for text in sentences):
            raise DataError(f"{path}: {name!r} has no list of sentences; {_SEE}")
    rows = [row for row, name in enumerate(vectors.names) if name in sentences_of]
    if not rows:
        raise DataError(f"{path} describes no class of the data, by name -> sentences; {_SEE}")
    if missing := [name for name in vectors.names if name not in sentences_of]:
        log.info(f"{path} describes {len(rows):,} classes; prompts serve {format_list(missing)}")

    sentences = [text for row in rows for text in sentences_of[vectors.names[row]]]
    known = list(dict.fromkeys(sentences))
    encoded, _ = encode_names(source, known, (PLACE,), cache_dir)
    vector_of = dict(zip(known, encoded, strict=True))
    word_vectors = vectors.word_vectors.clone()
    for row in rows:
        own = torch.stack([vector_of[text] for text in sentences_of[vectors.names[row]]])
        word_vectors[row] = normalize(own.mean(0), dim=0)

    origin = replace(vectors.origin, descriptions=f"{path.name} (sha256 {sha256_of(path)})")
    return vectors._replace(word_vectors=word_vectors, origin=origin)


def made_alike(
    names: Sequence[str], origin: VectorOrigin, *, where: str, remedy: str, keep: bool = True
) -> WordVectors:
    """Compute the word vectors of other names with the source of a checkpoint's vectors.

    Args:
        names: The names.
        origin: Origin of the checkpoint's vectors.
        where: Beginning of error messages.
        remedy: End of error messages: how to provide the weights of the encoder.
        keep: Write the vectors of new names to the cache.

    Returns:
        The word vectors.

    Raises:
        ConfigError: If the encoder is not available.
        CheckpointError: If the encoder has other weights now.
    """
    maker = f"{where}: the checkpoint makes word vectors by {origin.described()}"
    try:
        made = load_word_vectors(origin.source, names, templates=origin.templates, keep=keep)
    except ConfigError as error:
        raise ConfigError(f"{maker}, which cannot be had here: {error}; or {remedy}") from error

    if made.origin.sha256 != origin.sha256:
        now = f"the weights there now have the sha256 {made.origin.sha256[:12]}"
        raise CheckpointError(f"{maker}, and {now}; {remedy}")
    return made


@dataclass(frozen=True)
class ClassList:
    """Classes and their names. The first name is used in the data set, the others are synonyms."""

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
        """The class index of each of `names`, in ascending order."""
        indices: list[int] = []
        for index, names in enumerate(self.classes):
            indices += [index] * len(names)
        return indices

    def columns(self, known: Sequence[str]) -> list[int]:
        """Return the index of each class among the classes of a data set.

        Args:
            known: Class names of the data set.

        Returns:
            One index per class.

        Raises:
            DataError: If a class is not in the data set.
        """
        column_of = {name: column for column, name in enumerate(known)}
        columns = []
        for names in self.classes:
            if names[0] not in column_of:
                raise unknown_class(names[0], known, str(self.path))
            columns.append(column_of[names[0]])
        return columns


@documented("docs/zero_shot.md, section Any class list")
def read_class_list(path: Path) -> ClassList:
    """Read a class list.

    Each line has the class name of the data set and its synonyms, separated by semicolons. Names
    are compared ignoring case.

    Raises:
        DataError: If the file cannot be read, or a name is repeated or not valid.
    """
    classes: list[tuple[str, ...]] = []
    class_of: dict[str, str] = {}  # case-folded name -> its class
    for line in read_lines(path):
        names = tuple(name.strip() for name in line.split(";"))
        for name in names:
            as_name(name, path)
            if other := class_of.get(name.casefold()):
                raise DataError(
                    f"{path}: the name '{name}' is there twice, for '{other}' and for "
                    f"'{names[0]}'; leave one out"
                )
            class_of[name.casefold()] = names[0]
        classes.append(names)

    return ClassList(path, tuple(classes))
