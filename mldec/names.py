"""Class names: validation, disambiguation, and the classes of COCO and VOC."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar
from unicodedata import normalize

from mldec.errors import DataError
from mldec.files.text import expand_user, read_lines

_Name = TypeVar("_Name")

# Control characters (C0, DEL, C1), line and paragraph separators, and surrogates. They could
# control a terminal, break a line or be invalid in UTF-8.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

# Spaces of any width, and invisible characters except for the joiners of emoji and words.
_BLANKS = re.compile(r"[ \xa0\u1680\u2000-\u200a\u202f\u205f\u3000]+")
_INVISIBLE = re.compile(r"[\xad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")


def name_fault(name: object) -> str | None:
    """Return why a class name is invalid, such as "is empty", or None."""
    if not isinstance(name, str):
        return "is not text"
    if not name.strip():
        return "is empty"

    control = _CONTROL.search(name)
    if control:
        return f"has the control character U+{ord(control[0]):04X}"
    return None


def names_fault(names: Sequence[object]) -> str | None:
    """Return why the class names of a data set are invalid, or None."""
    numbers: dict[object, int] = {}
    for number, name in enumerate(names):
        fault = name_fault(name)
        if fault is not None:
            return f"the name {abbreviate(name)} of class {number} {fault}"
        if name in numbers:
            return f"the classes {numbers[name]} and {number} are both called {abbreviate(name)}"
        numbers[name] = number
    return None


def numbered_names(count: int) -> tuple[str, ...]:
    """Return "class 0", "class 1", ... for classes without names."""
    return tuple(f"class {index}" for index in range(count))


def as_name(value: object, where: str | Path) -> str:
    """Validate a class name from a file, and remove differences that no reader can see.

    Unicode is normalized (NFC), blanks are joined and stripped, and invisible characters removed.
    Numbers are converted to text. `where` is the file and the row, for messages. Raises DataError
    if the name is not valid.
    """
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        value = _INVISIBLE.sub("", normalize("NFC", str(value)))
        value = _BLANKS.sub(" ", value).strip(" ")
    fault = name_fault(value)
    if fault is not None:
        raise DataError(f"{where}: the class name {abbreviate(value)} {fault}; rename it")
    return str(value)


def check_names(names: Iterable[object], where: str | Path) -> tuple[str, ...]:
    """Validate class names with `as_name`, and return them.

    Raises DataError if a name is not valid, or two names are equal or differ only in case.
    """
    names_by_key: dict[str, str] = {}
    for value in names:
        name = as_name(value, where)
        other = names_by_key.get(name.casefold())
        if other is not None:
            raise DataError(f"{where}: the class {name!r} is listed twice ({other!r}); rename one")
        names_by_key[name.casefold()] = name
    return tuple(names_by_key.values())


def split_names(text: str, separator: str, where: str | Path) -> list[str]:
    """Split a text into stripped class names, without blank names; see `as_name`."""
    names = map(str.strip, text.split(separator))
    return [as_name(name, where) for name in names if name]


def given_names(classes: str | list[str] | None, root: Path) -> tuple[str, ...] | None:
    """Return the class names of the setting `data.classes`, or None if it is not set.

    `classes` are names, or the path, relative to `root`, of a text file with one name per line.
    """
    if classes is None:
        return None
    if isinstance(classes, str):
        path = root / expand_user(classes)
        return check_names(read_lines(path), path)
    return check_names(map(str.strip, classes), "data.classes")


def indices_of(names: Iterable[_Name]) -> dict[_Name, int]:
    """Map names or other keys to their indices."""
    return {name: index for index, name in enumerate(names)}


def abbreviate(value: object) -> str:
    """Return the repr of a value for a message, as one line of at most 60 characters."""
    text = re.sub(r"\s*\n\s*", " ", repr(value))
    if len(text) > 60:
        text = f"{text[:57]}..."
    return text


def format_list(names: Sequence[str], most: int = 10) -> str:
    """Return up to `most` names and the number of the remaining names, for a message."""
    text = ", ".join(names[:most])
    num_others = len(names) - most
    if num_others > 0:
        text += f" and {num_others:,} more"
    return text


def without_quotes(name: str) -> str:
    """Return a display name of Open Images without stray quotes and whitespace."""
    return re.sub(r"\s+", " ", name.strip(" \t\r\n'\""))


def disambiguate(names: Sequence[str], marks: Iterable[object] | None = None) -> tuple[str, ...]:
    """Append a mark in brackets to repeated names. The default marks are the class indices."""
    if marks is None:
        marks = range(len(names))

    count = Counter(names)
    unique_names = []
    for name, mark in zip(names, marks, strict=True):
        if count[name] > 1:
            name = f"{name} ({mark})"
        unique_names.append(name)
    return tuple(unique_names)


def unknown_class(name: str, names: Iterable[str], where: str) -> DataError:
    """Return the error for an unknown class, with the nearest class name as a hint."""
    known = list(names)
    near = [other for other in known if other.casefold() == name.casefold()]
    near += get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return DataError(
        f"{where}: the class {name!r} is not in the list of {len(known)} classes{hint}"
    )


_COCO = (
    "person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,"
    "stop sign,parking meter,bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,"
    "backpack,umbrella,handbag,tie,suitcase,frisbee,skis,snowboard,sports ball,kite,"
    "baseball bat,baseball glove,skateboard,surfboard,tennis racket,bottle,wine glass,cup,fork,"
    "knife,spoon,bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,pizza,donut,cake,"
    "chair,couch,potted plant,bed,dining table,toilet,tv,laptop,mouse,remote,keyboard,"
    "cell phone,microwave,oven,toaster,sink,refrigerator,book,clock,vase,scissors,teddy bear,"
    "hair drier,toothbrush"
)
_VOC = (
    "aeroplane,bicycle,bird,boat,bottle,bus,car,cat,chair,cow,diningtable,dog,horse,motorbike,"
    "person,pottedplant,sheep,sofa,train,tvmonitor"
)

COCO_NAMES = tuple(_COCO.split(","))  # sorted by category id; the ids have gaps
VOC = tuple(_VOC.split(","))  # in the order of the VOC devkit
