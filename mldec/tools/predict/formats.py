"""Formats of result files."""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mldec.data.readers.labeling import cvat_tags, studio_tasks
from mldec.files.atomic import csv_lines, named, to_json
from mldec.tools.predict.answers import Row, Rule, entries

SEPARATOR = ";"  # between the classes of an image in a CSV file


class Line(NamedTuple):
    """The result of an image, from which all formats are written."""

    image: str
    text: str  # its JSON object
    features: bytes | None  # float32 [C], if requested
    retry: bool  # see `Row`


Lines = Iterable[Line]


def line_of(rule: Rule, row: Row) -> Line:
    """Return the line of a row."""
    features = None if row.features is None else row.features.numpy().tobytes()
    return Line(named(row.image)["image"], to_json(entries(rule, row)), features, row.retry)


def row_of(line: Line) -> dict[str, Any]:
    """Return the JSON object of a line."""
    return dict(json.loads(line.text))


def cells_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the cells of a table."""
    cells = dict(row)
    if "predictions" in row:
        cells["classes"] = [prediction["name"] for prediction in row["predictions"]]
        cells["scores"] = [prediction["score"] for prediction in row["predictions"]]
    elif "scores" in row:
        cells["scores"] = list(row["scores"].values())
    return cells


def json_lines(rule: Rule, lines: Lines) -> Iterator[str]:
    """Yield the text of JSON Lines, with one JSON object per line."""
    for line in lines:
        yield line.text + "\n"


def json_list(rule: Rule, lines: Lines) -> Iterator[str]:
    """Yield the text of a JSON list, row by row."""
    # The list of one row indents the row like the whole list.
    rows = (to_json([row_of(line)], indent=1)[2:-2] for line in lines)
    return _as_list(rows)


def _as_list(items: Iterable[str]) -> Iterator[str]:
    yield "[\n"
    separator = ""
    for item in items:
        yield separator + item
        separator = ",\n"
    yield "\n]\n"


def csv_table(rule: Rule, lines: Lines) -> Iterator[str]:
    """Yield the text of a CSV file, row by row.

    The columns after image and error are a score per class, or the classes and their scores with
    `SEPARATOR` in between. Classes are a JSON list if the name of a class contains the separator.
    """
    return csv_lines(_csv_rows(rule, lines), "\n")


def _csv_rows(rule: Rule, lines: Lines) -> Iterator[list[str]]:
    columns = list(rule.classes.names)
    if rule.content == "top":
        columns = ["classes", "scores"]
    elif rule.content == "decisions":
        columns = ["classes"]
    has_separator = any(SEPARATOR in name for name in rule.classes.names)

    yield ["image", "error"] + columns
    for line in lines:
        cells = _cells_in(line)
        scores = [repr(score) for score in cells.get("scores", [])]
        if rule.content == "scores":
            fields = scores or [""] * len(columns)
        else:
            names = SEPARATOR.join(cells.get("classes", []))
            if has_separator and "error" not in cells:
                names = json.dumps(cells["classes"])
            fields = [names, SEPARATOR.join(scores)][: len(columns)]
        yield [cells["image"], cells.get("error", "")] + fields


def label_studio(rule: Rule, lines: Lines) -> Iterator[str]:
    """Yield the text of Label Studio tasks."""
    tasks = studio_tasks(map(_cells_in, lines), rule.image_prefix)
    return _as_list(map(to_json, tasks))


def cvat(rule: Rule, lines: Lines) -> Iterator[str]:
    """Yield the text of a file of "CVAT for images 1.1"."""
    return cvat_tags(map(_cells_in, lines), rule.classes.names)


def _cells_in(line: Line) -> dict[str, Any]:
    return cells_of(row_of(line))


# Formats that are written row by row, by the names of their options.
TEXTS = {
    "jsonl": json_lines,
    "json": json_list,
    "csv": csv_table,
    "label_studio": label_studio,
    "cvat": cvat,
}
PRELABELS = ("label_studio", "cvat")  # formats that need predicted classes


def parquet(rule: Rule, lines: Lines, file: BinaryIO) -> None:
    """Write a Parquet file.

    The names of all classes are in the metadata of the file, as a JSON list.
    """
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    columns = [("image", pyarrow.string()), ("error", pyarrow.string())]
    if rule.content != "scores":
        columns.append(("classes", pyarrow.list_(pyarrow.string())))
    if rule.content != "decisions":
        columns.append(("scores", pyarrow.list_(pyarrow.float32())))
    names = list(rule.classes.names)
    schema = pyarrow.schema(columns, metadata={"classes": json.dumps(names)})

    # Limit the memory of a row group.
    group = min(10_000, 1 + 10**6 // len(names))
    remaining = iter(lines)
    with ParquetWriter(file, schema) as writer:
        while group_lines := list(islice(remaining, group)):
            rows = [_cells_in(line) for line in group_lines]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


def features(lines: Callable[[], Lines], file: BinaryIO) -> None:
    """Write pooled features as a NumPy array, float32 [N, C]; C is 0 if no image was read.

    Rows of images with an error are NaN.
    """
    count = 0
    width = 0
    for line in lines():
        count += 1
        width = width or len(line.features or b"") // 4
    kind = np.lib.format.dtype_to_descr(np.dtype(np.float32))
    header = {"descr": kind, "fortran_order": False, "shape": (count, width)}
    np.lib.format.write_array_header_1_0(file, header)

    missing = np.full(width, np.nan, np.float32).tobytes()
    for line in lines():
        file.write(line.features or missing)


def write(kind: str, rule: Rule, lines: Callable[[], Lines], file: BinaryIO) -> None:
    """Write a result file. The kind is the name of its option."""
    if kind == "parquet":
        parquet(rule, lines(), file)
    elif kind == "features":
        features(lines, file)
    else:
        for text in TEXTS[kind](rule, lines()):
            file.write(text.encode())
