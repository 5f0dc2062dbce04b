"""Files of users as text, lines, JSON and CSV, and what cannot be read as such."""

from pathlib import Path

import pytest

from mldec.data.transforms import read_image
from mldec.errors import DataError
from mldec.files import text
from mldec.files.text import (
    csv_columns,
    csv_rows,
    open_binary,
    open_text,
    read_bytes,
    read_json,
    read_lines,
    read_text,
)


def link(path: Path, target: str | Path) -> Path:
    path.symlink_to(target)
    return path


def test_a_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    for path in (file, link(tmp_path / "link", file)):
        with open_binary(path) as stream:
            assert stream.read(5) == b"\xef\xbb\xbfon"
        assert read_text(path, "") == "one\ntwo\n"
        with open_text(path, newline="") as stream:
            assert stream.read() == "one\r\ntwo\n"


def test_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    odd = {
        tmp_path: "Is a directory",
        tmp_path / "none": "No such file",
        link(tmp_path / "loop", "loop"): "symbolic links",
        tmp_path / "a\0b": "no file has such a name",
        tmp_path / "\ud800": "no file has such a name",
    }
    for path, reason in odd.items():
        for read in (open_binary, open_text):
            with pytest.raises(OSError, match=reason) as caught:
                read(path)
            assert caught.value.filename is not None  # a command so knows that it is no bug
        for read_whole in (read_bytes, read_text, read_json):
            with pytest.raises(DataError, match=f"cannot be read .*({reason})"):
                read_whole(path, "see there")
        with pytest.raises(DataError, match=r"restore the file or leave it out") as refused:
            read_image(path)
        assert "\n" not in str(refused.value)


def test_json_that_python_cannot_hold(tmp_path: Path) -> None:
    for content in ("[" * 100_000, "9" * 5_000, "{", "\ufeff{}", ""):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(DataError, match=r"a\.json is not valid JSON"):
            read_json(tmp_path / "a.json", "")


def test_lines_without_blanks(tmp_path: Path) -> None:
    file = tmp_path / "list.txt"
    file.write_bytes(b"\xef\xbb\xbf one\r\n\n \ntwo")
    assert read_lines(file, "") == ["one", "two"]
    for content, reason in (
        (b" \n\n", "is empty; see there"),
        (b"caf\xe9", r"is not UTF-8 text \(byte 3\)"),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=rf"list\.txt {reason}"):
            read_lines(file, "see there")


def test_csv_rows_are_numbered_as_an_editor_counts_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('a,b\n\n"1\n2",3\n')
    assert list(csv_rows(file, "")) == [(1, ["a", "b"]), (4, ["1\n2", "3"])]
    assert next(csv_rows(file, "", delimiter=";")) == (1, ["a,b"])
    file.write_text('a,b\n"1"2,3\n')
    with pytest.raises(DataError, match=r"a\.csv, row 2 is not CSV .* check its quotes; see there"):
        list(csv_rows(file, "see there"))


def test_csv_columns_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.csv"
    file.write_text("x,y\n1,2\n3,4\n5,6\n")
    assert list(csv_columns(file, ["x", "y"], "")) == [(2, [("1", "3", "5"), ("2", "4", "6")])]
    monkeypatch.setattr(text, "CSV_ROWS", 2)
    expected = [(2, [("1", "3"), ("2", "4")]), (4, [("5",), ("6",)])]
    assert list(csv_columns(file, ["x", "y"], "")) == expected
    with pytest.raises(DataError, match="the header is 'x,y', not 'x'"):
        list(csv_columns(file, ["x"], ""))
    file.write_text("x,y\n1,2\n3,4\n5\n")
    with pytest.raises(DataError, match="row 4 has 1 columns, not 2"):
        list(csv_columns(file, ["x", "y"], ""))
