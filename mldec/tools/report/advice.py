"""What to do next: steps that follow from the numbers of a report, each with its reason."""

import shlex
from typing import NamedTuple

import numpy as np

from mldec.names import format_list
from mldec.tools.report.statistics import ClassTable, Histograms, Interval

# Points of average precision. A class whose interval is wider is hardly known; of all classes
# together, whose interval is narrower, models that differ by less are not told apart.
WIDE_OF_CLASS = 20.0
WIDE_OF_ALL = 5.0


class Step(NamedTuple):
    """One thing to do, with the command that does it if there is one."""

    text: str
    command: str | None = None


def next_steps(
    table: ClassTable,
    counted: Histograms,
    main: Interval,
    *,
    checkpoint: str,
    image_size: int,
    calibrated: bool,
    suspects: int,
    unreadable: int,
) -> list[Step]:
    """Return what the numbers advise, the most urgent first.

    They are those of the weakest classes, of the `main` metric, and the numbers of labels that the
    report suspects and of images that could not be read. Commands name the checkpoint by its path.
    """
    steps, path = [], shlex.quote(checkpoint)
    if unreadable:
        steps.append(Step(f"Repair or remove the {unreadable:,} unreadable images: see the list."))
    if suspects:
        text = f"Look at the labels that the model contradicts most clearly, {suspects:,} below."
        command = f"mldec check-data --checkpoint {path} --out check"
        steps.append(Step(text, command))

    # 1. Without any knowledge of a class its average precision is the share of its positives.
    low, high = (np.array(bounds) for bounds in table.intervals)
    precision = np.array(table.columns["AP"])
    positives, negatives = counted.positives.sum(1), counted.negatives.sum(1)
    share = 100 * positives / np.maximum(positives + negatives, 1)
    guessed = (low <= share) & (share < 100) & (positives > 0)
    if guessed.any():
        text = f"Not shown to be better than chance: {_named(table, guessed)}. Look at their scores"
        text += " below; more images, or another loss (loss=bce, loss=asl), may help."
        steps.append(Step(text))

    # 2. Weak classes: few images, or many.
    weak = np.zeros(len(precision), bool)
    weak[table.weakest()] = True
    weak &= (precision < np.nan_to_num(precision).mean()) & ~guessed
    wide = weak & (high - low > WIDE_OF_CLASS)
    if wide.any():
        text = f"Collect more images, for training and for validation: {_named(table, wide)}."
        steps.append(Step(text + " So few say little of a class."))
    if (weak & ~wide).any():
        text = f"Weak with many images: {_named(table, weak & ~wide)}. Look at their errors below"
        text += f"; for small objects try more pixels (data.image_size, now {image_size})."
        steps.append(Step(text))

    # 3. The numbers themselves.
    width = main.high - main.low
    if width > WIDE_OF_ALL:
        text = f"Use more validation images, or folds (data.fold=1/5): the interval is {width:.0f} "
        steps.append(Step(text + "points wide, and smaller differences between models say little."))
    if not calibrated:
        text = "Calibrate: no scores or thresholds are fitted to these classes yet."
        command = f"mldec calibrate {path} --out calibrated.pt"
        steps.append(Step(text, command))
    return steps


def _named(table: ClassTable, chosen: np.ndarray) -> str:
    """Name some classes, bool [K], with the numbers of images that show them."""
    positives = table.columns["positives"]
    return format_list(
        [f"{table.names[k]} ({positives[k]:,.0f})" for k in np.flatnonzero(chosen)], 5
    )
