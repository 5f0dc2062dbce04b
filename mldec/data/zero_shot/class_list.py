"""Class lists: classes to be scored by word vectors, each by one name or by several."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mldec.data.names import as_name, unknown_class
from mldec.errors import DataError
from mldec.files.text import read_lines

_SEPARATOR = ";"
_SEE = "see docs/zero_shot.md, section Any class list"


@dataclass(frozen=True)
class ClassList:
    """Classes and their names, in the order of a file.

    Attributes:
        path: of the file, for messages.
        classes: the names of each class. The first one is that of the data set, the others are
            synonyms.
    """

    path: Path
    classes: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, class by class."""
        return tuple(name for names in self.classes for name in names)

    @property
    def class_of_name(self) -> list[int]:
        """For each of `names` the index of its class, ascending."""
        return [index for index, names in enumerate(self.classes) for _ in names]

    def columns(self, known: Sequence[str]) -> list[int]:
        """Return the index of each class among the classes of a data set.

        Args:
            known: names of the classes of the data set.

        Raises:
            DataError: for a class that the data set does not have, or if a name with a comma is
                none of its names.
        """
        column_of = {name: column for column, name in enumerate(known)}

        # A comma may belong to a name of the data, such as "tench, Tinca tinca". Anywhere else it
        # is more likely to be meant as a separator.
        for name in self.names:
            if "," in name and name not in column_of:
                raise DataError(
                    f"{self.path}: '{name}' has a comma and is no class of the data; write "
                    f"semicolons between the names of a class, {_SEE}"
                )

        for own_name, *_ in self.classes:
            if own_name not in column_of:
                raise unknown_class(own_name, known, str(self.path), _SEE)
        return [column_of[own_name] for own_name, *_ in self.classes]


def read_class_list(path: Path) -> ClassList:
    """Read a class list: a class per line, its name in the data first, then synonyms.

    Between the names of a class there are semicolons. Upper and lower case make no different names.

    Args:
        path: UTF-8 text; blank lines are left out.

    Raises:
        DataError: if the file cannot be read, names no class, has an empty name or one that is not
            allowed, or has a name twice, in a class or in two.
    """
    classes: list[tuple[str, ...]] = []
    class_of: dict[str, str] = {}  # folded name -> the class in whose line it was
    for line in read_lines(path, _SEE):
        names = tuple(name.strip() for name in line.split(_SEPARATOR))
        if "" in names:
            raise DataError(f"{path}: '{line}' has an empty name; leave it out, {_SEE}")

        for name in names:
            as_name(name, path, _SEE)
            if other := class_of.get(name.casefold()):
                raise DataError(
                    f"{path}: the name '{name}' is there twice, for '{other}' and for "
                    f"'{names[0]}'; leave one out, {_SEE}"
                )
            class_of[name.casefold()] = names[0]
        classes.append(names)

    return ClassList(path, tuple(classes))
