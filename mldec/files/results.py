"""Files of results: refused before the work where they cannot be written, and never half there after it."""

import json
import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from mldec.errors import ConfigError, DataError, writing

STANDARD_OUTPUT = "-"


def check_targets(*targets: str | None) -> None:
    """Check that files of results can be written, before the work that fills them.

    Args:
        targets: files, "-" for standard output, None for what was not asked for.

    Raises:
        ConfigError: for a folder, a file in a folder that is not there, one that may not be written, or one for both.
    """
    chosen = [target for target in targets if target is not None]
    for target in chosen:
        if target != STANDARD_OUTPUT:
            _check_file(Path(target))
    if len({os.path.realpath(target) for target in chosen}) < len(chosen):
        raise ConfigError(
            f"cannot write two results to {chosen[0]}: choose another name for one of them"
        )


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; add the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: no permission; choose another place")


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON that every reader takes: a number that is not finite becomes null.

    What is not Unicode in a text, such as a byte of a file name in another encoding, is written as its number.
    """
    return json.dumps(_clean(value), indent=indent, allow_nan=False)


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


class ResultFile:
    """A file of results. Each fault in writing is a `DataError` that names it, and drops what was written.

    Args:
        target: the file; "-" is standard output.
        in_place: write under the file's own name from the start, so that it can be followed. Otherwise it is written
            beside its place, and `commit` gives it its name: what was there before stays until then.
    """

    def __init__(self, target: str, *, in_place: bool = False) -> None:
        self.target = target
        self._temporary: Path | None = None
        self.stream: TextIO | None = None  # None once it is closed

        if target == STANDARD_OUTPUT:
            self.target, self.stream = "standard output", sys.stdout
            return
        self._path = Path(target)
        # Another file must not take the place of a device or a pipe, such as /dev/stdout, nor of a link.
        if not in_place and (self._path.is_file() or not self._path.exists()):
            self._path = Path(os.path.realpath(target))
            self._temporary = self._path.with_name(f".{self._path.name[:40]}.{os.getpid()}.tmp")
        with writing(target):
            self.stream = (self._temporary or self._path).open("w", encoding="utf-8", newline="")

    def write(self, text: str, *, flush: bool = False) -> None:
        """Write text; with `flush` it reaches the file at once."""
        assert self.stream is not None
        try:
            with writing(self.target):
                self.stream.write(text)
                if flush:
                    self.stream.flush()
        except DataError:  # not at Ctrl-C, which the rows so far outlive
            self.discard()
            raise

    def commit(self) -> None:
        """Write the rest, close the file, and put it in its place."""
        if self.stream is None:
            return
        try:
            with writing(self.target):
                self.stream.flush()
                self._close()
                if self._temporary is not None:
                    self._temporary.replace(self._path)
        except DataError:
            self.discard()
            raise

    def discard(self) -> None:
        """Close the file, and remove what was written beside its place."""
        with suppress(OSError):  # a full disk, of which the write has told
            self._close()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        stream, self.stream = self.stream, None
        if stream is not None and stream is not sys.stdout:
            stream.close()


def write_result(target: str, text: str) -> None:
    """Write a file of results at once; see `ResultFile`.

    Raises:
        DataError: if it cannot be written; what was there before stays.
    """
    file = ResultFile(target)
    file.write(text)
    file.commit()


class JsonList:
    """A JSON list in a file, row by row; it is put in its place whole however its block ends, even by Ctrl-C.

    Without a row, and after a fault in writing, what was there before stays.

    Args:
        target: the file; "-" is standard output.
    """

    def __init__(self, target: str) -> None:
        self.file = ResultFile(target)
        self.rows = 0

    def add(self, row: Any) -> None:
        """Add a row.

        Raises:
            DataError: if it cannot be written.
        """
        lines = to_json([row], indent=1).removeprefix("[\n").removesuffix("\n]")
        self.file.write((",\n" if self.rows else "[\n") + lines)
        self.rows += 1

    def __enter__(self) -> "JsonList":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.file.stream is None:  # a write failed
            return
        if not self.rows:
            self.file.discard()
            return
        self.file.write("\n]\n")
        self.file.commit()


class JsonLines:
    """A file with a JSON object per line, each of which is there as soon as it is added.

    Args:
        target: the file; "-" is standard output.
    """

    def __init__(self, target: str) -> None:
        self.file = ResultFile(target, in_place=True)

    def add(self, row: Any) -> None:
        """Add a line.

        Raises:
            DataError: if it cannot be written.
        """
        self.file.write(to_json(row) + "\n", flush=True)

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.file.commit()
