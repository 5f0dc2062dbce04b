"""Write runs as a table: aligned text, or CSV."""

import csv
import io
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from mldec.errors import printable
from mldec.summary.runs import Run

COLUMNS = [field.name for field in fields(Run) if field.metadata.get("column", True)]


def table(runs: Sequence[Run]) -> str:
    """Return the runs as lines of text with aligned columns."""
    rows = [COLUMNS]
    rows += [[printable(_cell(value)) for value in _values(run)] for run in runs]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]

    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def to_csv(runs: Sequence[Run]) -> str:
    """Return the content of `--csv`: a heading, and one row per run."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    writer.writerows([["" if value is None else value for value in _values(run)] for run in runs])
    return text.getvalue()


def _values(run: Run) -> list[Any]:
    """Return the row of a run."""
    return [getattr(run, column) for column in COLUMNS]


def _cell(value: Any) -> str:
    """Return a value as text: two decimals for numbers, - for None."""
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
