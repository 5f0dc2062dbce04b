import io
import os
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from mldec.errors import ConfigError, DataError
from mldec.predict.inputs import Inputs, Item


def names(inputs: Inputs) -> list[str]:
    return [item.name for item in inputs]


def pack(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def test_files_are_taken_and_folders_searched(tmp_path: Path) -> None:
    for name in ("b.JPG", "a.png", "deep/er/c.webp", "notes.txt", "d.eps", "e.svg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "back").symlink_to(tmp_path)

    inputs = Inputs([str(tmp_path / "notes.txt"), f"{tmp_path}//", str(tmp_path / "a.png")])
    expected = ["notes.txt", "a.png", "b.JPG", "deep/er/c.webp", "a.png"]
    assert names(inputs) == [str(tmp_path / name) for name in expected]
    assert names(inputs) == names(inputs), "they can be gone through again"
    with pytest.raises(DataError, match="empty: the folder holds no image"):
        Inputs([str(tmp_path / "a.png"), str(tmp_path / "empty")])
    with pytest.raises(DataError, match="nothing: no such file or folder"):
        Inputs([str(tmp_path / "nothing")])


def test_the_order_of_a_folder_is_that_of_its_paths(tmp_path: Path) -> None:
    for name in ("a/z.png", "a.png", "a-b/x.png", "b/c/d.png", "b/c.png", "Z.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    expected = [str(path) for path in sorted(tmp_path.rglob("*.png"))]
    assert names(Inputs([str(tmp_path)])) == expected


def test_images_of_tar_files_are_where_their_bytes_are(tmp_path: Path) -> None:
    members = {"000.jpg": b"first", "000.txt": b"label", "in/001.PNG": b"second image"}
    path = pack(tmp_path / "shard.tar", members)
    items = list(Inputs([str(tmp_path)]))
    assert [item.name for item in items] == [f"{path}/000.jpg", f"{path}/in/001.PNG"]
    content = path.read_bytes()
    for item, expected in zip(items, (b"first", b"second image"), strict=True):
        assert item.path == str(path)
        assert item.size is not None
        assert content[item.offset : item.offset + item.size] == expected
    assert list(Inputs([str(path)])) == items


def test_links_in_a_tar_file_are_not_followed(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            member = tarfile.TarInfo(f"{kind!r}.png")
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
    assert list(Inputs([str(tmp_path / "x.tar")])) == []


@pytest.mark.parametrize("kind", ["cut", "gz", "text"])
def test_a_damaged_tar_file_is_one_fault_after_its_images(tmp_path: Path, kind: str) -> None:
    members = {f"{number}.png": bytes(2000) for number in range(3)}
    path = pack(tmp_path / "x.tar", members, "w:gz" if kind == "gz" else "w")
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:4000])
    elif kind == "text":
        path.write_text("no tar file" * 100)

    items = list(Inputs([str(path)]))
    assert len(items) == (3 if kind == "cut" else 1)
    assert all(item.fault is None for item in items[:-1])
    assert items[-1].name == str(path)
    assert str(items[-1].fault).startswith(f"{path}: it cannot be read as an uncompressed tar file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every folder")
def test_a_folder_that_cannot_be_listed_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    (tmp_path / "shut").mkdir(mode=0)
    first, second = Inputs([str(tmp_path)])
    assert first.fault is None
    assert "shut: the folder cannot be listed (Permission denied)" in str(second.fault)


def test_a_list_has_a_path_per_line(tmp_path: Path) -> None:
    listing = tmp_path / "list.txt"
    listing.write_bytes(b"a.png\r\n\n  b c.png\n\xff.png\nlast.png")
    inputs = Inputs([], str(listing), root=str(tmp_path))
    assert names(inputs) == ["a.png", "  b c.png", os.fsdecode(b"\xff.png"), "last.png"]
    assert [item.path for item in inputs][:2] == [f"{tmp_path}/a.png", f"{tmp_path}/  b c.png"]


def test_a_column_of_a_csv_file(tmp_path: Path) -> None:
    listing = tmp_path / "list.csv"
    listing.write_bytes(b'\xef\xbb\xbflabels,path\r\ncat,"a,b.png"\r\n\r\n,\xff.png\r\n')
    assert names(Inputs([], str(listing))) == ["a,b.png", os.fsdecode(b"\xff.png")]
    assert names(Inputs([], str(listing), column="labels")) == ["cat", ""]
    for content, message in {
        "x,y\n1,2\n": "its first row has no column image or path; pass --column with one of 'x, y'",
        "path\n": "it names no image",
        "path\na,b\n": "line 2 has 2 columns, not 1",
        'path\n"a': "line 2 is not CSV",
    }.items():
        listing.write_text(content)
        with pytest.raises(DataError, match=f"--list .*list.csv: {message}"):
            list(Inputs([], str(listing)))


def test_standard_input_is_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SimpleNamespace(buffer=io.BytesIO(b"a.png\nb.png\n"))
    monkeypatch.setattr(sys, "stdin", given)
    inputs = Inputs([], "-")
    assert not inputs.repeatable
    assert list(inputs) == [Item("a.png", "a.png"), Item("b.png", "b.png")]


def test_what_cannot_be_a_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    for listing, message in {
        "missing.txt": "missing.txt cannot be read",
        "empty.txt": "it names no image",
        ".": "cannot be read",
    }.items():
        with pytest.raises(DataError, match=message):
            Inputs([], str(tmp_path / listing))

    (tmp_path / "list.txt").write_text("a.png\n")
    good = str(tmp_path / "list.txt")
    with pytest.raises(DataError, match="--root nowhere: no such folder"):
        Inputs([], good, root="nowhere")
    with pytest.raises(ConfigError, match=r"--column has no effect: --list .* is no .csv file"):
        Inputs([], good, column="path")
    with pytest.raises(ConfigError, match="no image is named: pass files"):
        Inputs([])
    with pytest.raises(ConfigError, match="--root has no effect without --list"):
        Inputs([good], root=".")
