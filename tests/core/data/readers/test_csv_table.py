import json
import logging
import os

import pytest
import torch
from PIL import Image
from readers import Reader, names, targets, write_picture

from mldec.data.readers import csv_table as module
from mldec.data.readers.csv_table import csv_table
from mldec.data.types import fixed_sample
from mldec.errors import ConfigError, DataError
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator

TEXT = """\
path,labels,split
a/1.png,dog;cat,train
a/2.png,,train
"b/x, y.png","eel ; dog",train
b/4.png,cat,val
b/5.png,dog,test
"""


@pytest.fixture
def root(tmp_path):
    for name in ("a/1.png", "a/2.png", "b/x, y.png", "b/4.png", "b/5.png"):
        write_picture(tmp_path / "own" / name)
    (tmp_path / "own" / "data.csv").write_text(TEXT)
    return tmp_path / "own"


@pytest.fixture
def build(root):
    reader = Reader(csv_table, root, "Your own data")

    def build(text=None, **arguments):
        if text is not None:
            (root / "data.csv").write_text(text)
        return reader(**arguments)

    return build


def test_several_labels(build):
    data = build()
    assert data.val.classes.names == ("cat", "dog", "eel")
    assert not data.val.classes.exclusive
    assert names(data.train) == ["1.png", "2.png", "x, y.png"]
    assert targets(data.train) == [[1, 1, 0], [0, 0, 0], [0, 1, 1]]
    assert targets(data.val) == [[1, 0, 0]]
    assert targets(build(val="test").val) == [[0, 1, 0]]
    assert isinstance(data.evaluator(), MultiLabelEvaluator)
    assert fixed_sample(data.train.dataset, 2)[0].shape == (3, 16, 16)


def test_negatives_make_the_rest_unknown(build):
    text = (
        "split,negatives,labels,path\ntrain,dog,cat,a/1.png\n"
        "train,,,a/2.png\nval,eel;dog,cat,b/4.png\n"
    )
    data = build(text)
    assert data.train.classes.names == ("cat", "dog", "eel")
    assert targets(data.train) == [[1, 0, -1], [-1, -1, -1]]
    assert targets(data.val) == [[1, 0, 0]]
    assert fixed_sample(data.val.dataset, 0)[1].dtype == torch.int8


def test_one_label(build):
    text = "path,labels,split\na/1.png,dog,train\nb/4.png,cat,val\n"
    data = build(text, exclusive=True, top_k=2)
    assert data.train.classes.exclusive
    assert targets(data.train) == [[0, 1]]
    assert isinstance(data.evaluator(), SingleLabelEvaluator)
    with pytest.raises(ConfigError, match=r"data\.top_k 5 needs as many classes; there are 2"):
        build(text, exclusive=True, top_k=5)
    with pytest.raises(ConfigError, match=r"data.top_k is 2, for one label"):
        build(text, top_k=2)


def test_without_a_split_some_images_are_held_out(build, root):
    rows = [f"c/{number}.png,{'ab'[number % 2]}" for number in range(100)]
    (root / "c").mkdir()
    for number in range(100):
        Image.new("RGB", (2, 2)).save(root / "c" / f"{number}.png")
    text = "path,labels\n" + "\n".join(rows)
    data = build(text, val_fraction=0.3)
    train, val = set(names(data.train)), set(names(data.val))
    assert not train & val
    assert len(train | val) == 100
    assert 15 <= len(val) <= 45
    shuffled = build("path,labels\n" + "\n".join(reversed(rows)), val_fraction=0.3)
    assert set(names(shuffled.val)) == val
    assert set(names(build(text, val_fraction=0.3, seed=1).val)) != val


def test_names_from_a_list_or_a_file(build, root):
    assert targets(build(classes=["eel", "dog", "cat", "fox"]).val) == [[0, 0, 1, 0]]
    (root / "classes.txt").write_text("dog\ncat\neel\n")
    assert build(classes="classes.txt").val.classes.names == ("dog", "cat", "eel")


def test_other_signs(build, root):
    data = build(TEXT.replace(";", "|"), separator="|")
    assert targets(data.train)[0] == [1, 1, 0]
    (root / "data.csv").write_bytes(
        b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").replace("path", "Path").encode()
    )
    assert targets(build().train)[0] == [1, 1, 0]


def test_windows_separators_and_a_folder_of_images(build):
    data = build("path,labels,split\n.\\1.png,dog,train\n2.png,cat,val\n", images="a")
    assert names(data.train) == ["1.png"]
    data = build("path,labels,split\na\\1.png,dog,train\nb\\4.png,cat,val\n")
    assert fixed_sample(data.train.dataset, 0)[0].shape == (3, 16, 16)


def test_a_class_without_a_positive_is_logged(build, caplog):
    with caplog.at_level(logging.INFO, "mldec"):
        build()
    assert "csv train: 3 images, 3 classes" in caplog.messages
    assert "csv val: 2 of 3 classes have no image: 'dog', 'eel'" in caplog.messages


def test_a_second_start_parses_nothing_and_other_settings_do(build, monkeypatch):
    build()
    monkeypatch.setattr(module, "read_rows", None)
    assert targets(build().val) == [[1, 0, 0]]
    monkeypatch.undo()
    assert targets(build(classes=["eel", "dog", "cat"]).val) == [[0, 0, 1]]


# Other forms, which `test_csv_forms.py` tests one by one

ONE_HOT = """\
path,dog,cat,eel,split
a/1.png,1,1,0,train
a/2.png,0,0,0,train
"b/x, y.png",1,0,1,train
b/4.png,0,1,0,val
b/5.png,1,0,0,test
"""


def json_lists():
    """Return the same table with a column of JSON lists, between tabs."""
    lines = ["path\tlabels\tsplit"]
    for line in ONE_HOT.replace('"b/x, y.png"', "b/x  y.png").splitlines()[1:]:
        path, *cells, split = line.split(",")
        labels = [
            name for name, cell in zip(("dog", "cat", "eel"), cells, strict=True) if cell == "1"
        ]
        lines.append("\t".join([path.replace("  ", ", "), json.dumps(labels), split]))
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (TEXT, "a list of labels per image, columns between commas"),
        (
            'path;labels;split\na/1.png;"dog;cat";train\na/2.png;;train\n'
            'b/x, y.png;"eel;dog";train\nb/4.png;cat;val\nb/5.png;dog;test\n',
            "a list of labels per image, columns between semicolons",
        ),
        (ONE_HOT, "a column per class, columns between commas"),
        (json_lists(), "a JSON list of labels per image, columns between tabs"),
    ],
    ids=["names", "semicolons", "one-hot", "json"],
)
def test_all_forms_are_the_same_data_and_are_named(build, root, caplog, text, form):
    with caplog.at_level(logging.INFO, "mldec"):
        data = build(text, classes=["cat", "dog", "eel"])
    assert names(data.train) == ["1.png", "2.png", "x, y.png"]
    assert targets(data.train) == [[1, 1, 0], [0, 0, 0], [0, 1, 1]]
    assert targets(data.val) == [[1, 0, 0]]
    assert isinstance(data.evaluator(), MultiLabelEvaluator)
    assert caplog.messages.count(f"csv: {root}/data.csv has {form}") == 1


def test_an_empty_cell_makes_the_labels_partial(build):
    data = build(ONE_HOT.replace("a/2.png,0,0,0", "a/2.png,0,,"))
    assert data.train.classes.names == ("dog", "cat", "eel")  # the order of the columns
    assert targets(data.train) == [[1, 1, 0], [0, -1, -1], [1, 0, 1]]
    assert targets(data.val) == [[0, 1, 0]]
    assert isinstance(data.evaluator(), PartialLabelEvaluator)


def test_one_label_in_columns(build):
    text = "path,dog,cat,split\na/1.png,1,0,train\nb/4.png,0,1,val\n"
    data = build(text, exclusive=True)
    assert targets(data.train) == [[1, 0]]
    assert isinstance(data.evaluator(), SingleLabelEvaluator)
    with pytest.raises(DataError, match=r"row 2 has 2 labels; data\.exclusive=true wants one"):
        build(text.replace("1,0,train", "1,1,train"), exclusive=True)


def test_columns_that_are_not_those_of_the_setting(build):
    with pytest.raises(DataError, match=r"csv, row 1: the class 'cat' is not in the list of 2"):
        build(ONE_HOT, classes=["dog", "eel"])
    with pytest.raises(
        DataError, match=r"row 1: the class 'fox' of data\.classes has no column: add one"
    ):
        build(ONE_HOT, classes=["fox", "dog", "eel", "cat"])


def test_a_cached_table_of_another_form_is_not_taken(build, root):
    first = "path,labels,split\na/1.png,0,train\nb/4.png,1,val\n"
    other = first.replace("labels", "eelsss")
    assert build(first).val.classes.names == ("0", "1")

    # The same size and time, as after an edit by a program that keeps the time.
    times = (root / "data.csv").stat()
    (root / "data.csv").write_text(other)
    os.utime(root / "data.csv", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert build().val.classes.names == ("eelsss",)


# A stratified split


@pytest.fixture
def tail(root):
    """Return a table of 200 images, of whose classes one has two images only."""
    (root / "c").mkdir()
    rows = []
    for number in range(200):
        write_picture(root / "c" / f"{number}.png")
        labels = ["many", *["some"] * (number % 20 == 0), *["few"] * (number < 2)]
        rows.append(f"c/{number}.png,{';'.join(labels)}")
    return "path,labels\n" + "\n".join(rows)


def test_a_stratified_split(build, tail, caplog):
    with caplog.at_level(logging.INFO, "mldec"):
        data = build(tail, split="stratified", val_fraction=0.2)
    assert data.val.classes.names == ("few", "many", "some")
    assert not set(names(data.train)) & set(names(data.val))
    assert torch.tensor(targets(data.val)).sum(0).tolist() == [0, 40, 2]
    assert torch.tensor(targets(data.train)).sum(0).tolist() == [2, 160, 8]
    assert "csv val: 1 of 3 classes have no image: 'few'" in caplog.messages

    by_hash = names(build(val_fraction=0.2, split="hash").val)
    assert by_hash == names(build(val_fraction=0.2).val) != names(data.val)
    assert names(build(val_fraction=0.2, split="stratified").val) == names(data.val)


def test_many_classes_without_an_image_are_named(build, tail, caplog):
    letters = [f"class {letter}" for letter in "abcdefghij"]
    build(tail, classes=["few", "many", "some", *letters])
    listed = ", ".join(repr(letter) for letter in letters)
    assert any(message.endswith(f"no image: {listed}") for message in caplog.messages)


def test_wrong_splits(build, tail):
    with pytest.raises(ConfigError, match=r"data\.split is 'random': choose hash or stratified"):
        build(split="random")
    with pytest.raises(
        ConfigError, match=r"data\.split is stratified, but .*csv has a column split: leave one"
    ):
        build(split="stratified")
    with pytest.raises(
        DataError, match=r"data\.split=stratified leaves no image to val, of 200: change data\.val_"
    ):
        build(tail, split="stratified", val_fraction=0.001)


HEADER = "path,labels,split\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "are not path, labels"),
        ("file,labels\na/1.png,dog\n", "the columns 'file, labels' are not path, labels"),
        ("path,labels,colour\na/1.png,dog,red\n", "colour' are not path"),
        ("path,labels,path\na/1.png,dog,x\n", "are not path"),
        ("path|labels\na/1.png|dog\n", r"row 1: the columns 'path\|labels' are not"),
        (HEADER + "a/1.png,dog,cat,train\n", "row 2 has 4 fields, the header 3"),
        (HEADER + "a/1.png\n", "row 2 has 1 fields"),
        (HEADER + 'a/1.png,"dog,train\n', "row 2 is not CSV .*check its quotes"),
        (HEADER + 'a/1.png,"do"g,train\n', "row 2 is not CSV"),
        (HEADER + "../1.png,dog,train\n", r"row 2: '\.\./1\.png' is not a path inside"),
        (HEADER + "a\\..\\..\\1.png,dog,train\n", "is not a path inside"),
        (HEADER + "/etc/passwd,dog,train\n", "'/etc/passwd' is not a path inside"),
        (HEADER + "C:\\1.png,dog,train\n", "is not a path inside"),
        (HEADER + ",dog,train\n", "row 2: '' is not a path inside"),
        (
            HEADER + "a/1.png,dog,train\nb/4.png,cat,val\n./a//1.png,dog,val\n",
            "row 4: the image a/1.png is listed twice, first in row 2",
        ),
        (HEADER + "a/1.png,dog;dog,train\n", "has a label twice"),
        ("path,labels,negatives\na/1.png,dog,cat;dog\n", "'dog' is in labels and in negatives"),
        (HEADER + "a/1.png,dog,train\nb/4.png,Dog,val\n", "'dog' and 'Dog' differ in case only"),
        (HEADER + "a/1.png,,train\nb/4.png,,val\n", "no image has a label"),
        (HEADER + "a/1.png,dog,train\n", "no row of the split 'val'; it has train"),
        (
            HEADER + "a/1.png,dog,train\nb/9.png,cat,val\n",
            "1 of 1 listed images are absent, the first is .*/own/b/9.png",
        ),
        (HEADER, "no image has a label"),
    ],
)
def test_wrong_files(build, text, expected):
    with pytest.raises(DataError, match=expected) as caught:
        build(text)
    assert "\n" not in str(caught.value)
    assert "see DATASETS.md, section Your own data" in str(caught.value)


def test_labels_that_are_not_in_the_list(build):
    with pytest.raises(
        DataError,
        match=r"row 2: the class 'cat' is not in the list of 3 classes; did you mean 'Cat'\?",
    ):
        build(classes=["Cat", "dog", "eel"])
    with pytest.raises(DataError, match="did you mean 'catt'"):
        build(classes=["catt", "dog", "eel"])


@pytest.mark.parametrize("label", ["", "dog;cat"])
def test_one_label_means_one(build, label):
    with pytest.raises(DataError, match=r"row 3 has [02] labels; data\.exclusive=true wants one"):
        build(HEADER + f"b/4.png,cat,val\na/1.png,{label},train\n", exclusive=True)


def test_other_faults(build, root):
    (root / "data.csv").write_bytes(b"path,labels\na/\xe9.png,dog\n")
    with pytest.raises(DataError, match=r"is not UTF-8 text \(byte 14\): save it as UTF-8"):
        build()
    with pytest.raises(DataError, match=r"none\.csv cannot be read"):
        build(file="none.csv")
    with pytest.raises(DataError, match="is not a path inside"):
        build(file="../data.csv")
    with pytest.raises(DataError, match="is not a path inside"):
        build(images="..")
    with pytest.raises(ConfigError, match="separator"):
        build(separator=" ")
    with pytest.raises(ConfigError, match="val_fraction is 0"):
        build(val_fraction=0)
    with pytest.raises(ConfigError, match="threshold 2"):
        build(threshold=2)


@pytest.mark.parametrize("control", ["\t", "\0", "\n", "\x1b", "\x7f", "\x85"], ids=ascii)
def test_labels_that_no_class_may_have(build, control):
    for text in (
        TEXT.replace("eel", f"ee{control}l"),
        TEXT.replace("a/2.png,", f'a/2.png,"x{control}y"'),
    ):
        with pytest.raises(
            DataError, match=rf"data\.csv, row \d: the class name .* U\+{ord(control):04X}"
        ) as caught:
            build(text)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"data\.classes: the class name"):
        build(TEXT, classes=["dog", "cat", "eel", f"x{control}y"])


def test_bare_file_names_are_told_where_the_files_are(build, root):
    with pytest.raises(
        DataError, match=r"the first is .*1\.png; it is in a: pass data\.images=a; see DATASETS"
    ):
        build("path,labels,split\na/2.png,dog,train\n1.png,dog,val\n")
    with pytest.raises(
        DataError, match=rf"the first is {root}/9\.png; set data\.images to the folder that"
    ):
        build("path,labels,split\na/2.png,dog,train\n9.png,dog,val\n")
