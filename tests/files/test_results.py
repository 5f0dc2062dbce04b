"""Files of results: refused at once or written whole."""

import json
import math
import os
import stat
from pathlib import Path

import pytest

from mldec.errors import ConfigError, DataError
from mldec.files.results import (
    JsonLines,
    JsonList,
    ResultFile,
    check_folder,
    check_targets,
    to_json,
    write_file,
    write_result,
)


def test_targets_that_cannot_be_written_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "r.json")
    check_targets(file, None, "-", "/dev/null")
    with pytest.raises(ConfigError, match="it is a folder; add the name of a file"):
        check_targets(str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is no folder .*missing"):
        check_targets(str(tmp_path / "missing" / "r.json"))
    for both in ((file, str(tmp_path / "." / "r.json")), ("-", "-")):
        with pytest.raises(ConfigError, match="cannot write two results to"):
            check_targets(*both)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"r\.json: no permission"):
        check_targets(file)


def test_a_folder_that_cannot_be_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_bytes_are_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "x.bin"
    write_file(path, b"old")

    def full(self: Path, content: bytes) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(DataError, match=r"cannot write .*x\.bin: No space left"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_json_holds_only_what_every_reader_takes() -> None:
    value = {"a": [math.nan, math.inf, 1.5], "b": (1, True, None), "c": "x\udcff", "d": "\u65e5"}
    text = to_json(value)
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == {
        "a": [None, None, 1.5],
        "b": [1, True, None],
        "c": "x\\udcff",
        "d": "\u65e5",
    }
    text.encode("ascii")


def test_a_file_appears_whole_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")
    file = ResultFile(str(path))
    file.write("new", flush=True)
    assert path.read_text() == "old"
    file.commit()
    assert path.read_text() == "new"

    file = ResultFile(str(path))
    file.write("half")
    file.discard()
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
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
def test_a_full_disk_names_the_file(size: int) -> None:
    with pytest.raises(
        DataError, match="cannot write /dev/full: No space left on device; free space"
    ):
        write_result("/dev/full", "x" * size)
    with pytest.raises(DataError, match="/dev/full"), JsonLines("/dev/full") as lines:
        lines.add("x" * size)
    with pytest.raises(DataError, match="/dev/full"), JsonList("/dev/full") as rows:
        rows.add("x" * size)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("old")
    with JsonList(str(path)) as rows:
        rows.add(1)
        assert rows.file.stream is not None
        rows.file.stream.close()
        rows.file.stream = Path("/dev/full").open("w")  # noqa: SIM115
        with pytest.raises(DataError, match=r"cannot write .*r\.json: No space left"):
            rows.add("x" * 100_000)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


ROWS = [
    {"image": "a", "predictions": [{"name": "x", "score": 0.5}, {"name": "y", "score": 0.25}]},
    {"image": "b"},
    [],
]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_list_row_by_row_is_the_list_at_once(tmp_path: Path, count: int) -> None:
    with JsonList(str(tmp_path / "r.json")) as rows:
        for row in ROWS[:count]:
            rows.add(row)
    assert (tmp_path / "r.json").read_text() == json.dumps(ROWS[:count], indent=1) + "\n"


def test_a_list_is_whole_after_ctrl_c_and_absent_without_a_row(tmp_path: Path) -> None:
    path = tmp_path / "r.json"

    def interrupted(*added: int) -> None:
        with JsonList(str(path)) as rows:
            for row in added:
                rows.add(row)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        interrupted(1)
    assert json.loads(path.read_text()) == [1]
    assert list(tmp_path.iterdir()) == [path]


def test_lines_are_there_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with JsonLines(str(tmp_path / "r.jsonl")) as lines:
        for number in range(3):
            lines.add({"image": number})
            assert len((tmp_path / "r.jsonl").read_text().splitlines()) == number + 1
    with JsonLines("-") as lines:
        lines.add({"image": 7})
    assert capsys.readouterr().out == '{"image": 7}\n'
