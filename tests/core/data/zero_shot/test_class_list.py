"""Class lists: which files are read or refused, and which classes of a data set they name."""

from pathlib import Path

import pytest

from mldec.data.word_vectors import ClassList, read_class_list
from mldec.errors import DataError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "classes.txt"


def test_names_of_a_class_stand_on_its_line(file: Path) -> None:
    file.write_text("cat; kitten ;house cat\n\n  dog\ntench, Tinca tinca;tench\n")
    class_list = read_class_list(file)
    assert class_list.classes == (
        ("cat", "kitten", "house cat"),
        ("dog",),
        ("tench, Tinca tinca", "tench"),
    )
    assert len(class_list) == 3
    assert class_list.names == (
        "cat",
        "kitten",
        "house cat",
        "dog",
        "tench, Tinca tinca",
        "tench",
    )
    assert class_list.class_of_name == [0, 0, 0, 1, 2, 2]
    assert class_list.columns(["dog", "bird", "tench, Tinca tinca", "cat"]) == [3, 0, 2]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("cat;;kitten\n", "'cat;;kitten' has an empty name"),
        ("cat;\n", "'cat;' has an empty name"),
        ("cat;kitten;Kitten\n", "the name 'Kitten' is there twice, for 'cat' and for 'cat'"),
        ("cat\ndog\ncat\n", "the name 'cat' is there twice"),
        ("cat;pet\ndog;pet\n", "the name 'pet' is there twice, for 'cat' and for 'dog'"),
        ("cat;\x1b[2J\n", "has the control character"),
    ],
)
def test_faults_of_a_file_are_named(file: Path, text: str, part: str) -> None:
    file.write_text(text)
    with pytest.raises(DataError) as caught:
        read_class_list(file)
    message = str(caught.value)
    assert part in message
    assert str(file) in message
    assert "see docs/zero_shot.md" in message


def test_a_file_that_is_absent_is_named(file: Path) -> None:
    with pytest.raises(DataError, match=r"classes\.txt"):
        read_class_list(file)


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (("Cat",), "the class 'Cat' is not in the list of 30 classes; did you mean 'cat'?"),
        (("aeroplane",), "the class 'aeroplane' is not .* did you mean 'airplane'?"),
        (("cat, kitten",), "'cat, kitten' has a comma and is no class of the data; write semicol"),
        (("cat", "kitten, pet"), "'kitten, pet' has a comma"),
    ],
)
def test_a_class_that_the_data_does_not_have(names: tuple[str, ...], part: str) -> None:
    known = ["cat", "airplane", *(f"thing {number}" for number in range(28))]
    with pytest.raises(DataError, match=part):
        ClassList(Path("x.txt"), (names,)).columns(known)
