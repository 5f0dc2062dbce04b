import logging
import os
import pickle
from pathlib import Path

import pytest
import torch
from readers import Reader, labels, names, write_picture
from support import made

from mldec.data.readers import folders as module
from mldec.data.readers.folders import folders
from mldec.data.types import fixed_sample
from mldec.errors import ConfigError

TREE = {"train": {"cat": 3, "dog": 2, "eel": 1}, "val": {"cat": 1, "dog": 2}}


@pytest.fixture
def root(tmp_path):
    for split, classes in TREE.items():
        for name, count in classes.items():
            for number in range(count):
                write_picture(tmp_path / "own" / split / name / f"{number}.JPG")
    return tmp_path / "own"


@pytest.fixture
def build(root):
    return Reader(folders, root, "Your own data")


def test_images_by_class_and_name(build):
    data = build()
    assert data.val.classes.names == ("cat", "dog", "eel")
    assert data.val.classes.exclusive
    assert labels(data.train) == [0, 0, 0, 1, 1, 2]
    assert labels(data.val) == [0, 1, 1]
    assert names(data.train) == ["0.JPG", "1.JPG", "2.JPG", "0.JPG", "1.JPG", "0.JPG"]
    image, target = fixed_sample(data.val.dataset, 1)
    assert image.shape == (3, 16, 16)
    assert target.tolist() == [0, 1, 0]
    assert target.dtype == torch.int8
    again = pickle.loads(pickle.dumps(data.val.dataset))
    assert fixed_sample(again, 1)[1].tolist() == [0, 1, 0]


def test_a_class_without_images_in_a_split_is_logged(build, caplog):
    with caplog.at_level(logging.INFO, "mldec"):
        build()
    assert "folders val: 1 of 3 classes have no image: 'eel'" in caplog.messages
    assert "folders train: 6 images, 3 classes" in caplog.messages


def test_hidden_and_other_files_are_left_out(build, root):
    for name in (".DS_Store", "._0.JPG", "notes.txt", "Thumbs.db"):
        (root / "train" / "cat" / name).write_text("no image")
    (root / "train" / ".cache").mkdir()
    (root / "train" / ".DS_Store").write_text("no folder")
    assert len(build().train.dataset) == 6


def test_new_images_are_seen_in_spite_of_the_cache(build, root, monkeypatch):
    build()
    monkeypatch.setattr(module, "from_single", None)  # what a parse needs
    build()
    monkeypatch.undo()
    write_picture(root / "val" / "eel" / "new.png")
    assert labels(build().val) == [0, 1, 1, 2]


def test_without_two_folders_the_images_are_split_by_their_path(tmp_path):
    for name in ("a", "b"):
        for number in range(60):
            write_picture(tmp_path / "all" / name / f"{number}.png")

    def parts(**arguments):
        data = made(
            folders, root=str(tmp_path / "all"), cache_dir=str(tmp_path / "cache"), **arguments
        )
        return [
            {split.dataset.name(i) for i in range(len(split.dataset))}
            for split in (data.train, data.val)
        ]

    train, val = parts(val_fraction=0.25)
    assert not train & val
    assert len(train | val) == 120
    assert 15 <= len(val) <= 45
    assert parts(val_fraction=0.25) == [train, val]
    assert parts(val_fraction=0.25, seed=1) != [train, val]
    gone = sorted(train)[0]
    Path(gone).unlink()
    assert parts(val_fraction=0.25) == [train - {gone}, val]


def test_names_from_a_list_or_a_file(build, root):
    assert build(classes=["eel", "dog", "cat", "fox"]).val.classes.names == (
        "eel",
        "dog",
        "cat",
        "fox",
    )
    (root / "classes.txt").write_text("\ufeffeel\r\ndog\n\n cat", encoding="utf-8")
    data = build(classes="classes.txt")
    assert data.val.classes.names == ("eel", "dog", "cat")
    assert labels(data.val) == [1, 1, 2]


def test_folders_that_are_no_class(build, root):
    message = "the class 'cat' is not in the list of 3 classes; did you mean 'Cat'?"
    assert message in build.fault(classes=["Cat", "dog", "eel"])
    write_picture(root / "val" / "fox" / "1.png")
    assert "val: the class 'fox' is not in the list of 3 classes" in build.fault()


def test_names_that_differ_in_case(build, root):
    write_picture(root / "train" / "Dog" / "1.png")
    assert "differ in case only" in build.fault()
    assert "the class 'cat' is there twice" in build.fault(classes=["cat", "cat"])
    assert "empty name" in build.fault(classes=["cat", ""])
    assert "no name" in build.fault(classes=[])


def test_names_that_are_not_utf8(build, root):
    (root / "train" / os.fsdecode(b"caf\xe9")).mkdir()
    assert r"b'caf\xe9' has no UTF-8 name" in build.fault()
    (root / "classes.txt").write_bytes(b"caf\xe9\n")
    assert "classes.txt is not UTF-8 text" in build.fault(classes="classes.txt")


def test_file_names_that_are_not_utf8_are_read(build, root):
    (root / "val" / "cat" / "0.JPG").rename(root / "val" / "cat" / os.fsdecode(b"\xe9.jpg"))
    assert fixed_sample(build().val.dataset, 0)[0].shape == (3, 16, 16)


def test_missing_things(build, root):
    assert "is not a folder" in build.fault(root=str(root / "nowhere"))
    assert "cannot be listed (No such file" in build.fault(val="test")
    assert "classes.txt cannot be read" in build.fault(classes="classes.txt")
    (root / "classes.txt").write_text("\n")
    assert "classes.txt is empty" in build.fault(classes="classes.txt")
    (root / "bare").mkdir()
    assert "bare holds no folder of a class" in build.fault(train="bare")
    write_picture(root / "deep" / "cat" / "inner" / "1.png")
    assert "cat holds folders and no image" in build.fault(train="deep")


def test_an_unreadable_folder(build, root, monkeypatch):
    scandir = os.scandir

    def refuse(path="."):
        if Path(path) == root:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert f"{root} cannot be listed (Permission denied)" in build.fault()


def test_wrong_values_are_refused(build):
    for arguments, expected in [
        ({"top_k": 5}, r"data\.top_k 5 needs as many classes; there are 3"),
        ({"val_fraction": 1.0}, "val_fraction is 1.0"),
        ({"test_crop": 0.0}, "test crop: 0.0"),
        ({"bad_images": "no"}, "bad_images"),
    ]:
        with pytest.raises(ConfigError, match=expected):
            build(**arguments)


@pytest.mark.parametrize(
    "name", ["new\nline", "\x1b[31mred", "tab\there", "\x7f", "a\u2028b"], ids=ascii
)
def test_names_that_no_class_may_have(build, root, name):
    (root / "train" / name).mkdir()
    message = build.fault()
    assert f"{root / 'train'}: the class name {name!r} has the control character U+" in message
    assert "\n" not in message
