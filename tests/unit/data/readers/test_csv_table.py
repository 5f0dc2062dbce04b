"""CSV files in several forms."""

import json
import os
import unicodedata

import pytest
from readers import names, targets, write_picture
from trees import CSV, tree

from mldec.data.types import fixed_sample
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
JSON_LINES = [f"{path}\t{json.dumps(labels)}\t{split}\n" for path, labels, split in JSON]
HEADER = "path,labels,split\n"


@pytest.fixture
def reader(tmp_path):
    return tree("csv_table", tmp_path)


@pytest.fixture
def write(reader):
    def write(text):
        content = text if isinstance(text, bytes) else text.encode()
        (reader.root / "data.csv").write_bytes(content)
        return reader

    return write


# Forms


@pytest.mark.parametrize(
    "text",
    [
        CSV,
        "\ufeff\r\n" + CSV.replace("\n", "\r\n").replace("path", "Path"),
        'path;labels;split\na\\1.png;"dog;cat";train\n.\\a/2.png;;train\n'
        'b/x, y.png;"eel;dog";train\nb/4.png;cat;val\n',
        ONE_HOT,
        "path\tlabels\tsplit\n" + "".join(JSON_LINES),
    ],
    ids=["names", "windows", "semicolons", "one-hot", "json"],
)
def test_all_forms_give_the_same_data(write, text):
    data = write(text)(classes=["cat", "dog", "eel"])
    assert names(data.train) == ["1.png", "2.png", "x, y.png"]
    assert targets(data.train) == [[1, 1, 0], [0, 0, 0], [0, 1, 1]]
    assert targets(data.val) == [[1, 0, 0]]
    assert not data.val.classes.exclusive
    assert isinstance(data.evaluator(), MultiLabelEvaluator)


def test_classes_are_sorted_labels_and_column_gives_splits(reader):
    data = reader()
    assert data.val.classes.names == ("cat", "dog", "eel")
    assert targets(data.val) == [[1, 0, 0]]
    assert targets(reader(val="test").val) == [[0, 1, 0]]
    assert fixed_sample(data.train.dataset, 2)[0].shape == (3, 16, 16)


def test_negatives_column_makes_labels_partial(write):
    text = (
        "split,negatives,labels,path\ntrain,dog,cat,a/1.png\n"
        "train,,[],a/2.png\nval,eel;dog,cat,b/4.png\n"
    )
    data = write(text)()
    assert data.train.classes.names == ("cat", "dog", "eel")
    assert targets(data.train) == [[1, 0, -1], [-1, -1, -1]]
    assert targets(data.val) == [[1, 0, 0]]
    assert isinstance(data.evaluator(), PartialLabelEvaluator)


def test_empty_cell_makes_labels_partial(write):
    data = write(ONE_HOT.replace("a/2.png,0,0.0,0", "a/2.png,0,, "))()
    assert data.train.classes.names == ("dog", "cat", "eel")  # in the order of the columns
    assert targets(data.train) == [[1, 1, 0], [0, -1, -1], [1, 0, 1]]
    assert targets(data.val) == [[0, 1, 0]]
    assert isinstance(data.evaluator(), PartialLabelEvaluator)

    # An empty split does not.
    text = "path,split,dog,cat\na/1.png,,1,0\nb/4.png,train,0,1\nb/5.png,val,1,0\n"
    assert isinstance(write(text)().evaluator(), MultiLabelEvaluator)


def test_names_may_have_brackets_and_other_separators(write):
    for sign, name in ((",", "a;b"), (";", "a,b"), ("\t", "a,b;c")):
        text = "path,split,NAME\na/1.png,train,1\nb/4.png,val,0"
        text = text.replace(",", sign).replace("NAME", f'"{name}"')
        assert write(text)().train.classes.names == (name,)

    text = HEADER + "a/1.png,[unknown];[dog],train\na/2.png,[x,train\nb/4.png,[dog],val\n"
    assert write(text)().train.classes.names == ("[dog]", "[unknown]", "[x")
    text = HEADER + "a/1.png,dog;eel | cat|,train\nb/4.png,cat,val\n"
    assert write(text)(separator="|").train.classes.names == ("cat", "dog;eel")


@pytest.mark.parametrize("form", ["labels", "columns"])
def test_exclusive_data_has_one_label(write, form):
    text = "path,labels,split\na/1.png,dog,train\nb/4.png,cat,val\n"
    two = text.replace("dog", "dog;cat")
    if form == "columns":
        text = "path,cat,dog,split\na/1.png,0,1,train\nb/4.png,1,0,val\n"
        two = text.replace("0,1,train", "1,1,train")
    data = write(text)(exclusive=True, top_k=2)
    assert data.train.classes.exclusive
    assert targets(data.train) == [[0, 1]]
    assert isinstance(data.evaluator(), SingleLabelEvaluator)
    assert "row 2" in write(two).fault(exclusive=True)


def test_paths_are_relative_to_images(write):
    data = write(HEADER + "1.png,dog,train\n.\\2.png,cat,val\n")(images="a")
    assert names(data.train) == ["1.png"]
    text = HEADER + "a/2.png,dog,train\n9.png,dog,val\n"
    assert "data.images" in write(text).fault()
    assert "/elsewhere/9.png" in write(text.replace("9.png", "/elsewhere/9.png")).fault()


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (",path,labels,author,split\n0,a/1.png,dog,ann,Train\n1,b/4.png,cat,, VALID \n,,,,\n", {}),
        ("file_name,Tags,split\na/1.png,dog,TRAIN\nb/4.png,cat,Validation\n", {}),
        (
            "Unnamed: 0,filename,author,cat,dog,split,\n"
            "0,a/1.png,ann,0,1,train,\n1,b/4.png,,1,0,val,\n,,,,,,\n",
            {},
        ),
        (
            "path,labels,Photo,class,split\nx,1,a/1.png,dog,train\ny,2,b/4.png,cat,val\n",
            {"path_column": "photo", "labels_column": "class"},
        ),
        ("path,labels,split\n{root}/a/1.png,dog,train\n{root}/b/./4.png,cat,val\n", {}),
    ],
    ids=["index", "tags", "one-hot", "settings", "absolute"],
)
def test_columns_of_other_programs(write, reader, text, settings):
    data = write(text.replace("{root}", str(reader.root)))(**settings)
    assert data.train.classes.names == ("cat", "dog")
    assert (names(data.train), targets(data.train)) == (["1.png"], [[0, 1]])
    assert (names(data.val), targets(data.val)) == (["4.png"], [[1, 0]])


def test_other_encoding_is_a_setting(write):
    content = (HEADER + "a/1.png,Füchse,train\nb/4.png,Füchse,val\n").encode("cp1252")
    assert "data.encoding" in write(content).fault()
    assert write(content)(encoding="cp1252").train.classes.names == ("Füchse",)


def test_path_is_found_in_both_unicode_forms(write, reader):
    composed, decomposed = (unicodedata.normalize(form, "Süd/ö.png") for form in ("NFC", "NFD"))
    write_picture(reader.root / composed)
    data = write(HEADER + f"{decomposed},dog,train\na/1.png,cat,train\nb/4.png,cat,val\n")()
    assert data.train.dataset.name(0) == str(reader.root / composed)


def test_names_of_validation_split_are_not_merged(write):
    text = HEADER + "a/1.png,dog,train\na/2.png,dog,valid\nb/4.png,cat,Validation\n"
    assert "data.val=valid" in write(text).fault()
    assert names(write(text)(val="validation").val) == ["4.png"]
    assert names(write(text.replace("Validation", "val"))().val) == ["4.png"]


def test_table_is_read_again_for_other_settings_or_another_form(write, reader):
    reader()
    assert targets(reader(classes=["eel", "dog", "cat"]).val) == [[0, 0, 1]]
    first = HEADER + "a/1.png,0,train\nb/4.png,1,val\n"
    assert write(first)().val.classes.names == ("0", "1")

    # The same size and time, as after an edit by a program that keeps the time.
    times = (reader.root / "data.csv").stat()
    write(first.replace("labels", "eelsss"))
    os.utime(reader.root / "data.csv", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert reader().val.classes.names == ("eelsss",)
