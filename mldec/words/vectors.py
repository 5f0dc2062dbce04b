"""Word vectors of class names: text files, arrays, encoders, and lists of names."""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import normalize

from mldec.errors import CheckpointError, ConfigError, DataError, documented, log, naming_errors
from mldec.files.text import open_binary, read_json, read_lines
from mldec.files.torch_files import read_torch, sha256_of
from mldec.names import check_names, format_list, indices_of, names_fault
from mldec.words.encoder import PLACE, ClipSource, encode_names
from mldec.words.types import DIGITS_PREFIX, PREFIX, PROMPT, VectorOrigin, WordVectors

_SEE = "see DATASETS.md, section Word vectors"
_ARRAY_FILES = (".npy", ".pth", ".pt", ".pickle", ".pkl")


def _by_name(
    path: Path, names: Sequence[str], optional: Sequence[str], order: Sequence[str] | None
) -> dict[str, np.ndarray]:
    """Return the vectors of an array file by name. `order` lists the names of the array."""
    if order is None:
        order = read_lines(path.with_suffix(".txt"))
    fault = names_fault(order)
    if fault:
        raise DataError(f"{path}: {fault}; {_SEE}")

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
            f"{path}: exactly one dimension of {list(shape)} must be the number of names, "
            f"{len(order):,}; {_SEE}"
        )
    if array.shape[0] != len(order):
        array = array.T

    row_of = indices_of(order)
    vectors = {}
    for name in chain(names, optional):
        if name in row_of:
            vectors[name] = np.ascontiguousarray(array[row_of[name]], np.float32)
    return vectors


def _read_text(path: Path, names: Sequence[str], optional: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the vectors of a text file with lines "word number number ..." by name."""
    all_names = tuple(names) + tuple(optional)
    texts = set(all_names).union(*map(_words, all_names))
    spellings: dict[str, list[bytes]] = {}
    for text in texts:
        words = _words(text)
        forms = [text, " ".join(words), "_".join(words), "-".join(words)]
        # Compare bytes, because some files have words without a valid encoding.
        spellings[text] = [form.encode() for form in forms + [form.lower() for form in forms]]
    vector_of_word = _scan(path, set(chain.from_iterable(spellings.values())))

    vector_of_text: dict[str, np.ndarray] = {}
    for text, encoded in spellings.items():
        for word in encoded:
            if word in vector_of_word:
                vector_of_text.setdefault(text, vector_of_word[word])

    vectors: dict[str, np.ndarray] = {}
    means = []
    for name in all_names:
        words_of_name = _words(name)
        if name in vector_of_text:
            vectors[name] = vector_of_text[name]
        elif len(words_of_name) > 1 and vector_of_text.keys() >= set(words_of_name):
            vectors[name] = np.mean([vector_of_text[word] for word in words_of_name], axis=0)
            if name in names:
                means.append(name)

    if means:
        log.warning(f"{path}: names with the mean vector of their words: {format_list(means)}")
    return vectors


def _words(name: str) -> list[str]:
    return re.split(r"[ _-]+", name.strip())


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
            raise ValueError("expected a word and its numbers in each line")

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

    `source` is one of these: a text encoder, see `ClipSource.parse`; "digits:words", the vectors of
    `data=digits_zsl`; a `.pth` or `.npy` file of an array [N, D], [D, N] or [1, D, N]; a text file
    with lines "word number number ...". Names in `optional` may be missing in a file. `order` has
    the N names of an array file. None reads the text file with the same stem. For the other
    arguments see `encode_names`.

    Raises:
        DataError: If a name is missing or repeated, counts or widths differ, a vector is all
            zeros or not finite, or the file has another format.
    """
    all_names = tuple(names) + tuple(optional)
    fault = names_fault(all_names)
    if fault:
        raise DataError(f"{source}: {fault}; {_SEE}")

    if source.startswith(PREFIX):
        word_vectors, sha256 = encode_names(source, all_names, templates, cache_dir, keep=keep)
        origin = VectorOrigin(ClipSource.parse(source).absolute, sha256, tuple(templates))
        return WordVectors(all_names, word_vectors, origin)
    if source.startswith(DIGITS_PREFIX):
        from mldec.words.digits import named_vectors

        return named_vectors(source, names, optional)

    path = Path(source)
    with naming_errors(path, DataError, remedy=_SEE):
        if path.suffix in _ARRAY_FILES:
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
            raise DataError(f"{path}: the vector of {name!r} is zero or not finite; {_SEE}")
    word_vectors = torch.from_numpy(np.stack(list(vectors.values())))
    return WordVectors(tuple(vectors), word_vectors, VectorOrigin(path.name, sha256_of(path)))


def with_descriptions(
    vectors: WordVectors, source: str, path: Path, *, cache_dir: str | None = None
) -> WordVectors:
    """Replace the word vectors of classes by the vectors of class descriptions.

    The vector of a class is the normalized mean of the normalized vectors of its sentences.
    Classes without sentences keep their vectors.

    `source` is the text encoder. `path` is a JSON file of sentences by class name, such as
    {"zebra": ["a striped horse"]}.
    """
    content = read_json(path)
    sentences_of = content if isinstance(content, dict) else {}
    for name, sentences in sentences_of.items():
        is_list = isinstance(sentences, list) and len(sentences) > 0
        if not is_list or not all(isinstance(text, str) and text.strip() for text in sentences):
            raise DataError(f"{path}: {name!r} requires a list of sentences; {_SEE}")
    described = {}
    missing = []
    for row, name in enumerate(vectors.names):
        if name in sentences_of:
            described[row] = sentences_of[name]
        else:
            missing.append(name)
    if not described:
        raise DataError(f"{path}: it describes no class of the data; {_SEE}")
    if missing:
        log.info(f"{path}: {len(missing):,} classes without description: {format_list(missing)}")

    unique = list(dict.fromkeys(chain.from_iterable(described.values())))
    encoded, _ = encode_names(source, unique, (PLACE,), cache_dir)
    vector_of = dict(zip(unique, encoded, strict=True))
    word_vectors = vectors.word_vectors.clone()
    for row, sentences in described.items():
        own = torch.stack([vector_of[text] for text in sentences])
        word_vectors[row] = normalize(own.mean(0), dim=0)

    origin = replace(vectors.origin, descriptions=f"{path.name} (sha256 {sha256_of(path)})")
    return vectors._replace(word_vectors=word_vectors, origin=origin)


def encode_like_training(
    names: Sequence[str], origin: VectorOrigin, *, where: str, remedy: str, keep: bool = True
) -> WordVectors:
    """Compute the word vectors of other names with the text encoder of a checkpoint.

    `where` and `remedy` are the beginning and the end of error messages. `keep` writes the vectors
    of new names to the cache. Raises CheckpointError if the encoder has other weights now.
    """
    try:
        vectors = load_word_vectors(origin.source, names, templates=origin.templates, keep=keep)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}; or {remedy}") from error

    if vectors.origin.sha256 != origin.sha256:
        raise CheckpointError(
            f"{where}: the text encoder has changed since the training, it was "
            f"{origin.described()}; {remedy}"
        )
    return vectors


@documented("docs/zero_shot.md, section Any class list")
def read_class_list(path: Path) -> list[tuple[str, ...]]:
    """Read the names of each class from a class list.

    Each line has the class name of the data set and its synonyms, separated by semicolons. A name
    may occur only once, ignoring case.
    """
    classes = []
    known: list[str] = []
    for line in read_lines(path):
        names = tuple(name.strip() for name in line.split(";"))
        classes.append(names)
        known += names
    check_names(known, path)
    return classes
