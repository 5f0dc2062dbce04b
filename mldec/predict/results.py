"""Result files: blocks that survive a stop, their formats, streams and progress."""

import csv
import hashlib
import importlib.util
import io
import json
import logging
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from mldec.errors import FULL, ConfigError, DataError, UserError, printable, refusing, visible
from mldec.predict.answers import Content, Row, Rule, entries, named
from mldec.predict.inputs import Item
from mldec.runtime.cli import on_terminal
from mldec.runtime.results import ResultFile, replacing, to_json, write_file
from mldec.runtime.run_folder import LOCK_FILE, RunLock

SEPARATOR = ";"  # between the classes of an image in a CSV file
NPY = ".npy"


@dataclass(frozen=True)
class Text:
    """A file of text. Its parts can also be written one after another."""

    encode: Callable[[Row], str]  # returns the text of a row
    opening: str = ""  # the text before the first row
    between: str = ""  # the text between two rows
    closing: str = ""  # the text after the last row

    def part(self, rows: Sequence[Row]) -> bytes:
        """Return the bytes of some rows, without what stands before, between and after parts."""
        return self.between.join(map(self.encode, rows)).encode()

    def join(self, parts: Sequence[Path], file: BinaryIO) -> None:
        """Write a file that holds the rows of all parts, in their order."""
        file.write(self.opening.encode())
        for number, part in enumerate(parts):
            if number > 0:
                file.write(self.between.encode())
            with part.open("rb") as opened:
                shutil.copyfileobj(opened, file)
        file.write(self.closing.encode())


def json_lines(rule: Rule) -> Text:
    """Return the format of JSON Lines: a JSON object per line."""
    return Text(lambda row: to_json(entries(rule, row)) + "\n")


def json_list(rule: Rule) -> Text:
    """Return the format of one JSON list."""

    def encode(row: Row) -> str:
        # A list of one row has the indentation that the row has in the whole list.
        return to_json([entries(rule, row)], indent=1).removeprefix("[\n").removesuffix("\n]")

    return Text(encode, "[\n", ",\n", "\n]\n")


def comma_separated(rule: Rule) -> Text:
    """Return the format of CSV; its columns are image, error, and what the rule's content is.

    These are: classes and scores, with semicolons between them; a column per class; or classes. If
    a class has a semicolon in its name, the classes are a JSON list.
    """
    names = rule.classes.names
    columns = ["image", "error", "classes"]
    if rule.content is Content.TOP:
        columns.append("scores")
    elif rule.content is Content.SCORES:
        columns[2:] = names

    has_separator = any(SEPARATOR in name for name in names)

    def classes_of(row: Row) -> str:
        chosen = [item.name for item in row.predictions]
        return json.dumps(chosen) if has_separator else SEPARATOR.join(chosen)

    def encode(row: Row) -> str:
        fields: list[str] = [named(row.image)["image"], printable(row.error or "")]
        if rule.content is Content.SCORES:
            scores = [""] * len(names) if row.scores is None else map(repr, row.scores.tolist())
            fields += scores
        else:
            fields.append(classes_of(row) if row.error is None else "")
        if rule.content is Content.TOP:
            fields.append(SEPARATOR.join(repr(item.score) for item in row.predictions))
        return _line(fields)

    return Text(encode, _line(columns))


def _line(fields: Sequence[str]) -> str:
    """Return fields as a line of CSV."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue()


class Parquet:
    """A Parquet file; see `Text`.

    Its columns are those of `comma_separated`, with lists in place of separators, and with all
    scores of an image as one list; the classes are in the metadata of the file, a JSON list.
    """

    def __init__(self, rule: Rule) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigError(
                "--parquet needs pyarrow, which is not installed; run pip install -e '.[parquet]'"
            )
        import pyarrow

        self._rule = rule
        columns = [("image", pyarrow.string()), ("error", pyarrow.string())]
        if rule.content is not Content.SCORES:
            columns.append(("classes", pyarrow.list_(pyarrow.string())))
        if rule.content is not Content.DECISIONS:
            columns.append(("scores", pyarrow.list_(pyarrow.float32())))
        classes = json.dumps([*rule.classes.names])
        self._schema = pyarrow.schema(columns, metadata={"classes": classes})

    def part(self, rows: Sequence[Row]) -> bytes:
        """Return a whole Parquet file of some rows."""
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.Table.from_pylist([*map(self._entries, rows)], schema=self._schema)
        buffer = io.BytesIO()
        parquet.write_table(table, buffer)
        return buffer.getvalue()

    def join(self, parts: Sequence[Path], file: BinaryIO) -> None:
        """Write the rows of the parts, in groups of rows."""
        from pyarrow import parquet

        with parquet.ParquetWriter(file, self._schema) as writer:
            for part in parts:
                writer.write_table(parquet.read_table(part, schema=self._schema))

    def _entries(self, row: Row) -> dict[str, Any]:
        """Return the cells of a row; a cell that is not there is null."""
        if row.error is not None:
            return {**named(row.image), "error": printable(row.error)}

        if self._rule.content is Content.SCORES:
            assert row.scores is not None
            scores = row.scores.numpy()
        else:
            scores = np.array([item.score for item in row.predictions], np.float32)
        classes = [item.name for item in row.predictions]
        return {**named(row.image), "classes": classes, "scores": scores}


class Features:
    """Pooled features as an array of NumPy, float32 [N, C]; see `Text`.

    The row of an image without an answer is NaN.
    """

    def part(self, rows: Sequence[Row]) -> bytes:
        """Return the features of some rows as an array file; [n, 0] if no image was read."""
        widths = [len(row.features) for row in rows if row.features is not None]
        width = widths[0] if widths else 0
        features = np.full((len(rows), width), np.nan, np.float32)
        for own, row in zip(features, rows, strict=True):
            if row.features is not None:
                own[:] = row.features.numpy()

        buffer = io.BytesIO()
        np.save(buffer, features)
        return buffer.getvalue()

    def join(self, parts: Sequence[Path], file: BinaryIO) -> None:
        """Write the arrays of the parts below each other."""
        # Only the headers are read first: all features need not fit into memory.
        shapes = [np.load(part, mmap_mode="r").shape for part in parts]
        width = max((shape[1] for shape in shapes), default=0)
        header = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)),
            "fortran_order": False,
            "shape": (sum(shape[0] for shape in shapes), width),
        }
        np.lib.format.write_array_header_1_0(file, header)

        for part in parts:
            array = np.load(part)
            if not array.shape[1]:
                array = np.full((len(array), width), np.nan, np.float32)
            file.write(array.tobytes())


Format = Text | Parquet | Features  # how rows become the bytes of a file

FORMAT = 2  # of the record and of the blocks; raise it when their meaning changes
BLOCK = 128  # images per block: at most these are answered again after a crash
_RECORD = "block.json"


@dataclass(frozen=True)
class Block:
    """What is known of a finished block."""

    images: int  # in the block
    names: str  # hash of their names, see `digest`
    errors: int  # images without an answer
    parts: str = ""  # hash of the bytes of its parts


@dataclass(frozen=True, kw_only=True)
class Record:
    """How a result is made."""

    made_with: dict[str, Any]  # all that decides what it holds, by the names that users know
    format: int = FORMAT  # of this file
    # Of a complete result: the sum over its blocks, and their combined hash.
    finished: Block | None = None


def digest(names: Iterable[str]) -> str:
    """Return a hash of names of images, in their order."""
    return _hash(os.fsencode(name) for name in names)


def _hash(pieces: Iterable[bytes]) -> str:
    """Return a hash of several pieces; no name of an image holds the NUL between them."""
    return hashlib.sha256(b"\0".join(pieces)).hexdigest()


class Parts:
    """The parts of one or several result files that are made together.

    Beside each result file is a record, NAME.run.json, and until it is complete a folder,
    NAME.parts, with the lock of the command that makes it. The first folder has the blocks.

    Attributes:
        first: result file.
        folder: of the blocks.
    """

    def __init__(self, targets: Mapping[Path, Format]) -> None:
        self._targets = dict(targets)
        self.first = next(iter(targets))
        self._folders = [target.with_name(f"{target.name}.parts") for target in targets]
        self.folder = self._folders[0]
        self._records = [target.with_name(f"{target.name}.run.json") for target in targets]
        for path in (*self._folders, *self._records):
            if path in targets:
                raise ConfigError(f"{path} is the name of a record or of parts: name another file")

    def existing(self, made_with: dict[str, Any]) -> Record | None:
        """Return the record of a result that was begun; None if there is nothing in its place.

        It is finished only if all its files are there. What was made otherwise is refused, and so
        is what has no record.
        """
        records = [_read_record(path) for path in self._records]
        for target, folder, record in zip(self._targets, self._folders, records, strict=True):
            if record is not None:
                _compare(target, record.made_with, made_with)
                continue
            has_blocks = folder.exists() and {*folder.iterdir()} - {folder / LOCK_FILE}
            if target.exists() or has_blocks:
                existing = folder if has_blocks else target
                raise ConfigError(
                    f"{existing} exists, and nothing says how it was made: name another file, or "
                    f"pass --overwrite"
                )

        if records[0] is None or all(target.exists() for target in self._targets):
            return records[0]
        return replace(records[0], finished=None)

    def lock(self, stack: ExitStack) -> None:
        """Keep other processes away from all result files until the end of the stack."""
        for folder in self._folders:
            if folder.is_symlink():
                raise ConfigError(f"{folder} is a link: remove it, or name another result file")
            stack.callback(_remove_empty, folder)
            stack.enter_context(RunLock(folder, of_run=False)).take()

    def start(self, made_with: dict[str, Any]) -> Record:
        """Begin a result anew: remove the blocks of an earlier one, and write the records."""
        self._clear()
        record = Record(made_with=made_with)
        self._write_records(record)
        return record

    def done(self) -> set[int]:
        """Return the numbers of the finished blocks."""
        names = [entry.name for entry in self.folder.iterdir()]
        return {int(name) for name in names if re.fullmatch(r"\d{9}", name)}

    def read(self, number: int, *, whole: bool = False) -> Block:
        """Return what is known of a finished block; with `whole` its parts are checked too."""
        path, remedy = self._block(number), "delete it, and its images are answered again"
        with refusing(path, DataError, remedy=remedy):
            block = Block(**json.loads((path / _RECORD).read_text()))
            parts = (path / str(index) for index in range(len(self._targets)))
            if whole and _hash(part.read_bytes() for part in parts) != block.parts:
                raise ValueError("its sha256 is another one")
        return block

    def write(self, number: int, rows: Sequence[Row]) -> None:
        """Write a block."""
        contents = [file_format.part(rows) for file_format in self._targets.values()]
        errors = sum(row.error is not None for row in rows)
        block = Block(len(rows), digest(row.image for row in rows), errors, _hash(contents))
        record = to_json(asdict(block)).encode()

        temporary = self.folder / f".{number}.{os.getpid()}"
        try:
            temporary.mkdir(exist_ok=True)  # in a container, ids of processes come again
            for name, content in (*enumerate(contents), (_RECORD, record)):
                with (temporary / str(name)).open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            temporary.rename(self._block(number))
        except OSError as error:
            with suppress(OSError):
                shutil.rmtree(temporary)
            mend = "free space" if error.errno in FULL else "make it writable"
            raise DataError(
                f"cannot write {self.folder}: {error.strerror or error}; {mend}, and the same "
                f"command goes on from there"
            ) from error

    def finish(self, record: Record, blocks: int) -> Block:
        """Join the parts to the result files, and remove them."""
        done = [self.read(number, whole=True) for number in range(blocks)]
        summary = Block(
            images=sum(block.images for block in done),
            names=digest(block.names for block in done),
            errors=sum(block.errors for block in done),
        )
        for index, (target, file_format) in enumerate(self._targets.items()):
            parts = [self._block(number) / str(index) for number in range(blocks)]
            # What a link leads to is replaced, and not the link.
            with replacing(Path(os.path.realpath(target)), durable=True) as file:
                file_format.join(parts, file)

        # From here on the result is complete: only then the parts may go.
        self._write_records(replace(record, finished=summary))
        self._clear()
        return summary

    def check_names(self, number: int, names: Sequence[str]) -> None:
        """Check that a finished block is about the images that the input has there now."""
        if self.read(number).names != digest(names):
            raise self._changed(f"from number {number * BLOCK + 1:,} on")

    def check_all_names(self, finished: Block, names: Iterable[str]) -> None:
        """Check that a complete result is about the images that the input has now."""
        stream = iter(names)
        digests: list[str] = []
        images = 0
        while block := list(islice(stream, BLOCK)):
            digests.append(digest(block))
            images += len(block)

        if digest(digests) != finished.names:
            raise self._changed(f"{finished.images:,} images then, {images:,} now")

    def _changed(self, where: str) -> DataError:
        """Return the error of an input that has changed."""
        return DataError(
            f"{self.first}: the images are not those that it was begun with ({where}); pass "
            f"--overwrite to begin anew, or name another file"
        )

    def _write_records(self, record: Record) -> None:
        """Write the records, that of the first file last: with it, all are there."""
        content = (to_json(asdict(record), indent=1) + "\n").encode()
        for path in reversed(self._records):
            write_file(path, content)

    def _block(self, number: int) -> Path:
        """Return the folder of a block."""
        return self.folder / f"{number:09}"

    def _clear(self) -> None:
        """Remove all blocks, also those that were not finished, and nothing else."""
        for folder in self._folders:
            for entry in folder.iterdir():
                if re.fullmatch(r"\d{9}|\.\d+\.\d+", entry.name):
                    shutil.rmtree(entry, ignore_errors=True)


def _remove_empty(folder: Path) -> None:
    """Remove a folder if nothing is in it."""
    with suppress(OSError):
        folder.rmdir()


def _read_record(path: Path) -> Record | None:
    """Return a record; None if there is none."""
    if not path.exists():
        return None

    with refusing(path, DataError, remedy="restore it, or pass --overwrite to begin anew"):
        values = json.loads(path.read_text())
        if values["finished"] is not None:
            values["finished"] = Block(**values["finished"])
        record = Record(**values)
        if record.format != FORMAT or not isinstance(record.made_with, dict):
            raise ValueError("it is of another version")
    return record


def _compare(target: Path, earlier: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise a `ConfigError` if a result is made otherwise than before."""
    for key in {**earlier, **now}:
        if earlier.get(key) != now.get(key):
            raise ConfigError(
                f"{target} was begun with {key} {_shown(earlier.get(key))}, "
                f"not {_shown(now.get(key))}: name another file, or pass --overwrite"
            )


def _shown(value: Any) -> str:
    """Return a value of a record in a message."""
    text = visible(json.dumps(value)) if value is not None else "none"
    return text if len(text) <= 100 else f"{text[:100]}..."


class Division:
    """The images that this process answers, and their way into the parts.

    Attributes:
        images: number of images that are answered, or given to other processes.
        blocks: number of blocks of the input so far, likewise.
    """

    def __init__(
        self,
        items: Iterable[Item],
        parts: Parts,
        done: set[int],
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.images = 0
        self.blocks = 0
        self._items = iter(items)
        self._parts = parts
        self._done = done
        self._rank = rank
        self._world_size = world_size
        # Numbers and sizes of the blocks whose images are on their way, and the rows of the first.
        self._open: deque[tuple[int, int]] = deque()
        self._rows: list[Row] = []

    def to_do(self) -> Iterator[Item]:
        """Yield the images that this process answers, in the order of the input."""
        turn = 0
        while items := list(islice(self._items, BLOCK)):
            number = self.blocks
            self.blocks += 1

            if number in self._done:
                self.images += len(items)
                self._parts.check_names(number, [item.name for item in items])
                continue
            if turn % self._world_size == self._rank:
                self._open.append((number, len(items)))
                yield from items
            else:
                self.images += len(items)
            turn += 1

    def add(self, row: Row) -> None:
        """Take the row of the next image; a block is written with its last row."""
        self._rows.append(row)
        self.images += 1

        number, size = self._open[0]
        if len(self._rows) == size:
            self._parts.write(number, self._rows)
            self._open.popleft()
            self._rows = []


@contextmanager
def streaming(target: str, text: Text) -> Iterator[Callable[[Row], None]]:
    """Yield a function that writes a row to standard output or a device at once."""
    file = ResultFile(target)
    rows = 0

    def add(row: Row) -> None:
        nonlocal rows
        before = text.between if rows else text.opening
        file.write(before + text.encode(row), flush=True)
        rows += 1

    try:
        yield add
    finally:
        # A list is completed however the work ends; after a write that failed the file is closed.
        if file.stream is not None:
            if rows == 0:
                file.write(text.opening)
            file.write(text.closing)
            file.commit()


log = logging.getLogger("mldec")

EVERY = 60.0  # seconds between two lines of the log


class Progress:
    """A context manager that shows how many images are done."""

    def __init__(self, title: str, images: Iterable[object] | None) -> None:
        self._title = title
        self._started = self._last_line = time.monotonic()
        self._first: int | None = None
        self._bar = tqdm(desc=title, unit=" images", leave=False, disable=not on_terminal())
        if images is not None and not self._bar.disable:
            threading.Thread(target=self._count, args=(images,), daemon=True).start()

    def update(self, done: int) -> None:
        """Show that so many images are done, those of an earlier run included."""
        if not self._bar.disable:
            self._bar.update(done - self._bar.n)
            return

        # The speed is that of this run.
        now = time.monotonic()
        if self._first is None:
            self._first, self._started = done, now
        if now - self._last_line >= EVERY:
            self._last_line = now
            speed = (done - self._first) / max(1e-9, now - self._started)
            log.info(f"{self._title}: {done:,} images, {speed:.1f} images/s")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def _count(self, images: Iterable[object]) -> None:
        """Count the images; the job itself reports what cannot be read."""
        with suppress(UserError):
            self._bar.total = sum(1 for _ in images)
