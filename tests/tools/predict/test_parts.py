import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mldec.errors import ConfigError, DataError
from mldec.predict import results as parts_module
from mldec.predict.answers import Row
from mldec.predict.results import BLOCK, Parts, Record, Text, digest

TEXT = Text(lambda row: f"{row.image} {row.error}\n", "begin\n", "", "end\n")
LIST = Text(lambda row: row.image, "[", ", ", "]")
MADE = {"the checkpoint": "abc", "--top": 10, "the images": ["a", "b"]}


def rows(*names: str) -> list[Row]:
    return [Row(name, error="no" if name == "x" else None) for name in names]


def states(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return what changes when a file or folder below a folder is written."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def begin(parts: Parts) -> Record:
    parts.make_folder()
    return parts.existing(MADE) or parts.start(MADE)


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts({tmp_path / "out.txt": TEXT, tmp_path / "deep" / "list": LIST})


def test_blocks_in_any_order_become_the_files(parts: Parts, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    record = begin(parts)
    assert record.finished is None
    parts.write(1, rows("x", "d"))
    parts.write(0, rows("a", "b", "c"))
    assert parts.done() == {0, 1}
    assert parts.read(1).errors == 1

    summary = parts.finish(record, 2)
    assert (summary.images, summary.errors) == (5, 1)
    text = "begin\na None\nb None\nc None\nx no\nd None\nend\n"
    assert (tmp_path / "out.txt").read_text() == text
    assert (tmp_path / "deep" / "list").read_text() == "[a, b, c, x, d]"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "deep",
        "out.txt",
        "out.txt.run.json",
    ]
    assert begin(parts).finished == summary


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("--top", 5, "was begun with --top 10, not 5"),
        ("the checkpoint", "xyz", 'with the checkpoint "abc", not "xyz"'),
        ("--draft", True, "with --draft none, not true"),
    ],
)
@pytest.mark.parametrize("finished", [False, True])
def test_what_was_made_otherwise_is_refused(
    parts: Parts, tmp_path: Path, key: str, value: Any, message: str, finished: bool
) -> None:
    (tmp_path / "deep").mkdir()
    record = begin(parts)
    parts.write(0, rows("a"))
    if finished:
        parts.finish(record, 1)
    before = states(tmp_path)
    with pytest.raises(ConfigError, match=f"{message}: name another file, or pass --overwrite"):
        parts.existing({**MADE, key: value})
    assert states(tmp_path) == before

    parts.make_folder()
    again = parts.start({**MADE, key: value})
    assert (again.finished, again.made_with[key]) == (None, value)
    assert parts.done() == set()


def test_a_file_of_unknown_origin_is_not_overwritten(parts: Parts, tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists, and nothing says how it was made: name another"):
        parts.existing(MADE)
    assert (tmp_path / "out.txt").read_text() == "mine"


def test_a_result_that_was_removed_is_made_again(parts: Parts, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    record = begin(parts)
    parts.finish(record, 0)
    (tmp_path / "out.txt").unlink()
    assert begin(parts).finished is None


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"made_with": 1, "format": 1, "finished": null}', "\x00" * 99]
)
def test_a_damaged_record_is_one_line(parts: Parts, tmp_path: Path, content: str) -> None:
    (tmp_path / "out.txt.run.json").write_text(content)
    with pytest.raises(DataError, match=r"out.txt.run.json .*pass --overwrite to begin anew"):
        parts.existing(MADE)
    parts.make_folder()
    parts.start(MADE)
    assert parts.existing(MADE) is not None


def test_a_damaged_block_names_its_folder(parts: Parts) -> None:
    record = begin(parts)
    parts.write(0, rows("a"))
    (parts.folder / "000000000" / "block.json").write_text("{")
    with pytest.raises(DataError, match="000000000 is damaged: delete it, and its images are"):
        parts.finish(record, 1)
    shutil.rmtree(parts.folder / "000000000")
    assert parts.done() == set()


@pytest.mark.parametrize("during", ["part", "rename", "mkdir"])
def test_a_full_disk_leaves_whole_blocks(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    begin(parts)
    parts.write(0, rows("a"))

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if during == "part":
            patch.setattr(parts_module, "_write_durably", full)
        else:
            patch.setattr(Path, during, full)
        with pytest.raises(DataError, match="No space left on device; free space, and the same co"):
            parts.write(1, rows("b"))
    assert parts.done() == {0}
    assert [entry.name for entry in parts.folder.iterdir()] == ["000000000"]
    parts.write(1, rows("b"))


def test_a_full_disk_at_the_end_keeps_the_parts(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    record = begin(parts)
    parts.write(0, rows("a"))

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Text, "join", full)
        with pytest.raises(DataError, match=r"cannot write .*out.txt: No space left"):
            parts.finish(record, 1)
    assert not (tmp_path / "out.txt").exists()
    parts.finish(begin(parts), 1)
    assert (tmp_path / "deep" / "list").read_text() == "[a]"


def test_changed_images_are_noticed(parts: Parts, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    record = begin(parts)
    names = [f"{number}.png" for number in range(2 * BLOCK + 5)]
    for number in range(3):
        parts.write(number, rows(*names[BLOCK * number : BLOCK * (number + 1)]))
    parts.check_names(1, names[BLOCK : 2 * BLOCK])
    with pytest.raises(DataError, match=rf"\(from number {BLOCK + 1} on\); pass --overwrite"):
        parts.check_names(1, [*names[BLOCK : 2 * BLOCK - 1], "other"])

    summary = parts.finish(record, 3)
    parts.check_all_names(summary, iter(names))
    with pytest.raises(DataError, match=rf"\({len(names)} images then, {len(names) + 1} now\)"):
        parts.check_all_names(summary, iter([*names, "new"]))


def test_the_record_is_readable(parts: Parts, tmp_path: Path) -> None:
    made_with = {**MADE, "odd": os.fsdecode(b"\xff"), "nan": float("nan")}
    parts.make_folder()
    parts.start(made_with)
    record = json.loads((tmp_path / "out.txt.run.json").read_text())
    assert record["made_with"]["--top"] == 10
    assert parts.existing(made_with) is not None


def test_a_digest_is_of_the_names_and_their_order() -> None:
    assert len({digest(names) for names in (["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"])}) == 4


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    parts = Parts({tmp_path / "link": LIST})
    record = begin(parts)
    parts.finish(record, 0)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "[]"
