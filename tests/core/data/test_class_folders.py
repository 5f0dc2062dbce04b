"""A folder of images per class: what counts as a class and as an image, and what is refused."""

import importlib
import os
from pathlib import Path

import pytest

from mldec.data.cache import TableCache
from mldec.data.readers.folders import list_class_folders, list_images, read_class_folders
from mldec.data.table import Table
from mldec.errors import DataError

SEE = "see there"
CLASSES = ["b", "a", "c"]
DISPLAY = ("Bee", "Ant", "Cat")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for file in (
        "a/2.png",
        "a/1.JPG",
        "b/1.webp",
        "b/note.txt",
        "b/._1.jpg",
        ".git/1.png",
        "1.png",
    ):
        (tmp_path / "images" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / file).touch()
    return tmp_path / "images"


def read(root: Path, names: list[str] = CLASSES, display: tuple[str, ...] = DISPLAY) -> Table:
    cache = TableCache(str(root.parent / "cache"), SEE)
    return read_class_folders(root, names, display, cache)


def test_images_by_class_and_then_by_name(root: Path) -> None:
    table = read(root)
    assert table.files.tolist() == [b"b/1.webp", b"a/1.JPG", b"a/2.png"]
    assert table.labels.dense().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]
    assert table.classes == DISPLAY


def test_hidden_and_other_files_are_neither_class_nor_image(root: Path) -> None:
    assert list_class_folders(root, SEE) == ["a", "b"]
    assert list_images(root / "b", SEE) == ["1.webp"]
    assert list_images(root / ".git", SEE) == ["1.png"]


def test_the_list_is_cached_for_these_classes_and_these_files(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = read(root)
    with monkeypatch.context() as patch:
        module = importlib.import_module("mldec.data.readers.folders")
        patch.setattr(module, "from_single", None)  # what a parse needs
        assert read(root).files.tolist() == first.files.tolist()
    assert read(root, ["a", "b"], ("a", "b")).labels.dense().tolist() == [[1, 0], [1, 0], [0, 1]]
    assert read(root, display=("x", "y", "z")).classes == ("x", "y", "z")

    (root / "a" / "3.png").touch()
    os.utime(root / "a", ns=(0, 10**18))
    assert read(root).files.tolist()[-1] == b"a/3.png"
    (root / "c").mkdir()
    (root / "c" / "1.png").touch()
    assert read(root).files.tolist()[-1] == b"c/1.png"


def test_folders_that_are_refused(root: Path) -> None:
    with pytest.raises(DataError, match=r"images: the class 'a' is not in the list of 1 classes"):
        read(root, ["b"], ("Bee",))
    (root / "b" / "1.webp").unlink()
    (root / "b" / "inner").mkdir()
    with pytest.raises(DataError, match=r"/b holds folders and no image: one folder per class"):
        read(root)
    with pytest.raises(DataError, match=r"none cannot be listed \(No such file.*; see there"):
        list_class_folders(root / "none", SEE)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("x\x1b[31m", r"the class name 'x\\x1b\[31m' has the control character U\+001B"),
        (os.fsdecode(b"caf\xe9"), r"has the control character U\+DCE9"),
        (" ", "the class name ' ' is empty"),
    ],
    ids=["control", "latin-1", "blank"],
)
def test_folders_that_no_class_may_be_called(root: Path, name: str, expected: str) -> None:
    (root / name).mkdir()
    with pytest.raises(DataError, match=expected) as caught:
        list_class_folders(root, SEE)
    assert str(root) in str(caught.value)
    assert str(caught.value).isprintable()
