"""Caches of tables that are slow to read, and of results per image file."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from mldec.data.labels import Labels
from mldec.data.table import Table
from mldec.files.cache import FORMAT, cache_folder, read_cached, write_cached
from mldec.files.text import reading
from mldec.runtime import distributed
from mldec.runtime.console import progress_bar
from mldec.runtime.devices import processors


def cached_table(
    name: str, sources: Sequence[Path], parse: Callable[[], Table], cache_dir: str | None
) -> Table:
    """Return the table of some annotation files, from the cache if it is valid.

    A cached table is valid as long as size and modification time of all files are unchanged. `name`
    is the name of the reader, followed by all settings that affect `parse`. `sources` are files or
    folders. For `cache_dir` see `cache_folder`.
    """
    key = f"{FORMAT} {name}"
    for source in sources:
        with reading(source):
            stat = source.stat()
        # A hash of the content would read gigabytes at every start.
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
        # As bytes, because NumPy pads texts to the length of the longest name.
        "classes": np.frombuffer(json.dumps(table.classes).encode(), np.uint8),
    }
    write_cached(path, key, arrays)
    return table


def stamp(path: Path) -> str:
    """Return size and modification time of a file, or "" if it does not exist."""
    try:
        stat = path.stat()
    except OSError:
        return ""
    return f"{stat.st_size} {stat.st_mtime_ns}"


BLOCK = 256  # files between two updates of the progress bar


def compute_in_threads(
    files: Sequence[str], compute: Callable[[str], Any], title: str
) -> Iterator[tuple[str, Any]]:
    """Yield each file with the result of `compute`, and show a progress bar."""
    bar = progress_bar(total=len(files), desc=title)
    with ThreadPoolExecutor(processors()) as threads, bar:
        for start in range(0, len(files), BLOCK):
            block = files[start : start + BLOCK]
            yield from zip(block, threads.map(compute, block), strict=True)
            bar.update(len(block))


def cached_per_file(
    name: str,
    folder: Path,
    stamps: Mapping[str, str],
    compute: Callable[[str], Any],
    cache_dir: str | None,
) -> dict[str, Any]:
    """Return a JSON value for each file in a folder, from the cache if its stamp is unchanged.

    Other values are computed in threads. An interrupted call saves its values too. `name` has a
    version, such as "keywords 1". `stamps` maps a path to a text that changes with the file.
    """
    key = f"{FORMAT} {name}"
    digest = sha256(os.fsencode(f"{name} {folder}")).hexdigest()[:16]
    path = cache_folder(cache_dir) / f"{name.split()[0]}-{digest}.npz"
    entries: dict[str, Any] = {}  # maps a file to its stamp and its value
    if stored := read_cached(path, key):
        entries = json.loads(stored["entries"].tobytes())

    # The values of other files stay in the cache: a second run may read another part of the folder.
    changed = [file for file in stamps if entries.get(file, [None])[0] != stamps[file]]
    try:
        for file, value in compute_in_threads(changed, compute, f"read {name.split()[0]}"):
            entries[file] = [stamps[file], value]
    finally:
        if changed:
            content = json.dumps(entries).encode()
            write_cached(path, key, {"entries": np.frombuffer(content, np.uint8)})
    return {file: entries[file][1] for file in stamps}
