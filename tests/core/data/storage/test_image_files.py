"""Images as files of a folder: names, contents, and which of them are absent."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mldec.data.table import Table, encode_paths, from_dense
from mldec.data.types import ImageFiles, check_folder, in_folder, list_folder
from mldec.errors import DataError

FILES = ["a/1.png", "a/2.png", "b/1.png", "3.png", os.fsdecode(b"caf\xe9.png")]


@pytest.fixture
def storage(tmp_path: Path) -> ImageFiles:
    for number, file in enumerate(FILES):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(tmp_path / file)
    return ImageFiles(tmp_path, encode_paths(FILES), "see there")


def test_names_and_contents(storage: ImageFiles, tmp_path: Path) -> None:
    assert len(storage) == 5
    for index, file in enumerate(FILES):
        assert storage.name(index) == str(tmp_path / file)
        assert storage.content(index) == (tmp_path / file).read_bytes()
    assert pickle.loads(pickle.dumps(storage)).content(2) == storage.content(2)
    storage.verify()  # has nothing to compare with, and says nothing


def test_some_of_the_images(storage: ImageFiles) -> None:
    assert [storage.select(np.array([3, 0])).name(index) for index in range(2)] == [
        storage.name(3),
        storage.name(0),
    ]
    last = storage.select(np.array([False, False, False, False, True]))
    assert (len(last), last.name(0)) == (1, storage.name(4))
    assert last.see == "see there"


def test_absent_images(storage: ImageFiles, tmp_path: Path) -> None:
    assert not storage.absent().any()
    (tmp_path / "a" / "2.png").unlink()
    (tmp_path / "3.png").rename(tmp_path / "3.PNG")  # the case counts, as it will on another disk
    (tmp_path / "b" / "1.png").rename(tmp_path / "a" / "3.png")
    assert storage.absent().tolist() == [False, True, True, True, False]
    with pytest.raises(DataError, match=r"a/2\.png: no such file"):
        storage.content(1)
    (tmp_path / "b").rmdir()
    with pytest.raises(DataError, match=r"/b cannot be listed \(No such file.*\); see there"):
        storage.absent()


def test_each_folder_is_listed_once(
    storage: ImageFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listed = []
    scandir = os.scandir

    def count(path: Path) -> object:
        listed.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", count)
    storage.select(np.tile(np.arange(5), 20_000)).absent()  # more than one piece of names
    assert sorted(listed) == [tmp_path, tmp_path / "a", tmp_path / "b"]


def test_images_of_a_table(tmp_path: Path) -> None:
    labels = from_dense(np.array([[1, 0], [0, 1]], np.int8))
    images = in_folder(Table(encode_paths(["1", "2"]), labels, ("x", "y")), tmp_path, "see there")
    assert images.storage.name(1) == str(tmp_path / "2")
    assert images.classes == ("x", "y")
    assert images.labels is labels
    picked = images.select(np.array([1])).select_classes([1, 0])
    assert (picked.storage.name(0), picked.classes) == (str(tmp_path / "2"), ("y", "x"))
    assert picked.labels.dense().tolist() == [[1, 0]]


def test_the_folder_of_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"/none is not a folder; set data\.root to .* X"):
        check_folder(str(tmp_path / "none"), "X", "see there")
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match="/bare is empty; see there"):
        check_folder(str(tmp_path / "bare"), "X", "see there")
    (tmp_path / "bare" / "file").touch()
    with pytest.raises(DataError, match="/bare/file is not a folder"):
        check_folder(str(tmp_path / "bare" / "file"), "X", "see there")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for root in ("bare", "~/bare", str(tmp_path / "bare")):
        assert check_folder(root, "X", "see there") == tmp_path / "bare"
    assert [entry.name for entry in list_folder(tmp_path / "bare", "")] == ["file"]
