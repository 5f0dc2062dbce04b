"""Result files are checked first, and written atomically."""

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


@pytest.mark.parametrize(
    ("targets", "with_ending", "name"),
    [
        (("{}",), {}, "{}"),
        (("{}/missing/r.json",), {}, "missing"),
        (("{}/r.json", "{}/./r.json"), {}, "r.json"),
        (("-", "-"), {}, "-"),
        ((), {"json": "{}/best.pt"}, "best.pt"),
    ],
)
def test_unwritable_targets_raise_an_error(tmp_path, monkeypatch, targets, with_ending, name):
    (tmp_path / "best.pt").write_text("mine")
    targets = [target.format(tmp_path) for target in targets]
    with_ending = {ending: target.format(tmp_path) for ending, target in with_ending.items()}
    with pytest.raises(ConfigError, match=name.format(tmp_path)):
        check_targets(*targets, **with_ending)
    with pytest.raises(ConfigError, match=r"^--out .*best.pt/deeper"):
        check_folder("--out", str(tmp_path / "best.pt/deeper"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for call in (lambda: check_folder("--out", str(tmp_path)), lambda: check_targets("r.json")):
        with pytest.raises(ConfigError, match="permission"):
            call()


def test_writable_targets_are_accepted(tmp_path):
    file = str(tmp_path / "r.json")
    check_targets(file, None, "-", "/dev/null")
    write_result(file, "{}")
    (tmp_path / "empty").touch()
    check_targets(json=file, csv=str(tmp_path / "empty"), txt="-")
    check_folder("--out", str(tmp_path / "new" / "deeper"))
    assert not (tmp_path / "new").exists()


def test_json_is_standard():
    value = {"a": [math.nan, math.inf, 1.5], "b": (1, True, None), "c": "x\udcff", "d": "\u65e5"}
    text = to_json(value)
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == {
        "a": [None, None, 1.5],
        "b": [1, True, None],
        "c": "x\\udcff",
        "d": "\u65e5",
    }
    text.encode("ascii")


def test_files_are_replaced_completely_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "f.bin"
    write_file(path, b"old")

    def texts(error=None):
        yield "new"
        assert path.read_text() == "old"
        if error is not None:
            raise error
        yield " text"

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for error, expected in ((KeyboardInterrupt(), KeyboardInterrupt), (full, DataError)):
        with pytest.raises(expected):
            write_texts(str(path), texts(error))
        assert path.read_text() == "old"
        assert list(path.parent.iterdir()) == [path]
    with pytest.raises(DataError, match="/dev/full"):
        write_result("/dev/full", "x")
    write_texts(str(path), texts())
    assert path.read_text() == "new text"
    with replacing(path, durable=True) as file:
        file.write(b"one")
        assert path.read_text() == "new text"
    assert path.read_bytes() == b"one"


def test_links_and_pipes_are_kept(tmp_path):
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
