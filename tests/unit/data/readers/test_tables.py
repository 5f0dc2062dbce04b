"""Tables of other programs: forms, words and separators, and their meaning."""

import io
import json
import logging
from functools import partial

import numpy as np
import pandas
import pyarrow
import pytest

from mldec.build import resolve
from mldec.data.columns import Rules
from mldec.data.readers import csv_table
from mldec.data.readers.tables import parse, to_csv
from mldec.data.splits import HoldOut
from mldec.errors import ConfigError, DataError, UserError
from mldec.files.tables import with_index


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, pandas.DataFrame):
            save = content.to_excel if path.suffix == ".xlsx" else content.to_parquet
            save(path, index=False)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())


def values(images):
    """Return the labels of each image that are not 0, by path and class."""
    rows = {}
    for index in range(len(images)):
        named = zip(images.classes, images.labels.row(index).tolist(), strict=True)
        path = images.storage.keys.tolist()[index].decode()
        rows[path] = {name: value for name, value in named if value}
    return rows


@pytest.fixture
def read(tmp_path):
    """Write files, and return the classes and the labels of the images of both splits."""

    def read(files, *, rules=None, **arguments):
        write(tmp_path, files if isinstance(files, dict) else {"data.csv": files})
        source = csv_table(root=str(tmp_path), rules=Rules(**(rules or {})), **arguments)
        train = source.load(source.train, None)
        val = source.load(source.val, None)
        assert train.classes == val.classes
        return train.classes, values(train), values(val)

    return read


def names(rows):
    return {path: sorted(labels) for path, labels in rows.items()}


def together(read, *arguments, **options):
    """Return the classes, and the names of the labels of all images."""
    classes, train, val = read(*arguments, **options)
    return classes, names(train | val)


# Separators

SCAB = ["scab frog_eye_leaf_spot", "scab", "rust", "healthy", "complex", "powdery_mildew"]
SCAB += ["frog_eye_leaf_spot", "rust frog_eye_leaf_spot"]


def table(cells, header="path,labels"):
    rows = [f'{number}.jpg,"{cell}"' for number, cell in enumerate(cells)]
    return "\n".join([header, *rows])


@pytest.mark.parametrize(
    ("cells", "classes"),
    [
        (SCAB, 6),
        (["cat,dog", "cat", "bird"], 3),
        (["0,2", "1", "0"], 3),
        (["16 0", "7 1 2", "3"], 6),
        (["Cardiomegaly|Emphysema", "Effusion"], 3),
        (["cat; dog", "hot dog, grilled;cat"], 3),
        (["cat\ndog", "bird"], 3),
        (["golden retriever", "german shepherd", "pug"], 3),
        (["hot dog", "pug"], 2),
        (["25-32", "38-43", "0-2", "4"], 4),
        (["indoor/kitchen", "black & white", "c++", "indoor"], 4),
        (["['cat', 'dog']", "['cat']", "[]"], 2),
        (["['cat' 'dog']", "['it\\'s']"], 3),
        (["('cat', 'dog')", "{'bird'}"], 3),
        (["[1, 0]", "[2]"], 3),
        (["nan", "none", "NULL", "cat"], 1),
        (["dog;nan", "nan;nan", "cat"], 2),
        (["[cat,dog]", "[cat]", "[]"], 2),
        (["{cat,dog}", "{dog,bird}", "{}", ""], 3),
        (["[cat] dog", "[dog]"], 2),
        (["\u72d7\u3001\u732b", "\u72d7"], 2),
        (["\u72d7\uff1b\u732b", "\u72d7"], 2),
        (["\U0001f436;cat", "cat"], 2),
        (["\u0643\u0644\u0628\u060c\u0642\u0637", "\u0642\u0637"], 2),
        (["'dog'", "'cat'"], 2),
        (['""dog;cat""', '""cat""'], 2),
        (['""dog"", ""cat""', '""cat""'], 2),
        (["(dog, cat)", "(cat)", "(dog)"], 2),
        (["frozenset({'dog', 'cat'})", "set()", "frozenset({'cat'})"], 2),
        (["array(['dog', 'cat'], dtype=object)", "array([], dtype=object)"], 2),
        (["dog,", "cat,"], 2),
        (["1.10", "1.9", "St. Bernard"], 3),
    ],
)
def test_cells_are_divided_at_the_separator_that_they_share(read, cells, classes, caplog):
    caplog.set_level(logging.INFO)
    found, rows = together(read, table(cells), division=HoldOut(val_fraction=0.5))
    assert len(found) == classes
    assert len(rows) == len(cells)
    if cells == SCAB:
        assert rows["0.jpg"] == ["frog_eye_leaf_spot", "scab"]
        assert "' '" in caplog.text


@pytest.mark.parametrize(
    ("cells", "setting"),
    [
        (["horse person", "person tvmonitor", "car"], "data.separator=' '"),
        (["red car", "blue car", "green bike", "red bike", "blue bike", "green car"], "' '"),
        (["cat,dog", "bird,fish"], "data.separator=','"),
        (["tench, Tinca tinca", "pug"], "data.separator=';'"),
        (["cat|dog", "bird;fish"], "'|'"),
        (["cat/dog", "cat", "dog"], "data.separator='/'"),
        (["cat & dog", "cat", "dog", "bird"], "data.separator='&'"),
        (["cat-dog", "cat", "dog", "bird"], "data.separator='-'"),
        (["cat_dog", "cat", "dog", "bird"], "data.separator='_'"),
        (["cat:dog", "cat", "dog", "bird"], "data.separator=':'"),
        (["cat>dog", "cat", "dog", "bird"], "data.separator='>'"),
        (["cat||dog", "cat;"], "data.separator='|'"),
    ],
)
def test_ambiguous_separator_is_a_setting(read, cells, setting):
    with pytest.raises(DataError, match=r"data\.csv: .*data\.separator") as error:
        read(table(cells))
    assert setting in str(error.value)
    classes, _ = together(read, table(cells), rules={"separator": ";"})
    assert not any(";" in name for name in classes)


def test_single_label_may_be_none_but_not_missing(read):
    assert "none" in read(table(["none", "rain", "rain"]), exclusive=True)[0]
    with pytest.raises(DataError, match="0 labels"):
        read(table(["nan", "rain", "rain"]), exclusive=True)


def test_given_classes_and_single_labels_decide(read):
    cells = ["tench, Tinca tinca", "pug"]
    assert together(read, table(cells), classes=["tench, Tinca tinca", "pug"])[1]["0.jpg"]
    assert len(together(read, table(["red car", "blue car"]), exclusive=True)[0]) == 2
    _, rows = together(
        read, table(["cat,dog", "bird,fish"]), classes=["bird", "cat", "dog", "fish"]
    )
    assert rows["0.jpg"] == ["cat", "dog"]


@pytest.mark.parametrize("cell", ["[null, 'a']", '{""cat"": 1}', "[{'name': 'x'}]", "[0, 1, 0]"])
def test_other_values_in_cells_are_errors(read, cell):
    with pytest.raises(DataError, match="row 2"):
        read(table([cell, "cat"]))


@pytest.mark.parametrize("cell", ["-", "--", "\u2013", "cat;-", "cat:0.9", "cat(0.9)"])
def test_signs_and_scores_are_no_names(read, cell):
    with pytest.raises(DataError, match=r"row 3: .*data\.no_label=.*data\.classes"):
        read(table(["cat", cell, "dog"]))
    if cell == "-":
        _, rows = together(read, table(["cat", cell, "dog"]), rules={"no_label": ["-"]})
        assert rows["1.jpg"] == []
        assert "-" in together(read, table(["cat", cell]), classes=["-", "cat"])[0]


def test_names_for_no_label(read):
    cells = ["No Finding", "Effusion|Mass", "Mass"]
    assert "No Finding" in together(read, table(cells))[0]
    for no_label in ("No Finding", ["No Finding"]):
        classes, rows = together(read, table(cells), rules={"no_label": no_label})
        assert classes == ("Effusion", "Mass")
        assert rows["0.jpg"] == []


# Columns


def test_nih_columns_are_recognized(read):
    text = (
        "Image Index,Finding Labels,Follow-up #,Patient ID,View,\n"
        "1_0.png,Cardiomegaly|Emphysema,0,1,PA,\n2_0.png,Emphysema,1,1,AP,\n"
    )
    classes, rows = together(read, text)
    assert classes == ("Cardiomegaly", "Emphysema")
    assert list(rows) == ["1_0.png", "2_0.png"]


def test_unknown_columns_name_all_settings(read):
    with pytest.raises(DataError) as error:
        read("pic,lbl\nx1,cat\nx2,dog\n")
    assert "data.path_column=" in str(error.value)
    assert "data.labels_column=" in str(error.value)
    with pytest.raises(DataError, match=r"data\.labels_column=lbl"):
        read("img,lbl\na.jpg,cat\nb.jpg,dog\n")
    rules = {"path_column": "pic", "labels_column": "lbl"}
    assert len(together(read, "pic,lbl\nx1,cat\nx2,dog\n", rules=rules)[1]) == 2
    with pytest.raises(DataError, match="column names"):
        read("a.jpg,cat\nb.jpg,dog\n")
    # A column of file names is the path.
    assert len(together(read, "picture,label\na.jpg,cat\nb.jpg,dog\n")[1]) == 2


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("is_valid", ("False", "True")),
        ("is_valid", ("0", "1")),
        ("is_train", ("1", "0")),
        ("subset", ("training", "validation")),
        ("Partition", ("TRAIN", "dev")),
        ("usage", ("Training", "valid")),
    ],
)
def test_split_column_has_several_names_and_words(read, header, words):
    text = f"fname,labels,{header}\na.jpg,cat,{words[0]}\nb.jpg,dog,{words[1]}\n"
    classes, train, val = read(text)
    assert classes == ("cat", "dog")
    assert (list(train), list(val)) == (["a.jpg"], ["b.jpg"])
    text = f"fname,cat,{header}\na.jpg,1,{words[0]}\nb.jpg,0,{words[1]}\n"
    assert read(text)[0] == ("cat",)


def test_numbers_of_splits_are_a_setting(read):
    text = "path,dog,cat,fold\na.jpg,1,0,0\nb.jpg,0,1,1\nc.jpg,1,1,2\n"
    with pytest.raises(DataError, match=r"data\.split_column=fold data\.val="):
        read(text)
    classes, train, val = read(text, rules={"split_column": "fold"}, val="1")
    assert classes == ("dog", "cat")
    assert (sorted(train), sorted(val)) == (["a.jpg", "c.jpg"], ["b.jpg"])
    assert list(read(text, rules={"split_column": "fold"}, train="0", val="1")[1]) == ["a.jpg"]


def test_one_split_is_divided_and_test_needs_a_setting(read):
    text = "path,labels,split\n" + "".join(f"{n}.jpg,cat,train\n" for n in range(10))
    _, train, val = read(text)
    assert (len(train), len(val)) == (9, 1)
    with pytest.raises(DataError, match=r"data\.val=test"):
        read(text + "t.jpg,cat,test\n")
    with pytest.raises(ValueError, match="val is test"):
        read(text, val="test")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("1", "0", ""), (1, 0, -1)),
        (("1.0", "0.0", "nan"), (1, 0, -1)),
        (("True", "False", "None"), (1, 0, -1)),
        (("TRUE", "FALSE", "#N/A"), (1, 0, -1)),
        (("yes", "no", "?"), (1, 0, -1)),
        (("WAHR", "FALSCH", "NULL"), (1, 0, -1)),
        (('"1,0"', '"0,0"', ""), (1, 0, -1)),
        (("1", "-1", "-1"), (1, 0, 0)),
        (("x", "", ""), (1, 0, 0)),
    ],
)
def test_words_of_class_columns(read, words, expected):
    present, absent, unknown = words
    rows = [("a", present, absent), ("b", absent, present), ("c", unknown, present)]
    text = "path,dog,cat\n" + "".join(f"{name}.jpg,{dog},{cat}\n" for name, dog, cat in rows)
    classes, train, val = read(text)
    rows = train | val
    assert classes == ("dog", "cat")
    assert [rows[f"{name}.jpg"].get("dog", 0) for name in "abc"] == list(expected)


def test_column_that_looks_like_a_class_is_never_dropped(read, caplog):
    text = "path,dog,cat,sea\na.jpg,1,True,x\nb.jpg,0,False,x\n"
    assert read(text)[0] == ("dog", "cat", "sea")
    with pytest.raises(DataError, match=r"data\.empty"):
        read(text.replace("False,x", "False,"))
    assert read("path,cell_class\na.jpg,1\nb.jpg,2\n")[0] == ("1", "2")
    text = "path,label,dog,cat\na.jpg,x,1,0\nb.jpg,y,0,1\n"
    with pytest.raises(DataError, match=r"dog, cat .*data\.labels_column=label"):
        read(text)
    assert read(text, rules={"labels_column": "label"})[0] == ("x", "y")
    assert read(text, classes=["dog", "cat"])[0] == ("dog", "cat")
    assert read("path,dog,cat,sea\na.jpg,1,0,1\nb.jpg,0,1,1\n", classes=["cat", "dog"])[0] == (
        "cat",
        "dog",
    )
    with pytest.raises(DataError, match="row 3: the class 'dog'"):
        read("path,dog\na.jpg,1\nb.jpg,0.4\n")


def test_ambiguous_cells_of_class_columns_are_settings(read):
    text = "Path,Sex,Edema,Mass\na.jpg,Male,1.0,-1.0\nb.jpg,Female,0.0,\n"
    with pytest.raises(DataError, match=r"data\.minus_one="):
        read(text)
    _, train, val = read(text, rules={"minus_one": "unknown"})
    assert train | val == {"a.jpg": {"Edema": 1, "Mass": -1}, "b.jpg": {"Mass": -1}}
    _, train, val = read(text, rules={"minus_one": "absent", "empty": "absent"})
    assert train | val == {"a.jpg": {"Edema": 1}, "b.jpg": {"Edema": -1}}

    text = "path,dog,cat\na.jpg,1,\nb.jpg,,1\n"
    with pytest.raises(DataError, match=r"data\.empty="):
        read(text)
    _, train, val = read(text, rules={"empty": "absent"})
    assert train | val == {"a.jpg": {"dog": 1}, "b.jpg": {"cat": 1}}


# Rows


def test_rows_of_one_image_are_joined(read):
    text = "filename,class,xmin\na.jpg,cat,1\na.jpg,dog,5\na.jpg,cat,9\nb.jpg,dog,3\n"
    _, rows = together(read, text)
    assert rows == {"a.jpg": ["cat", "dog"], "b.jpg": ["dog"]}
    _, rows = together(read, "path,labels\na.jpg,cat;dog\na.jpg,dog;cat\nb.jpg,dog\n")
    assert rows == {"a.jpg": ["cat", "dog"], "b.jpg": ["dog"]}
    for text in (
        "path,labels\na.jpg,cat;dog\n./a.jpg,cat\n",
        "path,cat\na.jpg,1\na.jpg,0\n",
        "path,labels,split\na.jpg,cat,train\na.jpg,dog,val\n",
    ):
        with pytest.raises(DataError, match=r"row 3: .*row 2"):
            read(text)
    with pytest.raises(DataError, match="2 labels"):
        read("path,labels\na.jpg,cat\na.jpg,dog\n", exclusive=True)


@pytest.mark.parametrize("name", ["ISIC_01", "ISIC_01.jpg", "in/ISIC_01", "data/in/ISIC_01"])
def test_names_find_their_only_file(read, tmp_path, name):
    write(tmp_path, {"data/in/ISIC_01.jpg": "", "data/in/ISIC_01.txt": "", "data/2.png": ""})
    text = f"image,MEL,NV\n{name},1.0,0.0\n2,0.0,1.0\n"
    _, rows = together(read, text)
    assert rows == {"data/in/ISIC_01.jpg": ["MEL"], "data/2.png": ["NV"]}
    if "data" not in name:
        write(tmp_path, {"other/in/ISIC_01.jpg": ""})
        with pytest.raises(DataError, match=r"data/in/.*other/in/.*data\.images"):
            read(text)
        assert "in/ISIC_01.jpg" in together(read, text, images="data")[1]


@pytest.mark.parametrize("start", ["photos/", "photos\\"])
def test_paths_may_begin_with_the_name_of_the_folder(read, tmp_path, start):
    write(tmp_path, {"photos/1.jpg": "", "photos/in/2.jpg": ""})
    text = f"path,labels\n{start}1.jpg,cat\n{start}in/2.jpg,dog\n"
    assert together(read, text, images="photos")[1] == {"1.jpg": ["cat"], "in/2.jpg": ["dog"]}


def test_absolute_paths_may_be_outside(read, tmp_path):
    text = "path,labels\n/elsewhere/a/1.jpg,cat\nin/2.jpg,dog\n"
    source_root = str(tmp_path).lstrip("/")
    assert set(together(read, text)[1]) == {"elsewhere/a/1.jpg", f"{source_root}/in/2.jpg"}
    assert set(together(read, text.replace("in/2", "/elsewhere/b/2"))[1]) == {"a/1.jpg", "b/2.jpg"}


@pytest.mark.parametrize(
    "start",
    [
        "C:\\Users\\Eva\\",
        "\\\\server\\share\\",
        "/home/eva/",
        "gs://bucket/",
        "https://a.org/",
        "file:///mnt/",
    ],
)
def test_paths_of_another_computer_are_found_by_name(read, tmp_path, start, caplog):
    caplog.set_level(logging.INFO, logger="mldec")
    files = dict.fromkeys(["in/1.jpg", "out/1.jpg", "out/2.jpg"], "")
    text = "path,labels\nSin/1.jpg,cat\nSx/2.jpg,dog\n3.jpg,dog\n".replace("S", start)
    rows = names(together(read, {**files, "data.csv": text})[1])
    assert rows == {"in/1.jpg": ["cat"], "out/2.jpg": ["dog"], "3.jpg": ["dog"]}
    assert "2 paths elsewhere" in caplog.text

    for path in ("x/1.jpg", "out/2.jpg"):
        with pytest.raises(DataError, match=f"row [23].*{path[-5:]}"):
            read(text.replace("in/1.jpg", path))


def test_urls_may_have_a_query_and_quoted_characters(read, tmp_path):
    write(tmp_path, {"a 1.jpg": "", "b.jpg": ""})
    text = "path,labels\nhttps://a.org/x/a%201.jpg?w=1&h=2,cat\nhttps://a.org/b.jpg?raw,dog\n"
    assert together(read, text)[1] == {"a 1.jpg": ["cat"], "b.jpg": ["dog"]}


def test_folder_may_have_a_tilde(read, tmp_path):
    read("path,labels\n1.jpg,a\n2.jpg,b\n", images="~nobody_")
    images = csv_table(root=str(tmp_path), images="~nobody_").load("train", None)
    assert images.storage.folder == tmp_path / "~nobody_"


def test_columns_and_cells_that_look_equal(read):
    text = "path,labels\n1.jpg,Tu\u0308r\n2.jpg,T\u00fcr\n3.jpg,hot\u00a0dog;T\u00fcr\n"
    text += "4.jpg,hot dog\n"
    assert together(read, text)[0] == ("T\u00fcr", "hot dog")
    with pytest.raises(DataError, match="listed twice"):
        read("path,T\u00fcr,Tu\u0308r\n1.jpg,1,0\n2.jpg,0,1\n")
    text = "path,Tu\u0308r,cat\n1.jpg,1,0\n2.jpg,0,1\n"
    assert together(read, text)[0] == ("T\u00fcr", "cat")


def test_lock_files_are_not_tables(read):
    table = "path,labels\n1.jpg,a\n2.jpg,b\n"
    files = {"train/metadata.csv": table, "train/._metadata.csv": b"\0", "~$labels.xlsx": b"\0"}
    assert together(read, files)[0] == ("a", "b")


# Files


@pytest.mark.parametrize(
    "content",
    [
        "sep=;\r\npath;labels\r\na.jpg;cat\r\nb.jpg;dog\r\n",
        "\ufeffsep=;\npath;labels\na.jpg;cat\nb.jpg;dog\n",
        "path,labels\na.jpg,cat\nb.jpg,dog\n".encode("utf-16"),
        "path|labels\na.jpg|cat\nb.jpg|dog\n",
        "path, labels, \na.jpg, cat,\nb.jpg, dog, \n",
        "# exported by a tool\n\npath,labels\na.jpg,cat\nb.jpg,dog\n",
        "#,path,labels\n0,a.jpg,cat\n1,b.jpg,dog\n",
        '"path","the\nlabels"\na.jpg,cat\nb.jpg,dog\n',
        "path,labels\ra.jpg,cat\rb.jpg,dog\r",
    ],
)
def test_text_formats(read, content):
    assert together(read, content) == (("cat", "dog"), {"a.jpg": ["cat"], "b.jpg": ["dog"]})


@pytest.mark.parametrize("suffix", ["xlsx", "parquet", "jsonl"])
def test_typed_files(read, suffix):
    pytest.importorskip("openpyxl")
    frame = pandas.DataFrame({"path": ["a.jpg", "b.jpg"], "dog": [True, False], "cat": [1, None]})
    content = frame.to_json(orient="records", lines=True) if suffix == "jsonl" else frame
    _, train, val = read({f"t.{suffix}": content}, file=f"t.{suffix}")
    assert train | val == {"a.jpg": {"dog": 1, "cat": 1}, "b.jpg": {"cat": -1}}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("path,labels\na.jpg,cat\nb.jpg\n", "row 3"),
        ("path,labels\na.jpg,cat,dog\n", "row 2"),
        ("path,labels\na.jpg,cat\nb.jpg,cat,dog,x\n", "row 3"),
        ('path,labels\na.jpg,"cat\n', "quote"),
        ("path,labels\n,cat\n", "row 2"),
        ("path,labels\n", "rows"),
        ("", "data.csv"),
        ("path,labels,path\na.jpg,cat,b\n", "'path'"),
        ("path,labels\na.jpg,cat\n".encode("utf-16-le"), r"data\.encoding"),
        ("path,dog,cat\na.jpg,1,0\npath,dog,cat\n", "row 3"),
    ],
)
def test_faults_name_the_row(read, text, name):
    with pytest.raises(UserError, match=name):
        read(text)


@pytest.mark.parametrize("row", ["[1]", '{"file_name": ', "NaN"])
def test_faulty_json_line_is_named(read, row):
    with pytest.raises(DataError, match="row 2"):
        read({"m.jsonl": '{"file_name": "a.jpg", "label": "x"}\n' + row}, file="m.jsonl")


LINES = [{"path": "a.jpg", "labels": ["cat"]}, {"path": "b.jpg", "labels": ["dog"]}]


@pytest.mark.parametrize(
    "content",
    [json.dumps(LINES), json.dumps(LINES, indent=1), "\n\n".join(map(json.dumps, LINES)) + "\n\n"],
)
def test_json_may_be_a_list_or_have_blank_lines(read, content):
    expected = (("cat", "dog"), {"a.jpg": ["cat"], "b.jpg": ["dog"]})
    for name in ("t.json", "t.jsonl"):
        assert together(read, {name: content}, file=name) == expected


def manifest(file, **labels):
    """Return a line of a manifest with the given labels and metadata."""
    row = {"source-ref": f"s3://bucket/{file}"}
    for name, (value, metadata) in labels.items():
        row |= {name: value, f"{name}-metadata": {**metadata, "human-annotated": "yes"}}
    return json.dumps(row) + "\n"


def test_manifest_has_names_in_its_metadata(read, tmp_path):
    write(tmp_path, dict.fromkeys(["a.jpg", "b.jpg"], ""))
    names = {"class-map": {"0": "cat", "1": "dog"}}
    boxes = {"image_size": [], "annotations": [{"class_id": 1}, {"class_id": 1}]}
    both = [manifest("a.jpg", my_labels=([0, 1], names)), manifest("b.jpg", my_labels=([], names))]
    expected = (("cat", "dog"), {"a.jpg": ["cat", "dog"], "b.jpg": []})
    assert together(read, {"m.manifest": "".join(both)}, file="m.manifest") == expected

    cat = (1, {"class-name": "cat"})
    lines = [manifest("a.jpg", t_cat=cat, t_dog=(1, {"class-name": "dog"}))]
    lines.append(manifest("b.jpg", boxes=(boxes, names)))
    expected[1]["b.jpg"] = ["dog"]
    assert together(read, {"m.manifest": "".join(lines)}, file="m.manifest") == expected
    with pytest.raises(DataError, match=r"row 1.*7"):
        read({"m.manifest": manifest("a.jpg", my_labels=([7], names))}, file="m.manifest")


# Several tables

CLASSES = "filename, dog, cat\n1.jpg, 1, 0\n2.jpg, 0, 1\n"
METADATA = json.dumps({"file_name": "1.jpg", "labels": ["dog", "cat"]})


def test_tables_of_splits(read):
    files = {
        "train.csv": 'image_path,label\n1.jpg,"cat,dog"\n2.jpg,cat\n',
        "val.csv": "image_path,label\n3.jpg,dog\n",
    }
    assert read(files) == (
        ("cat", "dog"),
        {"1.jpg": {"cat": 1, "dog": 1}, "2.jpg": {"cat": 1}},
        {"3.jpg": {"dog": 1}},
    )


@pytest.mark.parametrize("name", ["_classes.csv", "metadata.jsonl", "metadata.csv", "x.tsv"])
def test_tables_in_folders_of_splits(read, tmp_path, name):
    text = METADATA if name.endswith("jsonl") else CLASSES
    if name in ("metadata.csv", "x.tsv"):
        text = "file_name,labels\n1.jpg,dog;cat\n"
    files = {f"{split}/{name}": text for split in ("train", "valid", "test")}
    write(tmp_path, {"train/1.jpg": "", "valid/1.jpg": ""})
    classes, train, val = read(files)
    assert sorted(classes) == ["cat", "dog"]
    assert next(iter(train)) == "train/1.jpg"
    assert next(iter(val)) == "valid/1.jpg"
    assert next(iter(read(files, val="test")[2])) == "test/1.jpg"


@pytest.mark.parametrize("parent", ["", "images/", "x/"])
@pytest.mark.parametrize("name", ["1.jpg", "1", "C:\\x\\1.jpg"])
def test_split_selects_the_folder_of_equal_names(read, tmp_path, parent, name):
    files = [f"{parent}{split}/{n}.jpg" for split in ("train", "valid") for n in (1, 2)]
    write(tmp_path, dict.fromkeys(files, ""))
    text = "path,labels\n2.jpg,{}\n" + name + ",{}\n"
    expected = [{files[1]: ["cat"], files[0]: ["dog"]}, {files[3]: ["dog"], files[2]: ["cat"]}]
    _, train, val = read(
        {"train.csv": text.format("cat", "dog"), "val.csv": text.format("dog", "cat")}
    )
    assert [names(train), names(val)] == expected

    rows = ["path,labels,split", "2.jpg,cat,train", "2.jpg,dog,val"]
    rows += [f"{name},dog,train", f"{name},cat,val"]
    _, train, val = read("\n".join(rows))
    assert [names(train), names(val)] == expected


def test_single_table_has_any_name(read):
    text = "path,labels\n" + "".join(f"{n}.jpg,cat\n" for n in range(10))
    assert len(read({"my labels.csv": text})[1]) == 9
    with pytest.raises(DataError, match=r"data\.file"):
        read({"my labels.csv": text, "other.tsv": text})


def test_table_without_validation_is_divided(read):
    text = "path,labels\n" + "".join(f"{n}.jpg,cat\n" for n in range(10))
    files = {"train.csv": text, "test.csv": "path\nx.jpg\n", "sample_submission.csv": text}
    assert len(read(files)[1]) == 9
    files["test.csv"] = "path,labels\nx.jpg,dog\n"
    with pytest.raises(DataError, match=r"data\.val=test"):
        read(files)
    # All tables have the same classes, whatever split is evaluated.
    assert read(files, val="test")[0] == ("cat", "dog")


def test_settings_of_older_checkpoints_are_accepted():
    node = {"_target_": "mldec.data.readers.csv_table", "root": "x", "file": "data.csv"}
    node |= {"images": "", "path_column": None, "labels_column": None, "encoding": "utf-8"}
    node |= {"separator": ";", "classes": None, "exclusive": False, "val_fraction": 0.1}
    part = resolve("data", node)
    assert part.shared(Rules) == Rules(separator=";")
    with pytest.raises(ConfigError, match="annotations"):
        resolve("data", {**node, "annotations": None})


@pytest.mark.parametrize(
    ("files", "settings"),
    [
        ({"data.yaml": "names: [a]"}, "data=yolo"),
        ({"obj.names": "cat", "train.txt": ""}, "obj.names .add data=yolo"),
        (
            {f"{name}.jpg": "" for name in ("train/a/1", "train/b/1", "val/a/2", "val/b/2")},
            "folders",
        ),
        ({"cat/1.jpg": "", "dog/2.jpg": ""}, "data=folders"),
        ({"train/_annotations.coco.json": "", "valid/1.jpg": ""}, "data=coco_json"),
        ({"annotations/instances_train.json": ""}, "data=coco_json"),
        ({"images/1.jpg": "", "result.json": '{"images": [], "categories": []}'}, "coco_json"),
        ({"data/1.jpg": "", "labels.json": '{"classes": [], "labels": {}}'}, "data=fiftyone"),
        (
            {"my project.json": '[{"id": 1, "annotations": []}]'},
            r"data=label_studio data\.file=my project\.json",
        ),
        ({"Annotations/1.xml": "", "JPEGImages/1.jpg": ""}, "convert Annotations"),
        ({"cat/1.jpg": "", "dog/2.jpg": "", "x.json": '{"images": 2}'}, "data=folders"),
        ({"set.yaml": "", "labels/train/1.txt": "", "images/train/1.jpg": ""}, "data=yolo"),
        ({"train/labels/1.txt": "", "train/images/1.jpg": ""}, "data=yolo"),
    ],
)
def test_other_layouts_are_named(read, files, settings):
    with pytest.raises(DataError, match=settings):
        read(files)


def sheets(**frames):
    """Return an Excel file of several sheets."""
    pytest.importorskip("openpyxl")
    file = io.BytesIO()
    with pandas.ExcelWriter(file) as writer:
        for name, frame in frames.items():
            frame.to_excel(writer, sheet_name=name, index=False)
    return file.getvalue()


def test_sheets_are_splits(read):
    train = pandas.DataFrame({"path": ["a.jpg", "b.jpg"], "label": ["cat", "dog"]})
    val = pandas.DataFrame({"path": ["c.jpg"], "label": ["cat"]})
    content = sheets(Train=train, empty=pandas.DataFrame(), validation=val)
    _, train_rows, val_rows = read({"t.xlsx": content}, file="t.xlsx")
    assert (names(train_rows), names(val_rows)) == (
        {"a.jpg": ["cat"], "b.jpg": ["dog"]},
        {"c.jpg": ["cat"]},
    )
    with pytest.raises(DataError, match="Readme, labels"):
        read({"t.xlsx": sheets(Readme=val[["path"]], labels=train)}, file="t.xlsx")


def test_group_in_both_splits_is_a_warning(read, caplog):
    text = "path,label,group,split\na.jpg,cat,x,train\nb.jpg,cat,x,val\nc.jpg,cat,y,train\n"
    read(text)
    assert "1 group" in caplog.text


def test_paths_that_differ_in_case_do_not_depend_on_the_order(read, tmp_path):
    write(tmp_path, {"a.jpg": "", "b.jpg": ""})
    rows = ["B.JPG,cat", "a.jpg,dog", "b.jpg,dog"]
    for order in (rows, rows[::-1], rows[1:] + rows[:1]):
        _, rows = together(read, "path,label\n" + "\n".join(order))
        assert rows == {"a.jpg": ["dog"], "b.jpg": ["cat", "dog"]}


# Tables in memory


def frame_of(**columns):
    paths = ["/p/a.jpg", "/p/b.jpg", "/p/in/c.jpg"]
    return pandas.DataFrame({"filename": paths, **columns})


LISTS = pandas.ArrowDtype(pyarrow.list_(pyarrow.string()))
FRAMES = {
    "bool": frame_of(dog=[True, False, True], cat=[1, 0, 1]),
    "object": frame_of(dog=[True, None, False], cat=[1.0, np.nan, 0.0]),
    "boolean": frame_of(dog=pandas.array([True, None, False], "boolean"), cat=[1, 0, 1]),
    "integers": frame_of(dog=pandas.array([1, None, 0], "Int64"), cat=[1, 0, 1]),
    "category": frame_of(label=pandas.Categorical(["dog", "cat", None])),
    "lists": frame_of(labels=[["dog", "cat"], [], ["dog"]], split=["train", "train", "val"]),
    "arrays": frame_of(labels=[np.array(["dog"]), np.array(["dog", "cat"]), frozenset(["cat"])]),
    "negatives": frame_of(labels=["dog", None, "cat"], negatives=["cat", "dog; cat", ""]),
    "index": frame_of(label=["dog", "cat", "dog"]).groupby("filename").agg(list),
    "unnamed index": frame_of(label=["dog", "cat", "dog"]).set_index("filename").rename_axis(None),
    "index and column": frame_of(label=["dog", "cat", "dog"]).set_index("filename", drop=False),
    "levels": pandas.concat({"x": frame_of(dog=[1, 0, 1], cat=[0, 1, 1])}, axis=1),
    "filtered": frame_of(label=["dog", "cat", "dog"]).set_index(pandas.Index([7, 8, 9])),
    "arrow": frame_of(labels=pandas.Series([["dog"], ["cat"], []], dtype=LISTS)),
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
def test_record_is_read_to_the_same_images(tmp_path, frame, monkeypatch):
    monkeypatch.setattr("pathlib.Path.is_dir", lambda path: True)
    parsed = parse({"data": with_index(frame)}, Rules())
    assert {"dog", "cat"} == set(parsed.table.classes)
    assert parsed.table.files.tolist() == [b"a.jpg", b"b.jpg", b"in/c.jpg"]

    (tmp_path / "record.csv").write_text(to_csv(parsed.table, parsed.splits))
    classes = list(parsed.table.classes) if parsed.by_column else None
    arguments = {"root": str(tmp_path), "file": "record.csv", "classes": classes}
    load = partial(csv_table, division=HoldOut(val_fraction=0.4), **arguments)
    for part in ("train", "val"):
        expected = load(in_memory=parsed).load(part, None)
        found = load().load(part, None)
        assert values(found) == values(expected)
        assert (found.classes, found.labels.default) == (expected.classes, expected.labels.default)
