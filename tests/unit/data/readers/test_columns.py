"""Tables whose columns have several possible meanings: they are read correctly, or stop."""

import logging

import numpy as np
import pandas
import pytest

from mldec.data.columns import Rules
from mldec.data.readers import csv_table
from mldec.data.readers.tables import parse
from mldec.data.splits import HoldOut
from mldec.errors import DataError

NAMES = ("dog", "cat", "dog", "cat", "dog", "cat")


def text_of(columns):
    """Return a CSV of six images; the values of a column are separated by blanks, _ is empty."""
    columns = {"path": [f"{number}.jpg" for number in range(6)]} | columns
    cells = [[value, *columns[value]] for value in columns]
    lines = [
        ",".join("" if cell == "_" else cell for cell in row) for row in zip(*cells, strict=True)
    ]
    return "\n".join(lines)


def columns_of(**columns):
    """Return columns of one character per row, or of words."""
    return {name: cells.split() if " " in cells else list(cells) for name, cells in columns.items()}


@pytest.fixture
def read(tmp_path):
    def read(columns, *, rules=None, **arguments):
        text = columns if isinstance(columns, str) else text_of(columns)
        (tmp_path / "data.csv").write_text(text)
        whole = HoldOut(val_fraction=0)
        rules = Rules(**(rules or {}))
        return csv_table(root=str(tmp_path), rules=rules, division=whole, **arguments)

    return read


def splits(source):
    """Return the number of each image in both splits, as in ("012", "34")."""
    parts = []
    for part in (source.train, source.val):
        keys = source.load(part, None).storage.keys.tolist()
        parts.append("".join(key.decode()[0] for key in keys))
    return tuple(parts)


def values(source):
    images = source.load("train", None)
    return images.classes, images.labels.dense().tolist()


# Splits


@pytest.mark.parametrize(
    ("columns", "expected", "log"),
    [
        ({"ml_use": "TRAINING TRAINING TRAINING VALIDATION TEST UNASSIGNED"}, ("012", "3"), 2),
        ({"is_train": "110000", "is_val": "001100", "is_test": "000011"}, ("01", "23"), 1),
        ({"is_val": "001100", "is_test": "000011"}, ("01", "23"), 1),
        ({"is_val": "00110_", "is_test": "00001_"}, ("01", "23"), 2),
        ({"is_valid": "0011__"}, ("01", "23"), 1),
        ({"is_training": "110011"}, ("0145", "23"), 0),
        ({"in_train": "110011"}, ("0145", "23"), 0),
        ({"split": "train train val val _ nan"}, ("01", "23"), 1),
    ],
)
def test_splits_are_read_and_other_images_counted(read, columns, expected, log, caplog):
    caplog.set_level(logging.INFO)
    source = read({"labels": NAMES} | columns_of(**columns))
    assert splits(source) == expected
    assert sum("not used" in line and "images" in line for line in caplog.messages) == log


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"Usage": "Training Training PublicTest PublicTest PrivateTest PrivateTest"}, "Usage"),
        (
            {"split_v1": "train train val val test test", "split_v2": "val val train val _ _"},
            "split_v2",
        ),
        ({"phase": "train train train train eval eval"}, "phase"),
        ({"dataset": "train train train test_public test_private test"}, "dataset"),
        ({"Datensatz": "Training Training Validierung Validierung Test Test"}, "Datensatz"),
        ({"set": "train train val val _ _", "is_valid": "110000"}, "is_valid"),
    ],
)
def test_ambiguous_splits_name_the_column(read, columns, name):
    columns = columns_of(**columns)
    with pytest.raises(DataError, match=rf"{name}.* data\.split_column=.*data\.train=") as error:
        read({"labels": NAMES} | columns)
    assert "\n" not in str(error.value)
    first, *_ = columns
    val = columns[first][-1].replace("_", "") or "val"
    source = read({"labels": NAMES} | columns, rules={"split_column": first}, val=val.lower())
    assert len(splits(source)[0]) >= 2


def test_log_names_the_columns_that_are_not_used(read, caplog):
    caplog.set_level(logging.INFO)
    values(read(columns_of(dog="101010", cat="010101", author="ann bob ann bob eva zoe")))
    assert any(line.endswith("not used: author") for line in caplog.messages)


def test_words_of_other_columns_are_no_splits(read):
    columns = columns_of(vehicle="train bus train bus bus tram")
    assert splits(read({"labels": NAMES} | columns))[0] == "012345"


def test_contradictory_flags_name_the_row(read):
    with pytest.raises(DataError, match="row 4: is_test"):
        read({"labels": NAMES} | columns_of(is_val="001100", is_test="001010"))


def test_flag_among_classes_needs_a_decision(read):
    for name in ("valid", "test", "train"):
        columns = columns_of(dog="101010", cat="010101", **{name: "101111"})
        with pytest.raises(DataError, match=rf"{name}.*data\.split_column={name}.*data\.classes"):
            read(columns)
        assert len(values(read(columns, classes=["dog", "cat", name]))[0]) == 3
        with pytest.raises(DataError, match=name):
            read(columns_of(**{name: "110111"}) | {"labels": NAMES})
    # Most images would be for training, so a rare 1 is a class.
    assert len(values(read(columns_of(dog="101010", train="010001")))[0]) == 2
    source = read(columns, rules={"split_column": "train"}, train="1", val="0")
    assert splits(source) == ("02345", "1")


# Labels next to other columns


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        ({"species": NAMES, "is_night": "100000"}, "species"),
        ({"disease": NAMES, "smoker": "yes no no no no no"}, "disease"),
        ({"breed": NAMES, "verified": "111110"}, "breed"),
        ({"label": NAMES, "label2": "cat _ _ bird _ _"}, "label"),
        ({"label": NAMES, "secondary_labels": "cat _ _ bird _ _"}, "label"),
        ({"label": NAMES, "label.1": "cat _ _ bird _ _"}, "label"),
        ({"label_names": NAMES, "label_ids": "1 0 1 0 1 0"}, "label_names"),
        ({"labels": NAMES, "tags": "in out in out in out"}, "labels"),
        ({"category": "pet pet pet pet pet pet", "subcategory": NAMES}, "subcategory"),
        ({"label": NAMES, "occluded": "100000"}, "label"),
    ],
)
def test_several_columns_of_labels_are_a_setting(read, columns, labels):
    columns = {
        name: columns_of(x=cells)["x"] if isinstance(cells, str) else cells
        for name, cells in columns.items()
    }
    with pytest.raises(DataError, match=rf"{labels}.* data\.labels_column="):
        read(columns)
    assert values(read(columns, rules={"labels_column": labels}))[0] == ("cat", "dog")


@pytest.mark.parametrize("name", ["LabelName", "Tag Name", "class_name", "choice", "species"])
def test_columns_of_exports_are_recognized(read, name):
    columns = {name: NAMES} | columns_of(
        Confidence="111111", annotator="111111", region_count="010101"
    )
    assert values(read(columns))[0] == ("cat", "dog")


@pytest.mark.parametrize(
    "columns",
    [
        columns_of(dog="101010", cat="010101", sea="000001", sex="male male female male _ _"),
        columns_of(
            dog="101010", cat="010101", width="640 640 480 480 640 640", patient_id="112233"
        ),
        columns_of(dog="101010", cat="010101", age="012345", taken="2024-01-01 2024-01-01 _ _ _ _"),
        columns_of(dog="101010", cat="010101", Genre="['cat'] ['dog'] ['cat'] ['cat'] [] []"),
    ],
)
def test_properties_of_photos_are_ignored(read, columns):
    assert values(read(columns))[0][:2] == ("dog", "cat")
    assert len(values(read(columns))[0]) in (2, 3)


# One row per label and value


@pytest.mark.parametrize(
    ("header", "words"),
    [("present", ("yes", "no")), ("value", ("1", "0")), ("Confidence", ("1.0", "0.0"))],
)
@pytest.mark.parametrize("rules", [{}, {"labels_column": "label"}])
def test_value_of_a_label_is_read(read, header, words, rules, caplog):
    caplog.set_level(logging.INFO)
    rows = [("1", "dog", 0), ("1", "cat", 1), ("2", "dog", 1), ("2", "cat", 0)]
    text = "\n".join(f"{path}.jpg,{label},{words[word]}" for path, label, word in rows)
    source = read(f"path,label,{header}\n{text}", rules=rules)
    assert values(source) == (("cat", "dog"), [[0, 1], [1, 0]])
    assert source.load("train", None).labels.default == 0
    assert header in caplog.text
    # A pair without a row is not annotated.
    source = read(f"path,label,{header}\n{text}\n3.jpg,dog,{words[0]}", rules=rules)
    assert values(source)[1][-1] == [-1, 1]
    with pytest.raises(DataError, match="1 labels"):
        read(f"path,label,{header}\n{text}\n1.jpg,dog,{words[1]}", rules=rules)


@pytest.mark.parametrize(
    ("header", "cells"),
    [
        ("confidence", "0.93 0.05 0.8 0.7 0.9 1"),
        ("score", "95% 35% 80% 90% 70% 70%"),
        ("count", "1 0 3 2 1 1"),
    ],
)
def test_low_scores_next_to_labels_need_a_decision(read, header, cells):
    columns = {"label": NAMES} | columns_of(**{header: cells})
    with pytest.raises(DataError, match=rf"{header}.*data\.labels_column=label"):
        read(columns)
    assert values(read(columns, rules={"labels_column": "label"}))[0] == ("cat", "dog")
    high = columns_of(**{header: "0.93 0.75 0.8 0.7 0.9 1"})
    assert values(read({"label": NAMES} | high))[0] == ("cat", "dog")


# Classes


@pytest.mark.parametrize(
    "cells", ["3 2 0 5 4 9", "0.8 0.3 0.1 1 0.5 0", "90% 0% 5% 80% 1% 0%", "+ - + - + -"]
)
@pytest.mark.parametrize(
    "others", [{"dog": "101010"}, {"dog": "101010", "cat": "010101", "eel": "110000"}]
)
def test_column_that_resembles_a_class_is_not_dropped(read, cells, others):
    columns = columns_of(**others, sea=cells)
    with pytest.raises(DataError, match=r"sea.* data\.classes=\[dog"):
        read(columns)
    assert values(read(columns, classes=list(others)))[0] == tuple(others)


@pytest.mark.parametrize(
    "words",
    [
        ("VERO", "FALSO"),
        ("verdadeiro", "falso"),
        ("waar", "onwaar"),
        ("prawda", "fałsz"),
        ("pos", "neg"),
    ],
)
def test_words_of_other_languages(read, words):
    columns = {"dog": [words[0], words[1]] * 3, "cat": [words[1]] * 6}
    assert values(read(columns)) == (("dog", "cat"), [[1, 0], [0, 0]] * 3)


@pytest.mark.parametrize(
    "marks",
    [
        ("✓", "✗"),
        ("✔️", "✖️"),
        ("☑", "☐"),
        ("✅", "❌"),
        ("checked", "unchecked"),
        ("ИСТИНА", "ЛОЖЬ"),
        ("DOĞRU", "YANLIŞ"),
        ("да", "нет"),
        ("1.00", "0.000"),
        ("1.0000e+00", "0.0000e+00"),
        ("+1", "-1"),
        ("100%", "0%"),
        ("T", "F"),
        ("y", "N"),
    ],
)
def test_marks_of_forms_and_spreadsheets(read, marks):
    present, absent = marks
    columns = {"dog": [present, absent] * 3, "cat": [absent] * 6}
    assert values(read(columns)) == (("dog", "cat"), [[1, 0], [0, 0]] * 3)


@pytest.mark.parametrize("mark", ["✅", "✔️", "checked", "dog"])
def test_ticks_and_the_name_of_the_column_are_present(read, mark):
    columns = {"dog": [mark, "_"] * 3, "cat": ["_", "x"] * 3}
    assert values(read(columns)) == (("dog", "cat"), [[1, 0], [0, 1]] * 3)


@pytest.mark.parametrize(
    "cells", ["FFFFFF", "FF__FF", "NNNNNN", "TTTTTT", "FNFNFN", "sand sand sand sand sand sand"]
)
def test_letters_need_the_other_one_of_the_pair(read, cells):
    columns = {"dog": "101010", "cat": "010101", "code": cells}
    assert values(read(columns_of(**columns)))[0] == ("dog", "cat")
    assert values(read({"label": NAMES} | columns_of(code=cells)))[0] == ("cat", "dog")
    with pytest.raises(DataError, match=r"data\.labels_column"):
        read(columns_of(code=cells))
    # The other letter may be in another column, and given classes decide.
    if cells == "FFFFFF":
        assert len(values(read(columns_of(code=cells, dog="TFTFTF")))[0]) == 2
        classes = ["dog", "cat", "code"]
        assert values(read(columns_of(**columns), classes=classes))[1][0] == [1, 0, 0]


def test_crosses_without_a_tick_are_ambiguous(read):
    with pytest.raises(DataError, match="cat"):
        read(columns_of(dog="101010", cat="✗_✗_✗_"))


def test_unknown_word_next_to_present_and_absent_is_an_error(read):
    with pytest.raises(DataError, match="cat"):
        read(columns_of(dog="101010", cat="present absent unsure unsure absent absent"))


def test_empty_columns_are_counted(read, caplog):
    caplog.set_level(logging.INFO)
    assert values(read(columns_of(dog="101010", eel="______")))[0] == ("dog",)
    assert "empty (1): eel" in caplog.text


def test_numbers_of_rows_are_no_classes(read):
    columns = {"Unnamed: 0.1": "012345", "Unnamed: 0": "012345", "level_0": "012345"}
    assert values(read(columns_of(dog="101010", **columns)))[0] == ("dog",)


def test_several_columns_of_files_and_an_id_need_a_setting(read):
    text = "ID,left,right,dog,cat\n1,1.jpg,2.jpg,1,0\n2,3.jpg,4.jpg,0,1\n"
    with pytest.raises(DataError, match=r"data\.path_column"):
        read(text)


def test_names_of_roles_may_be_classes(read):
    columns = columns_of(thumb="100100", index="011010", fake_id="001001")
    assert values(read(columns))[0] == ("thumb", "index", "fake_id")
    assert values(read(columns_of(dog="101010", index="012345")))[0] == ("dog",)

    text = "filename,tree,path\na.jpg,1,0\nb.jpg,0,1\nc.jpg,0,0\n"
    assert values(read(text)) == (("tree", "path"), [[1, 0], [0, 1], [0, 0]])

    columns = columns_of(single="100100", couple="010010", group="001001")
    with pytest.raises(DataError, match=r"group.*data\.classes=\[single,couple\]"):
        read(columns)
    assert len(values(read(columns, classes=["single", "couple", "group"]))[0]) == 3
    images = read(columns, rules={"group_column": "group"}).load("train", None)
    assert len(set(images.groups.tolist())) == 2


VECTORS = {"lists": [[1, 0], [0, 1]], "arrays": [np.array([1, 0]), np.array([0, 1])]}
VECTORS |= {"text": ["1 0 1", "0 1 0"], "json": ["[1, 0]", "[0, 1]"]}


@pytest.mark.parametrize("cells", VECTORS.values(), ids=VECTORS)
def test_vectors_of_classes_are_errors(cells):
    frame = pandas.DataFrame({"path": ["a.jpg", "b.jpg"], "labels": cells})
    with pytest.raises(DataError, match="vectors"):
        parse({"data": frame}, Rules(), has_files=False)


@pytest.mark.parametrize("rows", ["a.jpg,dog,,cat\nb.jpg,cat", "a.jpg,dog,,cat\nb.jpg,cat,,dog"])
def test_first_row_with_too_many_fields_is_named(read, rows):
    with pytest.raises(DataError, match="row 2"):
        read(f"path,labels\n{rows}\n")
