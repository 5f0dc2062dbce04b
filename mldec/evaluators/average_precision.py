"""Exact average precision per class, in the definitions that papers use, on any processes."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from mldec.errors import DataError
from mldec.runtime import distributed
from mldec.runtime.devices import Copies, moved

INTERPOLATIONS = ("none", "envelope", "11point")
COLUMNS = 64  # classes that a thread copies and sorts together


# A matrix of all images, or a sequence of its row blocks.
Blocks = Tensor | np.ndarray | Sequence[Tensor | np.ndarray]


def average_precision(
    scores: Blocks,
    targets: Blocks,
    *,
    interpolations: Sequence[str] = ("none",),
) -> dict[str, Tensor]:
    """Compute the average precision of each class.

    Images with equal scores share one rank, as in scikit-learn: the order of the rows never
    matters, not even in the last bit.

    Args:
        scores: float [N, K], a tensor or a numpy array, or a sequence of row blocks; higher is more
            likely (logits will do).
        targets: [N, K] of 1, 0 or -1 (left out of its class), in the same blocks.
        interpolations: some of "none", "envelope" and "11point". "none": mean of the precision at
            each positive (the official metric). "envelope": each precision replaced by the best one
            at no smaller recall (Query2Label, VOC 2010 and later). "11point": mean of that envelope
            at recall 0, 0.1, .. 1 (VOC 2007).

    Returns:
        For each interpolation, float64 [K] in [0, 1]; NaN for a class without a positive.
    """
    score_blocks = _as_blocks(scores)
    target_blocks = _as_blocks(targets)
    num_classes = score_blocks[0].shape[1]

    def of_classes(start: int) -> list[list[float]]:
        columns = slice(start, start + COLUMNS)
        pairs = zip(_columns(score_blocks, columns), _columns(target_blocks, columns), strict=True)
        return [_of_class(column, labels, interpolations) for column, labels in pairs]

    # Threads help: numpy sorts without the interpreter's lock.
    rows: list[list[float]] = []
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for part in threads.map(of_classes, range(0, num_classes, COLUMNS)):
            rows += part

    # [K, interpolations] -> one column per interpolation, also where there are no classes.
    columns = torch.tensor(rows, dtype=torch.float64).view(num_classes, len(interpolations)).t()
    return dict(zip(interpolations, columns, strict=True))


def check_finite(is_finite: bool, metric: str) -> None:
    """Raise a `DataError` if a score is not finite: a broken network must not get a metric."""
    if not is_finite:
        raise DataError(
            f"a score is not finite: {metric} has no meaning; look at the model's logits"
        )


def _as_blocks(values: Blocks) -> list[Tensor]:
    """Return the row blocks of one array or tensor, or of a sequence of them."""
    blocks = [values] if isinstance(values, Tensor | np.ndarray) else values
    return [torch.as_tensor(block) for block in blocks]


def _columns(blocks: Sequence[Tensor], columns: slice) -> np.ndarray:
    """Return the columns of some classes, from all row blocks, as [k, N]."""
    return torch.cat([block[:, columns] for block in blocks]).t().contiguous().numpy()


def _of_class(
    scores: np.ndarray, targets: np.ndarray, interpolations: Sequence[str]
) -> list[float]:
    """Return the average precision of one class for each interpolation; scores and targets [N]."""
    check_finite(bool(np.isfinite(scores).all()), "average precision")
    annotated = np.sort(scores[targets >= 0])
    positive = np.sort(scores[targets == 1])
    total = len(positive)
    if total == 0:
        return [np.nan] * len(interpolations)

    # For each positive, from the lowest score to the highest: the positives and the annotated
    # images that score at least as high.
    hits = total - np.searchsorted(positive, positive)
    seen = len(annotated) - np.searchsorted(annotated, positive)
    precision = hits / seen

    values = []
    for name in interpolations:
        if name == "none":
            values.append(precision.mean())
            continue

        # The lowest score stands for the highest recall, so the maximum runs over higher recalls.
        envelope = np.maximum.accumulate(precision)
        if name == "envelope":
            values.append(envelope.mean())
        else:
            # Positives at recall 0, 0.1, .. 1, rounded up in whole numbers: floats would err.
            needed = -(-np.arange(11) * total // 10)
            values.append(envelope[total - np.maximum(needed, 1)].mean())
    return values


# Shared between processes by class


class Predictions:
    """The logits and targets of this process's images, in main memory.

    Logits are kept in float32, so that close scores stay apart.
    """

    def __init__(self, num_classes: int) -> None:
        # A block without rows: a process that gets no image still takes part in every exchange.
        targets = torch.zeros(0, num_classes, dtype=torch.int8)
        self._blocks = [(torch.zeros(0, num_classes), targets)]
        self._arriving: Copies | None = None  # the last batch

    def add(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Add a batch, and return it for counting: float32 [B, K] and int8 [B, K] on its device.

        This waits for the batch before at most, never for this one.
        """
        logits, targets = logits.float(), targets.to(torch.int8)
        copies = Copies(logits, targets)
        self._keep_last()
        self._arriving = copies
        return logits, moved(targets, logits.device)

    def blocks(self) -> list[tuple[Tensor, Tensor]]:
        """Return the logits and targets of each batch, [B, K], in main memory."""
        self._keep_last()
        return self._blocks

    def shared_by_classes(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return logits and targets of all images, for this process's share of the classes."""
        logits, targets = map(list, zip(*self.blocks(), strict=True))
        return distributed.share_columns(logits), distributed.share_columns(targets)

    def _keep_last(self) -> None:
        """Keep the last batch once it is in main memory."""
        if self._arriving is None:
            return

        # Page-locked memory is for what travels: the system cannot put it aside.
        logits, targets = (
            copy.clone() if copy.is_pinned() else copy for copy in self._arriving.wait()
        )
        self._blocks.append((logits, targets))
        self._arriving = None


def average_precision_of_all(
    logits: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    interpolations: Sequence[str] = ("none",),
) -> dict[str, Tensor]:
    """Compute the `average_precision` of all K classes, the same on every process.

    The blocks [n, K / processes] are those of `Predictions.shared_by_classes`.
    """
    own_classes = average_precision(logits, targets, interpolations=interpolations)
    return {name: distributed.join_columns(values) for name, values in own_classes.items()}
