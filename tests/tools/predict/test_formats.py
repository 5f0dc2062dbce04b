import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mldec.data.types import Classes
from mldec.errors import ConfigError
from mldec.predict.answers import Content, Row, Rule, entries
from mldec.predict.results import Features, Format, Parquet, comma_separated, json_lines, json_list

CLASSES = Classes(("a", "b, c", "d"))


def rule(content: str = "top", **options: Any) -> Rule:
    return Rule(classes=CLASSES, content=Content(content), threshold=0.3, **options)


def rows_of(rule: Rule, count: int = 5) -> list[Row]:
    rows = []
    for number in range(count):
        scores = torch.tensor([0.1 * number, 0.9 - 0.1 * number, 0.35])
        features = torch.full((4,), float(number))
        rows.append(Row(f"{number}\n.png", rule.chosen(scores), scores, features))
    rows[1] = Row("odd.png", error="odd.png: no image; restore it")
    return rows


def joined(file_format: Format, rows: list[Row], tmp_path: Path, sizes: tuple[int, ...]) -> bytes:
    """Return the file of rows that were written in parts of these sizes."""
    paths = []
    for number, size in enumerate(sizes):
        part, rows = rows[:size], rows[size:]
        paths.append(tmp_path / f"part{number}")
        paths[-1].write_bytes(file_format.part(part))
    assert not rows
    file = io.BytesIO()
    file_format.join(paths, file)
    return file.getvalue()


@pytest.mark.parametrize("sizes", [(5,), (2, 2, 1), (1,) * 5])
@pytest.mark.parametrize("content", ["top", "scores", "decisions"])
def test_json_of_parts_is_that_of_all_rows(
    tmp_path: Path, sizes: tuple[int, ...], content: str
) -> None:
    chosen = rule(content)
    rows = rows_of(chosen)
    expected = [entries(chosen)(row) for row in rows]
    lines = joined(json_lines(chosen), rows, tmp_path, sizes).decode().splitlines()
    assert [json.loads(line) for line in lines] == expected
    text = joined(json_list(chosen), rows, tmp_path, sizes).decode()
    assert text == json.dumps(expected, indent=1) + "\n"


@pytest.mark.parametrize("sizes", [(5,), (2, 2, 1)])
def test_a_table_of_classes_and_scores(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    chosen = rule(top=2)
    rows = rows_of(chosen)
    text = joined(comma_separated(chosen), rows, tmp_path, sizes).decode()
    table = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [row["image"] for row in table] == [row.image for row in rows]
    assert table[1] == {
        "image": "odd.png",
        "error": "odd.png: no image; restore it",
        "classes": "",
        "scores": "",
    }
    assert table[0]["classes"] == "b, c;d"
    scores = [float(score) for score in table[0]["scores"].split(";")]
    assert scores == [prediction.score for prediction in rows[0].predictions]


def test_a_table_of_all_scores_and_of_decisions(tmp_path: Path) -> None:
    rows = rows_of(rule("scores"))
    text = joined(comma_separated(rule("scores")), rows, tmp_path, (5,)).decode()
    table = list(csv.reader(io.StringIO(text, newline="")))
    assert table[0] == ["image", "error", "a", "b, c", "d"]
    assert table[2][2:] == ["", "", ""]
    assert rows[3].scores is not None
    assert [float(cell) for cell in table[4][2:]] == rows[3].scores.tolist()

    text = joined(comma_separated(rule("decisions")), rows, tmp_path, (3, 2)).decode()
    table = list(csv.reader(io.StringIO(text, newline="")))
    assert table[0] == ["image", "error", "classes"]
    assert table[1] == ["0\n.png", "", "b, c;d"]


def test_a_class_with_the_separator_makes_lists_of_json(tmp_path: Path) -> None:
    odd = Rule(classes=Classes(("x;y", "z")))
    scores = torch.tensor([0.5, 0.25])
    text = joined(comma_separated(odd), [Row("i", odd.chosen(scores), scores)], tmp_path, (1,))
    [row] = csv.DictReader(io.StringIO(text.decode()))
    assert json.loads(row["classes"]) == ["x;y", "z"]


@pytest.mark.parametrize("content", ["top", "scores", "decisions"])
def test_parquet_has_the_same_rows(tmp_path: Path, content: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    chosen = rule(content)
    rows = rows_of(chosen)
    file = joined(Parquet(chosen), rows, tmp_path, (2, 2, 1))
    table = parquet.read_table(io.BytesIO(file))
    assert json.loads(table.schema.metadata[b"classes"]) == [*CLASSES.names]

    for row, entry in zip(rows, table.to_pylist(), strict=True):
        expected: dict[str, Any] = {"image": row.image, "error": row.error}
        chosen_classes = [item.name for item in row.predictions]
        if content != "scores":
            expected["classes"] = None if row.error else chosen_classes
        if content == "top":
            expected["scores"] = None if row.error else [item.score for item in row.predictions]
        elif content == "scores":
            expected["scores"] = None if row.scores is None else row.scores.tolist()
        assert entry == expected


def test_parquet_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"--parquet needs pyarrow.*pip install 'mldec\[parquet"):
        Parquet(rule())


@pytest.mark.parametrize("sizes", [(5,), (1, 1, 3)])
def test_features_are_an_array_with_nan_for_errors(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    content = joined(Features(), rows_of(rule()), tmp_path, sizes)
    (tmp_path / "f.npy").write_bytes(content)
    array = np.load(tmp_path / "f.npy", mmap_mode="r")
    assert (array.dtype, array.shape) == (np.float32, (5, 4))
    assert np.isnan(array[1]).all()
    assert array[[0, 2, 3, 4]].tolist() == [[float(number)] * 4 for number in (0, 2, 3, 4)]


def test_features_of_no_readable_image_are_empty(tmp_path: Path) -> None:
    content = joined(Features(), [Row("a", error="e")] * 3, tmp_path, (2, 1))
    assert np.load(io.BytesIO(content)).shape == (3, 0)
