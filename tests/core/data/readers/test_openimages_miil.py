import logging
import os
import pickle
from pathlib import Path

import pytest
import torch
from readers import Reader, targets, write_picture
from support import made

from mldec.data.readers.openimages import openimages_miil
from mldec.data.types import fixed_sample
from mldec.errors import ConfigError
from mldec.files import text as inputs

HEADER = "image_id,class_list,class_list_neg,split"
ROWS = """\
train/b.jpg,"['/m/0b', '/m/0a']","['/m/0c']",train
train/a.jpg,[],[],train
test/c.jpg,"['/m/0b','/m/0b', ""/m/0d""]","['/m/0a' , '/m/0b']",val
train\\d.jpg,"[ ]","['/m/0c']",train
"""
TRAIN, VAL = [[1, 1, 0, -1], [-1, -1, -1, -1], [-1, -1, 0, -1]], [[0, 1, -1, 1]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "openimages"
    for file in ("train/a.jpg", "train/b.jpg", "train/d.jpg", "test/c.jpg"):
        write_picture(folder / file)
    write(folder, ROWS)
    return folder


def write(root: Path, rows: str, header: str = HEADER) -> None:
    (root / "data.csv").write_text(f"{header}\n{rows}")


@pytest.fixture
def build(root: Path) -> Reader:
    return Reader(openimages_miil, root, "Open Images")


def test_positives_negatives_and_unknown(root: Path, build: Reader, caplog) -> None:  # trap 8
    with caplog.at_level(logging.INFO, "mldec"):
        data = build()
        assert targets(data.train) == TRAIN
        assert targets(data.val) == VAL
    assert (
        data.train.classes.names == data.val.classes.names == ("/m/0a", "/m/0b", "/m/0c", "/m/0d")
    )
    assert [data.train.dataset.name(i).removeprefix(str(root)) for i in range(3)] == [
        "/train/b.jpg",
        "/train/a.jpg",
        "/train/d.jpg",
    ]
    assert "1 labels are both present and absent: taken as present" in caplog.text


def test_val_is_the_official_test(root: Path, build: Reader) -> None:  # trap 9
    assert build().val.dataset.name(0) == str(root / "test" / "c.jpg")


def test_pieces_do_not_show(build: Reader, monkeypatch) -> None:
    monkeypatch.setattr(inputs, "CSV_ROWS", 1)
    data = build()
    assert targets(data.train) == TRAIN
    assert targets(data.val) == VAL


def test_display_names_without_stray_quotes(root: Path, build: Reader) -> None:  # trap 10
    torch.save(
        {"/m/0a": '"Ball"', "/m/0b": " 'Ball'", "/m/0c": "'Cat'"}, root / "mid_to_classes.pth"
    )
    assert build().val.classes.names == ("Ball (0)", "Ball (1)", "Cat", "/m/0d")
    assert build(names="mid").val.classes.names == ("/m/0a", "/m/0b", "/m/0c", "/m/0d")


def test_a_class_list_gives_classes_and_order(root: Path, build: Reader, caplog) -> None:
    (root / "list.txt").write_text("/m/0x\n/m/0b\n/m/0a\n")
    with caplog.at_level(logging.INFO, "mldec"):
        data = build(class_list="list.txt")
        assert targets(data.train) == [[-1, 1, 1], [-1, -1, -1], [-1, -1, -1]]
    assert data.train.classes.names == ("/m/0x", "/m/0b", "/m/0a")
    assert "3 of 9 labels are of classes outside the class list: left out" in caplog.text
    assert "nowhere.txt" in build.fault(class_list="nowhere.txt")


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", ["pickle", "torch", "text", "list", "numbers"])
def test_a_pth_file_cannot_run_anything(
    root: Path, build: Reader, tmp_path: Path, kind: str
) -> None:  # trap 19
    path, never = root / "mid_to_classes.pth", tmp_path / "never"
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"/m/0a": Malicious(never)}))
    elif kind == "torch":
        torch.save({"/m/0a": Malicious(never)}, path)
    elif kind == "text":
        path.write_text("<html>not found</html>")
    else:
        torch.save(["a"] if kind == "list" else {"/m/0a": 7}, path)
    assert str(path) in build.fault()
    assert not never.exists()


def test_names_in_a_fifo_are_not_waited_for(root: Path, build: Reader) -> None:
    os.mkfifo(root / "mid_to_classes.pth")
    assert f"no file at {root}/mid_to_classes.pth: check the path" in build.fault()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a.jpg,['/m/0a'],[]\n", "row 2 has 3 columns, not 4"),
        ("a.jpg,['/m/0a', '/m/0b'],[],val\n", "row 2 has 5 columns, not 4"),
        (
            "a.jpg,[],[],val\nb.jpg,/m/0a,[],val\n",
            "row 3 has '/m/0a', not a list of quoted class ids",
        ),
        ("a.jpg,,[],val\n", "row 2 has '', not a list"),
        ("a.jpg,[,[],val\n", "row 2 has '[', not a list"),
        ("a.jpg,[/m/0a],[],val\n", "row 2 has '[/m/0a]'"),
        ("a.jpg,[''],[],val\n", "row 2 has \"['']\""),
        ("a.jpg,\"['/m/0a' '/m/0b']\",[],val\n", "row 2 has"),
        ("a.jpg,\"['/m/0a', ]\",[],val\n", "row 2 has"),
        ("a.jpg,[],[__import__('os').abort()],val\n", "row 2 has \"[__import__('os').abort()]\""),
        ('a.jpg,"[],[],val\n', "wrong quoting after row 1"),
        (
            "a.jpg,[],[],val\nb.jpg,[],[],train\na.jpg,[],[],train\n",
            "row 4: the image a.jpg is listed twice, first in row 2",
        ),
        ("../a.jpg,[],[],val\n", "row 2: '../a.jpg' is not a path inside the image folder"),
        ("x\\..\\..\\a.jpg,[],[],val\n", "is not a path inside the image folder"),
        ("/etc/a.jpg,[],[],val\n", "row 2: '/etc/a.jpg' is not a path"),
        ("C:\\a.jpg,[],[],val\n", "is not a path inside the image folder"),
        (",[],[],val\n", "row 2: '' is not a path"),
        ("", "val has no image"),
    ],
)
def test_bad_rows(root: Path, build: Reader, rows: str, message: str) -> None:
    write(root, rows)
    assert message in build.fault()


def test_another_table(root: Path, build: Reader) -> None:
    write(root, ROWS, "path,labels,split")
    assert "the header is 'path,labels,split'" in build.fault()
    (root / "data.csv").unlink()
    assert "data.csv cannot be read" in build.fault()


def test_settings_are_checked_before_the_files(build: Reader) -> None:
    with pytest.raises(ConfigError, match=r"data\.names"):
        build(names="both")


def test_a_missing_image_and_an_unknown_split(root: Path, build: Reader) -> None:
    (root / "test" / "c.jpg").unlink()
    first = root / "test" / "c.jpg"
    assert f"1 of 1 listed images are absent, the first is {first}" in build.fault()
    assert "validation has no image" in build.fault(val="validation")


def test_the_real_sample(sample_data: Path, tmp_path: Path) -> None:
    data = made(
        openimages_miil,
        root=str(sample_data / "openimages_mini"),
        image_size=16,
        cache_dir=str(tmp_path),
    )
    train, val = data.train.dataset, data.val.dataset
    assert (len(train), len(val), len(data.val.classes)) == (100, 100, 166)
    assert data.val.classes.names == tuple(sorted(data.val.classes.names))
    for dataset, statements, classes in ((train, 328, 112), (val, 442, 103)):
        assert len(dataset.labels.values) == statements
        assert (dataset.labels.values == 1).all()  # the sample has no negatives
        assert (dataset.labels.counts() > 0).sum() == classes
    image, target = fixed_sample(train, 0)
    assert image.shape == (3, 16, 16)
    named = [
        name
        for name, value in zip(data.train.classes.names, target.tolist(), strict=True)
        if value == 1
    ]
    assert named == ["/m/02fq_6", "/m/02jfl0", "/m/02wbtzl", "/m/03bt1vf", "/m/0crjs"]


def test_a_display_name_that_no_class_may_have(root: Path, build: Reader) -> None:
    torch.save({"/m/0a": "red\x1b[31m", "/m/other": "\0"}, root / "mid_to_classes.pth")
    message = build.fault()
    assert (
        "mid_to_classes.pth: "
        "'/m/0a': the class name 'red\\x1b[31m' has the control character U+001B" in message
    )
