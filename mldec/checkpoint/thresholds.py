"""Read thresholds from a file that replaces the calibrated thresholds."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from mldec.checkpoint.state import Calibration
from mldec.data.types import Classes
from mldec.errors import ConfigError, DataError
from mldec.files.tables import SUFFIXES, as_cell, read_table, simple_name
from mldec.files.text import read_lines
from mldec.names import format_list, unknown_class

_SEE = "see docs/evaluating.md, section Thresholds from a file"
COLUMNS = ("class", "threshold")  # columns of a table, as in mldec calibrate --csv


def with_thresholds(
    path: Path, classes: Classes, weights: str, calibration: Calibration | None = None
) -> Calibration:
    """Replace the thresholds of a calibration, or of a new one, with the thresholds of a file.

    A class is present if its score is above its threshold, as in the code of RAM. The file has one
    threshold in [0, 1] per line, in the order of the classes. A table has the columns class and
    threshold; other classes keep their thresholds. `weights` is "ema" or "raw".
    """
    if classes.exclusive or classes.word_vectors is not None:
        raise ConfigError(
            f"--thresholds {path}: no effect on single-label and zero-shot models; remove it"
        )

    # A table may have a few classes only, so start with the thresholds of the checkpoint.
    base = calibration or Calibration(weights=weights)
    known = base.per_class(len(classes))
    if path.suffix.lower() in SUFFIXES:
        given = _by_name(path, classes)
    else:
        lines = read_lines(path)
        if len(lines) != len(classes):
            fault = f"{len(lines):,} lines for {len(classes):,} classes"
            raise ConfigError(f"--thresholds {path}: {fault}; {_SEE}")
        given = {name: _number(line, path) for name, line in zip(classes.names, lines, strict=True)}
    missing = [name for name in classes.names if name not in given]
    if missing and not known:
        raise DataError(
            f"--thresholds {path}: {len(missing):,} of {len(classes):,} classes have no threshold: "
            f"{format_list(missing)}; {_SEE}"
        )

    # Scores are float32 and compared with >=, so the next larger float32 is used for >.
    above = np.nextafter(np.array(list(given.values()), np.float32), np.float32(2)).tolist()
    values = dict(zip(classes.names, known, strict=False)) | dict(zip(given, above, strict=True))
    thresholds = tuple(values[name] for name in classes.names)
    base = replace(base, objective=None, metrics={})  # of other thresholds
    return replace(base, thresholds=thresholds, scope="class", file=path.name)


def _by_name(path: Path, classes: Classes) -> dict[str, float]:
    table = read_table(path, COLUMNS)
    names = [simple_name(str(name)) for name in table.columns]
    if not set(COLUMNS) <= set(names):
        raise DataError(
            f"--thresholds {path}: the columns class and threshold are missing in the header "
            f"{','.join(names)[:80]!r}; {_SEE}"
        )

    given: dict[str, float] = {}
    cells = [table.iloc[:, names.index(column)] for column in COLUMNS]
    for cell, threshold in zip(*cells, strict=True):
        name = str(as_cell(cell))
        if name not in classes.names:
            raise unknown_class(name, classes.names, f"--thresholds {path}")
        if name in given:
            raise DataError(f"--thresholds {path}: the class {name!r} is listed twice; remove one")
        given[name] = _number(str(threshold), path)
    return given


def _number(text: str, path: Path) -> float:
    try:
        value = float(text.replace(",", "."))  # spreadsheets may write a decimal comma
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise DataError(f"--thresholds {path}: {text[:40]!r} is not a number from 0 to 1; {_SEE}")
    return value
