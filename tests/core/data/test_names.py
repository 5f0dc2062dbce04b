"""The rule for class names, the same for readers, for `Classes` and for checkpoints."""

from pathlib import Path

import pytest

from mldec.data.table import (
    MAX_NAME,
    as_name,
    check_names,
    given_names,
    name_fault,
    names_fault,
    read_lines,
    split_names,
    told_apart,
)
from mldec.data.types import Classes
from mldec.errors import DataError

GOOD = [
    "dog",
    " dog ",
    "caf\u00e9",
    "\u72ac",
    "\u200f\u05d0",
    "\U0001f415",
    "0",
    "Ram C/V, 'Cargo' \"Van\"",
    "x" * MAX_NAME,
]
C0_AND_C1 = ["\t", "\n", "\r", "\0", "\x0b", "\x1b", "\x1c", "\x7f", "\x85", "\x9b"]
CONTROLS = [*C0_AND_C1, "\u2028", "\u2029", "\ud800", "\udce9"]
ODD = [None, True, [], {}, b"dog", ("dog",), "", "  ", "x" * (MAX_NAME + 1)]


def test_names_that_are_taken() -> None:
    assert [name_fault(name) for name in GOOD] == [None] * len(GOOD)
    assert names_fault(GOOD) is None
    assert Classes(tuple(GOOD)).names == tuple(GOOD)
    assert check_names(GOOD[:2], "", "") == ("dog", " dog ")


@pytest.mark.parametrize("name", [f"red{control}car" for control in CONTROLS] + ODD, ids=ascii)
def test_names_that_are_refused_everywhere(name: object) -> None:
    assert name_fault(name)
    with pytest.raises(DataError, match=r"of class 1 (has|is)"):
        Classes(("a", name))  # type: ignore[arg-type]
    with pytest.raises(
        DataError, match=r"^a\.csv, row 3: the class name .* (has|is) .*: rename it; see there$"
    ):
        as_name(name, "a.csv, row 3", "see there")
    if isinstance(name, str) and name:
        with pytest.raises(DataError, match=r"^a\.txt: the class name "):
            check_names([name], "a.txt", "")


def test_two_classes_of_one_name() -> None:
    assert names_fault(["a", "b", "a"]) == "the classes 0 and 2 are both called 'a'"
    assert (
        names_fault(["a", "A"]) is None
    )  # two MIDs of Open Images; of a user's own names it is a mistake
    with pytest.raises(DataError, match="are both called 'a'"):
        Classes(("a", "a"))


def test_more_names_than_a_checkpoint_holds() -> None:
    assert names_fault(range(300_001)) == "300,001 classes are more than 300,000"  # type: ignore[arg-type]


def test_numbers_become_text() -> None:
    assert [as_name(value, "", "") for value in (1, -2, 0.5, 10**400, float("nan"))][:3] == [
        "1",
        "-2",
        "0.5",
    ]


def test_lines_end_where_an_editor_ends_them(tmp_path: Path) -> None:
    file = tmp_path / "classes.txt"
    file.write_bytes("one\r\n\n  two \rthree\u2028still three\nfour\x0bstill four\n".encode())
    assert read_lines(file, "") == ["one", "two", "three\u2028still three", "four\x0bstill four"]
    with pytest.raises(
        DataError, match=r"classes\.txt: the class name 'three.*still three' has .* U\+2028"
    ):
        given_names("classes.txt", tmp_path, "")
    with pytest.raises(
        DataError, match=r"data\.classes: the class name 'a.tb' has the control character U\+0009"
    ):
        given_names(["a\tb"], tmp_path, "")


def test_names_in_a_text() -> None:
    assert split_names(" a ;; b c;", ";", "x, row 1", "see there") == ["a", "b c"]
    assert split_names("", ";", "", "") == []
    with pytest.raises(DataError, match=r"^x, row 1: the class name 'a.x1b' has .*; see there$"):
        split_names("b;a\x1b", ";", "x, row 1", "see there")


def test_shared_names_get_their_mark() -> None:
    assert told_apart(["a", "b", "a"]) == ("a (0)", "b", "a (2)")
    assert told_apart(["a", "b", "a"], ["x", "y", "z"]) == ("a (x)", "b", "a (z)")
