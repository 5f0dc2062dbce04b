"""Files that others wrote: how every one of them is opened, so that none makes a command wait for ever."""

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any, TextIO

from mldec.errors import DataError

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def open_binary(path: str | Path, *, buffering: int = -1) -> BufferedReader:
    """Open a regular file, or a link to one, to read its bytes.

    Raises:
        OSError: it cannot be opened; also where the path is a folder, a FIFO, a device or a socket, or no path at all.
    """
    try:
        return open(path, "rb", buffering=buffering, opener=_open_regular)  # type: ignore[return-value]
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, "no file has such a name", str(path)) from error


def open_text(path: str | Path, *, newline: str | None = None) -> TextIO:
    """Open a regular file, or a link to one, to read its text: UTF-8, with or without a byte order mark.

    Raises:
        OSError: see `open_binary`.
    """
    try:
        return open(path, encoding="utf-8-sig", newline=newline, opener=_open_regular)
    except ValueError as error:
        raise OSError(errno.EINVAL, "no file has such a name", str(path)) from error


def read_text(path: Path, see: str, *, newline: str | None = None) -> str:
    """Return the text of a file: UTF-8, with or without a byte order mark.

    Args:
        path: of the file.
        see: where help is, for messages.
        newline: as for `open`; None makes every line end a newline.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    try:
        with open_text(path, newline=newline) as file:
            return file.read()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {see}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8; {see}") from error


def read_json(path: Path, see: str) -> Any:
    """Return the content of a JSON file.

    Raises:
        DataError: it cannot be read, or is not valid JSON that Python can hold.
    """
    try:
        with open_binary(path) as file:
            return json.loads(file.read().decode("utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {see}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error}); restore it, {see}") from error


def _open_regular(path: str, flags: int) -> int:
    # Without waiting for somebody who writes to a FIFO; to a regular file the flag means nothing.
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))

    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    raise OSError(errno.EINVAL, f"{kind}, not a regular file", path)
