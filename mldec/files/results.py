"""Write result files, completely or not at all.

A target that cannot be written is refused before the work that would fill it.
"""

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from mldec.errors import ConfigError, DataError, writing

STANDARD_OUTPUT = "-"


def check_targets(*targets: str | None) -> None:
    """Check that result files can be written, before the work that fills them.

    Args:
        targets: paths of files, "-" for standard output, None for a result that is not wanted.

    Raises:
        ConfigError: if a target is a folder, lies in a folder that does not exist, is not writable,
            or is named twice.
    """
    chosen = [target for target in targets if target is not None]
    for target in chosen:
        if target != STANDARD_OUTPUT:
            _check_file(Path(target))

    # Compare the real paths: one of them may be a link to the other.
    if len({os.path.realpath(target) for target in chosen}) < len(chosen):
        raise ConfigError(
            f"cannot write two results to {chosen[0]}: choose another name for one of them"
        )


def _check_file(path: Path) -> None:
    """Check that one file can be written, or created."""
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; add the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: no permission; choose another place")


def is_special(path: Path) -> bool:
    """Tell whether a path is that of a device or a pipe, such as /dev/stdout."""
    return path.exists() and not path.is_file()


def check_folder(option: str, folder: str) -> None:
    """Check that files can be written to a folder, which need not exist yet.

    Args:
        option: that names the folder, for messages.
        folder: its path.

    Raises:
        ConfigError: if it is a file, or cannot be made or written to.
    """
    # What exists of the path decides whether the rest can be made.
    existing = Path(folder).absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent

    if not existing.is_dir():
        raise ConfigError(f"{option} {folder}: {existing} is a file; name a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{option} {folder}: no permission to write to {existing}; choose another place"
        )


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return a value as standard JSON, in which infinite and NaN numbers become null.

    Characters that are not Unicode, such as a byte of a file name in another encoding, are escaped.

    Args:
        value: nested dictionaries, lists, tuples and scalars.
        indent: as for `json.dumps`.
    """
    return json.dumps(_clean(value), indent=indent, allow_nan=False)


def _clean(value: Any) -> Any:
    """Copy a tree of values without what JSON and UTF-8 cannot hold."""
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
    """A result file; if writing fails, what was written is dropped and a `DataError` names it.

    A temporary file beside it is written, and `commit` gives it the name; until then an existing
    file stays as it is.

    Args:
        target: path of the file; "-" is standard output.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._temporary: Path | None = None
        self.stream: TextIO | None = None  # None once it is closed

        if target == STANDARD_OUTPUT:
            self.target, self.stream = "standard output", sys.stdout
            return
        self._path = Path(target)

        # A temporary file must not replace a device or a pipe, such as /dev/stdout, nor a link.
        if not is_special(self._path):
            self._path = Path(os.path.realpath(target))
            self._temporary = self._path.with_name(f".{self._path.name[:40]}.{os.getpid()}.tmp")

        with writing(target):
            self.stream = (self._temporary or self._path).open("w", encoding="utf-8", newline="")

    def write(self, text: str, *, flush: bool = False) -> None:
        """Write text; with `flush` it reaches the file at once.

        Raises:
            DataError: if it cannot be written.
        """
        assert self.stream is not None

        try:
            with writing(self.target):
                self.stream.write(text)
                if flush:
                    self.stream.flush()
        except DataError:
            # Ctrl-C is not caught: the rows written so far are kept then.
            self.discard()
            raise

    def commit(self) -> None:
        """Write what is buffered, close the file, and give it its name.

        Raises:
            DataError: if that fails; an existing file stays as it is.
        """
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
        """Close the file, and remove the temporary one."""
        # Closing flushes, which may fail on the full disk that the write has reported already.
        with suppress(OSError):
            self._close()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        stream, self.stream = self.stream, None

        # Standard output belongs to the whole process.
        if stream is not None and stream is not sys.stdout:
            stream.close()


def write_result(target: str, text: str) -> None:
    """Write a whole result file; see `ResultFile`.

    Raises:
        DataError: if it cannot be written; an existing file stays as it is.
    """
    file = ResultFile(target)
    file.write(text)
    file.commit()


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """Open a file to write bytes, which gets its name if the block ends without an error.

    Args:
        path: of the file; its folder is made.
        durable: wait until the content is on the disk; otherwise the name may be there before it
            after a loss of power.

    Raises:
        DataError: if it cannot be written; an existing file stays as it is.
    """
    temporary = path.with_name(f".{path.name[:40]}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, completely or not at all, and the folder that it is in; see `replacing`."""
    with replacing(path) as file:
        file.write(content)
