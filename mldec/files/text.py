"""Files that others wrote: how every one of them is opened, so that none makes a command wait for ever."""

import csv
import errno
import io
import json
import os
import stat
from collections.abc import Iterator, Sequence
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, cast

from mldec.errors import DataError

CSV_ROWS = 4096  # per piece of a large file: with 65,536 reading took twice as long
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_binary(path: str | Path) -> BufferedReader:
    """Open a regular file, or a link to one, to read its bytes.

    Raises:
        OSError: it cannot be opened; also where the path is a folder, a FIFO, a device or a socket, or no path at all.
    """
    try:
        return open(path, "rb", opener=_open_regular)
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, "no file has such a name", str(path)) from error


def open_text(path: str | Path, *, newline: str | None = None) -> TextIO:
    """Open a regular file, or a link to one, to read its text: UTF-8, with or without a byte order mark.

    Raises:
        OSError: see `open_binary`.
    """
    try:
        return cast(TextIO, open(path, encoding="utf-8-sig", newline=newline, opener=_open_regular))
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
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8; {see}"
        ) from error


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


def read_lines(path: Path, see: str) -> list[str]:
    """Return the lines of a text file that are not blank, without the blanks around them.

    Raises:
        DataError: if it cannot be read, is not UTF-8, or has no line.
    """
    # Not `splitlines`: it would make two lines of one that holds a form feed or another rare separator.
    lines = [line.strip() for line in read_text(path, see).split("\n") if line.strip()]
    if not lines:
        raise DataError(f"{path} is empty; {see}")
    return lines


def csv_rows(path: Path, see: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each row of a CSV file that is not blank, as an editor counts lines, and its fields.

    Raises:
        DataError: if it cannot be read, is not UTF-8, or its quotes are not those of CSV.
    """
    reader = csv.reader(io.StringIO(read_text(path, see, newline=""), newline=""), strict=True)
    try:
        for fields in reader:
            if fields:
                yield reader.line_num, fields
    except csv.Error as error:
        raise DataError(
            f"{path}, row {reader.line_num} is not CSV ({error}): check its quotes; {see}"
        ) from error


def csv_columns(
    path: Path, header: Sequence[str], see: str
) -> Iterator[tuple[int, list[tuple[str, ...]]]]:
    """Read a CSV file of millions of rows in pieces, as columns: one row at a time is slow, all at once is gigabytes.

    Args:
        path: of the file.
        header: what its first row must be.
        see: where help is, for messages.

    Yields:
        The number of the piece's first row (the header is row 1), and the texts of each column.

    Raises:
        DataError: if the file cannot be read, or has another header or a row of another length.
    """
    first = 2
    try:
        with open_text(path, newline="") as file:
            reader = csv.reader(file, strict=True)
            found = next(reader, [])
            if found != list(header):
                raise DataError(
                    f"{path}: the header is {','.join(found)!r}, not {','.join(header)!r}; {see}"
                )

            while rows := list(islice(reader, CSV_ROWS)):
                if set(map(len, rows)) != {len(header)}:
                    wrong = next(
                        number for number, row in enumerate(rows) if len(row) != len(header)
                    )
                    fault = f"row {first + wrong} has {len(rows[wrong])} columns, not {len(header)}"
                    raise DataError(f"{path}: {fault}; {see}")
                yield first, list(zip(*rows, strict=True))
                first += len(rows)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {see}") from error
    except csv.Error as error:
        raise DataError(
            f"{path}: wrong quoting after row {first - 1} ({error}, line {reader.line_num}); {see}"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text after row {first - 1}; {see}") from error


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
