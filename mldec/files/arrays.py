"""Numpy's files, which strangers may have written or a disk may have damaged; no pickle in them is ever read."""

import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mldec.files.text import open_binary


def read_npz(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Return some arrays of an `.npz` file that `numpy.savez` wrote; the checksums of their bytes are compared.

    Raises:
        OSError: it cannot be opened.
        KeyError: an array is absent.
        ValueError: it is damaged, compressed, or no such file; in one line.
    """
    with open_binary(path) as file:
        try:
            with np.load(file, allow_pickle=False) as stored:
                _refuse_bomb(stored.zip, path.stat().st_size)
                return {name: stored[name] for name in names}
        except KeyError:
            raise
        except Exception as error:  # zipfile and numpy raise almost anything on damaged bytes
            raise ValueError(_reason(error)) from error


def read_npy(path: Path) -> np.ndarray:
    """Return the numbers of an `.npy` file: real or whole ones.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is damaged, holds something else, or claims more than the memory has; in one line.
    """
    with open_binary(path) as file:
        try:
            array = np.load(file, allow_pickle=False)
        except Exception as error:  # as above; a header may also hold any expression, or any size
            raise ValueError(_reason(error)) from error
    if not isinstance(array, np.ndarray):
        raise ValueError("it holds several arrays where one is wanted")
    if array.dtype.kind not in "fiub":
        raise ValueError(f"it holds {array.dtype} where numbers are wanted")
    return array


def _refuse_bomb(archive: zipfile.ZipFile, size: int) -> None:
    members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("it is compressed, as numpy.savez does not")
    if sum(member.file_size for member in members) > size:
        raise ValueError("it claims more bytes than it has")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
