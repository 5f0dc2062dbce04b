"""The cache folder, and arrays stored in it."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mldec.errors import DataError, brief
from mldec.files.atomic import replacing

log = logging.getLogger("mldec")


FORMAT = 6  # of a cached table; raise it when the meaning of a stored array changes


def cache_folder(cache_dir: str | None) -> Path:
    """Return the folder of the cache: the setting, or $XDG_CACHE_HOME/mldec or ~/.cache/mldec."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mldec")
    return Path(cache_dir or default).expanduser()


def write_cached(path: Path, key: str, arrays: Mapping[str, Any]) -> None:
    """Write arrays and their key to a file of the cache, whole or not at all with a warning."""
    try:
        with replacing(path) as file:
            # The key comes last: damage that hides arrays from zipfile hides the last ones.
            np.savez(file, **arrays, key=key)
    except DataError as error:
        log.warning("%s; until then it is made anew at every start", error)


def read_cached(path: Path, key: str) -> dict[str, Any] | None:
    """Return the arrays of a file of the cache; None if it has another key, or cannot be used."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            return dict(stored) if str(stored["key"]) == key else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:
        # zipfile and NumPy raise almost anything on damaged bytes.
        log.warning("%s is not used (%s): it is made anew", path, brief(error))
        return None
