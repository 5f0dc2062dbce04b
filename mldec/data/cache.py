"""The cache: arrays that take long to compute, in the user's own folder."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from mldec.data.table import Labels, Table
from mldec.errors import DataError, brief
from mldec.runtime.results import replacing
from mldec.runtime.text import reading

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


class TableCache:
    """A folder of parsed tables, each valid as long as its annotation files do not change."""

    def __init__(self, folder: str | None, see: str) -> None:
        self.folder = folder
        self.see = see  # a pointer to the documentation, for messages

    def table(self, name: str, sources: Sequence[Path], parse: Callable[[], Table]) -> Table:
        """Return the table that `parse` makes of annotation files, from the cache if it is valid.

        Its name has every setting that `parse` depends on; size and time of each annotation file
        decide whether it is valid.
        """
        key = f"{FORMAT} {name}"
        for source in sources:
            with reading(source, self.see):
                stat = source.stat()
            key += f" {stat.st_size} {stat.st_mtime_ns} {source}"

        # One file per set of sources, so that a newer table replaces the old one.
        identity = " ".join([name, *map(str, sources)])
        digest = sha256(os.fsencode(identity)).hexdigest()[:16]
        path = cache_folder(self.folder) / f"{name.split()[0]}-{digest}.npz"
        if stored := read_cached(path, key):
            classes = tuple(json.loads(stored["classes"].tobytes()))
            columns = (stored["starts"], stored["label_classes"], stored["values"])
            labels = Labels(*columns, len(classes), int(stored["default"]))
            return Table(stored["files"], labels, classes)

        table = parse()
        arrays = {
            "files": table.files,
            "starts": table.labels.starts,
            "label_classes": table.labels.classes,
            "values": table.labels.values,
            "default": table.labels.default,
            "classes": np.frombuffer(json.dumps(table.classes).encode(), np.uint8),
        }
        write_cached(path, key, arrays)
        return table
