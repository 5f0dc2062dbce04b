"""The folder of the cache, and how a file gets into it."""

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mldec.errors import DataError
from mldec.files.results import replacing

log = logging.getLogger("mldec")


def cache_folder(cache_dir: str | None) -> Path:
    """Return the folder of the cache.

    Args:
        cache_dir: the setting; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mldec")
    try:
        return Path(cache_dir or default).expanduser()
    except RuntimeError:  # an account without a home, as in some containers
        return Path(tempfile.gettempdir(), "mldec")


def write_cached(path: Path, arrays: Mapping[str, Any], otherwise: str) -> None:
    """Write arrays to a file of the cache.

    Other processes see a whole file or none; see `replacing`.

    Args:
        path: of the file; its folder is created.
        arrays: by name.
        otherwise: what happens if it cannot be written, such as "they are parsed at every start".
    """
    # A cache that cannot be written is no fault of the run.
    try:
        with replacing(path) as file:
            np.savez(file, **arrays)
    except DataError as error:
        log.warning("%s; until then %s", error, otherwise)
