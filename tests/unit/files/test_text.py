"""Text, JSON, YAML and CSV files."""

import pytest

from mldec.errors import DataError
from mldec.files.text import (
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


@pytest.mark.parametrize(
    ("read", "content", "part"),
    [
        (read_json, b"[" * 100_000, "JSON"),
        (read_yaml, b"[" * 500, ""),
        (read_yaml, b"names:\n\t- cat\n", "line 2"),
        (read_lines, b" \n\n", "empty"),
        (read_lines, b"caf\xe9", "byte 3"),
    ],
)
def test_invalid_content_names_file_and_row(tmp_path, read, content, part):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.txt.*{part}"):
        read(tmp_path / "a.txt")


def test_lines_are_stripped(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b"\xef\xbb\xbf one\r\n\n \ntwo")
    assert read_lines(file) == ["one", "two"]
