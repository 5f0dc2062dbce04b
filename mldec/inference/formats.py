"""Files of rows: JSON Lines, a JSON list, CSV, Parquet, and features as an array of NumPy.

A file is written in parts, which are joined at the end: see `mldec.inference.parts`.
"""

import csv
import importlib.util
import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from mldec.errors import ConfigError, printable
from mldec.files.results import to_json
from mldec.inference.rows import Content, Row, Rule, entries, named

SEPARATOR = ";"  # between the classes of an image in a CSV file
NPY = ".npy"


class Format(Protocol):
    """How rows become the bytes of a file."""

    def part(self, rows: Sequence[Row]) -> bytes:
        """Return the bytes of a part: some rows, in their order."""
        ...

    def join(self, parts: Sequence[Path], file: BinaryIO) -> None:
        """Write a file that holds the rows of all parts, in their order.

        Raises:
            OSError: if it cannot be written.
        """
        ...


@dataclass(frozen=True)
class Text:
    """A file of text; see `Format`. Its parts can also be written one after another.

    Attributes:
        encode: returns the text of a row.
        opening: the text before the first row.
        between: the text between two rows.
        closing: the text after the last row.
    """

    encode: Callable[[Row], str]
    opening: str = ""
    between: str = ""
    closing: str = ""

    def part(self, rows: Sequence[Row]) -> bytes:
        """Return the bytes of some rows, without what stands before, between and after parts."""
        return self.between.join(map(self.encode, rows)).encode()

    def join(self, parts: Sequence[Path], file: BinaryIO) -> None:
        """Write the parts one after another; see `Format`."""
        file.write(self.opening.encode())
        for number, part in enumerate(parts):
            file.write(self.between.encode() if number else b"")
            with part.open("rb") as opened:
                shutil.copyfileobj(opened, file)
        file.write(self.closing.encode())


def json_lines(rule: Rule) -> Text:
    """Return the format of JSON Lines: a JSON object per line."""
    entries_of = entries(rule)
    return Text(lambda row: to_json(entries_of(row)) + "\n")


def json_list(rule: Rule) -> Text:
    """Return the format of one JSON list."""
    entries_of = entries(rule)

    def encode(row: Row) -> str:
        # A list of one row has the indentation that the row has in the whole list.
        return to_json([entries_of(row)], indent=1).removeprefix("[\n").removesuffix("\n]")

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
    """A Parquet file; see `Format`.

    Its columns are those of `comma_separated`, with lists in place of separators, and with all
    scores of an image as one list; the classes are in the metadata of the file, a JSON list.

    Args:
        rule: which classes are in a row.

    Raises:
        ConfigError: if pyarrow is not installed.
    """

    def __init__(self, rule: Rule) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigError(
                "--parquet needs pyarrow, which is not installed; run pip install 'mldec[parquet]'"
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
        """Write the rows of the parts, in groups of rows; see `Format`."""
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
    """Pooled features as an array of NumPy, float32 [N, C]; see `Format`.

    The row of an image without an answer is NaN.
    """

    def part(self, rows: Sequence[Row]) -> bytes:
        """Return the features of some rows as an array file; [n, 0] if no image was read."""
        features = [row.features for row in rows]
        width = next((len(feature) for feature in features if feature is not None), 0)
        array = np.full((len(rows), width), np.nan, np.float32)
        for values, feature in zip(array, features, strict=True):
            if feature is not None:
                values[:] = feature.numpy()

        buffer = io.BytesIO()
        np.save(buffer, array)
        return buffer.getvalue()

    def join(self, parts: Sequence[Path], file: BinaryIO) -> None:
        """Write the arrays of the parts below each other; see `Format`."""
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
