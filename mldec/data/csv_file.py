"""CSV files of millions of rows, read in pieces."""

import csv
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from mldec.errors import DataError
from mldec.inputs import open_text

ROWS = 4096  # at a time: 65,536 took twice as long


def read_csv(path: Path, columns: Sequence[str], see: str) -> Iterator[tuple[int, list[tuple[str, ...]]]]:
    """Read a CSV file in pieces, as columns, because a row at a time is slow and all at once is gigabytes.

    Yields:
        The number of the first row (the header is row 1), and for each column its texts.

    Raises:
        DataError: if the file cannot be read, or has another header or a row of another length.
    """
    first = 2
    try:
        with open_text(path, newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            if header != list(columns):
                raise DataError(f"{path}: the header is {','.join(header)!r}, not {','.join(columns)!r}; {see}")
            while rows := list(islice(reader, ROWS)):
                if set(map(len, rows)) != {len(columns)}:
                    bad = next(place for place, row in enumerate(rows) if len(row) != len(columns))
                    fault = f"row {first + bad} has {len(rows[bad])} columns, not {len(columns)}"
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
