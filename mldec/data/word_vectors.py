"""Word vectors of class names: text files, arrays, encoders, and lists of names."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from mldec.errors import CheckpointError, ConfigError, DataError, brief
from mldec.files.text import open_binary, read_lines, reading
from mldec.files.torch_files import read_torch, sha256_of

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


_SEE = "see DATASETS.md, section Word vectors"
_TORCH_FILES = (".pth", ".pt", ".pickle", ".pkl")


def read_vectors(
    path: str | Path, names: Sequence[str], *, order: Sequence[str] | None = None
) -> Tensor:
    """Return the word vectors of some names from a file.

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
    vectors = look_up(Path(path), names, order=order)
    return torch.stack([torch.from_numpy(vector) for vector in vectors.values()])


def look_up(
    path: Path,
    names: Sequence[str],
    *,
    order: Sequence[str] | None = None,
    optional: Sequence[str] = (),
) -> dict[str, np.ndarray]:
    """Return the word vectors of names, float32 [D] each, in the order of the names.

    Args:
        path: see `read_vectors`.
        names: likewise.
        order: likewise.
        optional: further names, which may have no vector.

    Raises:
        DataError: see `read_vectors`.
    """
    if fault := names_fault((*names, *optional)):
        raise DataError(f"the class names: {fault}; {_SEE}")

    with reading(path, _SEE):
        if path.suffix in _TORCH_FILES:
            vectors = _by_name(path, _read_torch(path), names, order, optional)
        elif path.suffix == ".npy":
            vectors = _by_name(path, _read_npy(path), names, order, optional)
        else:
            vectors = read_text(path, names, _SEE, optional=optional)

    _check_numbers(vectors, str(path))
    return vectors


def nearest(
    names: Sequence[str], vectors: Tensor, seen: Iterable[int], k: int = 3
) -> dict[str, list[tuple[str, float]]]:
    """Return the k seen classes nearest to each unseen class, to be inspected before training.

    Args:
        names: of all N classes.
        vectors: word vectors [N, D].
        seen: indices of the seen classes; all others are unseen.
        k: number of neighbours, or all seen classes if there are fewer.

    Returns:
        Name of an unseen class -> names of seen classes and their cosines, the nearest first.
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

    Such an unseen class is not new to the model. Regular plurals end in -s, -es or -ies for -y.
    They affect 30 of the 81 unseen classes of NUS-WIDE, which also has the irregular leaf/leaves.
    """
    seen_names, unseen_names = set(seen), set(unseen)

    # Either of the two may be the plural.
    pairs: set[tuple[str, str]] = set()
    for name in unseen_names:
        pairs |= {(name, plural) for plural in _plurals(name) & seen_names}
    for name in seen_names:
        pairs |= {(plural, name) for plural in _plurals(name) & unseen_names}
    return sorted(pairs)


def _plurals(name: str) -> set[str]:
    return {name + "s", name + "es", re.sub("y$", "ies", name)} - {name}


def _read_torch(path: Path) -> np.ndarray:
    """Return the only tensor in a torch file, float32."""
    try:
        loaded = read_torch(path)
    except CheckpointError as error:
        if _is_text(path):
            raise DataError(
                f"{path} is not a torch file but begins like text: the official README swaps the "
                f"links of data.csv and wordvec_array.pth; swap the two files back, {_SEE}"
            ) from error
        raise DataError(f"{error}; {_SEE}") from error

    # SDL, the earlier work of the same group, wraps the tensor in a dictionary.
    if isinstance(loaded, dict) and len(loaded) == 1:
        loaded = next(iter(loaded.values()))
    if not isinstance(loaded, Tensor):
        raise DataError(
            f"{path} holds a {type(loaded).__name__} where one tensor is wanted; {_SEE}"
        )
    return loaded.float().numpy()


def _is_text(path: Path) -> bool:
    """Return whether a file begins with printable ASCII, but not with the "PK" of a zip archive."""
    if not path.is_file():
        return False

    with open_binary(path) as file:
        start = file.read(4)
    return start[:2] != b"PK" and start.isascii() and start.decode().isprintable() and start != b""


def _read_npy(path: Path) -> np.ndarray:
    with open_binary(path) as file:
        try:
            array = np.load(file, allow_pickle=False)
            if array.dtype.kind not in "fiub":
                raise ValueError(f"it holds {array.dtype} where numbers are wanted")
        except Exception as error:
            # The header is text, which may claim any type and any size.
            fault = f"is not a .npy file of numbers ({brief(error)})"
            raise DataError(f"{path} {fault}; {_SEE}") from error

    # Numbers that become infinite are refused later, with the name of their class.
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _by_name(
    path: Path,
    array: np.ndarray,
    names: Sequence[str],
    order: Sequence[str] | None,
    optional: Sequence[str],
) -> dict[str, np.ndarray]:
    """Return the vectors of names from an array whose own names are `order`; see `look_up`."""
    if order is None:
        order = _names_beside(path)
    _check_unique(order, f"the names of {path}")

    # An array file may have a leading dimension of size 1, as [1, D, N].
    shape = array.shape
    if array.ndim == 3 and shape[0] == 1:
        array = array[0]
    if array.ndim != 2 or len(order) not in array.shape:
        raise DataError(
            f"{path} has shape {list(shape)}, which does not fit {len(order):,} names; {_SEE}"
        )

    # A square array fits both ways, and a wrong guess would train on the wrong vectors.
    if array.shape[0] == array.shape[1]:
        raise DataError(
            f"{path} has shape {list(shape)}: rows or columns may be the names', "
            f"add another name; {_SEE}"
        )

    vectors = array if array.shape[0] == len(order) else array.T
    row_of = {name: row for row, name in enumerate(order)}
    missing = [name for name in names if name not in row_of]
    if missing:
        raise DataError(f"{path}: {lacking(missing, len(names))}; {_SEE}")

    wanted = [*names, *(name for name in optional if name in row_of)]
    rows = np.ascontiguousarray(vectors[[row_of[name] for name in wanted]])
    return dict(zip(wanted, rows, strict=True))


def _names_beside(path: Path) -> list[str]:
    """Return the lines of the text file beside an array file."""
    names_file = path.with_suffix(".txt")
    if not names_file.exists():
        raise DataError(f"{path} has no names: write them, one a line, to {names_file}; {_SEE}")
    return read_lines(names_file, _SEE)


def _check_unique(names: Sequence[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(f"{where} have {name!r} twice; {_SEE}")
        seen.add(name)


def _check_numbers(vectors: Mapping[str, np.ndarray], where: str) -> None:
    """Check that the vectors are finite and not zero."""
    numbers = np.stack(list(vectors.values()))
    # A vector of zeros cannot be scaled to length 1, as the zero-shot heads and `nearest` do.
    faulty_rows = {
        "has a number that is NaN or infinite": ~np.isfinite(numbers).all(1),
        "is all zeros": (numbers == 0).all(1),
    }

    names = list(vectors)
    for fault, is_faulty in faulty_rows.items():
        faulty = [names[row] for row in np.flatnonzero(is_faulty)]
        if faulty:
            raise DataError(
                f"{where}: the vector of {faulty[0]!r} ({len(faulty)} of {len(names):,}) {fault}; "
                f"{_SEE}"
            )


class WordVectors(NamedTuple):
    """Word vectors of K names.

    Attributes:
        names: those asked for, and then the optional ones that have a vector.
        queries: float32 [K, D]; row i belongs to names[i].
        origin: how they were made.
    """

    names: tuple[str, ...]
    queries: Tensor
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
        """Return the word vectors of the classes of a data set.

        Args:
            folder: of the data set; a relative path is relative to it.
            names: of the K classes.
            order: the names of an array file without a text file of names beside it.

        Raises:
            DataError: see `word_vectors`.
            ConfigError: see `word_vectors`; or if there are to be none.
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

    Args:
        source: see `VectorSettings.vectors`; a relative path is relative to the working directory.
        names: the wanted names, each once.
        optional: further names, which need not have a vector in a file.
        order: see `vectors.read_vectors`.
        templates: sentences with {} for the name, for a text encoder.
        cache_dir: see `VectorSettings`.
        keep: write the vectors of new names by a text encoder to the cache.

    Raises:
        DataError: if a name is listed twice or not allowed, or a file is at fault, see
            `vectors.read_vectors`.
        ConfigError: if the text encoder cannot be had, see `mldec.data.text_encoder.open_model`.
    """
    all_names = (*names, *optional)
    if fault := names_fault(all_names):
        raise DataError(f"the class names: {fault}; {_SEE}")

    if source.startswith(PREFIX):
        queries, sha256 = encode_names(source, all_names, templates, cache_dir, keep=keep)
        origin = VectorOrigin(ClipSource.parse(source).anywhere, sha256, tuple(templates))
        return WordVectors(all_names, queries, origin)

    path = Path(source)
    vectors = look_up(path, names, order=order, optional=optional)
    with reading(path, _SEE):
        sha256 = sha256_of(path)
    queries = torch.stack([torch.from_numpy(vector) for vector in vectors.values()])
    return WordVectors(tuple(vectors), queries, VectorOrigin(path.name, sha256))


def made_alike(
    names: Sequence[str], origin: VectorOrigin, *, where: str, remedy: str, keep: bool = True
) -> WordVectors:
    """Make the word vectors of other names as those of a checkpoint were made.

    Args:
        names: of the classes.
        origin: of the word vectors of the checkpoint: a text encoder.
        where: begins the messages.
        remedy: ends them: how to give the weights of the encoder.
        keep: see `word_vectors`.

    Raises:
        ConfigError: if the text encoder cannot be had.
        CheckpointError: if it has other weights now.
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

    Attributes:
        path: of the file, for messages.
        classes: the names of each class. The first one is that of the data set, the others are
            synonyms.
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
        """Return the index of each class among the classes of a data set.

        Args:
            known: names of the classes of the data set.

        Raises:
            DataError: for a class that the data set does not have, or if a name with a comma is
                none of its names.
        """
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

    Args:
        path: UTF-8 text; blank lines are left out.

    Raises:
        DataError: if the file cannot be read, names no class, has an empty name or one that is not
            allowed, or has a name twice, in a class or in two.
    """
    classes: list[tuple[str, ...]] = []
    class_of: dict[str, str] = {}  # folded name -> the class in whose line it was
    for line in read_lines(path, _SEE_LISTS):
        names = tuple(name.strip() for name in line.split(_SEPARATOR))
        if "" in names:
            raise DataError(f"{path}: '{line}' has an empty name; leave it out, {_SEE_LISTS}")

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
