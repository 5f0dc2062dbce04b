"""Class names: the rule for them, and where they come from: a list, a text file, what the labels say, others' words."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from mldec.errors import DataError, suggest
from mldec.files.text import read_lines

MAX_NAME = 1_000  # characters
MAX_NAMES = 300_000  # a checkpoint holds a million values, and may hold each name twice

# What would steer the terminal that prints a name, break a line of it, or be no UTF-8: the control characters (C0, DEL,
# C1), the line and the paragraph separator, halves of surrogate pairs.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def name_fault(name: object) -> str | None:
    """Return what keeps a value from being a class name, such as "is empty"; None if nothing does."""
    if not isinstance(name, str):
        return (
            "is null, not text" if name is None else f"is of type {type(name).__name__}, not text"
        )
    if not name.strip():
        return "is empty"
    if control := _CONTROL.search(name):
        return f"has the control character U+{ord(control[0]):04X}"
    if len(name) > MAX_NAME:
        return f"has {len(name):,} characters, more than {MAX_NAME:,}"
    return None


def names_fault(names: Sequence[object]) -> str | None:
    """Return the first thing that keeps values from being the names of the classes of a dataset; None if nothing does.

    Every `Classes` is held to this, and every checkpoint that is read, so that what can be trained can be read again.
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
        value: as the file has it.
        where: the file and the row, for the message.
        see: where help is.

    Raises:
        DataError: if no class may be called so.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if fault := name_fault(value):
        raise DataError(f"{where}: the class name {shown(value)} {fault}: rename it; {see}")
    return str(value)


def shown(value: object) -> str:
    """Return a value in quotes for a message, without its end if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def given_names(classes: str | list[str] | None, root: Path, see: str) -> tuple[str, ...] | None:
    """Return the class names of a list, or of a text file with one a line; None if there is neither.

    Args:
        classes: the names, or the file's path, from `root` on if it is not absolute.
        root: folder of the data.
        see: where help is.

    Raises:
        DataError: for a file that cannot be read, no name, a name given twice or that no class may have.
    """
    if classes is None:
        return None
    where = str(root / Path(classes).expanduser()) if isinstance(classes, str) else "data.classes"
    names = (
        read_lines(Path(where), see)
        if isinstance(classes, str)
        else [name.strip() for name in classes]
    )
    if not names or "" in names:
        raise DataError(f"{where}: it has {'an empty' if names else 'no'} name; {see}")
    return check_names(names, where, see)


def without_quotes(name: str) -> str:
    """Return a display name without the stray quotes and blanks that those of Open Images come with."""
    return re.sub(r"\s+", " ", name.strip(" \t\r\n'\""))


def told_apart(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, those that several classes share as "name (index)".

    Data and released checkpoints of the same classes in the same order so have the same names.
    """
    count = Counter(names)
    return tuple(
        f"{name} ({index})" if count[name] > 1 else name for index, name in enumerate(names)
    )


def check_names(names: Iterable[str], where: str | Path, see: str) -> tuple[str, ...]:
    """Return the names as they came, unless two are equal or differ in their case only, which is a mistake.

    Raises:
        DataError: with the two names, or with one that no class may have.
    """
    seen: dict[str, str] = {}
    for name in names:
        as_name(name, where, see)
        other = seen.get(name.casefold())
        if other is not None:
            what = "is there twice" if other == name else f"and {other!r} differ in case only"
            raise DataError(f"{where}: the class {name!r} {what}; {see}")
        seen[name.casefold()] = name
    return tuple(seen.values())


def unknown_class(name: str, names: Iterable[str], where: str, see: str) -> DataError:
    """Return the fault that a label is not among the classes, with the nearest of them."""
    known = list(names)
    near = next((other for other in known if other.casefold() == name.casefold()), None)
    hint = f"; did you mean {near!r}?" if near else suggest(name, known) if len(known) <= 20 else ""
    return DataError(
        f"{where}: the class {name!r} is not in the list of {len(known)} classes{hint}; {see}"
    )
