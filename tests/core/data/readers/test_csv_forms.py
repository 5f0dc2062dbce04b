"""The forms of a CSV file: each is recognised, and all of them say the same."""

import json
from pathlib import Path

import pytest

from mldec.data.readers.csv_table import Kind, read_rows, recognise
from mldec.errors import DataError

SEE = "see there"


def recognised(path: Path, text: str):
    (path / "a.csv").write_text(text)
    return recognise(path / "a.csv", SEE)


def rows(path: Path, text: str, separator: str = ";") -> list[tuple]:
    form = recognised(path, text)
    return [
        (row.path, row.split, row.positives, row.negatives)
        for row in read_rows(path / "a.csv", form, separator, SEE)
    ]


def fault(path: Path, text: str) -> str:
    with pytest.raises(DataError) as caught:
        rows(path, text)
    message = str(caught.value)
    assert message.startswith(f"{path / 'a.csv'}, row ")
    assert message.endswith("; see there")
    assert "\n" not in message
    assert len(message) < 500
    return message.removeprefix(f"{path / 'a.csv'}, ").removesuffix("; see there")


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
def test_the_signs_between_columns(tmp_path: Path, delimiter: str) -> None:
    lists = 'Split,path,Labels\ntrain,a.png,"dog;cat"\n"val","x,	;.png",\n'
    columns = "path,cat,Dog , split\na.png,1,0,val\n"
    assert rows(tmp_path, lists.replace(",", delimiter).replace(f"x{delimiter}", "x,")) == [
        ("a.png", "train", ["dog", "cat"], []),
        ("x,	;.png", "val", [], []),
    ]
    assert rows(tmp_path, columns.replace(",", delimiter)) == [("a.png", "val", ["cat"], [])]


def test_a_sign_in_a_class_name_decides_nothing(tmp_path: Path) -> None:
    assert recognised(tmp_path, 'path,"a;b"\nx,1\n').classes == ("a;b",)
    assert recognised(tmp_path, '"path";"a,b"\nx;1\n').classes == ("a,b",)
    assert recognised(tmp_path, '\n\n"path"\ta,b;c\r\nx\t1\r\n').classes == ("a,b;c",)
    assert recognised(tmp_path, "\ufeffpath;a\nx;1\n").classes == ("a",)


def test_a_column_per_class(tmp_path: Path) -> None:
    text = "path,dog,Cat,eel\na,1,0,0\nb, 1.0 ,0.0,1\nc,0,0,0\n"
    form = recognised(tmp_path, text)
    assert (form.kind, form.classes, form.partial) == (Kind.ONE_HOT, ("dog", "Cat", "eel"), False)
    assert str(form) == "a column per class, columns between commas"
    assert rows(tmp_path, text) == [
        ("a", "", ["dog"], []),
        ("b", "", ["dog", "eel"], []),
        ("c", "", [], []),
    ]

    text = text.replace("b, 1.0 ,", "b, ,")
    assert rows(tmp_path, text) == [
        ("a", "", ["dog"], ["Cat", "eel"]),
        ("b", "", ["eel"], ["Cat"]),
        ("c", "", [], ["dog", "Cat", "eel"]),
    ]
    form = recognised(tmp_path, text)
    assert form.partial
    assert str(form).endswith("between commas, an empty cell is not annotated")


def test_an_empty_split_leaves_every_class_annotated(tmp_path: Path) -> None:
    assert not recognised(tmp_path, "path,split,dog\na,,1\nb,val,0\n").partial


@pytest.mark.parametrize("empty", ["", "[]", " [ ] "])
def test_json_lists(tmp_path: Path, empty: str) -> None:
    lists = [["dog", "x, y; z"], ["c\u00e4t"]]
    text = "path\tlabels\tnegatives\n"
    text += f"a\t{empty}\t\n"
    text += f"b\t{json.dumps(lists[0])}\t{empty}\n"
    text += f"c\t{empty}\t{json.dumps(lists[1])}\n"
    expected = [("a", "", [], []), ("b", "", lists[0], []), ("c", "", [], lists[1])]
    form = recognised(tmp_path, text)
    assert (form.kind, form.classes, form.partial) == (Kind.JSON, None, True)
    assert str(form) == (
        "a JSON list of labels per image, columns between tabs, a class in neither list is not "
        "annotated"
    )
    assert rows(tmp_path, text) == expected
    assert rows(tmp_path, 'path,labels\na,"[""dog"", ""cat""]"\n') == [
        ("a", "", ["dog", "cat"], [])
    ]


def test_brackets_that_are_no_list(tmp_path: Path) -> None:
    text = "path,labels\na,[unknown];[dog]\nb,[x\nc,[unknown]\n"
    assert recognised(tmp_path, text).kind is Kind.NAMES
    assert [row[2] for row in rows(tmp_path, text)] == [
        ["[unknown]", "[dog]"],
        ["[x"],
        ["[unknown]"],
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "row 1: the columns '' are not path, labels"),
        ("path\na\n", "row 1: the columns 'path' are not path, labels"),
        ("path,split\na,val\n", "row 1: the columns 'path, split' are not"),
        ("image_id;dog\na;1\n", "row 1: the columns 'image_id;dog' are not"),
        ("path,labels,dog\na,dog,1\n", "row 1: the columns 'path, labels, dog' are not"),
        ("path,negatives,dog\na,dog,1\n", "and a column per class: rename them or leave some out"),
        ("Path,path,dog\na,a,1\n", "row 1: the columns 'path, path, dog' are not"),
        (f"file,{'x,' * 900}y\n", "... are not path, labels"),
        ("path,dog,cat,dog\na,1,0,1\n", "row 1: the class 'dog' is there twice: rename one"),
        ("path,dog,Dog\na,1,0\n", "row 1: the class 'Dog' and 'dog' differ in case only: rename"),
        (",path,dog\n0,a,1\n", "row 1: the class name '' is empty: rename it"),
        (
            "path,dog,cat\na,1,0\nb,1,2\n",
            "row 3: the class 'cat' has '2', which is not 0, 1 or empty (not annotated): "
            "correct it, leave out the column, or call it labels if it lists them",
        ),
        ("path,dog\na,-1\n", "row 2: the class 'dog' has '-1', which is not 0, 1"),
        ("path,dog\na,yes\n", "row 2: the class 'dog' has 'yes', which is not 0, 1"),
        ("path;dog;cat\na;1\n", "row 2 has 2 fields, the header 3: add the others"),
        ("path\tlabels\na\tb\tc\n", "row 2 has 3 fields, the header 2: quote fields with tabs"),
        ('path;labels\na;"dog\n', "row 2 is not CSV"),
        ("path\tlabels\na\t[1, 2]\n", "row 2: '[1, 2]' is no JSON list of strings"),
        ("path\tlabels\na\t['dog']\n", "is no JSON list of strings such as"),
        ('path\tlabels\na\t["dog", 1]\n', "is no JSON list of strings"),
        ('path\tlabels\na\t["dog",]\n', "is no JSON list of strings"),
        ('path\tlabels\na\t["dog"]\nb\tcat;dog\n', "row 3: 'cat;dog' is no JSON list of strings"),
        ('path\tlabels\na\t["dog"]\nb\t{"dog": 1}\n', "row 3: '{\"dog\": 1}' is no JSON list"),
        ('path\tlabels\na\t["dog"]\nb\t' + "[" * 9999 + "\n", "is no JSON list of strings"),
        ('path\tlabels\na\t["dog", " "]\n', "row 2: the class name '' is empty"),
        ('path\tlabels\na\t["dog", "dog "]\n', "has a label twice: leave one out"),
        ('path\tlabels\na\tdog\nb\t["cat"]\n', "row 3: '[\"cat\"]' is a JSON list, but the labels"),
        ("path\tlabels\na\tdog\nb\t[]\n", "before are not: write all of them in one form"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in fault(tmp_path, text)


def test_faults_of_the_whole_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv cannot be read .*; see there$"):
        recognise(tmp_path / "a.csv", SEE)
    (tmp_path / "a.csv").write_text("path,labels\na,dog\n", encoding="utf-16")
    with pytest.raises(DataError, match="is not UTF-8 text"):
        recognise(tmp_path / "a.csv", SEE)
