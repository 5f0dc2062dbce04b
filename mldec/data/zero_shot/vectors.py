"""Word vectors of class names from a file, matched by name: their order in it does not matter.

Files: the official `wordvec_array.pth` (tensor [300, N]), `.npy` arrays, and the text files of
GloVe, word2vec and fastText.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mldec.data.names import names_fault
from mldec.data.zero_shot.vector_text import lacking, read_text
from mldec.errors import CheckpointError, DataError
from mldec.files.arrays import read_npy
from mldec.files.text import open_binary, read_lines, reading
from mldec.files.torch_files import read_torch

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
    try:
        array = read_npy(path)
    except ValueError as error:
        raise DataError(f"{path} is not a .npy file of numbers ({error}); {_SEE}") from error

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
