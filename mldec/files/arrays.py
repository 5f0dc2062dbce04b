"""Read NumPy's files without ever loading pickled objects in them."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mldec.errors import brief
from mldec.files.text import open_binary


def read_npz(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Read arrays of an `.npz` file that `numpy.savez` wrote, and compare their checksums.

    Args:
        path: of the file.
        names: of the arrays.

    Returns:
        The arrays by name.

    Raises:
        OSError: if the file cannot be opened.
        KeyError: if it does not hold an array of that name.
        ValueError: if it is damaged, or no such file; the message is one line.
    """
    with open_binary(path) as file:
        try:
            with np.load(file, allow_pickle=False) as stored:
                return {name: stored[name] for name in names}
        except KeyError:
            raise
        except Exception as error:
            # zipfile and NumPy raise almost anything on damaged bytes.
            raise ValueError(brief(error)) from error


def read_npy(path: Path) -> np.ndarray:
    """Read an `.npy` file of real numbers, integers or booleans.

    Raises:
        OSError: if the file cannot be opened.
        ValueError: if it is damaged, holds something else, or claims more than fits into memory;
            the message is one line.
    """
    with open_binary(path) as file:
        try:
            array = np.load(file, allow_pickle=False)
        except Exception as error:
            # The header is text, which may claim any type and any size.
            raise ValueError(brief(error)) from error

    # numpy.load also opens an .npz file under this name.
    if not isinstance(array, np.ndarray):
        raise ValueError("it holds several arrays where one is wanted")
    if array.dtype.kind not in "fiub":
        raise ValueError(f"it holds {array.dtype} where numbers are wanted")
    return array
