"""CSV files with a fixed header, read in chunks. Other tables: tests/unit/data/readers."""

import pytest

from mldec.errors import DataError
from mldec.files import tables


def columns(path):
    return list(tables.csv_columns(path, ["x", "y"]))


def test_columns_are_read_in_chunks(tmp_path, monkeypatch):
    file = tmp_path / "a.csv"
    file.write_text("x,y\n1,NA\n3,4\n5,6\n")
    assert columns(file) == [(2, [["1", "3", "5"], ["NA", "4", "6"]])]
    monkeypatch.setattr(tables, "CSV_ROWS", 2)
    assert columns(file) == [(2, [["1", "3"], ["NA", "4"]]), (4, [["5"], ["6"]])]
    file.write_text("x,y\n")
    assert columns(file) == []


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("x\n1\n", "'x,y'"),
        ("x,y\n1,2\n3,4\n5\n", "row 4"),
        ("x,y\n1,2\n3,4,5\n", "row 3"),
        ('x,y\n"1,2\n', "quote"),
    ],
)
def test_invalid_rows_are_named(tmp_path, content, part):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataError, match=rf"a\.csv.*{part}"):
        columns(tmp_path / "a.csv")
