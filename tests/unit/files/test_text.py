"""Files of users as text, lines, JSON and CSV, and what cannot be read as such."""

import pytest

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
    read_yaml,
)


def test_a_link_to_a_file_is_read(tmp_path):
    file, link = tmp_path / "a.txt", tmp_path / "link"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    link.symlink_to(file)
    assert read_bytes(link)[:5] == b"\xef\xbb\xbfon"
    assert read_text(link) == "one\ntwo\n"
    assert read_text(link, newline="") == "one\r\ntwo\n"


def test_what_cannot_be_opened_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    odd = {
        tmp_path: "Is a directory",
        tmp_path / "none": "No such file",
        tmp_path / "loop": "symbolic links",
        tmp_path / "a\0b": "no file has such a name",
        tmp_path / "\ud800": "no file has such a name",
    }
    for path, reason in odd.items():
        for open_file in (open_binary, open_text):
            with pytest.raises(OSError, match=reason) as caught:
                open_file(path)
            assert caught.value.filename is not None  # a command so knows that it is no bug
        for read in (read_bytes, read_text, read_json):
            with pytest.raises(DataError, match=f"cannot be read .*({reason}).*"):
                read(path)


COLUMNS = lambda path: [*csv_columns(path, ["x", "y"])]  # noqa: E731
ROWS = lambda path: [*csv_rows(path)]  # noqa: E731


@pytest.mark.parametrize(
    ("read", "content", "fault"),
    [
        (read_json, b"[" * 100_000, "is not valid JSON"),
        (read_json, b"9" * 5_000, "is not valid JSON"),
        (read_json, b"\xef\xbb\xbf{}", "is not valid JSON"),
        (read_yaml, b"a: &x [1]\nb: *x\n", "cannot be used .*aliases"),
        (read_yaml, b"[" * 2_000, "cannot be used"),
        (read_lines, b" \n\n", "is empty"),
        (read_lines, b"caf\xe9", r"is not UTF-8 text \(byte 3\)"),
        (ROWS, b'a,b\n"1"2,3\n', "row 2 is not CSV .* check its quotes"),
        (COLUMNS, b"x\n1\n", "the header is 'x', not 'x,y'"),
        (COLUMNS, b"x,y\n1,2\n3,4\n5\n", "row 4 has 1 columns, not 2"),
        (COLUMNS, b'x,y\n"1"2,3\n', "wrong quoting after row 1"),
        (COLUMNS, b"x,y\n1,\xe9\n", "is not UTF-8 text"),
    ],
)
def test_what_is_no_such_text_is_refused(tmp_path, read, content, fault):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.txt.*{fault}"):
        read(tmp_path / "a.txt")


def test_lines_and_rows(tmp_path, monkeypatch):
    file = tmp_path / "a.csv"
    file.write_bytes(b"\xef\xbb\xbf one\r\n\n \ntwo")
    assert read_lines(file) == ["one", "two"]

    # Numbered as an editor counts lines.
    file.write_text('a,b\n\n"1\n2",3\n')
    assert list(csv_rows(file)) == [(1, ["a", "b"]), (4, ["1\n2", "3"])]
    assert next(csv_rows(file, delimiter=";")) == (1, ["a,b"])

    # In pieces.
    file.write_text("x,y\n1,2\n3,4\n5,6\n")
    assert COLUMNS(file) == [(2, [("1", "3", "5"), ("2", "4", "6")])]
    monkeypatch.setattr(text, "CSV_ROWS", 2)
    assert COLUMNS(file) == [(2, [("1", "3"), ("2", "4")]), (4, [("5",), ("6",)])]
