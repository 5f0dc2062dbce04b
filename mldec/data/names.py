"""Class names: which are allowed, and how they are read from settings, text files and labels."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from mldec.errors import DataError, suggest
from mldec.files.text import read_lines

MAX_NAME = 1_000  # characters
MAX_NAMES = 300_000  # a checkpoint holds a million values, and may hold each name twice

# These characters would control the terminal that prints a name, break its line or not be valid
# UTF-8: control characters (C0, DEL, C1), line and paragraph separators, surrogates.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def name_fault(name: object) -> str | None:
    """Return why a value cannot be a class name, such as "is empty"; None if it can be one."""
    if name is None:
        return "is null, not text"
    if not isinstance(name, str):
        return f"is of type {type(name).__name__}, not text"

    if not name.strip():
        return "is empty"
    if control := _CONTROL.search(name):
        return f"has the control character U+{ord(control[0]):04X}"
    if len(name) > MAX_NAME:
        return f"has {len(name):,} characters, more than {MAX_NAME:,}"
    return None


def names_fault(names: Sequence[object]) -> str | None:
    """Return why values cannot be the class names of a dataset; None if they can.

    `Classes` and the reader of checkpoints share this check, so that every model that can be
    trained can also be read again.
    """
    if len(names) > MAX_NAMES:
        return f"{len(names):,} classes are more than {MAX_NAMES:,}"

    numbers: dict[object, int] = {}
    for number, name in enumerate(names):
        if fault := name_fault(name):
            return f"the name {shown(name)} of class {number} {fault}"
        if name in numbers:
            return f"the classes {numbers[name]} and {number} are both called {shown(name)}"
        numbers[name] = number

    return None


def as_name(value: object, where: str | Path, see: str) -> str:
    """Return a class name from a file; a number becomes text.

    Args:
        value: the value in the file.
        where: the file and the row, for the message.
        see: pointer to the documentation, for the message.

    Raises:
        DataError: if the name is not allowed, see `name_fault`.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)

    if fault := name_fault(value):
        raise DataError(f"{where}: the class name {shown(value)} {fault}: rename it; {see}")
    return str(value)


def split_names(text: str, separator: str, where: str | Path, see: str) -> list[str]:
    """Return the class names in a text, stripped; blank ones are left out.

    Args:
        text: the names with `separator` between them.
        separator: any text.
        where: see `as_name`.
        see: see `as_name`.

    Raises:
        DataError: see `as_name`.
    """
    names = map(str.strip, text.split(separator))
    return [as_name(name, where, see) for name in names if name]


def shown(value: object) -> str:
    """Return the repr of a value for a message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def given_names(classes: str | list[str] | None, root: Path, see: str) -> tuple[str, ...] | None:
    """Return the class names of the setting `data.classes`; None if it is not set.

    Args:
        classes: the names, or the path of a text file with one name per line, relative to `root`.
        root: folder of the data.
        see: pointer to the documentation, for messages.

    Raises:
        DataError: if the file cannot be read, or there is no name, a name twice or one that is not
            allowed.
    """
    if classes is None:
        return None

    if isinstance(classes, str):
        path = root / Path(classes).expanduser()
        where = str(path)
        names = read_lines(path, see)
    else:
        where = "data.classes"
        names = [name.strip() for name in classes]

    if not names or "" in names:
        raise DataError(f"{where}: it has {'an empty' if names else 'no'} name; {see}")
    return check_names(names, where, see)


def without_quotes(name: str) -> str:
    """Return a display name of Open Images without its stray quotes and blanks."""
    return re.sub(r"\s+", " ", name.strip(" \t\r\n'\""))


def told_apart(names: Sequence[str], marks: Iterable[object] | None = None) -> tuple[str, ...]:
    """Return the names, with a mark in brackets appended to those that several classes share.

    Data and released checkpoints thus get the same names for the same classes in the same order.

    Args:
        names: of K classes.
        marks: K different ones; None for the indices.
    """
    count = Counter(names)
    marked = zip(names, range(len(names)) if marks is None else marks, strict=True)
    return tuple(f"{name} ({mark})" if count[name] > 1 else name for name, mark in marked)


def check_names(names: Iterable[str], where: str | Path, see: str) -> tuple[str, ...]:
    """Return the names unchanged, after checking that no two are equal or differ in case only.

    Raises:
        DataError: for such a pair, or for a name that is not allowed.
    """
    seen: dict[str, str] = {}
    for name in names:
        as_name(name, where, see)

        other = seen.get(name.casefold())
        if other is not None:
            problem = "is there twice" if other == name else f"and {other!r} differ in case only"
            raise DataError(f"{where}: the class {name!r} {problem}: rename one; {see}")
        seen[name.casefold()] = name
    return tuple(seen.values())


def unknown_class(name: str, names: Iterable[str], where: str, see: str) -> DataError:
    """Return the error for a label that is not among the classes, with the nearest class name."""
    known = list(names)
    same_letters = [other for other in known if other.casefold() == name.casefold()]
    near = same_letters or get_close_matches(name, known, n=1)

    # A suggestion may list all known names, which is useful for a few classes only.
    hint = ""
    if near:
        hint = f"; did you mean {near[0]!r}?"
    elif len(known) <= 20:
        hint = suggest(name, known)

    return DataError(
        f"{where}: the class {name!r} is not in the list of {len(known)} classes{hint}; {see}"
    )
