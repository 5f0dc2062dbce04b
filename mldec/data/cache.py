"""The cache of parsed annotation files.

They take seconds to minutes to parse, and less than a second to read from the cache.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from mldec.data.table import Labels, Table, names_fault
from mldec.files.arrays import read_npz
from mldec.files.cached import cache_folder, write_cached
from mldec.files.text import reading

log = logging.getLogger("mldec")

FORMAT = 5  # of a cached table; raise it when the meaning of a stored array changes


class TableCache:
    """A folder of parsed tables, each valid as long as its annotation files do not change.

    Args:
        folder: where the tables are stored; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.
        see: pointer to the documentation, for messages.
    """

    def __init__(self, folder: str | None, see: str) -> None:
        self.folder = folder
        self.see = see

    def table(
        self,
        name: str,
        sources: Sequence[Path],
        parse: Callable[[], Table],
        *,
        values: range = range(2),
    ) -> Table:
        """Return the table that `parse` makes of annotation files, from the cache if it is valid.

        Args:
            name: of the kind of table, with every setting that `parse` depends on, such as "coco".
            sources: the annotation files; the size and time of each decide whether the cache is
                valid.
            parse: reads the annotation files.
            values: the values that a label may have.

        Raises:
            DataError: if a source cannot be read, or from `parse`.
        """
        # The key is stored with the table: it changes with the annotation files.
        key = f"{FORMAT} {name}"
        for source in sources:
            with reading(source, self.see):
                stat = source.stat()
            key += f" {stat.st_size} {stat.st_mtime_ns} {source}"

        file = _cache_file(f"{name} {' '.join(map(str, sources))}", self.folder)
        table = _load(file, key, values)
        if table is None:
            table = parse()
            _store(file, key, table)
        return table


def _cache_file(name: str, cache_dir: str | None) -> Path:
    """Return the path of a table: one per set of sources, so that a newer one replaces the old."""
    digest = sha256(os.fsencode(name)).hexdigest()[:16]
    return cache_folder(cache_dir) / f"{name.split()[0]}-{digest}.npz"


def _load(cache: Path, key: str, values: range) -> Table | None:
    """Return a cached table; None if there is none, or it has another key or is damaged.

    Damage is found by the checksums of the zip format. The content is checked nevertheless, like
    that of any file, because others may be able to write to the cache.
    """
    try:
        stored = read_npz(
            cache, ("key", "files", "starts", "label_classes", "values", "rest", "classes")
        )
        if str(stored["key"]) != key:
            return None

        classes = json.loads(stored["classes"].tobytes())
        labels = Labels(
            stored["starts"],
            stored["label_classes"],
            stored["values"],
            num_classes=len(classes),
            default=int(stored["rest"]),
        )
        table = Table(stored["files"], labels, tuple(classes))

        # Whoever wrote this file, later code relies on these properties.
        fault = labels.fault(values)
        fault = fault or names_fault(classes)
        fault = fault or _files_fault(table.files, len(labels))
        if stored["rest"].dtype.kind != "i":
            fault = "the value of the other labels is no whole number"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, KeyError, ValueError, TypeError, RecursionError) as error:
        fault = " ".join(str(error).split())

    if fault:
        log.warning("%s is not used (%s): the annotations are parsed again", cache, fault)
        return None
    return table


def _files_fault(files: np.ndarray, images: int) -> str | None:
    """Return what is wrong with the paths of a cached table, or None.

    There may be millions of paths, so that they are checked all at once, as one array of bytes.
    """
    if files.dtype.kind != "S" or files.shape != (images,):
        return "its paths are not one for each image"

    width = files.dtype.itemsize
    characters = np.ascontiguousarray(files).view(np.uint8)
    first_characters = characters[::width]
    if (first_characters == 0).any() or (first_characters == ord("/")).any():
        return "a path is empty or absolute"

    # Two dots may also be part of a name, or end one path and begin the next.
    for dots in re.finditer(rb"\.\.", characters.data):
        for row in {dots.start() // width, (dots.end() - 1) // width}:
            if b".." in files[row].split(b"/"):
                return "a path leads out of the folder"
    return None


def _store(cache: Path, key: str, table: Table) -> None:
    """Write a table to the cache."""
    arrays = {
        "key": key,
        "files": table.files,
        "starts": table.labels.starts,
        "label_classes": table.labels.classes,
        "values": table.labels.values,
        "rest": table.labels.default,
        "classes": np.frombuffer(json.dumps(table.classes).encode(), np.uint8),
    }

    write_cached(cache, arrays, "the annotations are parsed at every start")
