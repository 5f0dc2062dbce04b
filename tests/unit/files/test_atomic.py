"""Files of results: refused at once or written whole."""

import errno
import json
import math
import os
import stat

import pytest

from mldec.errors import ConfigError, DataError
from mldec.files.atomic import (
    check_folder,
    check_targets,
    replacing,
    to_json,
    write_file,
    write_result,
    write_texts,
)


def test_targets_that_cannot_be_written_are_refused(tmp_path, monkeypatch):
    file = str(tmp_path / "r.json")
    check_targets(file, None, "-", "/dev/null")
    with pytest.raises(ConfigError, match="it is a folder; add the name of a file"):
        check_targets(str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is no folder .*missing"):
        check_targets(str(tmp_path / "missing" / "r.json"))
    for both in ((file, str(tmp_path / "." / "r.json")), ("-", "-")):
        with pytest.raises(ConfigError, match="cannot write two results to"):
            check_targets(*both)

    (tmp_path / "best.pt").write_text("mine")
    (tmp_path / "empty").touch()  # as mktemp makes it
    write_result(file, "{}")
    check_targets(json=file, csv=str(tmp_path / "empty"), txt="-")
    with pytest.raises(ConfigError, match=r"best\.pt exists, and is no \.json file that could be"):
        check_targets(json=str(tmp_path / "best.pt"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"r\.json: no permission"):
        check_targets(file)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    check_folder("--out", str(tmp_path))
    check_folder("--out", str(tmp_path / "new" / "deeper"))
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    for path in ("file", "file/deeper"):
        with pytest.raises(ConfigError, match=f"^--out .*{path}: .*file is a file; name a folder"):
            check_folder("--out", str(tmp_path / path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="no permission to write to"):
        check_folder("--out", str(tmp_path / "new"))


def test_json_holds_only_what_every_reader_takes():
    value = {"a": [math.nan, math.inf, 1.5], "b": (1, True, None), "c": "x\udcff", "d": "\u65e5"}
    text = to_json(value)
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == {
        "a": [None, None, 1.5],
        "b": [1, True, None],
        "c": "x\\udcff",
        "d": "\u65e5",
    }
    text.encode("ascii")


def test_a_file_appears_whole_under_its_name(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("old")

    def texts(*, is_faulty):
        yield "new"
        assert path.read_text() == "old"
        if is_faulty:
            raise KeyboardInterrupt
        yield " text"

    with pytest.raises(KeyboardInterrupt):
        write_texts(str(path), texts(is_faulty=True))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_texts(str(path), texts(is_faulty=False))
    assert path.read_text() == "new text"


def test_links_and_pipes_stay_what_they_are(tmp_path):
    (tmp_path / "link").symlink_to("real")
    write_result(str(tmp_path / "link"), "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "text"

    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_result(str(tmp_path / "pipe"), "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_full_disk_names_the_file(size):
    with pytest.raises(
        DataError, match="cannot write /dev/full: No space left on device; free space"
    ):
        write_result("/dev/full", "x" * size)


def test_bytes_replace_a_file_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "f.bin"
    write_file(path, b"old")
    with replacing(path, durable=True) as file:
        file.write(b"one")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"one"

    def failing():
        with replacing(path) as file:
            file.write(b"two")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DataError, match=r"cannot write .*f\.bin: No space left on device; free sp"):
        failing()
    assert path.read_bytes() == b"one"
    assert list(path.parent.iterdir()) == [path]
