"""Labels in the cells of a table: marks in class columns, and names of classes.

`mldec.data.columns` defines which columns these are.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from mldec.data.columns import Roles, Rules
from mldec.data.labels import Labels, from_dense, from_entries
from mldec.data.sheet import (
    ABSENT,
    MINUS,
    MISSING,
    PRESENT,
    TICKS,
    UNKNOWN,
    Column,
    Sheet,
    names_of,
    pairs_of,
)
from mldec.errors import DataError, log
from mldec.files.tables import Cell, Unreadable, as_cell
from mldec.names import abbreviate, as_name, check_names, format_list, indices_of, unknown_class

# Separators that names rarely contain, also in Chinese.
_CERTAIN = ";|\n\t\u3001\uff1b"
_COMMAS = ",\uff0c\u060c"
_RARE = "/+&-_:\\>~*^."  # characters that are more often a part of names
# A dash usually means that there is no label, and dog:0.9 is a name with a score.
_NO_NAME = re.compile(r"[!-/:-@[-`{-~\u2013\u2014]+|.+[:(=] *[01]?[.]\d+\)?")
# Names in brackets without quotes, as in lists of PostgreSQL, makesense.ai and VIA.
_BRACKETS = (r"\{[^{}]*\}", r"\[[^][]*\]", r"\([^()]*\)")


def class_labels(sheet: Sheet, columns: Sequence[Column], rules: Rules) -> Labels:
    """Return the labels of a table with one column per class, in the order of the columns.

    The meaning of -1 and of empty cells depends on the other cells of all class columns, see
    `Rules`. Classes are then consistent, even if a column has only ones and empty cells.

    Raises:
        DataError: If a cell has no meaning, or if -1 or the empty cells have several meanings.
    """
    values = _meanings(sheet, columns, rules)

    # The value 2 marks a cell without a meaning, so that its row can be found.
    matrix = np.empty((len(columns[0].codes), len(columns)), np.int8)
    for number, column in enumerate(columns):
        cells = np.array([values.get(word, 2) for word in column.words], np.int8)
        matrix[:, number] = cells[column.codes]
        if 2 in cells:
            row = int(matrix[:, number].argmax())
            raise DataError(
                f"{sheet.where(row)}: the class {column.name!r} has "
                f"{abbreviate(column.cells[column.codes[row]])}, not 0, 1 or an empty cell; "
                f"correct it"
            )
    return from_dense(matrix, default=-1 if (matrix < 0).any() else 0)


def _meanings(sheet: Sheet, columns: Sequence[Column], rules: Rules) -> dict[str, int]:
    """Return the label of each word in class columns."""
    used = set().union(*(column.words for column in columns))
    has_zeros = not used.isdisjoint(ABSENT)
    has_minus = not used.isdisjoint(MINUS)
    minus_one = rules.minus_one or ("unknown" if has_zeros else "absent")
    has_absent = has_zeros or (has_minus and minus_one == "absent")

    # In a table that is filled in by hand, x marks the present classes, and empty cells are absent.
    # In a table with 0 and 1, an empty cell is usually an unknown label. If some columns have only
    # x and others have 0 and 1, both meanings are possible.
    only_marks = used <= MISSING | TICKS
    has_empty = not used.isdisjoint(MISSING)
    has_column_of_marks = any(column.filled and column.filled <= TICKS for column in columns)
    empty = rules.empty or ("absent" if only_marks else "unknown")

    # An empty cell next to cells of 1 only may be an absent class or a missing annotation. A table
    # with -1, 0 and 1 may use -1 or 0 for unknown labels.
    settings = []
    if has_minus and has_zeros and rules.minus_one is None:
        settings.append("data.minus_one=unknown (or absent, if 0 is unknown)")
    is_ambiguous = not only_marks and (has_column_of_marks or not has_absent)
    if has_empty and not rules.empty and is_ambiguous:
        settings.append("data.empty=absent (or unknown)")
    if settings:
        raise DataError(
            f"{sheet.source}: the cells of {format_list(names_of(columns))} have "
            f"several meanings; add {' '.join(settings)}"
        )
    if has_minus:
        log.info(f"data: {sheet.source}: -1 in a class column is {minus_one}")
    if has_empty:
        log.info(f"data: {sheet.source}: an empty cell in a class column is {empty}")

    # If -1 is absent, 0 is unknown. In the labels of this package it is the other way around.
    zero = -1 if has_minus and minus_one == "absent" and has_zeros else 0
    values = dict.fromkeys(PRESENT, 1) | dict.fromkeys(UNKNOWN, -1) | dict.fromkeys(ABSENT, zero)
    values |= dict.fromkeys(MINUS, 0 if minus_one == "absent" else -1)
    return values | dict.fromkeys(MISSING, 0 if empty == "absent" else -1)


def named_labels(
    sheet: Sheet, roles: Roles, rules: Rules, classes: Sequence[str] | None, *, exclusive: bool
) -> tuple[Labels, tuple[str, ...]]:
    """Return the labels of a table with names of classes in its cells, and the classes.

    If the table has a column of negatives, a class in neither column is unknown (-1). Otherwise all
    classes that are not named are absent (0). Without `classes`, the sorted names in the table are
    the classes. With `exclusive`, each image has exactly one label.

    Raises:
        DataError: If a cell is not a list of names, or its separator is ambiguous.
    """
    assert roles.labels is not None
    given = frozenset(classes or ())
    names = _cell_names(sheet, roles.labels, rules, given, exclusive=exclusive)
    entries = [dict.fromkeys(cell, 1) for cell in names]
    codes = roles.labels.codes
    if roles.value is not None:
        # The class of a row is in `labels`, and its value, as in a class column, in another column.
        rules = replace(rules, minus_one="unknown", empty="unknown")
        values = class_labels(sheet, [roles.value], rules).dense()[:, 0]
        pairs, codes = np.unique([codes, values], axis=1, return_inverse=True)
        entries = [dict.fromkeys(entries[code], value) for code, value in pairs.T.tolist()]
    if roles.negatives is not None:
        # Each distinct pair of cells in both columns gets a code.
        negatives = _cell_names(sheet, roles.negatives, rules, given, exclusive=exclusive)
        codes, code_pairs = pairs_of(codes, roles.negatives.codes)
        positives = entries
        entries = []
        for code, (present, absent) in enumerate(code_pairs):
            both = positives[present].keys() & negatives[absent]
            if both:
                fault = f"the class {min(both)!r} is in labels and in negatives"
                row = int((codes == code).argmax())
                raise DataError(f"{sheet.where(row)}: {fault}; remove one")
            entries.append(dict.fromkeys(negatives[absent], 0) | positives[present])

    found = set().union(*entries)
    if classes is None:
        if not found:
            raise DataError(f"{sheet.source}: no image has a label; add labels")
        classes = check_names(sorted(found), sheet.source)
    for name in sorted(found.difference(classes)):
        code = next(code for code, cell in enumerate(entries) if name in cell)
        raise unknown_class(name, classes, sheet.where(int((codes == code).argmax())))

    columns = indices_of(classes)
    numbered = [{columns[name]: value for name, value in cell.items()} for cell in entries]
    default = 0 if roles.negatives is None and roles.value is None else -1
    labels = from_entries(numbered, num_classes=len(classes), default=default)
    return labels.select(codes), tuple(classes)


def _cell_names(
    sheet: Sheet, column: Column, rules: Rules, given: frozenset[str], *, exclusive: bool
) -> list[list[str]]:
    """Return the class names in each distinct cell of a column. `given` are the given classes."""
    # Convert cells of text to lists, if they contain one. Other text is split by the separator.
    cells = [_parse_list(cell) if isinstance(cell, str) else cell for cell in column.cells]
    filled = {cell for cell in cells if isinstance(cell, str) and cell}
    are_names = given.isdisjoint(filled) and len(filled) > 0
    for brackets in _BRACKETS:
        if are_names and all(re.fullmatch(brackets, cell) for cell in filled):
            cells = [str(cell)[1:-1] if cell in filled else cell for cell in cells]
            log.info(f"data: {sheet.source}: the brackets in {column.name} are not a part of names")

    # Words for missing values are names if they are given. With exactly one label per image, none
    # is one, too.
    missing = MISSING - given - ({"none"} if exclusive else set())
    # The name of a single label may contain a comma or a space, so nothing is detected. A semicolon
    # still separates names, so that two labels raise an error.
    texts = [cell for cell in cells if isinstance(cell, str) and cell.casefold() not in missing]
    separator = rules.separator
    if not separator:
        separator = ";" if exclusive else _find_separator(sheet, texts, given)
    no_label = rules.no_label or ()
    if isinstance(no_label, str):
        no_label = [no_label]

    names = []
    ignored: set[str] = set()
    first_rows = np.unique(column.codes, return_index=True)[1]
    for row, cell in zip(first_rows, cells, strict=True):
        where = sheet.where(row)
        if isinstance(cell, bool | Unreadable):
            fault = f"{cell} is not a class name or a list of class names"
            raise DataError(f"{where}: {fault}; write text or a list of text")
        if isinstance(cell, str) and cell.casefold() in missing:
            cell = (cell,)  # such as N/A, which is not divided
        parts = cell.split(separator) if isinstance(cell, str) else cell
        found = [as_name(part.strip(), where) for part in parts if part.strip()]
        ignored.update(name for name in found if name.casefold() in missing and name not in given)
        names.append([name for name in found if name not in ignored and name not in no_label])
        for name in names[-1]:
            if _NO_NAME.fullmatch(name) and name not in given:
                fault = f"{name!r} is probably not a class name"
                raise DataError(f"{where}: {fault}; add data.no_label=[{name}] or data.classes")
    if ignored:
        text = format_list(sorted(ignored))
        log.info(f"data: {sheet.source}: {text} in {column.name} are missing values, not labels")

    is_vector = all(len(cell) == len(names[0]) > 1 for cell in names)
    if is_vector and set().union(*names) == {"0", "1"}:
        fault = f"the cells of {column.name} are vectors of 0 and 1"
        raise DataError(f"{sheet.source}: {fault}; write one column per class, or names")
    return names


def _parse_list(text: str) -> Cell:
    """Return the names in a list in JSON, in Python, or printed by NumPy. Other text is returned.

    Text that starts like a list and cannot be parsed is `Unreadable`.
    """
    # Most cells are no lists, and the expressions below are slow.
    if not text.endswith(("]", ")", "}", "'", '"')):
        return text
    # Python prints some types of lists with their name.
    text = re.sub(r"(?s)^(?:frozenset|set|array)\((.*?)(?:, dtype=.*)?\)$", r"\1", text)
    # A list may lack its brackets: "dog", "cat". A single name in quotes may contain a separator.
    if re.fullmatch(r"([\"']).*\1", text, re.DOTALL):
        names = _parse_list(f"[{text}]")
        if isinstance(names, tuple) and len(names) == 1:
            return names[0]
        return names
    # Names may contain brackets, as in "[red] car". The first item of a list is in quotes, is a
    # number or a mapping, or is null, nan or None.
    start = r"\[\s*([\"'\d{]|(null|nan|None)\s*,)|[({]\s*[\"']"
    if not re.fullmatch(rf"({start}).*[\])}}]|\[\s*\]", text, re.DOTALL):
        return text
    with suppress(ValueError):
        return as_cell(json.loads(text))
    # NumPy prints ['a' 'b'] without commas, which Python would read as the text 'ab'.
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return as_cell(ast.literal_eval(re.sub(r"(['\"])\s+(['\"])", r"\1, \2", text)))
    return Unreadable(abbreviate(text))


def _find_separator(sheet: Sheet, texts: Sequence[str], given: frozenset[str]) -> str:
    """Return the separator of the class names in cells, by default a semicolon.

    Raises:
        DataError: If several characters may be the separator, or one may be a part of the names.
    """
    results = {sign: _separates(texts, sign, given) for sign in _CERTAIN + _COMMAS + _RARE + " "}
    # Names with spaces are common. If another sign separates names, a space is a part of them.
    if any(result is not False for sign, result in results.items() if sign != " "):
        del results[" "]
    found = [sign for sign, result in results.items() if result]
    unclear = [sign for sign, result in results.items() if result is None]
    if len(found) == 1 or not found + unclear:
        separator = found[0] if found else ";"
        if separator != ";":
            log.info(f"data: {sheet.source}: labels are separated by {separator!r}")
        return separator

    # Show the setting for each candidate. With a semicolon, each cell is one name.
    sign = (found + unclear)[-1]
    example = next(text for text in texts if sign in text)
    settings = [f"data.separator={sign!r}" for sign in dict.fromkeys(found + unclear + [";"])]
    fault = f"the labels {abbreviate(example)} are one name or several"
    raise DataError(f"{sheet.source}: {fault}; add {' or '.join(settings)}")


def _separates(texts: Sequence[str], sign: str, given: frozenset[str]) -> bool | None:
    """Return whether a character separates names in cells, or None if this cannot be decided."""
    # The given classes may contain the character.
    if not any(sign in text for text in texts) or given.issuperset(texts):
        return False
    cells = [[part.strip() for part in text.split(sign) if part.strip()] for text in texts]
    several = [parts for parts in cells if len(parts) > 1]
    # A name does not end with a separator.
    is_last = sign in _CERTAIN + _COMMAS and any(text.endswith(sign) for text in texts)
    if is_last or not several:
        return is_last
    names = Counter[str]()  # number of cells with each name
    for parts in cells:
        names.update(set(parts))
    # Class names rarely contain a semicolon, a bar, a line break, a tab, or the marks of lists in
    # Chinese and Japanese.
    if sign in _CERTAIN or given.issuperset(names):
        return True
    # Ranges, such as 25-32, are names.
    if sign not in "-_:." and all(name.isdecimal() for name in names):
        return True

    # The names in a list also occur in other cells. Words of a name rarely do, except for nouns, as
    # in "hot dog" and "dog". A comma is therefore a separator if at least half of the lists have a
    # repeated name. Otherwise it may be a part of names, such as "Smith, Anna".
    alone = {parts[0] for parts in cells if len(parts) == 1}
    num_repeated = sum(any(names[part] > 1 for part in parts) for parts in several)
    if sign in _COMMAS:
        return True if 2 * num_repeated >= len(several) else None

    # Names with spaces are more common than lists with spaces, so a space needs stronger evidence:
    # the names of at least half of the lists also occur alone, or few names form lists of several
    # lengths.
    num_alone = sum(alone.issuperset(parts) for parts in several)
    # Names such as "black & white" and "indoor/kitchen" are common, too, and lists with these signs
    # are rare, so they are never read as lists without a setting.
    if sign in _RARE:
        return None if 2 * num_alone >= len(several) else False
    num_lengths = len(set(map(len, cells)))
    if 2 * num_alone >= len(several) or (2 * len(names) <= len(cells) and num_lengths > 2):
        return True
    return None if num_repeated else False
