"""Read tables with pandas: delimited text, JSON lines, Excel and Parquet.

Cells of delimited text stay text, because pandas would read the class name 1.10 as a number and NA
as a missing value. Cells of other files and of DataFrames keep their type. `as_cell` converts both
to the same values.
"""

import codecs
import csv
import io
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from mldec.errors import ConfigError, DataError, naming_errors
from mldec.files.text import open_binary, reading

# pandas takes half a second to import, so it is imported when a table is read.
if TYPE_CHECKING:
    from pandas import DataFrame

EXCEL = (".xlsx", ".xlsm")
JSON_LINES = (".jsonl", ".ndjson", ".manifest")
SUFFIXES = (".csv", ".tsv", ".parquet", *JSON_LINES, *EXCEL)  # found in a folder
TYPED = (".parquet", ".json", *JSON_LINES, *EXCEL)  # all other files are delimited text

CSV_ROWS = 16_384  # rows of delimited text per chunk
_DELIMITERS = ",\t;|"
_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


@dataclass(frozen=True)
class Unreadable:
    """A cell of an unsupported type, such as bytes. It is an error only if its column is used."""

    value: str  # type and value, for messages

    def __str__(self) -> str:
        return self.value


# Text, a boolean, a list of names, or an unsupported value. A missing value is "".
Cell = str | bool | tuple[str, ...] | Unreadable


def as_cell(value: Any) -> Cell:
    """Convert a value of any type to a cell.

    None, NaN and NA are missing values. Numbers become text, without a decimal point if they are
    integers. Iterables of text and numbers are lists of names.
    """
    if isinstance(value, str | os.PathLike):
        return str(value).strip()
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return ""
    if isinstance(value, int | float | np.integer | np.floating):
        if np.isnan(value):
            return ""
        return str(int(value)) if float(value).is_integer() else str(value)

    is_list = isinstance(value, Iterable) and getattr(value, "ndim", 1) == 1
    if is_list and not isinstance(value, bytes | bytearray | Mapping):
        names = [as_cell(item) for item in value]
        # Zeros and ones with repetitions are a multi-hot vector, not a list of names.
        is_vector = len(set(names)) < len(names) and set(names) <= {"0", "1"}
        if all(isinstance(name, str) and name for name in names) and not is_vector:
            return tuple(map(str, names))
    return Unreadable(f"{type(value).__name__} {value!r}"[:60])


def simple_name(name: str) -> str:
    """Return the name of a column in lower case without spaces, underscores and hyphens."""
    return re.sub(r"[\s_-]", "", name.lower())


def read_table(path: Path, known: Collection[str], encoding: str = "utf-8") -> "DataFrame":
    """Read a table. Its index contains the row numbers in the file, where the header is row 1.

    Args:
        path: File with a suffix in `TYPED`. All other files are delimited text.
        known: Simple names of expected columns. The delimiter of text is detected by them.
        encoding: Encoding of delimited text. If it is utf-8, a byte order mark has precedence.

    Raises:
        ConfigError: If an optional package is missing.
        DataError: If the file cannot be read. The cause is a UnicodeError if its text has another
            encoding.
        LookupError: If the encoding is unknown.
    """
    suffix = path.suffix.lower()
    package = "openpyxl" if suffix in EXCEL else "pyarrow"
    if suffix in (".parquet", *EXCEL) and find_spec(package) is None:
        raise ConfigError(f"{path}: {package} is missing; run pip install -e '.[tables]'")
    import pandas

    with reading(path), open_binary(path) as file:
        if suffix not in TYPED:
            # The chunks are joined, because the meaning of a column depends on all of its cells.
            frame = pandas.concat(text_chunks(str(path), file, known, encoding))
            # A row with too few fields has an empty last cell. Most tables need no second pass.
            if (frame.iloc[:, -1] == "").any():
                _check_fields(path, known, encoding)
            return frame[(frame != "").to_numpy().any(axis=1)]

        with naming_errors(path, DataError, remedy="restore it"):
            if suffix in (".json", *JSON_LINES):
                lines = io.TextIOWrapper(file, "utf-8-sig")
                rows = dict(_json_rows(path, lines))
                return pandas.DataFrame(list(rows.values()), index=list(rows))
            if suffix == ".parquet":
                frame = with_index(pandas.read_parquet(file))
                return frame.set_index(frame.index + 1)
            return _read_sheets(path, file)


def _read_sheets(path: Path, file: IO[bytes]) -> "DataFrame":
    """Read an Excel file. The names of several sheets with equal columns are the splits."""
    import pandas

    frames = {}
    for sheet, frame in pandas.read_excel(file, None, header=None, dtype=object).items():
        frame = frame.dropna(how="all")
        if len(frame):
            # pandas would rename columns without a name or with the same name.
            frame.columns = [str(as_cell(name)) for name in frame.iloc[0]]
            frames[sheet] = frame.iloc[1:].set_index(frame.index[1:] + 1)
    if len(frames) < 2:
        return next(iter(frames.values()), pandas.DataFrame())
    if len({tuple(frame.columns) for frame in frames.values()}) > 1:
        raise DataError(f"{path}: the sheets {', '.join(frames)} have different columns; keep one")
    return pandas.concat([frame.assign(split=sheet) for sheet, frame in frames.items()])


def with_index(frame: "DataFrame") -> "DataFrame":
    """Return a DataFrame with its index as columns, and with a new index that starts at 0.

    An index of numbers without a name is not used, nor an index that the DataFrame has as a column.
    """
    index = frame.index
    is_numbered = index.names == [None] and index.inferred_type in ("integer", "floating", "empty")
    is_column = set(index.names) <= set(frame.columns)
    return frame.reset_index(drop=is_numbered or is_column, allow_duplicates=True)


def _json_rows(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line, or of each item of a list on several lines."""
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        try:
            if text[0] == "[":
                rows = json.loads(text + "".join(lines))
            else:
                rows = [json.loads(text)]
        except ValueError as error:
            raise DataError(f"{path}, row {number}: invalid JSON ({error}); correct it") from error
        for row, value in enumerate(rows, number):
            if not isinstance(value, dict):
                raise DataError(f"{path}, row {row}: not a JSON object; write one per line")
            with naming_errors(f"{path}, row {row}", DataError, remedy="correct it"):
                yield row, _with_names(value)


def _with_names(row: dict[str, Any]) -> dict[str, Any]:
    """Replace the indices in a manifest of Amazon SageMaker or Rekognition by names of classes.

    `X-metadata` has the name of the label `X`, or a mapping of the indices in `X` to names.
    """
    names: list[Any] = []
    keys = [key for key in row if "class-" in str(row.get(f"{key}-metadata"))]
    if not keys:
        return row
    for key in keys:
        metadata = row.pop(f"{key}-metadata")
        value = row.pop(key)
        if isinstance(value, dict):
            value = [box["class_id"] for box in value["annotations"]]
        if "class-name" in metadata:
            names.append(metadata["class-name"])
        else:
            names += [metadata["class-map"][str(index)] for index in value]
    return row | {"labels": names}


def text_chunks(
    source: str,
    file: IO[bytes],
    known: Collection[str],
    encoding: str = "utf-8",
    errors: str = "strict",
) -> Iterator["DataFrame"]:
    """Yield the rows of delimited text in chunks, with cells of text; see `read_table`.

    There is at least one chunk, so that the columns of an empty table are known. `source` is the
    name of the file for messages, and `errors` the handling of invalid bytes, as in `open`.
    """
    import pandas

    text, names, delimiter, first = _open(file, known, encoding, errors)
    width = len(names)
    # pandas would drop the additional fields of a row, rename columns with the same name, and skip
    # blank lines, which changes the numbers of the rows.
    try:
        reader = pandas.read_csv(
            text,
            sep=delimiter,
            header=None,
            names=range(width + 3),  # a row with too many fields has one in the last columns
            index_col=False,
            dtype=object,
            keep_default_na=False,
            skip_blank_lines=False,
            skipinitialspace=True,
            chunksize=CSV_ROWS,
            encoding_errors=errors,
        )
        for chunk in reader:
            chunk.index += first
            too_long = chunk.index[(chunk.iloc[:, width:] != "").any(axis=1)]
            if len(too_long):
                raise _wrong_fields(source, too_long[0], width + 1, width, delimiter)
            chunk = chunk.iloc[:, :width]
            chunk.columns = names
            yield chunk
    except pandas.errors.ParserError as error:
        place = re.search(r"in line (\d+), saw (\d+)", str(error))
        if place is None:
            raise DataError(f"{source}: a quote is not closed; check the quotes") from error
        row = int(place[1]) + first - 1
        raise _wrong_fields(source, row, int(place[2]), width, delimiter) from error


def csv_columns(path: Path, header: Sequence[str]) -> Iterator[tuple[int, list[list[str]]]]:
    """Read a CSV file of millions of rows, which must have this header.

    Yields:
        Number of the first row of a chunk (the header is row 1), and the fields of each column.
    """
    with reading(path), open_binary(path) as file:
        for chunk in text_chunks(str(path), file, list(map(simple_name, header))):
            if list(chunk.columns) != list(header):
                names = ",".join(chunk.columns)
                raise DataError(f"{path}: header {names!r}, not {','.join(header)!r}; correct it")
            if (chunk.iloc[:, -1] == "").any():
                _check_fields(path, header, "utf-8")
            if len(chunk):
                yield chunk.index[0], [chunk[name].tolist() for name in header]


def decoded(file: IO[bytes], encoding: str = "utf-8", errors: str = "strict") -> io.TextIOWrapper:
    """Open a file as text. If the encoding is utf-8, a byte order mark has precedence."""
    if codecs.lookup(encoding).name == "utf-8" and file.seekable():
        start = file.read(3)
        file.seek(0)
        encoding = next((codec for bom, codec in _BOMS.items() if start.startswith(bom)), encoding)
    return io.TextIOWrapper(file, encoding, errors=errors, newline="")


def _open(
    file: IO[bytes], known: Collection[str], encoding: str, errors: str
) -> tuple[io.TextIOWrapper, list[str], str, int]:
    """Return the text after the header, the columns, the delimiter, and the next row number."""
    text = decoded(file, encoding, errors)
    # Comments may precede the header. They have no delimiter, unlike a header such as #,path.
    comment = re.compile(rf"#[^{_DELIMITERS}]*")
    lines = enumerate(text, 1)
    filled = (pair for pair in lines if pair[1].strip() and not comment.fullmatch(pair[1]))
    number, line = next(filled, (1, "path"))
    if "\0" in line:
        raise UnicodeDecodeError(encoding, b"\0", 0, 1, "UTF-16 has a NUL in each letter")
    # The first line may define the delimiter for Excel, as in "sep=;".
    separator = re.fullmatch(r'"?sep=(.)"?', line.strip("\ufeff\r\n"))
    if separator:
        number, line = next(filled, (number, "path"))
    # A name in quotes may contain line breaks.
    while line.count('"') % 2 and (following := next(lines, None)):
        number = following[0]
        line += following[1]

    def fields(delimiter: str) -> list[str]:
        row = next(csv.reader(io.StringIO(line), delimiter=delimiter, skipinitialspace=True))
        return [name.strip() for name in row]

    def is_better(delimiter: str) -> tuple[bool, int]:
        names = fields(delimiter)
        is_known = not set(known).isdisjoint(map(simple_name, names))
        return is_known and len(names) > 1, len(names)

    # The best delimiter divides the header into several names with an expected one, or else into
    # most names.
    delimiter = max(_DELIMITERS, key=is_better)
    if separator:
        delimiter = separator[1]
    return text, fields(delimiter), delimiter, number + 1


def _check_fields(path: Path, known: Collection[str], encoding: str) -> None:
    """Raise DataError for a row with too few fields, which pandas fills with empty cells."""
    with open_binary(path) as file:
        text, names, delimiter, first = _open(file, known, encoding, "strict")
        for row, fields in enumerate(csv.reader(text, delimiter=delimiter), first):
            if any(fields) and len(fields) < len(names):
                raise _wrong_fields(str(path), row, len(fields), len(names), delimiter)


def _wrong_fields(source: str, row: int, found: int, expected: int, delimiter: str) -> DataError:
    return DataError(
        f"{source}, row {row}: {found} fields instead of {expected}; add the missing ones, or "
        f"quote fields with {delimiter!r}"
    )
