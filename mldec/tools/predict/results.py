"""Result files that survive a kill.

1. Rows are added to a database in the folder FILE.progress. A restarted command continues after
   them.
2. The result files are written at the end, each atomically.
3. The record FILE.run.json has the settings from the start, and at the end the fingerprints of the
   files. A restarted command only replaces files in the record.

The database is removed at the end, unless some images may succeed in another attempt. The next
command then replaces only their rows.
"""

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from mldec.errors import ConfigError, DataError, naming_errors
from mldec.files.atomic import named, replacing, to_json
from mldec.files.text import read_if_exists
from mldec.files.torch_files import sha256_of
from mldec.tools.predict.answers import Rule
from mldec.tools.predict.decode import Item
from mldec.tools.predict.formats import Line, row_of, write

VERSION = 6  # of records and rows; increase it if their meaning changes

# Rows are flushed to the disk after this number of rows or seconds.
FLUSHED_ROWS = 1000
FLUSHED_SECONDS = 30.0

# Suffixes of the record and of the folder of the rows, after the name of the first result file.
RECORD = ".run.json"
PROGRESS = ".progress"
ROWS = "rows.sqlite"

COLUMNS = "number INTEGER PRIMARY KEY, image, text, features, retry"  # see `Line`


@dataclass(frozen=True, kw_only=True)
class Record:
    """The settings of a result, and its content once it is complete."""

    made_with: dict[str, Any]  # all settings that change the rows, by names for messages
    images: int | None = None  # None before all rows are written
    errors: int = 0  # images with an error
    retry: int = 0  # images that the next command predicts again
    names: str = ""  # hash of the names of the images
    # SHA-256 of each result file; None while the file is written or replaced.
    files: dict[str, str | None] = field(default_factory=dict)


class Results:
    """The result files of a command, their record and their rows.

    Only one process may use them at a time, see `locked`. Files that are not in the record are
    never replaced, except with `overwrite`, which also starts again. Raises ConfigError if the
    settings have changed, or a file is not in the record.
    """

    def __init__(
        self, targets: Mapping[str, str], made_with: dict[str, Any], *, overwrite: bool = False
    ) -> None:
        self.name = next(iter(targets.values()))  # for messages
        self.images = 0  # number of rows
        self.retries = 0  # number of images to retry, if there is a row for each image
        self._targets = targets  # by the names of their options
        self._path = Path(self.name + RECORD)
        self._rows = Path(self.name + PROGRESS, ROWS)
        self._numbers: Iterator[int] = count()  # of the next rows

        # The record is written before the first row.
        content = read_if_exists(self._path)
        if content is None and self._rows.exists():
            raise ConfigError(f"{self._rows} exists and was not written by this command; move it")
        if overwrite:
            self._rows.unlink(missing_ok=True)
            # None permits later commands to replace these files, if this one is killed.
            existing = [path for path in targets.values() if Path(path).exists()]
            self._save(Record(made_with=made_with, files=dict.fromkeys(existing)))
            return
        self.record = Record(made_with=made_with)
        if content is not None:
            remedy = "restore it, or pass --overwrite to start again"
            with naming_errors(self._path, DataError, remedy=remedy):
                self.record = Record(**json.loads(content))
        self._check(made_with)

    def _check(self, made_with: dict[str, Any]) -> None:
        for key in {**self.record.made_with, **made_with}:
            before = self.record.made_with.get(key)
            now = made_with.get(key)
            if before != now:
                raise ConfigError(
                    f"{self.name} was started with {key} {json.dumps(before)[:100]}, not "
                    f"{json.dumps(now)[:100]}; name another file, or pass --overwrite"
                )
        for path in self._targets.values():
            # "" differs from all hashes: the file is not in the record.
            known = self.record.files.get(path, "")
            if Path(path).exists() and known not in (None, sha256_of(Path(path))):
                raise ConfigError(
                    f"{path} exists and was changed or not written by this command; "
                    f"move it, name another file, or pass --overwrite"
                )

    def is_complete(self, items: Iterable[Item]) -> bool:
        """Return True if no row is missing. Raises DataError if the images have changed."""
        record = self.record
        exist = all(Path(path).exists() for path in self._targets.values())
        if record.images is None or record.retry or not exist:
            return False
        images, names = count_and_hash(named(item.name)["image"] for item in items)
        if names != record.names:
            raise self._changed(f"{record.images:,} images then, {images:,} now")
        # The process may have been killed between the result and the removal of its rows.
        self._rows.unlink(missing_ok=True)
        return True

    def begin(self, items: Iterator[Item], batch: int) -> Iterator[Item]:
        """Return the images without a row, or those to retry if there is a row for each image.

        Rows of an incomplete batch are removed, because a batch of another size may change the last
        digit of a score.
        """
        # A result whose rows are missing starts again: all images are predicted.
        if not self._rows.exists():
            self._save(replace(self.record, images=None, retry=0))
        with self._database() as rows:
            rows.execute(f"CREATE TABLE IF NOT EXISTS rows ({COLUMNS})")
            [(self.images,)] = rows.execute("SELECT count(*) FROM rows")
            # The record has the number of images once there was a row for each of them.
            has_all = self.images == self.record.images
            if not has_all:
                self.images -= self.images % batch
                rows.execute("DELETE FROM rows WHERE number >= ?", (self.images,))

        # Compare the images with their rows, and collect the images to retry.
        again = []
        for number, line in enumerate(self.lines()):
            item = next(items, None)
            if item is None or named(item.name)["image"] != line.image:
                raise self._changed(f"image {number + 1:,} differs")
            if line.retry and has_all:
                again.append((number, item))
        if has_all and next(items, None) is not None:
            raise self._changed(f"there were {self.images:,}, now there are more")
        self.retries = len(again)
        self._numbers = chain([number for number, _ in again], count(self.images))
        return chain([item for _, item in again], items)

    def write(self, lines: Iterable[Line]) -> None:
        """Add the rows of the images of `begin`, in their order. An error keeps the other rows."""
        waiting: list[tuple[Any, ...]] = []
        flushed = time.monotonic()
        try:
            for line in lines:
                waiting.append((next(self._numbers), *line))
                is_late = time.monotonic() - flushed > FLUSHED_SECONDS
                if is_late or len(waiting) >= FLUSHED_ROWS:
                    self._flush(waiting)
                    waiting = []
                    flushed = time.monotonic()
        finally:
            self._flush(waiting)

    def _flush(self, values: list[tuple[Any, ...]]) -> None:
        with self._database() as rows:
            rows.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?)", values)

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """Open the rows for one transaction. Errors become DataError."""
        # The folder is locked already, and network file systems may not support SQLite's locks.
        address = f"{self._rows.absolute().as_uri()}?nolock=1"
        remedy = "make it writable and free space, or pass --overwrite to start again"
        with (
            naming_errors(self._rows, DataError, remedy=remedy),
            closing(sqlite3.connect(address, uri=True)) as rows,
            rows,
        ):
            yield rows

    def lines(self) -> Iterator[Line]:
        """Yield all rows."""
        with self._database() as rows:
            query = "SELECT image, text, features, retry FROM rows ORDER BY number"
            yield from map(Line._make, rows.execute(query))

    def publish(self, rule: Rule) -> None:
        """Write all result files from the rows, and then their record."""
        errors = 0
        retry = 0

        def names() -> Iterator[str]:
            nonlocal errors, retry
            for line in self.lines():
                errors += "error" in row_of(line)
                retry += line.retry
                yield line.image

        images, digest = count_and_hash(names())
        self._save(replace(self.record, files=dict.fromkeys(self._targets.values())))
        # Commands that write the same file must not share a temporary file.
        tag = hashlib.sha256(str(self._rows.absolute()).encode()).hexdigest()[:12]
        files: dict[str, str | None] = {}
        for kind, target in self._targets.items():
            # Replace the target of a link, not the link.
            with replacing(Path(os.path.realpath(target)), durable=True, tag=tag) as file:
                write(kind, rule, self.lines, file)
            files[target] = sha256_of(Path(target))
        record = replace(self.record, images=images, names=digest, files=files)
        self._save(replace(record, errors=errors, retry=retry))
        if not retry:
            self._rows.unlink()

    def _save(self, record: Record) -> None:
        with replacing(self._path, durable=True) as file:
            file.write((to_json(asdict(record), indent=1) + "\n").encode())
        self.record = record

    def _changed(self, difference: str) -> DataError:
        return DataError(
            f"{self.name}: the input images have changed ({difference}); "
            f"pass --overwrite to start again, or name another file"
        )


def count_and_hash(names: Iterable[str]) -> tuple[int, str]:
    """Return the number of names, and a hash of the names in their order."""
    digest = hashlib.sha256()
    count = 0
    for name in names:
        digest.update(name.encode() + b"\0")
        count += 1
    return count, digest.hexdigest()
