"""Result files: rows that survive a stop, the formats made of them, and parts of shards."""

import base64
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mldec.errors import ConfigError, DataError, Stopped, naming_errors, visible, writing
from mldec.files.atomic import csv_lines, named, replacing, to_json, write_texts
from mldec.tools.predict import storage
from mldec.tools.predict.answers import Row, Rule, entries
from mldec.tools.predict.decode import Item
from mldec.tools.predict.inputs import Inputs

SEPARATOR = ";"  # between the classes of an image in a CSV file
FEATURES = b"\t"  # in a line before the features; JSON has no tab
RETRY = FEATURES + b"!"  # at the end of a line without an answer that another try may give

# A line is the row of an image as bytes: its JSON, and its features in base64 if they are wanted.
Lines = Iterable[bytes]


def line_of(rule: Rule, row: Row) -> bytes:
    """Return the line of a row, without its end."""
    line = to_json(entries(rule, row)).encode()
    if row.features is not None:
        line += FEATURES + base64.b64encode(row.features.numpy().tobytes())
    return line + RETRY if row.may_pass else line


def row_of(line: bytes) -> dict[str, Any]:
    """Return the entries of a row in JSON."""
    return dict(json.loads(line.partition(FEATURES)[0]))


def image_of(line: bytes) -> str | None:
    """Return the name of the image of a line with its end; None if the line is damaged."""
    text, _, rest = line.removesuffix(b"\n").removesuffix(RETRY).partition(FEATURES)
    try:
        base64.b64decode(rest, validate=True)
        image = json.loads(text)["image"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return image if isinstance(image, str) and line.endswith(b"\n") else None


def cells_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the cells of a row in a table; a cell that is not there is empty."""
    cells: dict[str, Any] = {key: row[key] for key in ("image", "error", "classes") if key in row}
    if "predictions" in row:
        cells["classes"] = [one["name"] for one in row["predictions"]]
        cells["scores"] = [one["score"] for one in row["predictions"]]
    elif "scores" in row:
        # A list is that of a table, which is read again.
        scores = row["scores"]
        cells["scores"] = scores if isinstance(scores, list) else [*scores.values()]
    return cells


def json_lines(rule: Rule, lines: Lines) -> Iterator[str]:
    """Yield the text of JSON Lines: a JSON object per line."""
    for line in lines:
        yield line.partition(FEATURES)[0].decode() + "\n"


def json_list(rule: Rule, lines: Lines) -> Iterator[str]:
    """Yield the text of one JSON list, row by row."""
    before = "[\n"
    for line in lines:
        # A list of one row has the indentation that the row has in the whole list.
        yield before + to_json([row_of(line)], indent=1).removeprefix("[\n").removesuffix("\n]")
        before = ",\n"
    yield "[\n\n]\n" if before == "[\n" else "\n]\n"


def comma_separated(rule: Rule, lines: Lines) -> Iterator[str]:
    """Return the text of CSV, row by row; its columns are image, error, and the rule's content.

    These are: classes and scores, with semicolons between them; a column per class; or classes. If
    a class has a semicolon in its name, the classes are a JSON list.
    """
    lists = {"top": ("classes", "scores"), "decisions": ("classes",)}
    columns = lists.get(rule.content, rule.classes.names)
    has_separator = any(SEPARATOR in name for name in rule.classes.names)

    def rows() -> Iterator[Sequence[str]]:
        yield ["image", "error", *columns]
        for line in lines:
            cells = cells_of(row_of(line))
            chosen, scores = cells.get("classes", []), [*map(repr, cells.get("scores", []))]
            fields = scores or [""] * len(columns)
            if rule.content in lists:
                is_list = has_separator and "error" not in cells
                names = json.dumps(chosen) if is_list else SEPARATOR.join(chosen)
                fields = [names, SEPARATOR.join(scores)][: len(columns)]
            yield [cells["image"], cells.get("error", ""), *fields]

    return csv_lines(rows(), "\n")


# The formats that are written row by row, by the names of their options.
TEXTS = {"jsonl": json_lines, "json": json_list, "csv": comma_separated}


def parquet(rule: Rule, lines: Lines, file: BinaryIO) -> None:
    """Write a Parquet file.

    Its columns are those of `comma_separated`, with lists in place of separators, and with all
    scores of an image as one list; the classes are in the metadata of the file, a JSON list.
    """
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    columns = [("image", pyarrow.string()), ("error", pyarrow.string())]
    if rule.content != "scores":
        columns.append(("classes", pyarrow.list_(pyarrow.string())))
    if rule.content != "decisions":
        columns.append(("scores", pyarrow.list_(pyarrow.float32())))
    names = rule.classes.names
    schema = pyarrow.schema(columns, metadata={"classes": json.dumps([*names])})

    # The rows of a group are in memory together.
    group = min(10_000, 1 + 10**6 // len(names))
    remaining = iter(lines)
    with ParquetWriter(file, schema) as writer:
        while rows := [cells_of(row_of(line)) for line in islice(remaining, group)]:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


def features(lines: Callable[[], Lines], file: BinaryIO) -> None:
    """Write pooled features as an array of NumPy, float32 [N, C]; [N, 0] if no image was read.

    The row of an image without an answer is NaN.
    """
    arrays = (base64.b64decode(line.partition(FEATURES)[2]) for line in lines())
    width = next((len(array) // 4 for array in arrays if array), 0)
    kind = np.lib.format.dtype_to_descr(np.dtype(np.float32))
    shape = (sum(1 for _ in lines()), width)
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)

    missing = np.full(width, np.nan, np.float32).tobytes()
    for line in lines():
        file.write(base64.b64decode(line.partition(FEATURES)[2]) or missing)


def write(kind: str, rule: Rule, lines: Callable[[], Lines], file: BinaryIO) -> None:
    """Write a result file of the kind that an option names."""
    if kind == "parquet":
        parquet(rule, lines(), file)
    elif kind == "features":
        features(lines, file)
    else:
        file.writelines(text.encode() for text in TEXTS[kind](rule, lines()))


def stream(kind: str, target: str, rule: Rule, lines: Lines) -> None:
    """Write each line at once to standard output or a device; the kind is one of `TEXTS`.

    A list is completed however the lines end.
    """
    faults: list[BaseException] = []

    def until_end() -> Iterator[bytes]:
        try:
            yield from lines
        except BaseException as error:
            faults.append(error)

    write_texts(target, TEXTS[kind](rule, until_end()))
    if faults:
        raise faults[0]


VERSION = 4  # of records and lines; raise it when their meaning changes
CHUNK = 100_000  # rows of a Parquet file of a shard
FLUSHED_ROWS, FLUSHED_SECONDS = 1000, 30.0  # at most these are answered again after a crash
RECORD, JOURNAL = ".run.json", ".progress"  # what stands beside a result file
NOTES = "files.json"  # in the folder of the journals, see `Outputs`
WORK = "_mldec"  # folder beside the parts of shards; readers of tables skip names with _
REMEDY = "remove it, and run its shard again"
_PART = r"part-\d{5,}-of-(\d{5,})\.(jsonl|parquet)"
_PART_FILE = r"part-\d{5,}-of-\d{5,}(_\d{5,})?\.(jsonl|parquet)"


@dataclass(frozen=True, kw_only=True)
class Record:
    """How rows are made, and once all are there what they are."""

    made_with: dict[str, Any]  # all that decides on them, by the names that users know
    images: int | None = None  # None until all are there
    errors: int = 0  # images without an answer
    retry: int = 0  # images without an answer that another try may give
    names: str = ""  # hash of the names of the images
    # Image files that were left out, by suffix, as of `UnsupportedFiles.to_dict`.
    unsupported_files: dict[str, Any] = field(default_factory=dict)
    # Result files, and the fingerprints that they may have: one for a complete result.
    files: dict[str, list[str]] = field(default_factory=dict)

    def write(self, path: str) -> None:
        """Write the record to a file of its own."""
        storage.write(path, (to_json(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def read(cls, path: str) -> "Record | None":
        """Return the record in a file; None if there is none."""
        if not storage.exists(path):
            return None
        remedy = "restore it, or pass --overwrite to begin anew"
        with naming_errors(path, DataError, remedy=remedy), storage.opened(path) as file:
            record = cls(**json.loads(file.read()))
            is_object = isinstance(record.made_with, dict) and isinstance(record.files, dict)
            counts = (record.images or 0, record.errors, record.retry)
            if not is_object or not all(isinstance(count, int) for count in counts):
                raise ValueError("it is not a record of predict")
            return record

    def compare(self, target: str, now: dict[str, Any]) -> None:
        """Raise a `ConfigError` if a result is made otherwise now."""
        for key in {**self.made_with, **now}:
            before, after = self.made_with.get(key), now.get(key)
            if before != after:
                raise ConfigError(
                    f"{target} was begun with {key} {_shown(before)}, not {_shown(after)}: "
                    f"name another file, or pass --overwrite"
                )


def _shown(value: Any) -> str:
    """Return the beginning of a value of a record, for messages."""
    return "none" if value is None else visible(json.dumps(value))[:100]


def changed(target: str, where: str) -> DataError:
    """Return the error of an input that has changed."""
    return DataError(
        f"{target}: the images are not those that it was begun with ({where}); pass "
        f"--overwrite to begin anew, or name another file"
    )


class Outputs:
    """The result files of a command. A file that it did not write is never replaced.

    The record of a complete result holds the fingerprints of its files. Until then, they are in a
    file of the folder `work`, which is written before a result file gets its name.
    """

    def __init__(self, targets: Sequence[str], work: Path, *, overwrite: bool = False) -> None:
        self.work = work
        self.path = beside(targets[0], RECORD)
        self.record: Record | None = None  # of a complete result
        self.written: dict[str, list[str]] = {}  # by this process
        self._targets = targets
        self._notes = str(work / NOTES)
        self._ours: dict[str, list[str]] = {}

        if overwrite:
            # The files that exist now may be replaced, also by a command that goes on.
            for path in existing(targets):
                self._ours[_key(path)] = [storage.fingerprint(path) or ""]
            self._note()
            storage.remove(self.path)
            return
        self.record = Record.read(self.path)
        for record in (self.record, Record.read(self._notes)):
            for key, fingerprints in record.files.items() if record else ():
                self._ours.setdefault(key, []).extend(fingerprints)

    def check(self, path: str) -> None:
        """Raise a `ConfigError` if a file exists that this command did not write."""
        known = self._ours.get(_key(path), [])
        if storage.exists(path) and (not known or storage.fingerprint(path) not in known):
            raise ConfigError(
                f"{path} exists, and nothing says how it was made: move it, name another file, or "
                f"pass --overwrite"
            )

    def are_whole(self) -> bool:
        """Return True if all result files exist as they were written."""
        found = existing(self._targets)
        for path in found:
            self.check(path)
        return self.record is not None and self.record.files.keys() <= {*map(_key, found)}

    def write(self, path: str, content: Callable[[BinaryIO], None]) -> None:
        """Write a result file, completely or not at all."""

        def ready(whole: Path) -> None:
            self.check(path)
            # After a kill, the earlier file or this one has the name.
            own = storage.fingerprint(str(whole), hashed=not storage.is_address(path)) or ""
            self._ours.setdefault(_key(path), []).append(own)
            self.written[_key(path)] = [own]
            self._note()

        with storage.publishing(path, self.work, ready) as file:
            content(file)

    def finish(self, record: Record) -> None:
        """Remove files of an earlier result that are not in this one, and write the record."""
        for path in existing(self._targets):
            if _key(path) not in self.written:
                self.check(path)
                storage.remove(path)
        record.write(self.path)
        self.record = record
        Path(self._notes).unlink(missing_ok=True)

    def _note(self) -> None:
        with writing(self.work):
            self.work.mkdir(parents=True, exist_ok=True)
        Record(made_with={}, files=self._ours).write(self._notes)


def _key(path: str) -> str:
    """Return the name of a result file in a record: parts may be moved with their folder."""
    return path.rpartition("/")[2] if is_part(path) else path


def existing(targets: Iterable[str]) -> list[str]:
    """Return the result files that exist, with all files of a part."""
    found = []
    for target in targets:
        if not is_part(target):
            found += [target] if storage.exists(target) else []
            continue
        folder, _, name = target.rpartition("/")
        stem, _, ending = name.partition(".")
        for entry in entries_of(folder):
            if re.fullmatch(rf"{stem}(_\d{{5,}})?\.{ending}", entry.name):
                found.append(f"{folder}/{entry.name}")
    return found


def entries_of(folder: str) -> list[storage.Entry]:
    """Return what a folder holds; nothing if there is no folder."""
    try:
        return storage.entries(folder)
    except FileNotFoundError:
        return []
    except DataError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise


ROWS, HOW = "rows.jsonl", "record.json"  # files of a journal


class Journal:
    """The rows of one process on its own disk: a line each, in the order of its images."""

    def __init__(self, folder: Path, target: str, made_with: dict[str, Any]) -> None:
        # The folder holds the record of how they are made too, and the lock of the process.
        self.folder, self.rows, self.target = folder, folder / ROWS, target
        self.images = 0  # number of rows
        self.failed: list[Item] = []  # of a complete journal, the images to be tried again
        self._made_with = made_with
        self._waiting: list[bytes] = []
        self._flushed = time.monotonic()

    def begin(self, items: Iterator[Item], batch: int, *, overwrite: bool) -> Iterator[Item]:
        """Return the images that are left, after those of the whole rows, which are compared.

        Other rows are cut off, and so are those of a batch that was not written whole: in a batch
        of another size the last digit of a score may be another one.
        """
        record = str(self.folder / HOW)
        if self.rows.exists() and not storage.exists(record):
            raise ConfigError(f"{self.rows} exists, and nothing says how it was made: move it")
        earlier = None if overwrite else Record.read(record)
        if earlier is None:
            self.rows.unlink(missing_ok=True)
            Record(made_with=self._made_with).write(record)
        else:
            earlier.compare(self.target, self._made_with)
        self.rows.touch()

        end = position = 0
        kept: list[Item] = []  # of the last batch
        with self.rows.open("rb+") as file:
            for line in file:
                name = image_of(line)
                if name is None:
                    break
                item = next(items, None)
                self.images += 1
                if item is None or named(item.name)["image"] != name:
                    raise changed(self.target, f"number {self.images:,} is another one")
                if line.endswith(RETRY + b"\n"):
                    self.failed.append(item)
                kept.append(item)
                position += len(line)
                if self.images % batch == 0:
                    end = position
                    kept.clear()
            is_complete = earlier is not None and self.images == earlier.images
            file.truncate(position if is_complete else end)
        if is_complete:
            return items
        self.failed.clear()
        self.images -= len(kept)
        return chain(kept, items)

    def add(self, line: bytes) -> None:
        """Take the row of the next image."""
        self._waiting.append(line + b"\n")
        self.images += 1
        is_late = time.monotonic() - self._flushed > FLUSHED_SECONDS
        if is_late or len(self._waiting) >= FLUSHED_ROWS:
            self.flush()

    def flush(self) -> None:
        """Bring all rows to the disk."""
        # They are tried once: after a full disk the last line may be a part of one.
        waiting, self._waiting = self._waiting, []
        with writing(self.folder), self.rows.open("ab") as file:
            file.writelines(waiting)
            file.flush()
            os.fsync(file.fileno())
        self._flushed = time.monotonic()

    def retry(self, lines: Iterator[bytes]) -> None:
        """Replace the rows of the failed images. After a stop, those that are left stay."""
        # Other processes must not join the rows meanwhile.
        Record(made_with=self._made_with).write(str(self.folder / HOW))
        stopped = None
        with replacing(self.rows) as new, self.rows.open("rb") as old:
            for line in old:
                if line.endswith(RETRY + b"\n") and stopped is None:
                    try:
                        line = next(lines) + b"\n"
                    except Stopped as stop:
                        stopped = stop
                new.write(line)
        self.finish()
        if stopped is not None:
            raise stopped

    def finish(self) -> None:
        """Note that all rows are there."""
        record = Record(made_with=self._made_with, images=self.images)
        record.write(str(self.folder / HOW))


def remove_journal(folder: Path) -> None:
    """Remove the files of a journal, and its folder if nothing else is in it."""
    if (folder / HOW).exists():
        for path in (folder / ROWS, folder / HOW, *folder.glob(".*.tmp.json*")):
            path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def part_of(folder: str, ending: str, number: int, shards: int) -> str:
    """Return the path of the part of a shard."""
    return f"{folder.rstrip('/')}/part-{number:05}-of-{shards:05}.{ending}"


def parts_in(folder: str) -> list[str]:
    """Return the paths of all parts that a folder should have, by the names of those in it."""
    matches = [re.fullmatch(_PART, entry.name) for entry in entries_of(folder)]
    kinds = {(int(match[1]), match[2]) for match in matches if match}
    if len(kinds) > 1:
        raise ConfigError(f"{folder} holds parts of several kinds: name one folder for each")
    return [part_of(folder, ending, n, shards) for shards, ending in kinds for n in range(shards)]


def beside(target: str, ending: str) -> str:
    """Return the path of what belongs to a result file: beside it, or for a part in `WORK`."""
    folder, _, name = target.rpartition("/")
    return f"{folder}/{WORK}/{name}{ending}" if is_part(target) else target + ending


def is_part(target: str) -> bool:
    """Return True if a result file is a file of the part of a shard, by its name."""
    return re.fullmatch(_PART_FILE, target.rpartition("/")[2]) is not None


def chunk_of(part: str, number: int) -> str:
    """Return the path of the files of `CHUNK` rows of a part: its own, then NAME_00001.parquet."""
    return part.replace(".parquet", f"_{number:05}.parquet") if number else part


def lines_in(path: str) -> Iterator[bytes]:
    """Yield the lines in a file of JSON lines, or in the Parquet files of a part."""
    if not path.endswith(".parquet"):
        with storage.opened(path) as file:
            yield from (line.rstrip(b"\n") for line in file)
        return

    from pyarrow import parquet

    number = 0
    while storage.exists(chunk := chunk_of(path, number)):
        with naming_errors(chunk, DataError, remedy=REMEDY), storage.opened(chunk) as file:
            for batch in parquet.ParquetFile(file).iter_batches(1000):
                for cells in batch.to_pylist():
                    row = {key: cell for key, cell in cells.items() if cell is not None}
                    yield to_json(row).encode()
        number += 1


def check_part(part: str, shard: str) -> Record:
    """Return the record of a part; raise a `DataError` unless the part is complete."""
    record = Record.read(beside(part, RECORD))
    if record is None:
        raise DataError(f"{part} is not complete; run --shard {shard} first")
    found = {_key(path): path for path in existing([part])}
    for name in {**record.files, **found}:
        path = found.get(name)
        fault = None
        if path is None:
            fault = f"{name} is missing; run --shard {shard} again"
        elif name not in record.files:
            fault = f"{path} is not a file of this result; move it"
        elif storage.fingerprint(path) not in record.files[name]:
            fault = f"{path} has changed since it was written; {REMEDY}"
        if fault is not None:
            raise DataError(fault)
    return record


def joined(parts: Sequence[str], inputs: Inputs) -> Iterator[bytes]:
    """Yield the lines of all parts in the order of the input, whose images it goes through."""
    if len(parts) == 1:
        yield from lines_in(parts[0])
        return

    lines = [lines_in(part) for part in parts]
    number = 0
    for number, (owner, item) in enumerate(inputs.divided(len(parts)), 1):
        line = next(lines[owner], b"{}")
        if row_of(line).get("image") != named(item.name)["image"]:
            raise changed(str(Path(parts[0]).parent), f"number {number:,} is another one")
        yield line
    if any(next(rest, None) for rest in lines):
        raise changed(str(Path(parts[0]).parent), f"they were more than {number:,}")


def write_chunk(
    outputs: Outputs, part: str, rule: Rule, lines: Callable[[], Lines], number: int
) -> None:
    """Write one of the files of `CHUNK` rows of a Parquet part, unless this process wrote it."""
    chunk = chunk_of(part, number)
    rows = range(number * CHUNK, (number + 1) * CHUNK)
    if _key(chunk) not in outputs.written:
        outputs.write(
            chunk, lambda file: parquet(rule, islice(lines(), rows.start, rows.stop), file)
        )


def publish(
    outputs: Outputs,
    targets: Mapping[str, str],
    rule: Rule,
    lines: Callable[[], Lines],
    made_with: dict[str, Any],
    inputs: Inputs,
) -> Record:
    """Write result files, by their kinds, and then the record that they are whole."""
    errors = 0
    retry = 0

    def names() -> Iterator[str]:
        nonlocal errors, retry
        for line in lines():
            row = row_of(line)
            errors += "error" in row
            retry += line.endswith(RETRY)
            yield row["image"]

    images, digest = summed(names())
    for kind, target in targets.items():
        if kind == "parquet" and is_part(target):
            for number in range(max(1, -(-images // CHUNK))):
                write_chunk(outputs, target, rule, lines, number)
        else:
            outputs.write(target, partial(write, kind, rule, lines))

    record = Record(
        made_with=made_with,
        images=images,
        errors=errors,
        retry=retry,
        names=digest,
        files=outputs.written,
        unsupported_files=inputs.unsupported.to_dict(),
    )
    outputs.finish(record)
    return record


def summed(names: Iterable[str]) -> tuple[int, str]:
    """Return how many names there are, and a hash of them in their order."""
    digest, count = hashlib.sha256(), 0
    for name in names:
        digest.update(name.encode() + b"\0")
        count += 1
    return count, digest.hexdigest()
