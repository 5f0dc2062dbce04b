"""Open and read files that users provide: text, JSON and CSV.

All of them are opened here, because a FIFO or a device in place of a file would block a command
forever.
"""

import csv
import errno
import io
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, cast

from mldec.errors import DataError

CSV_ROWS = 4096  # rows per chunk of a large file: with 65,536, reading took twice as long
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def open_binary(path: str | Path) -> BufferedReader:
    """Open a regular file, or a link to one, to read its bytes.

    Raises:
        OSError: if it cannot be opened, also because the path is that of a folder, a FIFO, a device
            or a socket, or no valid path.
    """
    try:
        return open(path, "rb", opener=_open_regular)
    except ValueError as error:
        # The path holds a NUL, or half of a surrogate pair.
        raise OSError(errno.EINVAL, "no file has such a name", str(path)) from error


def open_text(path: str | Path, *, newline: str | None = None) -> TextIO:
    """Open a regular file, or a link to one, to read UTF-8 text, with or without a byte order mark.

    Args:
        path: of the file.
        newline: as for `open`; None translates every line end to a newline.

    Raises:
        OSError: see `open_binary`.
    """
    try:
        return cast(TextIO, open(path, encoding="utf-8-sig", newline=newline, opener=_open_regular))
    except ValueError as error:
        raise OSError(errno.EINVAL, "no file has such a name", str(path)) from error


@contextmanager
def reading(path: Path, see: str) -> Iterator[None]:
    """Turn an `OSError` in this context into a `DataError`: the file cannot be read.

    Args:
        path: of the file, for the message.
        see: where the user finds help, for the message.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); {see}") from error


def read_bytes(path: Path, see: str) -> bytes:
    """Return the content of a regular file.

    Args:
        path: of the file.
        see: where the user finds help, for messages.

    Raises:
        DataError: if the file cannot be read.
    """
    with reading(path, see), open_binary(path) as file:
        return file.read()


def read_text(path: Path, see: str, *, newline: str | None = None) -> str:
    """Return the text of a UTF-8 file, with or without a byte order mark.

    Args:
        path: of the file.
        see: where the user finds help, for messages.
        newline: as for `open`; None translates every line end to a newline.

    Raises:
        DataError: if the file cannot be read, or is not UTF-8.
    """
    try:
        with reading(path, see), open_text(path, newline=newline) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8; {see}"
        ) from error


def read_json(path: Path, see: str) -> Any:
    """Return the content of a JSON file.

    Args:
        path: of the file.
        see: where the user finds help, for messages.

    Raises:
        DataError: if the file cannot be read, or is not valid JSON that Python can represent.
    """
    content = read_bytes(path, see)
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error}); restore it, {see}") from error


def parse_json(content: bytes) -> Any:
    """Return what JSON from an untrusted file says, if every reader would read the same.

    Args:
        content: of the file, UTF-8.

    Raises:
        DataError: if it is not standard JSON, or an object has a key twice; the message is the end
            of a sentence that names the file.
    """
    try:
        return json.loads(
            content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not valid JSON ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON whose keys are all different."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("an object has a key twice")
    return content


def _no_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python reads and standard JSON does not have."""
    raise ValueError(f"{name} is no number in JSON")


def read_lines(path: Path, see: str) -> list[str]:
    """Return the lines of a text file that are not blank, stripped of surrounding whitespace.

    Args:
        path: of the file.
        see: where the user finds help, for messages.

    Raises:
        DataError: if the file cannot be read, is not UTF-8, or has no such line.
    """
    # Not `splitlines`, which would also split a line at a form feed and other rare separators.
    lines = [line.strip() for line in read_text(path, see).split("\n") if line.strip()]

    if not lines:
        raise DataError(f"{path} is empty; {see}")
    return lines


def csv_rows(path: Path, see: str, *, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Read the rows of a CSV file that are not blank.

    Args:
        path: of the file.
        see: where the user finds help, for messages.
        delimiter: the sign between two fields.

    Yields:
        The number of the row's last line, from 1, as an editor counts lines; and the row's fields.

    Raises:
        DataError: if the file cannot be read, is not UTF-8, or its quoting is not that of CSV.
    """
    text = io.StringIO(read_text(path, see, newline=""), newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)

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
    """Read a CSV file of millions of rows in chunks, as columns.

    One row at a time would be slow, and all rows at once take gigabytes.

    Args:
        path: of the file.
        header: the fields that its first row must have.
        see: where the user finds help, for messages.

    Yields:
        The number of the chunk's first row (the header is row 1), and the texts of each column.

    Raises:
        DataError: if the file cannot be read, has another header, or a row of another length.
    """
    first = 2
    try:
        with reading(path, see), open_text(path, newline="") as file:
            reader = csv.reader(file, strict=True)
            actual_header = next(reader, [])
            if actual_header != list(header):
                names = ",".join(actual_header)
                raise DataError(f"{path}: the header is {names!r}, not {','.join(header)!r}; {see}")

            while rows := list(islice(reader, CSV_ROWS)):
                # One set of lengths checks a chunk fast; look for the wrong row only if there is
                # one.
                if set(map(len, rows)) != {len(header)}:
                    wrong = next(
                        number for number, row in enumerate(rows) if len(row) != len(header)
                    )
                    fault = f"row {first + wrong} has {len(rows[wrong])} columns, not {len(header)}"
                    raise DataError(f"{path}: {fault}; {see}")

                yield first, list(zip(*rows, strict=True))
                first += len(rows)
    except csv.Error as error:
        raise DataError(
            f"{path}: wrong quoting after row {first - 1} ({error}, line {reader.line_num}); {see}"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text after row {first - 1}; {see}") from error


def _open_regular(path: str, flags: int) -> int:
    """Open a file as `open` does for its `opener`, unless it is not a regular one."""
    # Opening a FIFO would otherwise wait for a writer; the flag has no effect on a regular file.
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))

    # Ask the open file, not the path, which may have changed meanwhile.
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor

    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    raise OSError(errno.EINVAL, f"{kind}, not a regular file", path)
