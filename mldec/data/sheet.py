"""Columns of a table of labels, and the words in their cells."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np

from mldec.data.images import NOT_READ, READ
from mldec.errors import DataError
from mldec.files.tables import Cell, as_cell, simple_name
from mldec.names import format_list

if TYPE_CHECKING:
    from pandas import DataFrame

# Words for missing values, and the words of class columns, in lower case; see `Column.words`.
MISSING = {"", "nan", "na", "n/a", "#n/a", "<na>", "null", "none"}
UNKNOWN = {"?", "unknown", "uncertain", "maybe"}
TRUE = {"1", "true", "yes"}
FALSE = {"0", "false", "no"}
MINUS = {"-1"}
COMMON = TRUE | FALSE | MINUS
# Marks of forms and of tables that are filled in by hand, where an empty cell is absent.
TICKS = {"x", "checked", *"✓✔☑✅"}
_CROSSES = set("✗✘✖☐❌")
# Pairs of words that could also be codes, so that a column of classes must not have any other
# words. Excel writes true and false in the language of the user.
_PAIRS = """
    t/f y/n present/absent positive/negative pos/neg checked/unchecked on/off
    wahr/falsch vrai/faux vero/falso verdadero/falso verdadeiro/falso waar/onwaar prawda/fałsz
    sant/falskt sand/falsk sann/usann tosi/epätosi pravda/nepravda igaz/hamis doğru/yanliş
    истина/ложь ja/nein ja/nee oui/non sí/no si/no sim/não tak/nie да/нет 是/否 はい/いいえ
"""
PRESENT = TRUE | TICKS | set(re.findall(r"(\S+)/", _PAIRS))
ABSENT = FALSE | _CROSSES | set(re.findall(r"/(\S+)", _PAIRS))
# Words that are often something else, such as F (female), N (north), sand, or a cross for a tick,
# and the words of which the table must also have one.
CODES = {"t": {"f"}, "f": {"t"}, "n": {"y"}, "on": {"off"}, "sand": {"falsk"}, "sim": {"não"}}
CODES |= dict.fromkeys(_CROSSES, TICKS)
_NUMBER = re.compile(r"([+-]?\d+[.,]?\d*(?:e[+-]\d+)?)(%?)", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Column:
    """A column of N rows, stored as its distinct cells, because most of them occur in many rows."""

    name: str
    cells: list[Cell]  # distinct cells, in the order of their first rows
    codes: np.ndarray  # index of the cell of each row, int [N]

    @cached_property
    def key(self) -> str:
        """The name as returned by `simple_name`."""
        return simple_name(self.name)

    @cached_property
    def words(self) -> list[str]:
        """The distinct cells in lower case, with numbers and marks in their shortest form."""
        words = [_word(str(cell)) for cell in self.cells]
        # Survey forms write the name of a choice in the column of this name.
        own = self.name.casefold()
        if own not in MISSING | PRESENT | ABSENT and set(words) <= MISSING | {own}:
            words = ["x" if word == own else word for word in words]
        return words

    @cached_property
    def filled(self) -> set[str]:
        """The words that are not missing values."""
        return set(self.words) - MISSING

    @cached_property
    def numbers(self) -> set[float] | None:
        """The distinct numbers in the filled cells, or None if there is other text."""
        try:
            return set(map(float, self.filled))
        except ValueError:
            return None

    @cached_property
    def has_image_names(self) -> bool:
        """Whether the filled cells are names of image files."""
        # A hundred cells are sufficient: this only selects one of the columns.
        cells = [cell for cell in self.cells[:100] if cell != ""]
        return bool(cells) and all(map(is_image_name, cells))

    @cached_property
    def is_binary(self) -> bool:
        """Whether the cells are repeated zeros and ones, not the numbers of rows or groups."""
        has_both = not (self.filled.isdisjoint(TRUE) or self.filled.isdisjoint(FALSE))
        is_repeated = len(self.cells) < len(self.codes)
        return has_both and is_repeated and self.filled <= TRUE | FALSE

    def has(self, words: Collection[str]) -> np.ndarray:
        """Return a mask of the rows whose word is in `words`, bool [N]."""
        return np.array([word in words for word in self.words], bool)[self.codes]


def _word(text: str) -> str:
    """Return text in lower case without the variants of emoji, and numbers such as 1.0 as 1."""
    # pandas writes 1.0 if an integer column has missing values, and some spreadsheets write a
    # decimal comma. Digits only, such as 01, may be the name of a fold.
    number = _NUMBER.fullmatch(text)
    if number and not text.isdecimal():
        value = float(number[1].replace(",", "."))
        return str(value / 100 if number[2] else value).removesuffix(".0")
    return text.casefold().replace("\ufe0f", "")


def is_image_name(text: object) -> bool:
    """Return True for text that ends with the suffix of an image file."""
    return isinstance(text, str) and PurePath(text).suffix.lower() in READ | NOT_READ


@dataclass(frozen=True)
class Sheet:
    """The columns of a table, or of several concatenated tables with the same columns."""

    columns: list[Column]
    source: str  # names of the tables, for messages
    tables: np.ndarray  # name of the table of each row, [N]
    rows: np.ndarray  # number of each row in the file of its table, [N]

    @cached_property
    def marks(self) -> set[str]:
        """The words for presence and absence, without codes such as F for female."""
        marks = PRESENT | ABSENT | MINUS
        few = [column for column in self.columns if len(column.cells) <= len(marks)]
        used = set().union(*(column.filled for column in few if column.filled <= marks | UNKNOWN))
        return marks - {word for word, others in CODES.items() if used.isdisjoint(others)}

    def where(self, index: int) -> str:
        """Return the table and the row number in its file of row `index`, for messages."""
        return f"{self.tables[index]}, row {self.rows[index]}"


def names_of(columns: Sequence[Column]) -> list[str]:
    """Return the names of columns."""
    return [column.name for column in columns]


def sheet_of(frames: Mapping[str, "DataFrame"]) -> Sheet:
    """Concatenate tables, given by their names. Raises DataError if their columns differ."""
    import pandas

    first, *others = frames.values()
    for name, frame in frames.items():
        # pandas would fill the columns of the other tables with missing values.
        only = set(frame.columns) ^ set(first.columns)
        if only:
            fault = f"other columns than the first table ({format_list(sorted(map(str, only)))})"
            raise DataError(f"{name}: {fault}; use the same ones, or set data.file to one table")
        # pandas cannot match columns with the same name in several tables.
        if others and len(set(frame.columns)) < len(frame.columns):
            raise DataError(f"{name}: two columns have the same name; rename one")

    # The concatenation copies the data, so a single table is used as it is.
    table = first
    if others:
        table = pandas.concat(frames.values(), ignore_index=True)

    columns = []
    for number, name in enumerate(table.columns):
        # Names of several levels, as of a pivot table, end with that of the class.
        if isinstance(name, tuple):
            name = next((part for part in reversed(name) if part), "")
        values = table.iloc[:, number]
        # Cells are parsed once per distinct value, which is much faster for class columns.
        try:
            codes, distinct = pandas.factorize(values, use_na_sentinel=False)
        except (TypeError, NotImplementedError):
            # Lists cannot be hashed, so each row has its own cell.
            codes = np.arange(len(table))
            distinct = values
        columns.append(Column(str(name).strip(), [as_cell(cell) for cell in distinct], codes))
    # Names are objects, because text of fixed width would take hundreds of bytes per row.
    tables = np.repeat(np.array(list(frames), object), list(map(len, frames.values())))
    rows = np.concatenate([frame.index for frame in frames.values()])
    return Sheet(columns, " and ".join(frames), tables, rows)


def pairs_of(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return the codes of the pairs of two arrays of codes [N], and the distinct pairs in order."""
    import pandas

    size = int(second.max()) + 1
    codes, keys = pandas.factorize(first.astype(np.int64) * size + second)
    # Python's integers are much faster as indices of lists than those of NumPy.
    return codes, list(zip((keys // size).tolist(), (keys % size).tolist(), strict=True))
