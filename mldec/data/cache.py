"""Cache of tables that are slow to read from annotation files."""

import json
import logging
import os
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from mldec.data.labels import Labels
from mldec.data.table import Table
from mldec.files.cache import FORMAT, cache_folder, read_cached, write_cached
from mldec.files.text import reading
from mldec.runtime import distributed

log = logging.getLogger("mldec")


def cached_table(
    name: str, sources: Sequence[Path], parse: Callable[[], Table], cache_dir: str | None
) -> Table:
    """Return the table of some annotation files, from the cache if it is valid.

    A cached table is valid as long as size and modification time of all files are unchanged.

    Args:
        name: Name of the reader, followed by all settings that affect `parse`.
        sources: Annotation files or folders.
        parse: Reads the annotation files.
        cache_dir: See `cache_folder`.
    """
    key = f"{FORMAT} {name}"
    for source in sources:
        with reading(source):
            stat = source.stat()
        key += f" {stat.st_size} {stat.st_mtime_ns} {source}"

    # Use one file per set of sources, so that a newer table replaces the old one.
    identity = " ".join([name, *map(str, sources)])
    digest = sha256(os.fsencode(identity)).hexdigest()[:16]
    path = cache_folder(cache_dir) / f"{name.split()[0]}-{digest}.npz"

    # Parsing may need gigabytes, so rank 0 fills the cache before the other ranks read it.
    tables: list[Table] = []
    distributed.on_main(lambda: tables.append(_read_or_parse(path, key, parse)))
    if distributed.is_main():
        return tables[0]
    return _read_or_parse(path, key, parse)


def _read_or_parse(path: Path, key: str, parse: Callable[[], Table]) -> Table:
    """Return the table of a cache file. Without a valid one, parse the sources and write it."""
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
