"""Exact average precision per class, in several definitions, on any number of ranks."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from mldec.errors import DataError
from mldec.runtime import distributed
from mldec.runtime.devices import PinnedCopies, to_device

INTERPOLATIONS = ("none", "envelope", "11point")
COLUMNS = 64  # classes per task of a thread

# A matrix, or a sequence of its row blocks.
Blocks = Tensor | np.ndarray | Sequence[Tensor | np.ndarray]


def average_precision(
    scores: Blocks, targets: Blocks, *, interpolations: Sequence[str] = ("none",)
) -> dict[str, Tensor]:
    """Compute the average precision of each class.

    Images with equal scores share one rank, as in scikit-learn. The result does not depend on the
    order of the rows, not even in the last bit.

    Args:
        scores: Float [N, K], or a sequence of row blocks. Higher is more likely; logits work.
        targets: [N, K] of 1, 0 or -1 (ignored for this class), in the same blocks.
        interpolations: Any of "none", "envelope" and "11point". "none" is the mean precision at
            the positives (the official metric). "envelope" replaces each precision by the maximum
            at equal or higher recall (Query2Label, VOC 2010 and later). "11point" is the mean of
            the envelope at recall 0, 0.1, .. 1 (VOC 2007).

    Returns:
        Float64 [K] in [0, 1] for each interpolation; NaN for a class without positives.

    Raises:
        DataError: If a score is not finite.
    """
    score_blocks = _as_blocks(scores)
    target_blocks = _as_blocks(targets)
    num_classes = score_blocks[0].shape[1]

    def of_chunk(start: int) -> list[list[float]]:
        columns = slice(start, start + COLUMNS)
        own_scores = columns_of(score_blocks, columns)
        chunk = zip(own_scores, columns_of(target_blocks, columns), strict=True)
        return [_of_class(column, labels, interpolations) for column, labels in chunk]

    # NumPy releases the GIL while it sorts.
    rows: list[list[float]] = []
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for part in threads.map(of_chunk, range(0, num_classes, COLUMNS)):
            rows += part

    # [K, interpolations] -> one column per interpolation. `view` handles K = 0.
    columns = torch.tensor(rows, dtype=torch.float64).view(num_classes, len(interpolations)).t()
    return dict(zip(interpolations, columns, strict=True))


def check_finite(is_finite: bool, metric: str) -> None:
    """Raise DataError if a score is not finite."""
    if not is_finite:
        raise DataError(f"{metric}: a logit is not finite; check the model and its weights")


def _as_blocks(values: Blocks) -> list[Tensor]:
    """Return a matrix or its row blocks as a list of tensors."""
    if isinstance(values, Tensor | np.ndarray):
        return [torch.as_tensor(values)]
    return [torch.as_tensor(block) for block in values]


def columns_of(blocks: Sequence[Tensor], columns: slice | np.ndarray) -> np.ndarray:
    """Return some columns of all row blocks as [k, N]."""
    return torch.cat([block[:, columns] for block in blocks]).t().contiguous().numpy()


def _of_class(
    scores: np.ndarray, targets: np.ndarray, interpolations: Sequence[str]
) -> list[float]:
    """Return the average precision of one class per interpolation. Scores and targets are [N]."""
    check_finite(bool(np.isfinite(scores).all()), "average precision")
    annotated = np.sort(scores[targets >= 0])
    positive = np.sort(scores[targets == 1])
    total = len(positive)
    if total == 0:
        return [np.nan] * len(interpolations)

    # For each positive, in ascending order of scores: the numbers of positives and of annotated
    # images with at least the same score.
    hits = total - np.searchsorted(positive, positive)
    seen = len(annotated) - np.searchsorted(annotated, positive)
    precision = hits / seen

    values = []
    for name in interpolations:
        if name == "none":
            values.append(precision.mean())
            continue

        # Scores ascend, so recall descends: the running maximum covers all higher recalls.
        envelope = np.maximum.accumulate(precision)
        if name == "envelope":
            values.append(envelope.mean())
        else:
            # Number of positives at recall 0, 0.1, .. 1, rounded up without float errors.
            needed = -(-np.arange(11) * total // 10)
            values.append(envelope[total - np.maximum(needed, 1)].mean())
    return values


class Predictions:
    """The logits and targets of the images of this rank, in main memory.

    Logits are stored in float32, so that similar scores remain different.
    """

    def __init__(self, num_classes: int) -> None:
        # Start with an empty block: a rank without images takes part in all exchanges too.
        self._logits = [torch.zeros(0, num_classes)]
        self._targets = [torch.zeros(0, num_classes, dtype=torch.int8)]
        self._arriving: PinnedCopies | None = None  # asynchronous copies of the last batch

    def add(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Add a batch. This waits at most for the copies of the previous batch.

        Returns logits float32 [B, K] and targets int8 [B, K], both on the device of the logits.
        """
        logits = logits.float()
        targets = targets.to(torch.int8)
        copies = PinnedCopies(logits, targets)
        self._keep_last()
        self._arriving = copies
        return logits, to_device(targets, logits.device)

    def blocks(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the logits and the targets of all batches, [B, K] each, in main memory."""
        self._keep_last()
        return self._logits, self._targets

    def shared_by_classes(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return logits and targets of the images of all ranks, for the classes of this rank."""
        logits, targets = self.blocks()
        return distributed.share_columns(logits), distributed.share_columns(targets)

    def _keep_last(self) -> None:
        """Store the last batch once its copies are complete."""
        if self._arriving is None:
            return

        # Do not keep pinned memory, which the system cannot swap.
        logits, targets = self._arriving.wait()
        if logits.is_pinned():
            logits = logits.clone()
        if targets.is_pinned():
            targets = targets.clone()
        self._logits.append(logits)
        self._targets.append(targets)
        self._arriving = None


def average_precision_of_all(
    logits: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    interpolations: Sequence[str] = ("none",),
) -> dict[str, Tensor]:
    """Compute `average_precision` of all K classes, the same on all ranks.

    The arguments are the blocks [n, K / ranks] of `Predictions.shared_by_classes`.
    """
    own_classes = average_precision(logits, targets, interpolations=interpolations)
    return {name: distributed.join_columns(values) for name, values in own_classes.items()}
