"""A long result in parts: what is done stays done, whatever ends the process.

Beside a result `out.jsonl` stand `out.jsonl.run.json`, which says how it is made, and, until it is
complete, the folder `out.jsonl.parts`. There every block of images is a folder with a part of each
result file. A block appears by being renamed, so that it is complete or absent.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mldec.errors import FULL, ConfigError, DataError, visible
from mldec.files.results import replacing, to_json, write_file
from mldec.inference.formats import Format
from mldec.inference.rows import Row

FORMAT = 1  # of the record and of the blocks; raise it when their meaning changes
BLOCK = 128  # images per block: at most these are answered again after a crash
_RECORD = "block.json"


@dataclass(frozen=True)
class Block:
    """What is known of a finished block.

    Attributes:
        images: in the block.
        names: hash of their names, see `digest`.
        errors: images without an answer.
    """

    images: int
    names: str
    errors: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """How a result is made.

    Attributes:
        made_with: all that decides what it holds, by the names that users know.
        format: of this file.
        finished: the result is complete; the sum over its blocks, and their combined hash.
    """

    made_with: dict[str, Any]
    format: int = FORMAT
    finished: Block | None = None


def digest(names: Iterable[str]) -> str:
    """Return a hash of names of images, in their order."""
    # A NUL cannot be in a path.
    joined = b"\0".join(os.fsencode(name) for name in names)
    return hashlib.sha256(joined).hexdigest()


def total(blocks: Sequence[Block]) -> Block:
    """Return the sums over blocks, and the hash of their hashes."""
    return Block(
        images=sum(block.images for block in blocks),
        names=digest(block.names for block in blocks),
        errors=sum(block.errors for block in blocks),
    )


class Parts:
    """The parts of one or several result files that are made together.

    Args:
        targets: the result files, regular or absent, and their formats.

    Attributes:
        first: the result file that the record and the parts are named after.
        folder: of the blocks.
    """

    def __init__(self, targets: Mapping[Path, Format]) -> None:
        self._targets = dict(targets)
        self.first = next(iter(targets))
        self.folder = self.first.with_name(f"{self.first.name}.parts")
        self._record_path = self.first.with_name(f"{self.first.name}.run.json")

    def existing(self, made_with: dict[str, Any]) -> Record | None:
        """Return the record of a result that was begun, finished only if all its files are there.

        Args:
            made_with: see `Record`.

        Returns:
            None if there is no such result, and nothing in its place.

        Raises:
            ConfigError: if it was made otherwise, or nothing says how.
            DataError: if the record cannot be read.
        """
        record = self._read_record()
        if record is None:
            for target in self._targets:
                if target.exists():
                    raise ConfigError(
                        f"{target} exists, and nothing says how it was made: name another file, "
                        f"or pass --overwrite"
                    )
            return None

        self._compare(record.made_with, _as_json(made_with))
        is_complete = all(target.exists() for target in self._targets)
        return record if is_complete else replace(record, finished=None)

    def make_folder(self) -> None:
        """Make the folder of the blocks.

        Raises:
            DataError: if that fails.
        """
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def start(self, made_with: dict[str, Any]) -> Record:
        """Begin a result anew: remove the blocks of an earlier one, and write the record.

        Raises:
            DataError: if it cannot be written.
        """
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)

        record = Record(made_with=_as_json(made_with))
        self._write_record(record)
        return record

    def done(self) -> set[int]:
        """Return the numbers of the finished blocks."""
        return {int(entry.name) for entry in os.scandir(self.folder) if entry.name.isdecimal()}

    def read(self, number: int) -> Block:
        """Return what is known of a finished block.

        Raises:
            DataError: if it is damaged.
        """
        path = self._block(number) / _RECORD
        try:
            return Block(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"{path.parent} is damaged: delete it, and its images are answered again"
            ) from error

    def write(self, number: int, rows: Sequence[Row]) -> None:
        """Write a block.

        Args:
            number: of the block in the input.
            rows: of its images, in their order.

        Raises:
            DataError: if it cannot be written; the other blocks stay as they are.
        """
        errors = sum(row.error is not None for row in rows)
        block = Block(len(rows), digest(row.image for row in rows), errors)

        temporary = self.folder / f".{number}.{os.getpid()}"
        try:
            temporary.mkdir()
            for index, file_format in enumerate(self._targets.values()):
                _write_durably(temporary / str(index), file_format.part(rows))
            _write_durably(temporary / _RECORD, to_json(asdict(block)).encode())
            temporary.rename(self._block(number))
        except OSError as error:
            with suppress(OSError):
                shutil.rmtree(temporary)
            raise self._unwritable(error) from error

    def finish(self, record: Record, blocks: int) -> Block:
        """Join the parts to the result files, and remove them.

        Args:
            record: of the result.
            blocks: their number.

        Returns:
            The sums over the blocks.

        Raises:
            DataError: if a block is missing, or a file cannot be written; the parts stay.
        """
        summary = total([self.read(number) for number in range(blocks)])
        for index, (target, file_format) in enumerate(self._targets.items()):
            parts = [self._block(number) / str(index) for number in range(blocks)]
            with replacing(_resolved(target), durable=True) as file:
                file_format.join(parts, file)

        # From here on the result is complete: only then the parts may go.
        self._write_record(Record(made_with=record.made_with, finished=summary))
        shutil.rmtree(self.folder, ignore_errors=True)
        return summary

    def check_names(self, number: int, names: Sequence[str]) -> None:
        """Check that a finished block is about the images that the input has there now.

        Args:
            number: of the block.
            names: of its images.

        Raises:
            DataError: if the input has changed.
        """
        if self.read(number).names != digest(names):
            raise self._changed(f"from number {number * BLOCK + 1:,} on")

    def check_all_names(self, finished: Block, names: Iterable[str]) -> None:
        """Check that a complete result is about the images that the input has now.

        Args:
            finished: of the record.
            names: of all images.

        Raises:
            DataError: if the input has changed.
        """
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

    def _compare(self, earlier: dict[str, Any], now: dict[str, Any]) -> None:
        """Raise a `ConfigError` if a result is made otherwise than before."""
        for key in {**earlier, **now}:
            if earlier.get(key) != now.get(key):
                raise ConfigError(
                    f"{self.first} was begun with {key} {_shown(earlier.get(key))}, "
                    f"not {_shown(now.get(key))}: name another file, or pass --overwrite"
                )

    def _read_record(self) -> Record | None:
        """Return the record; None if there is none."""
        try:
            values = json.loads(self._record_path.read_text())
            finished = values.pop("finished")
            record = Record(**values, finished=None if finished is None else Block(**finished))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{self._record_path} cannot be read as a record of {self.first}: restore it, or "
                f"pass --overwrite to begin anew"
            ) from error

        if record.format != FORMAT or not isinstance(record.made_with, dict):
            raise DataError(
                f"{self._record_path} is of another version: pass --overwrite to begin anew"
            )
        return record

    def _write_record(self, record: Record) -> None:
        """Write the record.

        Raises:
            DataError: if that fails.
        """
        write_file(self._record_path, (to_json(asdict(record), indent=1) + "\n").encode())

    def _block(self, number: int) -> Path:
        """Return the folder of a block."""
        return self.folder / f"{number:09}"

    def _unwritable(self, error: OSError) -> DataError:
        """Return the error of a block that cannot be written."""
        mend = "free space" if error.errno in FULL else "make it writable"
        return DataError(
            f"cannot write {self.folder}: {error.strerror or error}; {mend}, and the same command "
            f"goes on from there"
        )


def _as_json(made_with: dict[str, Any]) -> dict[str, Any]:
    """Return facts as they are read from a record, so that they compare equal to it."""
    return dict(json.loads(to_json(made_with)))


def _shown(value: Any) -> str:
    """Return a value of a record in a message."""
    text = visible(json.dumps(value)) if value is not None else "none"
    return text if len(text) <= 100 else f"{text[:100]}..."


def _write_durably(path: Path, content: bytes) -> None:
    """Write a file, and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _resolved(path: Path) -> Path:
    """Return the path of a file itself, not that of a link to it."""
    return Path(os.path.realpath(path))
