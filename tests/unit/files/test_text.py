"""Text, JSON, YAML and CSV files."""

import pytest

from mldec.errors import DataError
from mldec.files import text
from mldec.files.text import (
    csv_columns,
    csv_rows,
    read_bytes,
    read_json,
    read_lines,
    read_text,
    read_yaml,
)


def test_byte_order_mark_and_newlines(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert read_bytes(file)[:5] == b"\xef\xbb\xbfon"
    assert read_text(file) == "one\ntwo\n"
    assert read_text(file, newline="") == "one\r\ntwo\n"


def columns(path):
    return list(csv_columns(path, ["x", "y"]))


def rows(path):
    return list(csv_rows(path))


@pytest.mark.parametrize(
    ("read", "content", "part"),
    [
        (read_json, b"[" * 100_000, "JSON"),
        (read_yaml, b"[" * 2_000, ""),
        (read_lines, b" \n\n", "empty"),
        (read_lines, b"caf\xe9", "byte 3"),
        (rows, b'a,b\n"1"2,3\n', "row 2"),
        (columns, b"x\n1\n", "'x,y'"),
        (columns, b"x,y\n1,2\n3,4\n5\n", "row 4"),
        (columns, b'x,y\n"1"2,3\n', "row 1"),
    ],
)
def test_invalid_content_names_file_and_row(tmp_path, read, content, part):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.txt.*{part}"):
        read(tmp_path / "a.txt")


def test_lines_and_rows(tmp_path, monkeypatch):
    file = tmp_path / "a.csv"
    file.write_bytes(b"\xef\xbb\xbf one\r\n\n \ntwo")
    assert read_lines(file) == ["one", "two"]

    # The numbers are those of an editor.
    file.write_text('a,b\n\n"1\n2",3\n')
    assert list(csv_rows(file)) == [(1, ["a", "b"]), (4, ["1\n2", "3"])]
    assert next(csv_rows(file, delimiter=";")) == (1, ["a,b"])

    file.write_text("x,y\n1,2\n3,4\n5,6\n")
    assert columns(file) == [(2, [("1", "3", "5"), ("2", "4", "6")])]
    monkeypatch.setattr(text, "CSV_ROWS", 2)
    assert columns(file) == [(2, [("1", "3"), ("2", "4")]), (4, [("5",), ("6",)])]
