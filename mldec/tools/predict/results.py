"""Result files that survive a kill, and the parts of shards.

1. Rows are appended to a journal in a local folder. A restarted command continues after them.
2. The result files are written at the end, each atomically. A file is first added to the record
   next to the first file. A restarted command only replaces files in the record.
3. Finally, the record gets the fingerprints of the files, and the journal is removed. It is kept
   while some images may succeed in another attempt. The next command replaces only their rows.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from mldec.data.photos import SkippedFiles
from mldec.errors import ConfigError, DataError, Stopped, naming_errors, writing
from mldec.files.atomic import named, replacing, to_json
from mldec.tools.predict import storage
from mldec.tools.predict.answers import Rule
from mldec.tools.predict.decode import Item
from mldec.tools.predict.formats import RETRY, Lines, image_of, row_of, write
from mldec.tools.predict.inputs import Inputs, Shard

VERSION = 5  # of records and lines; increase it if their meaning changes

# A journal is flushed after this number of rows or seconds.
FLUSHED_ROWS = 1000
FLUSHED_SECONDS = 30.0

# Suffixes of the record and of the folder of journals of a result file.
RECORD = ".run.json"
JOURNAL = ".progress"
WORK = "_mldec"  # folder of these for parts; table readers skip names that start with _

# Files in the folder of a journal.
ROWS = "rows.jsonl"
HOW = "record.json"

PART = r"part-\d{5,}-of-(\d{5,})\.(jsonl|parquet)"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The settings of a result or a journal, and its content once it is complete."""

    made_with: dict[str, Any]  # all settings that change the rows, by names for messages
    images: int | None = None  # None before all rows are written
    errors: int = 0  # images with an error
    retry: int = 0  # images of the result that the next command predicts again
    names: str = ""  # hash of the names of the images
    unsupported_files: dict[str, Any] = field(default_factory=dict)  # see `SkippedFiles`
    # Fingerprint of each result file, as a list. The list is empty while the file is written.
    files: dict[str, list[str]] = field(default_factory=dict)

    def write(self, path: str, scratch: Path) -> None:
        """Write the record to a file, see `storage.publishing`."""
        with storage.publishing(path, scratch) as file:
            file.write((to_json(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def read(cls, path: str) -> "Record | None":
        """Return the record in a file, or None if it does not exist."""
        if not storage.exists(path):
            return None
        remedy = "restore it, or pass --overwrite to start again"
        with naming_errors(path, DataError, remedy=remedy), storage.opened(path) as file:
            return cls(**json.loads(file.read()))

    def compare(self, target: str, made_with: dict[str, Any]) -> None:
        """Raise ConfigError if the settings have changed."""
        for key in {**self.made_with, **made_with}:
            before = self.made_with.get(key)
            now = made_with.get(key)
            if before != now:
                raise ConfigError(
                    f"{target} was started with {key} {json.dumps(before)[:100]}, not "
                    f"{json.dumps(now)[:100]}; name another file, or pass --overwrite"
                )


def changed(target: str, difference: str) -> DataError:
    """Return the error for changed input images."""
    return DataError(
        f"{target}: the input images have changed ({difference}); "
        f"pass --overwrite to start again, or name another file"
    )


class Outputs:
    """The result files of a command and their record. Other files are never replaced."""

    def __init__(
        self, targets: Mapping[str, str], made_with: dict[str, Any], work: Path, overwrite: bool
    ) -> None:
        self._targets = targets  # by the names of their options
        self._made_with = made_with  # see `Record`
        self._work = work  # local folder for temporary files
        self._path = companion(next(iter(targets.values())), RECORD)
        if overwrite:
            self.record: Record | None = None
            files: dict[str, list[str]] = {}
            for path in targets.values():
                if storage.exists(path):
                    files[_key(path)] = []
            self._save(Record(made_with=made_with, files=files))
        else:
            self.record = Record.read(self._path)

    def is_complete(self) -> bool:
        """Return True if all files are as they were written; raise ConfigError for other files."""
        for path in self._targets.values():
            known = self.record.files.get(_key(path)) if self.record else None
            if not storage.exists(path) or known == []:
                continue
            if known is None or storage.fingerprint(path) not in known:
                raise ConfigError(
                    f"{path} exists and was changed or not written by this command; "
                    f"move it, name another file, or pass --overwrite"
                )
        is_written = self.record is not None and self.record.images is not None
        return is_written and all(storage.exists(path) for path in self._targets.values())

    def publish(self, rule: Rule, lines: Callable[[], Lines], inputs: Inputs) -> Record:
        """Write all result files, and then their record."""
        errors = 0
        retry = 0

        def names() -> Iterator[str]:
            nonlocal errors, retry
            for line in lines():
                row = row_of(line)
                errors += "error" in row
                retry += line.endswith(RETRY)
                yield row["image"]

        images, digest = count_and_hash(names())
        for kind, target in self._targets.items():
            files = self.record.files if self.record else {}
            self._save(Record(made_with=self._made_with, files={**files, _key(target): []}))
            with storage.publishing(target, self._work) as file:
                write(kind, rule, lines, file)

        record = Record(
            made_with=self._made_with,
            images=images,
            errors=errors,
            retry=retry,
            names=digest,
            unsupported_files=inputs.skipped.to_dict(),
            files={_key(path): [storage.fingerprint(path)] for path in self._targets.values()},
        )
        self._save(record)
        return record

    def _save(self, record: Record) -> None:
        record.write(self._path, self._work)
        self.record = record


def count_and_hash(names: Iterable[str]) -> tuple[int, str]:
    """Return the number of names, and a hash of the names in their order."""
    digest = hashlib.sha256()
    count = 0
    for name in names:
        digest.update(name.encode() + b"\0")
        count += 1
    return count, digest.hexdigest()


class Journal:
    """The rows of one process in a local folder: one line per image, in order."""

    def __init__(self, folder: Path, target: str, made_with: dict[str, Any]) -> None:
        self.folder = folder
        self.rows = folder / ROWS
        self.images = 0  # number of rows
        self.failed: list[Item] = []  # images to retry, if the journal is complete
        self._target = target  # the result file, for messages
        self._record = str(folder / HOW)
        self._made_with = made_with  # see `Record`
        self._waiting: list[bytes] = []
        self._flushed = time.monotonic()

    def begin(self, items: Iterator[Item], batch: int, overwrite: bool) -> Iterator[Item]:
        """Return the images without a row, or the images to retry of a complete journal.

        Rows of an incomplete batch are removed, because a batch of another size may change the last
        digit of a score.
        """
        if self.rows.exists() and not storage.exists(self._record):
            raise ConfigError(f"{self.rows} exists and was not written by this command; move it")
        record = None if overwrite else Record.read(self._record)
        if record is None:
            self.rows.unlink(missing_ok=True)
            record = Record(made_with=self._made_with)
            record.write(self._record, self.folder)
        record.compare(self._target, self._made_with)
        self.rows.touch()

        end = position = 0
        kept: list[Item] = []  # of the last batch
        failed = []
        with self.rows.open("rb+") as file:
            for line in file:
                name = image_of(line)
                if name is None:
                    break
                item = next(items, None)
                self.images += 1
                if item is None or named(item.name)["image"] != name:
                    raise changed(self._target, f"image {self.images:,} differs")
                kept.append(item)
                if line.endswith(RETRY + b"\n"):
                    failed.append(item)
                position += len(line)
                if self.images % batch == 0:
                    end = position
                    kept.clear()
            if self.images == record.images:
                if next(items, None) is not None:
                    raise changed(self._target, f"there were {self.images:,}, now there are more")
                self.failed = failed
                return iter(failed)
            file.truncate(end)
        self.images -= len(kept)
        return chain(kept, items)

    def add(self, line: bytes) -> None:
        """Append the row of the next image."""
        self._waiting.append(line + b"\n")
        self.images += 1
        is_late = time.monotonic() - self._flushed > FLUSHED_SECONDS
        if is_late or len(self._waiting) >= FLUSHED_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write all rows to the disk."""
        # Write them only once, because a full disk may leave an incomplete line.
        waiting = self._waiting
        self._waiting = []
        with writing(self.folder), self.rows.open("ab") as file:
            file.writelines(waiting)
            file.flush()
            os.fsync(file.fileno())
        self._flushed = time.monotonic()

    def retry(self, lines: Iterator[bytes]) -> None:
        """Replace the rows of the images to retry. A stop keeps the other rows."""
        stopped = None
        with replacing(self.rows) as new, self.rows.open("rb") as old:
            for line in old:
                if line.endswith(RETRY + b"\n") and stopped is None:
                    try:
                        line = next(lines) + b"\n"
                    except Stopped as error:
                        stopped = error
                new.write(line)
        if stopped is not None:
            raise stopped

    def finish(self) -> None:
        """Record that the rows are complete."""
        Record(made_with=self._made_with, images=self.images).write(self._record, self.folder)


def remove_journals(work: Path, folders: Iterable[Path]) -> None:
    """Remove the files of journals, and their folders if they are empty."""
    for folder in folders:
        if (folder / HOW).exists():
            (folder / ROWS).unlink(missing_ok=True)
            (folder / HOW).unlink()
        with suppress(OSError):
            folder.rmdir()
    with suppress(OSError):
        work.rmdir()


def part_of(folder: str, kind: str, shard: Shard) -> str:
    """Return the path of the part of a shard."""
    return f"{folder.rstrip('/')}/part-{shard.number:05}-of-{shard.total:05}.{kind}"


def parts_in(folder: str) -> list[str]:
    """Return the paths of all parts in a folder, including missing ones."""
    kinds = set()
    files = storage.files_in(folder, SkippedFiles()) if storage.exists(folder) else ()
    for path in files:
        if match := re.fullmatch(PART, path.rpartition("/")[2]):
            kinds.add((match[2], int(match[1])))
    if len(kinds) > 1:
        raise ConfigError(f"{folder} has parts of several results; use one folder for each")
    parts = []
    for kind, count in kinds:
        parts += [part_of(folder, kind, Shard(number, count)) for number in range(count)]
    return parts


def is_part(target: str) -> bool:
    """Return True for the name of a part."""
    return re.fullmatch(PART, target.rpartition("/")[2]) is not None


def companion(target: str, suffix: str) -> str:
    """Return the path of the record or of the journals of a result file."""
    folder, _, name = target.rpartition("/")
    if is_part(target):
        return f"{folder}/{WORK}/{name}{suffix}"
    return target + suffix


def _key(path: str) -> str:
    # Parts can be moved with their folder.
    return path.rpartition("/")[2] if is_part(path) else path


def lines_in(path: str) -> Iterator[bytes]:
    """Yield the lines of a JSON Lines or Parquet file."""
    with storage.opened(path) as file:
        if not path.endswith(".parquet"):
            for line in file:
                yield line.rstrip(b"\n")
            return

        from pyarrow.parquet import ParquetFile

        with naming_errors(path, DataError, remedy="remove it, and run its shard again"):
            for batch in ParquetFile(file).iter_batches(1000):
                for cells in batch.to_pylist():
                    row = {key: cell for key, cell in cells.items() if cell is not None}
                    yield to_json(row).encode()


def joined(parts: Sequence[Sequence[str]], inputs: Inputs, target: str) -> Iterator[bytes]:
    """Yield the lines of the files of all parts, in the order of the input images."""
    lines = [chain.from_iterable(map(lines_in, files)) for files in parts]
    if len(lines) == 1:
        yield from lines[0]
        return

    number = 0
    for number, (owner, item) in enumerate(inputs.divided(len(parts)), 1):
        line = next(lines[owner], b"{}")
        if row_of(line).get("image") != named(item.name)["image"]:
            raise changed(target, f"image {number:,} differs")
        yield line
    if any(next(rest, None) for rest in lines):
        raise changed(target, f"there were more than {number:,}")
