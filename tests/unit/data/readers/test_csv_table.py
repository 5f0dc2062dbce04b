"""A CSV file of the user's own: each form is recognised, and all of them are the same data."""

import json
import logging
import os
import unicodedata

import pytest
import torch
from readers import names, targets, write_picture
from trees import CSV, tree

from mldec.data.types import fixed_sample
from mldec.errors import ConfigError, DataError
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator

ONE_HOT = """\
path,dog,cat,eel,split
a/1.png,1,1,0,train
a/2.png,0,0.0,0,train
"b/x, y.png", 1.0 ,0,1,train
b/4.png,0,1,0,val
b/5.png,1,0,0,test
"""
JSON = [("a/1.png", ["dog", "cat"], "train"), ("a/2.png", [], "train")]
JSON += [("b/x, y.png", ["eel", "dog"], "train"), ("b/4.png", ["cat"], "val")]
JSON += [("b/5.png", ["dog"], "test")]
HEADER = "path,labels,split\n"


@pytest.fixture
def reader(tmp_path):
    return tree("csv_table", tmp_path)


@pytest.fixture
def build(reader):
    def build(text=None, **arguments):
        if text is not None:
            content = text if isinstance(text, bytes) else text.encode()
            (reader.root / "data.csv").write_bytes(content)
        return reader(**arguments)

    return build


@pytest.fixture
def fault(build):
    def fault(text, **arguments):
        with pytest.raises(DataError) as caught:
            build(text, **arguments)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return fault


# Forms


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (CSV, "a list of labels per image, columns between commas"),
        (
            "\ufeff\r\n" + CSV.replace("\n", "\r\n").replace("path", "Path"),
            "a list of labels per image, columns between commas",
        ),
        (
            'path;labels;split\na\\1.png;"dog;cat";train\n.\\a/2.png;;train\n'
            'b/x, y.png;"eel;dog";train\nb/4.png;cat;val\nb/5.png;dog;test\n',
            "a list of labels per image, columns between semicolons",
        ),
        (ONE_HOT, "a column per class, columns between commas"),
        (
            "path\tlabels\tsplit\n"
            + "".join(f"{path}\t{json.dumps(labels)}\t{split}\n" for path, labels, split in JSON),
            "a list of labels per image, columns between tabs",
        ),
    ],
    ids=["names", "windows", "semicolons", "one-hot", "json"],
)
def test_all_forms_are_the_same_data_and_are_named(build, reader, caplog, text, form):
    with caplog.at_level(logging.INFO, "mldec"):
        data = build(text, classes=["cat", "dog", "eel"])
    assert names(data.train) == ["1.png", "2.png", "x, y.png"]
    assert targets(data.train) == [[1, 1, 0], [0, 0, 0], [0, 1, 1]]
    assert targets(data.val) == [[1, 0, 0]]
    assert not data.val.classes.exclusive
    assert isinstance(data.evaluator(), MultiLabelEvaluator)
    assert caplog.messages.count(f"csv: {reader.root}/data.csv has {form}") == 1


def test_the_classes_are_the_sorted_labels_and_the_splits_those_of_the_column(build, caplog):
    with caplog.at_level(logging.INFO, "mldec"):
        data = build()
    assert data.val.classes.names == ("cat", "dog", "eel")
    assert targets(data.val) == [[1, 0, 0]]
    assert targets(build(val="test").val) == [[0, 1, 0]]
    assert fixed_sample(data.train.dataset, 2)[0].shape == (3, 16, 16)
    assert "csv train: 3 images, 3 classes" in caplog.messages
    assert "csv val: 2 of 3 classes have no image: 'dog', 'eel'" in caplog.messages


def test_negatives_make_the_rest_unknown(build):
    text = (
        "split,negatives,labels,path\ntrain,dog,cat,a/1.png\n"
        "train,,[],a/2.png\nval,eel;dog,cat,b/4.png\n"
    )
    data = build(text)
    assert data.train.classes.names == ("cat", "dog", "eel")
    assert targets(data.train) == [[1, 0, -1], [-1, -1, -1]]
    assert targets(data.val) == [[1, 0, 0]]
    assert isinstance(data.evaluator(), PartialLabelEvaluator)


def test_an_empty_cell_makes_the_labels_partial(build):
    data = build(ONE_HOT.replace("a/2.png,0,0.0,0", "a/2.png,0,, "))
    assert data.train.classes.names == ("dog", "cat", "eel")  # the order of the columns
    assert targets(data.train) == [[1, 1, 0], [0, -1, -1], [1, 0, 1]]
    assert targets(data.val) == [[0, 1, 0]]
    assert isinstance(data.evaluator(), PartialLabelEvaluator)

    # An empty split leaves every class annotated.
    text = "path,split,dog,cat\na/1.png,,1,0\nb/4.png,train,0,1\nb/5.png,val,1,0\n"
    assert isinstance(build(text).evaluator(), MultiLabelEvaluator)


@pytest.mark.parametrize(("sign", "name"), [(",", "a;b"), (";", "a,b"), ("\t", "a,b;c")])
def test_a_sign_in_a_class_name_decides_nothing(build, sign, name):
    rows = ["path,split,NAME", "a/1.png,train,1", "b/4.png,val,0"]
    text = "\n".join(rows).replace(",", sign).replace("NAME", f'"{name}"')
    assert build(text).train.classes.names == (name,)


def test_brackets_that_are_no_list_are_names_and_other_separators(build):
    data = build(HEADER + "a/1.png,[unknown];[dog],train\na/2.png,[x,train\nb/4.png,[dog],val\n")
    assert data.train.classes.names == ("[dog]", "[unknown]", "[x")
    text = HEADER + "a/1.png,dog;eel | cat|,train\nb/4.png,cat,val\n"
    assert build(text, separator="|").train.classes.names == ("cat", "dog;eel")


@pytest.mark.parametrize("form", ["labels", "columns"])
def test_one_label(build, fault, form):
    text = "path,labels,split\na/1.png,dog,train\nb/4.png,cat,val\n"
    two = text.replace("dog", "dog;cat")
    if form == "columns":
        text = "path,cat,dog,split\na/1.png,0,1,train\nb/4.png,1,0,val\n"
        two = text.replace("0,1,train", "1,1,train")
    data = build(text, exclusive=True, top_k=2)
    assert data.train.classes.exclusive
    assert targets(data.train) == [[0, 1]]
    assert isinstance(data.evaluator(), SingleLabelEvaluator)
    assert "row 2 has 2 labels; data.exclusive=true wants one" in fault(two, exclusive=True)


def test_a_folder_of_images(build, fault, reader):
    data = build(HEADER + "1.png,dog,train\n.\\2.png,cat,val\n", images="a")
    assert names(data.train) == ["1.png"]
    text = HEADER + "a/2.png,dog,train\n1.png,dog,val\n"
    assert "it is in a: pass data.images=a; see DATASETS" in fault(text)
    message = fault(text.replace("1.png", "/elsewhere/1.png"))
    assert f"is not a path inside the image folder {reader.root};" in message
    expected = f"the first is {reader.root}/9.png; set data.images to the folder that"
    assert expected in fault(text.replace("1.png", "9.png"))


# Tables of other programs


@pytest.mark.parametrize(
    ("text", "settings", "unused"),
    [
        (",path,labels,split\n0,a/1.png,dog,train\n1,b/4.png,cat,val\n", {}, "column 1"),
        ("image,label,split\na/1.png,dog,Train\nb/4.png,cat, VALID \n", {}, None),
        ("file_name,Tags,split\na/1.png,dog,TRAIN\nb/4.png,cat,Validation\n", {}, None),
        (
            "path,labels,author,year,split\na/1.png,dog,ann,2025,train\nb/4.png,cat,,2026,val\n,,,,\n",
            {},
            "author, year",
        ),
        (
            "Unnamed: 0,filename,author,cat,dog,split,\n"
            "0,a/1.png,ann,0,1,train,\n1,b/4.png,,1,0,val,\n,,,,,,\n",
            {},
            "Unnamed: 0, author, column 7",
        ),
        (
            "path,labels,Photo,class,split\nx,1,a/1.png,dog,train\ny,2,b/4.png,cat,val\n",
            {"path_column": "photo", "labels_column": "class"},
            "path, labels",
        ),
        (
            "path,label,cat,split\na/1.png,dog,1,train\nb/4.png,cat,0,val\n",
            {"labels_column": "label"},
            "cat",
        ),
        ("path,labels,split\n{root}/a/1.png,dog,train\n{root}/b/./4.png,cat,val\n", {}, None),
    ],
    ids=["index", "image", "tags", "extra", "one-hot", "settings", "doubt", "absolute"],
)
def test_a_table_as_other_programs_write_it(build, reader, caplog, text, settings, unused):
    with caplog.at_level(logging.INFO, "mldec"):
        data = build(text.replace("{root}", str(reader.root)), **settings)
    assert data.train.classes.names == ("cat", "dog")
    assert (names(data.train), targets(data.train)) == (["1.png"], [[0, 1]])
    assert (names(data.val), targets(data.val)) == (["4.png"], [[1, 0]])
    logged = [message for message in caplog.messages if "not used" in message]
    expected = f"csv: {reader.root}/data.csv has columns that are not used: {unused}"
    assert logged == ([] if unused is None else [expected])


def test_a_named_column_must_be_there(build):
    with pytest.raises(ConfigError, match=r"^data\.path_column is 'photo': .*path, labels, split"):
        build(path_column="photo")


@pytest.mark.parametrize(("encoding", "setting"), [("cp1252", "cp1252"), ("utf-16", "utf-16")])
def test_another_encoding_needs_the_setting(build, fault, encoding, setting):
    content = (HEADER + "a/1.png,Füchse,train\nb/4.png,Füchse,val\n").encode(encoding)
    assert f"is not UTF-8 text: pass data.encoding={setting}, or save it as" in fault(content)
    assert build(content, encoding=setting).train.classes.names == ("Füchse",)
    with pytest.raises(ConfigError, match=r"^data\.encoding is 'latin-99'"):
        build(encoding="latin-99")


@pytest.mark.parametrize(("table", "disk"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_a_path_of_a_mac_is_found(build, reader, table, disk):
    def path(form):
        return unicodedata.normalize(form, "Süd/ö.png")

    write_picture(reader.root / path(disk))
    data = build(HEADER + f"{path(table)},dog,train\na/1.png,cat,train\nb/4.png,cat,val\n")
    assert data.train.dataset.name(0) == str(reader.root / path(disk))


def test_a_few_absent_images_may_be_left_out(fault, build):
    text = CSV.replace("a/2.png", "none/2.png")
    assert "1 of 3 listed images are absent" in fault(text)
    assert "leave them out with data.absent=skip" in fault(text)
    assert "data.images" not in fault(text)
    assert names(build(text, absent="skip").train) == ["1.png", "x, y.png"]


def test_two_names_of_the_validation_split_are_not_merged(build, fault):
    text = HEADER + "a/1.png,dog,train\na/2.png,dog,valid\nb/4.png,cat,Validation\n"
    assert "it has no split 'val': pass data.val=valid" in fault(text)
    assert names(build(text, val="validation").val) == ["4.png"]
    assert names(build(text.replace("Validation", "val")).val) == ["4.png"]


# Doubts


def test_rows_that_are_not_used_are_counted(build, fault, caplog):
    expected = "csv: 1 rows of the split 'test' are not used; evaluate them by data.val=test"
    with caplog.at_level(logging.INFO, "mldec"):
        build()
    assert caplog.messages.count(expected) == 1
    message = "data.csv: it has no split 'val': pass data.val=dev; see DATASETS"
    assert message in fault(CSV.replace("val", "dev"))
    assert "it has no split 'x': pass data.val=val;" in fault(CSV, val="x")
    with pytest.raises(ConfigError, match=r"data\.val is test: .* has no column split: add one"):
        build("path,labels\n1.png,cat\n", val="test")
    with pytest.raises(ConfigError, match=r"data\.train is all: .* has no column split: add one"):
        build("path,labels\n1.png,cat\n", train="all")


@pytest.mark.parametrize(
    ("rows", "hint"),
    [
        (["dog|cat", "cat", "dog"], "class 'dog|cat' looks like several names: pass data.separa"),
        (["dog | cat", "cat|eel", "eel"], "class 'cat|eel' looks like several names: pass"),
        (['"a, b"', "a", "b"], "class 'a, b' looks like several names: pass data.separator=','"),
        (['"projectile, missile"', "missile", "crane"], None),
    ],
)
def test_another_separator_is_hinted_at(build, caplog, rows, hint):
    splits = [("a/1.png", "train"), ("a/2.png", "train"), ("b/4.png", "val")]
    lines = [f"{path},{row},{split}\n" for row, (path, split) in zip(rows, splits, strict=True)]
    build(HEADER + "".join(lines))
    hints = [message for message in caplog.messages if "several names" in message]
    assert len(hints) == (hint is not None)
    assert all(hint in message for message in hints)


# Splits without a column


def test_a_stratified_split(build, reader, caplog, fault):
    rows = []
    for number in range(200):
        write_picture(reader.root / "c" / f"{number}.png")
        labels = ["many", *["some"] * (number % 20 == 0), *["few"] * (number < 2)]
        rows.append(f"c/{number}.png,{';'.join(labels)}")
    text = "path,labels\n" + "\n".join(rows)

    with caplog.at_level(logging.INFO, "mldec"):
        data = build(text, val_fraction=0.2)
    assert data.val.classes.names == ("few", "many", "some")
    assert not set(names(data.train)) & set(names(data.val))
    assert torch.tensor(targets(data.val)).sum(0).tolist() == [1, 41, 2]
    assert torch.tensor(targets(data.train)).sum(0).tolist() == [1, 159, 8]
    start = "csv: no column split, so 41 of 200 images are held out for validation (stratified)"
    hints = [message for message in caplog.messages if message.startswith(start)]
    assert len(hints) == 1
    assert "data.val_fraction" in hints[0]
    assert names(build(val_fraction=0.2).val) == names(data.val)
    assert names(build(val_fraction=0.2, split="hash").val) != names(data.val)
    assert "val has no image" in fault(text, split="hash", val_fraction=0.001)


# The cache


def test_a_table_is_read_again_for_other_settings_or_another_form(build, reader):
    build()
    assert targets(build(classes=["eel", "dog", "cat"]).val) == [[0, 0, 1]]
    first = HEADER + "a/1.png,0,train\nb/4.png,1,val\n"
    assert build(first).val.classes.names == ("0", "1")

    # The same size and time, as after an edit by a program that keeps the time.
    times = (reader.root / "data.csv").stat()
    (reader.root / "data.csv").write_text(first.replace("labels", "eelsss"))
    os.utime(reader.root / "data.csv", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert build().val.classes.names == ("eelsss",)


# Faults beyond those of test_faults.py


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "row 1: none of the columns '' has the paths of the images: call one path"),
        ("Photo,labels\na,dog\n", "'Photo, labels' has the paths of the images: call one path"),
        ("path,author\na,ann\n", "none of the columns 'path, author' has labels: call one labels"),
        ("path,negatives,dog\na,dog,1\n", "'path, negatives, dog' has labels: call one labels"),
        ("path,label,dog\na,dog,1\n", "in the column 'label', or in columns of 0 and 1 such as 'd"),
        ("path,labels,Path\na,dog,b\n", "row 1: the column 'path' is there twice: rename one"),
        ("path,dog,cat,dog\na,1,0,1\n", "row 1: the class 'dog' is there twice: rename one"),
        ("path,dog,cat\na,1,0\nb,2,1\nc,0,1\n", "row 3: the class 'dog' has '2', not 0, 1 or noth"),
        ("path,dog\na,-1\n", "row 2: the class 'dog' has '-1', not 0, 1 or nothing"),
        ("path;dog;cat\na;1\n", "row 2 has 2 fields, the header 3: add the others"),
        ("path\tlabels\na\t[1, 2]\n", "write a JSON list such as"),
        ("path\tlabels\na\t['dog', 'cat']\n", "write a JSON list such as"),
        ('path\tlabels\na\t["dog", " "]\n', "row 2: the class name '' is empty"),
        ("path,labels,negatives\na/1.png,dog,cat;dog\n", "'dog' is in labels and in negatives"),
    ],
)
def test_wrong_files(fault, text, expected):
    message = fault(text)
    assert expected in message
    assert message.endswith("; see DATASETS.md, section Your own data")


def test_classes_that_are_not_those_of_the_setting(fault):
    message = "row 2: the class 'cat' is not in the list of 3 classes; did you mean 'Cat'?"
    assert message in fault(CSV, classes=["Cat", "dog", "eel"])
    assert "the class 'cat' is not in the list" in fault(ONE_HOT, classes=["dog", "eel"])
    assert "data.classes: the class name" in fault(CSV, classes=["dog", "cat", "x\x1by"])
    for setting in ({"file": "../data.csv"}, {"images": ".."}):
        assert "is not a path inside" in fault(CSV, **setting)
    assert "none.csv cannot be read" in fault(CSV, file="none.csv")
