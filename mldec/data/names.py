"""Class names: a list, a text file, what the labels say, or what others call them."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from mldec.errors import DataError, suggest


def read_lines(file: Path, see: str) -> list[str]:
    """Return the lines of a text file that are not blank, without the blanks around them.

    Raises:
        DataError: if it cannot be read, is not UTF-8, or has no line.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); {see}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text (byte {error.start}): save it as UTF-8; {see}") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{file} is empty; {see}")
    return lines


def given_names(classes: str | list[str] | None, root: Path, see: str) -> tuple[str, ...] | None:
    """Return the class names of a list, or of a text file with one a line; None if there is neither.

    Args:
        classes: the names, or the file's path, from `root` on if it is not absolute.
        root: folder of the data.
        see: where help is.

    Raises:
        DataError: for a file that cannot be read, no name, a name given twice.
    """
    if classes is None:
        return None
    where = str(root / Path(classes).expanduser()) if isinstance(classes, str) else "data.classes"
    names = read_lines(Path(where), see) if isinstance(classes, str) else [name.strip() for name in classes]
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
    return tuple(f"{name} ({index})" if count[name] > 1 else name for index, name in enumerate(names))


def check_names(names: Iterable[str], where: str | Path, see: str) -> tuple[str, ...]:
    """Return the names as they came, unless two are equal or differ in their case only, which is a mistake.

    Raises:
        DataError: with the two names.
    """
    seen: dict[str, str] = {}
    for name in names:
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
    return DataError(f"{where}: the class {name!r} is not in the list of {len(known)} classes{hint}; {see}")
