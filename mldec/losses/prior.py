"""How often a class shows, as the mean of what a model predicts: estimated in training, read from and written to files.

Source: Alibaba-MIIL/PartialLabelingCSL, whose file has the columns `Classes,avg_pred`.
"""

import csv
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from mldec.errors import DataError
from mldec.files.text import open_text
from mldec.runtime import distributed

log = logging.getLogger("mldec")

COLUMNS = ["Classes", "avg_pred"]


class PriorEstimate(nn.Module):
    """The mean probability of each class over every training image so far, those of all processes.

    It travels in the loss's `state_dict`, so that a resumed run goes on with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: Tensor | None = None  # float64 [K + 1]: of the probabilities, and the images

    def update(self, probability: Tensor) -> None:
        """Add a batch [B, K]; every process must do so equally often."""
        probability = probability[
            probability.isfinite().all(1)
        ]  # of a step that the learner leaves out
        batch = torch.cat(
            [
                probability.double().sum(0),
                probability.new_tensor([len(probability)], dtype=torch.double),
            ]
        )
        batch = distributed.total(batch)
        self.sums = batch if self.sums is None else self.sums.to(batch.device) + batch

    def value(self) -> Tensor | None:
        """Return the estimate, float32 [K] in [0, 1]; None before the first batch."""
        return None if self.sums is None else (self.sums[:-1] / self.sums[-1].clamp(min=1)).float()

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return what travels: the number of classes is not known when a loss is built, so it is no buffer."""
        return {} if self.sums is None else {"sums": self.sums}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Go on from there.

        Raises:
            ValueError: if it is no such state.
        """
        sums = state.get("sums") if isinstance(state, dict) else state
        if sums is not None and (
            not isinstance(sums, Tensor) or sums.ndim != 1 or sums.dtype is not torch.float64
        ):
            raise ValueError("the class priors are no sums of probabilities")
        self.sums = sums


def read_prior(path: str | Path) -> list[float]:
    """Read the priors of a file, in its order, which must be that of the classes.

    Raises:
        DataError: if it cannot be read or is not of the form; it names the row.
    """
    see = f"it must be a CSV file with the header {','.join(COLUMNS)} and a number from 0 to 1 a class"
    try:
        with open_text(path, newline="") as file:
            header, *rows = list(csv.reader(file, strict=True)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"loss.class_prior {path} cannot be read ({error}); {see}") from error
    if header != COLUMNS or not rows:
        raise DataError(
            f"loss.class_prior {path} has the header {','.join(header)!r} and {len(rows)} rows; {see}"
        )
    return [_number(path, number, row, see) for number, row in enumerate(rows, 2)]


def save_estimate(loss: nn.Module, path: Path, names: Sequence[str]) -> None:
    """Write what a loss estimated in training, if it did."""
    estimate = getattr(loss, "estimate", None)
    prior = estimate.value() if isinstance(estimate, PriorEstimate) else None
    if prior is not None:
        write_prior(path, names, prior.tolist())
        log.info(f"class priors, for loss.class_prior of another run: {path}")


def write_prior(path: str | Path, names: Sequence[str], prior: Sequence[float]) -> None:
    """Write the priors of classes in a form that `read_prior` reads."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(zip(names, prior, strict=True))


def _number(path: str | Path, number: int, row: list[str], see: str) -> float:
    try:
        _, text = row
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise DataError(f"loss.class_prior {path}: row {number} is {','.join(row)!r}; {see}")
    return value
