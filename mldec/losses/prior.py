"""Class priors, the mean prediction of a model per class: estimated, read and written.

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
    """The mean probability of each class over all training images so far, on all processes.

    It is part of the loss's `state_dict`, so that a resumed run continues the estimate.
    """

    def __init__(self) -> None:
        super().__init__()

        # float64 [K + 1]: the sum of the probabilities per class, and the number of images.
        self.sums: Tensor | None = None

    def update(self, probability: Tensor) -> None:
        """Add the probabilities of a batch, [B, K]; all processes must call this equally often."""
        # One NaN would spoil the estimate for good; the learner skips such a step as well. Taking
        # these images out would need their number, for which a GPU had to be waited for.
        finite = probability.isfinite().all(1, keepdim=True)
        sums = probability.double().masked_fill(~finite, 0).sum(0)
        batch_sums = torch.cat([sums, finite.double().sum(0)])
        batch_sums = distributed.total(batch_sums)

        # After a resumption the sums so far may be on another device.
        if self.sums is None:
            self.sums = batch_sums
        else:
            self.sums = self.sums.to(batch_sums.device) + batch_sums

    def value(self) -> Tensor | None:
        """Return the estimate, float32 [K] in [0, 1]; None before the first batch."""
        if self.sums is None:
            return None

        return (self.sums[:-1] / self.sums[-1].clamp(min=1)).float()

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return the sums for the state_dict.

        They are no buffer, because the number of classes is unknown when the loss is built.
        """
        return {} if self.sums is None else {"sums": self.sums}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Continue from the sums of a state_dict.

        Raises:
            ValueError: if they are not a float64 vector.
        """
        sums = state.get("sums") if isinstance(state, dict) else state
        if sums is not None and (
            not isinstance(sums, Tensor) or sums.ndim != 1 or sums.dtype is not torch.float64
        ):
            raise ValueError("the class priors are no sums of probabilities")

        self.sums = sums


def read_prior(path: str | Path) -> list[float]:
    """Read the priors of a file: K numbers in its order, which must be that of the classes.

    Raises:
        DataError: if the file cannot be read or a row is malformed; the message names the row.
    """
    see = (
        f"it must be a CSV file with the header {','.join(COLUMNS)} "
        f"and a number from 0 to 1 per class"
    )
    try:
        with open_text(path, newline="") as file:
            header, *rows = list(csv.reader(file, strict=True)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"loss.class_prior {path} cannot be read ({error}); {see}") from error

    if header != COLUMNS or not rows:
        raise DataError(
            f"loss.class_prior {path} has the header {','.join(header)!r} "
            f"and {len(rows)} rows; {see}"
        )

    # Row 1 is the header.
    return [_number(path, number, row, see) for number, row in enumerate(rows, 2)]


def save_estimate(loss: nn.Module, path: Path, names: Sequence[str]) -> None:
    """Write the class priors that a loss has estimated in training, if it has."""
    estimate = getattr(loss, "estimate", None)
    prior = estimate.value() if isinstance(estimate, PriorEstimate) else None

    if prior is not None:
        write_prior(path, names, prior.tolist())
        log.info(f"class priors, for loss.class_prior of another run: {path}")


def write_prior(path: str | Path, names: Sequence[str], prior: Sequence[float]) -> None:
    """Write class priors as the CSV file that `read_prior` reads."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(zip(names, prior, strict=True))


def _number(path: str | Path, number: int, row: list[str], see: str) -> float:
    """Return the prior in a row of the file; raise a `DataError` that names the row."""
    try:
        _, text = row
        value = float(text)
    except ValueError:
        value = math.nan

    # NaN fails this comparison too, whether it was in the file or stands for a malformed row.
    if not 0 <= value <= 1:
        raise DataError(f"loss.class_prior {path}: row {number} is {','.join(row)!r}; {see}")
    return value
