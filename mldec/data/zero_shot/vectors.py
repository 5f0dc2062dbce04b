"""Word vectors of class names, joined by name: a file in another order, or with other classes, cannot shift them.

Sources: the official `wordvec_array.pth` (tensor [300, N]), `.npy` arrays, the text files of GloVe, word2vec and
fastText, and the text encoders of open-clip.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mldec.data.names import names_fault
from mldec.data.zero_shot.vector_text import lacking, read_text
from mldec.errors import CheckpointError, ConfigError, DataError
from mldec.files.arrays import read_npy
from mldec.files.text import open_binary
from mldec.files.text import read_text as read_text_file
from mldec.files.torch_files import read_torch

_SEE = "see DATASETS.md, section Word vectors"
_TORCH_FILES = (".pth", ".pt", ".pickle", ".pkl")


def read_vectors(
    source: str | Path, names: Sequence[str], *, order: Sequence[str] | None = None
) -> Tensor:
    """Return the word vectors of some names.

    Args:
        source: a `.pth` or `.npy` file of an array [N, D], [D, N] or [1, D, N] (which side is the names' is told by
            their number), a text file with "word number number ..." in each line, or "clip:MODEL:WEIGHTS", such as
            "clip:ViT-B-32:openai".
        names: the K names wanted, each once.
        order: the N names of an array file; None: the lines of the text file beside it (`vectors.npy`, `vectors.txt`).
            Without meaning for the other sources.

    Returns:
        float32 [K, D], row i is that of names[i].

    Raises:
        DataError: names that are twice or missing, counts or widths that differ, a vector of zeros, NaN or infinite
            numbers, or a file of another kind. Nothing in a file is executed.
        ConfigError: open-clip is not installed, or has no such model.
    """
    if fault := names_fault(names):
        raise DataError(f"the class names: {fault}; {_SEE}")
    if str(source).startswith("clip:"):
        model, _, weights = str(source).removeprefix("clip:").partition(":")
        return _checked(
            encode_text(names, model=model, weights=weights or "openai"), names, str(source)
        )
    path = Path(source)
    try:
        if path.suffix in _TORCH_FILES:
            found = _by_name(path, _read_torch(path), names, order)
        elif path.suffix == ".npy":
            found = _by_name(path, _read_npy(path), names, order)
        else:
            found = read_text(path, names, _SEE)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {_SEE}") from error
    return _checked(found, names, str(path))


def class_vectors(
    folder: Path, source: str, names: Sequence[str], *, order: Sequence[str]
) -> Tensor:
    """Return the word vectors of a data set's classes: what its reader passes `data.vectors` to.

    Args:
        folder: of the data set; a relative `source` lies in it.
        source: see `read_vectors`.
        names: of the K classes wanted.
        order: names of an array file that has no text file with names beside it.

    Raises:
        DataError: see `read_vectors`.
        ConfigError: see `read_vectors`.
    """
    if source.startswith("clip:"):
        return read_vectors(source, names)
    path = folder / Path(source).expanduser()
    named = path.suffix != ".txt" and path.with_suffix(".txt").is_file()
    return read_vectors(path, names, order=None if named else order)


def encode_text(
    names: Sequence[str],
    *,
    model: str = "ViT-B-32",
    weights: str = "openai",
    prompt: str = "a photo of a {}.",
) -> Tensor:
    """Return what a text encoder of open-clip makes of the names: float32 [K, D], rows of length 1.

    Args:
        names: of the classes.
        model: its name in open-clip.
        weights: their name in open-clip (downloaded once), or a file.
        prompt: the sentence with {} for the name.

    Raises:
        ConfigError: open-clip is not installed, or has no such model.
    """
    try:
        import open_clip
    except ImportError as error:
        raise ConfigError(
            f"vectors clip:{model} need open-clip: pip install open-clip-torch"
        ) from error
    try:
        encoder = open_clip.create_model(model, pretrained=weights).eval()
        tokens = open_clip.get_tokenizer(model)([prompt.format(name) for name in names])
    except Exception as error:  # whatever a download or a model list raises
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"vectors clip:{model}:{weights} cannot be had from open-clip ({reason})"
        ) from error
    with torch.no_grad():
        return encoder.encode_text(tokens, normalize=True).float()


def nearest(
    names: Sequence[str], vectors: Tensor, seen: Iterable[int], k: int = 3
) -> dict[str, list[tuple[str, float]]]:
    """Return the k seen classes nearest to each unseen one, with the cosine: a table to look at before training.

    Args:
        names: of all N classes.
        vectors: [N, D].
        seen: indices of the seen classes; all others are unseen.
        k: neighbours wanted.
    """
    columns = sorted(set(seen))
    rows = sorted(set(range(len(names))) - set(columns))
    unit = torch.nn.functional.normalize(vectors.float(), dim=1)
    cosines, places = (unit[rows] @ unit[columns].T).topk(min(k, len(columns)), dim=1)
    return {
        names[row]: [
            (names[columns[place]], cosine) for place, cosine in zip(near, values, strict=True)
        ]
        for row, near, values in zip(rows, places.tolist(), cosines.tolist(), strict=True)
    }


def twins(seen: Collection[str], unseen: Collection[str]) -> list[tuple[str, str]]:
    """Return the pairs (unseen, seen) of which one is the regular plural of the other: a leak across the split.

    Regular is -s, -es and -y to -ies: 30 of the 81 unseen classes of NUS-WIDE (and leaf/leaves, which is not).
    """
    known = set(seen)
    pairs = {(name, twin) for name in unseen for twin in _plurals(name) & known}
    names = set(unseen)
    return sorted(pairs | {(name, twin) for twin in known for name in _plurals(twin) & names})


def _plurals(name: str) -> set[str]:
    return {name + "s", name + "es", re.sub("y$", "ies", name)} - {name}


def _read_torch(path: Path) -> np.ndarray:
    try:
        loaded = read_torch(path)
    except CheckpointError as error:
        if _is_text(path):
            raise DataError(
                f"{path} is not a torch file but begins like text: the official README swaps the links of data.csv "
                f"and wordvec_array.pth; swap the two files back, {_SEE}"
            ) from error
        raise DataError(f"{error}; {_SEE}") from error
    if (
        isinstance(loaded, dict) and len(loaded) == 1
    ):  # the form of SDL, the same group's earlier work
        loaded = next(iter(loaded.values()))
    if not isinstance(loaded, Tensor):
        raise DataError(
            f"{path} holds a {type(loaded).__name__} where one tensor is wanted; {_SEE}"
        )
    return loaded.float().numpy()


def _is_text(path: Path) -> bool:
    """Tell whether a file begins with printable ASCII, and not like an archive."""
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
    with np.errstate(over="ignore"):  # what becomes infinite is refused with its name
        return array.astype(np.float32)


def _by_name(
    path: Path, array: np.ndarray, names: Sequence[str], order: Sequence[str] | None
) -> Tensor:
    """Pick the names' rows out of an array whose own names are `order`."""
    if order is None:
        order = _names_beside(path)
    _check_unique(order, f"the names of {path}")
    shape = array.shape
    if array.ndim == 3 and shape[0] == 1:
        array = array[0]
    if array.ndim != 2 or len(order) not in array.shape:
        raise DataError(
            f"{path} has shape {list(shape)}, which does not fit {len(order):,} names; {_SEE}"
        )
    if array.shape[0] == array.shape[1]:
        raise DataError(
            f"{path} has shape {list(shape)}: rows or columns may be the names', add another name; {_SEE}"
        )
    rows = array if array.shape[0] == len(order) else array.T
    places = {name: place for place, name in enumerate(order)}
    missing = [name for name in names if name not in places]
    if missing:
        raise DataError(f"{path}: {lacking(missing, len(names))}; {_SEE}")
    return torch.from_numpy(np.ascontiguousarray(rows[[places[name] for name in names]]))


def _names_beside(path: Path) -> list[str]:
    beside = path.with_suffix(".txt")
    if not beside.exists():
        raise DataError(f"{path} has no names: write them, one a line, to {beside}; {_SEE}")
    return [line.strip() for line in read_text_file(beside, _SEE).split("\n") if line.strip()]


def _check_unique(names: Sequence[str], what: str) -> None:
    known: set[str] = set()
    for name in names:
        if name in known:
            raise DataError(f"{what} have {name!r} twice; {_SEE}")
        known.add(name)


def _checked(vectors: Tensor, names: Sequence[str], where: str) -> Tensor:
    for fault, rows in (
        ("has a number that is NaN or infinite", ~vectors.isfinite().all(1)),
        ("is all zeros", (vectors == 0).all(1)),
    ):
        bad = [names[row] for row in rows.nonzero().flatten().tolist()]
        if bad:
            raise DataError(
                f"{where}: the vector of {bad[0]!r} ({len(bad)} of {len(names):,}) {fault}; {_SEE}"
            )
    return vectors
