"""Files that are none: each is refused at once, where reading it would wait for ever."""

import ast
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import mldec
from mldec.data.transforms import read_image
from mldec.errors import DataError
from mldec.files.text import open_binary, open_text, read_json, read_text

PACKAGE = Path(mldec.__file__).parent


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """End a test that waits."""
    signal.alarm(20)
    yield
    signal.alarm(0)


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


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


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(tmp_path / "socket"))
    odd = {
        fifo(tmp_path / "fifo"): "a FIFO, not a regular file",
        link(tmp_path / "link", tmp_path / "fifo"): "a FIFO, not a regular file",
        Path("/dev/zero"): "a device, not a regular file",
        link(tmp_path / "tty", "/dev/tty"): "a device, not a regular file|No such device",
        tmp_path / "socket": "a socket, not a regular file|No such device",
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
        for read_whole in (read_text, read_json):
            with pytest.raises(DataError, match=f"cannot be read .*({reason})"):
                read_whole(path, "see there")
        with pytest.raises(DataError, match=r"restore the file or leave it out") as refused:
            read_image(path)
        assert "\n" not in str(refused.value)


def test_json_that_python_cannot_hold(tmp_path: Path) -> None:
    for text in ("[" * 100_000, "9" * 5_000, "{", "\ufeff{}", ""):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(DataError, match=r"a\.json is not valid JSON"):
            read_json(tmp_path / "a.json", "")


def test_readers_open_files_in_no_other_way() -> None:
    allowed = {
        ("mldec/data/vectors.py", "path.open"),  # of a torch file
        ("mldec/data/shards.py", "os.open"),  # with O_NOFOLLOW, after a look at the file
        ("mldec/data/shards.py", "tarfile.open"),
        ("mldec/data/transforms.py", "Image.open"),  # of a file that is open
        ("mldec/data/imagenet.py", "(files('timm.data') / '_info' / name).read_text"),
    }
    for path in (PACKAGE / "data").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if name.rpartition(".")[2] in ("open", "read_text", "read_bytes", "fromfile"):
                place = (str(path.relative_to(PACKAGE.parent)), name)
                assert place in allowed or name == "read_text", place
