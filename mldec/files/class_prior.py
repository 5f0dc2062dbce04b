"""Class priors in a CSV file, which `PartialAsymmetricLoss` estimates in one run for another.

The file has the header `COLUMNS` and one row per class. The rows must be in the order of the
classes, because the names are not compared.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

from mldec.errors import DataError, naming_errors
from mldec.files.text import open_text

COLUMNS = ["Classes", "avg_pred"]


def read_prior(path: str | Path) -> list[float]:
    """Read the K class priors of a file. Raises DataError unless they are numbers in [0, 1]."""
    form = f"a CSV file with the header {','.join(COLUMNS)} and a number from 0 to 1 per class"
    with naming_errors(f"loss.class_prior {path}", DataError, remedy=f"give {form}"):
        with open_text(path, newline="") as file:
            _, *rows = csv.reader(file, strict=True)
        prior = [float(text) for _, text in rows]
        # NaN fails these comparisons, too.
        if not all(0 <= value <= 1 for value in prior):
            raise ValueError("a number is not in [0, 1]")
        return prior


def write_prior(path: Path, names: Sequence[str], prior: Sequence[float]) -> None:
    """Write the priors of the classes to a file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(zip(names, prior, strict=True))
