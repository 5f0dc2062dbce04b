"""Word vectors of class names: text files, arrays, encoders, and lists of names."""

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mldec.data.table import as_name, names_fault, unknown_class
from mldec.data.text_encoder import DEFAULT, PREFIX, ClipSource, encode_names, read_templates
from mldec.data.types import VectorOrigin
from mldec.errors import CheckpointError, ConfigError, DataError, refusing
from mldec.files.text import open_binary, read_lines
from mldec.files.torch_files import read_torch, sha256_of

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section Word vectors"
_SHOWN = 10  # names in a message
_TORCH_FILES = (".pth", ".pt", ".pickle", ".pkl")


def read_vectors(
    path: str | Path, names: Sequence[str], *, order: Sequence[str] | None = None
) -> Tensor:
    """Return the word vectors of some names from a file.

    In a text file the first line may be "count width". A name is looked up as it is, then with
    blanks, '_' and '-' between its words, then in lower case. If it is not in the file, a name of
    several words gets the mean of their vectors, with a warning. If a word has several lines, the
    first counts.

    Args:
        path: a `.pth` or `.npy` file of an array [N, D], [D, N] or [1, D, N], where the dimension
            of size N is that of the names; or a text file with "word number number ..." in each
            line.
        names: the K wanted names, each once.
        order: the N names of an array file; None: the lines of the text file beside it
            (`vectors.txt` for `vectors.npy`). No effect on other files.

    Returns:
        float32 [K, D]; row i belongs to names[i].

    Raises:
        DataError: if a name is missing or listed twice, counts or widths differ, a vector is all
            zeros or has NaN or infinite numbers, or the file has another format. Nothing in a file
            is executed.
    """
    return word_vectors(str(path), names, order=order).queries


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
        raise DataError(f"{path}: {lacking(missing, len(names))}; {_SEE}")

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
    if order is None:
        order = read_lines(path.with_suffix(".txt"), _SEE)
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
    if array.ndim != 2 or (array.shape[0] == len(order)) == (array.shape[1] == len(order)):
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
    # Bytes are compared, as some files have words in no encoding. The single words of a name are
    # needed for the mean.
    spellings: dict[str, list[bytes]] = {}
    for name in (*names, *optional):
        for text in (name, *_words(name)):
            spellings[text] = [spelling.encode() for spelling in _spellings(text)]
    vector_of_word = _scan(path, {word for words in spellings.values() for word in words})

    vectors: dict[str, np.ndarray] = {}
    by_mean = []
    for name in (*names, *optional):
        # Each text has the vector of its first spelling that has one.
        parts = []
        for text in (name, *_words(name)):
            of_text = [vector_of_word[word] for word in spellings[text] if word in vector_of_word]
            parts.append(of_text[0] if of_text else None)

        # With a word missing, the mean would stand for another name.
        whole, *of_words = parts
        known_words = [vector for vector in of_words if vector is not None]
        if whole is not None:
            vectors[name] = whole
        elif len(known_words) == len(of_words) > 1:
            vectors[name] = np.mean(known_words, axis=0)
            by_mean.append(name)

    if means := [name for name in by_mean if name in set(names)]:
        log.warning("%s: the mean of their words' vectors serves %s", path, listed(means))
    return vectors


def _words(name: str) -> list[str]:
    return re.split(r"[ _-]+", name.strip())


def _spellings(name: str) -> list[str]:
    """Return the spellings under which a name is looked up, in the order of preference."""
    spellings = [name, *(separator.join(_words(name)) for separator in " _-")]
    return [*spellings, *(spelling.lower() for spelling in spellings)]


def _scan(path: Path, wanted: Collection[bytes]) -> dict[bytes, np.ndarray]:
    """Return the vectors of the wanted words, float32 [D] each; the first line of a word counts."""
    # Splitting a line is slow, and millions of them are not wanted.
    first_words = {word.split()[0] for word in wanted if word.split()}

    vectors: dict[bytes, np.ndarray] = {}
    with open_binary(path) as file:
        # Count the numbers from the end, because a word may contain blanks. The first field is
        # always the word, even if it is a number.
        header, fields = file.readline().split(), file.readline().split()
        if len(header) == 2 and all(field.isdigit() for field in header):
            width = int(header[1])
        else:
            fields = header
            width = min(len(list(takewhile(_is_number, reversed(fields)))), len(fields) - 1)
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


def lacking(missing: Sequence[str], total: int) -> str:
    """Return the message that some of the names have no vector."""
    return f"{len(missing):,} of {total:,} names have no vector: {listed(missing)}"


def listed(names: Sequence[str]) -> str:
    """Return up to ten names and the number of the others, for a message."""
    shown = ", ".join(names[:_SHOWN])
    if len(names) <= _SHOWN:
        return shown
    return f"{shown} and {len(names) - _SHOWN:,} more"


def nearest(
    names: Sequence[str], vectors: Tensor, seen: Iterable[int], k: int = 3
) -> dict[str, list[tuple[str, float]]]:
    """Return the k seen classes nearest to each unseen class, to be inspected before training.

    `vectors` [N, D] are of all N classes, and `seen` the indices of the seen ones. An unseen class
    is mapped to the names of seen classes and their cosines, the nearest first.
    """
    seen_indices = sorted(set(seen))
    unseen_indices = sorted(set(range(len(names))) - set(seen_indices))

    unit = torch.nn.functional.normalize(vectors.float(), dim=1)
    similarity = unit[unseen_indices] @ unit[seen_indices].T  # [unseen, seen]
    cosines, columns = similarity.topk(min(k, len(seen_indices)), dim=1)

    neighbours = {}
    for row, index in enumerate(unseen_indices):
        near = [names[seen_indices[column]] for column in columns[row].tolist()]
        neighbours[names[index]] = list(zip(near, cosines[row].tolist(), strict=True))
    return neighbours


def twins(seen: Collection[str], unseen: Collection[str]) -> list[tuple[str, str]]:
    """Return the pairs (unseen, seen) of which one name is the regular plural of the other.

    Such an unseen class is not new to the model: 30 of the 81 unseen classes of NUS-WIDE.
    """
    pairs = set()
    for singulars, plurals in ((unseen, set(seen)), (seen, set(unseen))):
        for name in singulars:
            for plural in {name + "s", name + "es", re.sub("y$", "ies", name)} & plurals - {name}:
                pairs.add((name, plural) if singulars is unseen else (plural, name))
    return sorted(pairs)


class WordVectors(NamedTuple):
    """Word vectors of K names."""

    # Those asked for, and then the optional ones that have a vector.
    names: tuple[str, ...]

    # float32 [K, D]; row i belongs to names[i].
    queries: Tensor

    # How they were made.
    origin: VectorOrigin


@dataclass(frozen=True, kw_only=True)
class VectorSettings:
    """The settings of a zero-shot `data` node that say where its word vectors come from.

    Attributes:
        vectors: a file in `root` (or elsewhere, by an absolute path), see `vectors.read_vectors`;
            or a text encoder of open_clip: "clip:MODEL:WEIGHTS", or "clip:FOLDER" without network,
            see `mldec.data.text_encoder.ClipSource.parse`. None: the classes have no word vectors.
        prompts: of a text encoder: a sentence with {} for the name; "clip80" or "simple7", lists of
            CLIP; or a file in `root` with one sentence per line. Several are averaged.
        cache_dir: folder for the vectors of names by a text encoder; see `FileSettings`.

    Raises:
        ConfigError: if prompts are given without a text encoder.
    """

    vectors: str | None = "wordvec_array.pth"
    prompts: str = DEFAULT
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.prompts != DEFAULT and not (self.vectors or "").startswith(PREFIX):
            raise ConfigError(
                f"data.prompts {self.prompts!r} has no effect on the vectors of a file "
                f"(data.vectors {self.vectors!r}); leave it out, or choose a text encoder"
            )

    def of_classes(self, folder: Path, names: Sequence[str], order: Sequence[str]) -> WordVectors:
        """Return the word vectors of the classes of a data set in a folder.

        `order` are the names of an array file without a text file of names beside it.
        """
        if self.vectors is None:
            raise ConfigError(f"data.vectors is null: name the word vectors of the classes; {_SEE}")
        if self.vectors.startswith(PREFIX):
            templates = read_templates(self.prompts, folder)
            return word_vectors(self.vectors, names, templates=templates, cache_dir=self.cache_dir)

        path = folder / Path(self.vectors).expanduser()
        has_names_beside = path.suffix != ".txt" and path.with_suffix(".txt").is_file()
        return word_vectors(str(path), names, order=None if has_names_beside else order)


DEFAULT_VECTORS = VectorSettings()
NO_VECTORS = VectorSettings(vectors=None)


def word_vectors(
    source: str,
    names: Sequence[str],
    *,
    optional: Sequence[str] = (),
    order: Sequence[str] | None = None,
    templates: Sequence[str] = (DEFAULT,),
    cache_dir: str | None = None,
    keep: bool = True,
) -> WordVectors:
    """Return the word vectors of names from a file or a text encoder.

    The source is as in `VectorSettings.vectors`, but a relative path is relative to the working
    directory. Optional names need not have a vector in a file, whose `order` is as in
    `read_vectors`. A text encoder fills the names into templates; `keep` writes the vectors of new
    names to its cache.
    """
    all_names = (*names, *optional)
    if fault := names_fault(all_names):
        raise DataError(f"the class names: {fault}; {_SEE}")

    if source.startswith(PREFIX):
        queries, sha256 = encode_names(source, all_names, templates, cache_dir, keep=keep)
        origin = VectorOrigin(ClipSource.parse(source).anywhere, sha256, tuple(templates))
        return WordVectors(all_names, queries, origin)

    path = Path(source)
    vectors = _look_up(path, names, optional, order)
    queries = torch.from_numpy(np.stack(list(vectors.values())))
    return WordVectors(tuple(vectors), queries, VectorOrigin(path.name, sha256_of(path)))


def made_alike(
    names: Sequence[str], origin: VectorOrigin, *, where: str, remedy: str, keep: bool = True
) -> WordVectors:
    """Make the word vectors of other names as those of a checkpoint were made, by a text encoder.

    Messages begin with `where` and end with `remedy`: how to give the weights of the encoder.
    Raises a `ConfigError` if it cannot be had, and a `CheckpointError` if it has other weights now.
    """
    try:
        made = word_vectors(origin.source, names, templates=origin.templates, keep=keep)
    except ConfigError as error:
        raise ConfigError(
            f"{where}: the checkpoint makes word vectors by {origin.described()}, which cannot be "
            f"had here: {error}; or {remedy}"
        ) from error

    if made.origin.sha256 != origin.sha256:
        raise CheckpointError(
            f"{where}: the checkpoint makes word vectors by {origin.described()}, and the weights "
            f"there now have the sha256 {made.origin.sha256[:12]}; {remedy}"
        )
    return made


_SEPARATOR = ";"
_SEE_LISTS = "see docs/zero_shot.md, section Any class list"


@dataclass(frozen=True)
class ClassList:
    """Classes and their names, in the order of a file.

    The first name of a class is that of the data set, the others are synonyms.
    """

    path: Path
    classes: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, class by class."""
        return tuple(name for names in self.classes for name in names)

    @property
    def class_of_name(self) -> list[int]:
        """For each of `names` the index of its class, ascending."""
        return [index for index, names in enumerate(self.classes) for _ in names]

    def columns(self, known: Sequence[str]) -> list[int]:
        """Return the index of each class among the classes of a data set."""
        column_of = {name: column for column, name in enumerate(known)}

        # A comma may belong to a name of the data, such as "tench, Tinca tinca". Anywhere else it
        # is more likely to be meant as a separator.
        for name in self.names:
            if "," in name and name not in column_of:
                raise DataError(
                    f"{self.path}: '{name}' has a comma and is no class of the data; write "
                    f"semicolons between the names of a class, {_SEE_LISTS}"
                )

        for own_name, *_ in self.classes:
            if own_name not in column_of:
                raise unknown_class(own_name, known, str(self.path), _SEE_LISTS)
        return [column_of[own_name] for own_name, *_ in self.classes]


def read_class_list(path: Path) -> ClassList:
    """Read a class list: a class per line, its name in the data first, then synonyms.

    Between the names of a class there are semicolons. Upper and lower case make no different names.
    """
    classes: list[tuple[str, ...]] = []
    class_of: dict[str, str] = {}  # folded name -> the class in whose line it was
    for line in read_lines(path, _SEE_LISTS):
        names = tuple(name.strip() for name in line.split(_SEPARATOR))
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
