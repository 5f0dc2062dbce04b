"""The classes of a checkpoint beside those of the data: names, order and word vectors."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mldec.data.base import Classes
from mldec.data.names import names_fault
from mldec.errors import CheckpointError, DataError
from mldec.files.text import read_text

log = logging.getLogger("mldec")

_MIN_SHARED = 5  # names from which on two sources of word vectors can be told apart
_ONE_PER_LINE = "write one class name per line, in the checkpoint's order"


def read_class_names(path: Path) -> tuple[str, ...]:
    """Read a file that gives a checkpoint's classes their names, one per line.

    Nothing is stripped but the line ends, so that names are read as `--write-classes` writes them.

    Args:
        path: UTF-8 text; the end of its last line may be missing.

    Raises:
        DataError: if the file cannot be read, has an empty line, or a name twice or one that is not
            allowed.
    """
    names = tuple(read_text(path, _ONE_PER_LINE).removesuffix("\n").split("\n"))
    if fault := names_fault(names):
        raise DataError(f"--class-names {path}: {fault}; {_ONE_PER_LINE}")
    return names


def check_count(names: Sequence[str], num_classes: int, path: str | Path) -> None:
    """Check that there is a given name for each class of a checkpoint.

    Raises:
        CheckpointError: if there are fewer or more.
    """
    if len(names) != num_classes:
        raise CheckpointError(
            f"--class-names: {path} has {num_classes} classes, the file names {len(names)}; "
            f"{_ONE_PER_LINE}"
        )


class _Reordered(nn.Module):
    """A classifier whose logits are put in another order.

    Args:
        model: images [B, 3, H, W] and queries -> logits [B, K].
        columns: for each of the K logits in the new order, its column in the model's.
    """

    def __init__(self, model: nn.Module, columns: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("columns", torch.tensor(columns), persistent=False)

    def forward(self, images: Tensor, queries: Tensor | None = None) -> Tensor:
        return self.model(images, queries)[:, self.columns]


def scoring(model: nn.Module, trained: Classes, current: Classes, path: str | Path) -> nn.Module:
    """Return a checkpoint's model, with its logits in the order of the data's classes.

    A zero-shot model follows the order of the word vectors that it is given: nothing changes.

    Args:
        model: images [B, 3, H, W] and queries -> logits [B, K].
        trained: the classes of the checkpoint.
        current: the classes of the data.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: if the classes differ, or word vectors of the same width are missing.
    """
    check_queries(trained, current, path)
    if trained.queries is not None or trained.names == current.names:
        return model

    log.info(f"{path} has the classes of the data in another order: its logits are reordered")
    column_of = {name: column for column, name in enumerate(trained.names)}
    return _Reordered(model, [column_of[name] for name in current.names])


def check_queries(trained: Classes, current: Classes, path: str | Path) -> None:
    """Check that a checkpoint can score the classes of the data, in whatever order.

    A zero-shot model scores any classes that have word vectors, another model only its own classes.

    Args:
        trained: the classes of the checkpoint.
        current: the classes of the data.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: if the classes differ, or word vectors of the same width are missing.
    """
    if trained.queries is None:
        _check_same_names(trained, current, path)
        return

    width = trained.queries.shape[1]
    vectors = "none"
    if current.queries is not None:
        vectors = f"vectors of {current.queries.shape[1]} numbers"

    if current.queries is None or current.queries.shape[1] != width:
        raise CheckpointError(
            f"{path} asks by word vectors of {width} numbers, the data has {vectors}: "
            f"choose the vectors of its training"
        )


def check_vectors(trained: Classes, current: Classes, path: str | Path) -> None:
    """Check that word vectors are of the kind that a zero-shot checkpoint was trained with.

    Vectors of another text encoder may have the same width. Then the vectors of the names that
    both have are no nearer to those of the checkpoint than to those of its other classes.

    Args:
        trained: the classes of the checkpoint.
        current: other classes.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: if the width differs, or most of the shared names have another meaning.
    """
    check_queries(trained, current, path)
    trained_row = {name: row for row, name in enumerate(trained.names)}
    current_row = {name: row for row, name in enumerate(current.names)}
    shared = [name for name in current.names if name in trained_row]
    if len(shared) < _MIN_SHARED or trained.queries is None or current.queries is None:
        return

    before = F.normalize(trained.queries[[trained_row[name] for name in shared]], dim=1)
    now = F.normalize(current.queries[[current_row[name] for name in shared]], dim=1)

    # Other prompts move the vectors a little, so that most of them stay nearest to their own name.
    is_own = (now @ before.T).argmax(1) == torch.arange(len(shared))
    if is_own.float().mean() < 0.5:
        raise CheckpointError(
            f"{path} asks by other word vectors of {before.shape[1]} numbers: of {len(shared)} "
            f"names that both have, {int(is_own.sum())} vectors are nearest to their own name's; "
            f"choose the vectors of its training"
        )


def check_classes(trained: Classes, current: Classes, path: str | Path) -> None:
    """Check that the classes of a checkpoint are those of the data, in the same order.

    Args:
        trained: the classes of the checkpoint.
        current: the classes of the data.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: if names, order or word vectors differ.
    """
    if trained.names == current.names:
        before, now = trained.queries, current.queries
        if before is not None and now is not None and not torch.equal(before, now):
            raise CheckpointError(
                f"{path} is of other word vectors than the data: put the same data.vectors back"
            )
        return

    _check_same_count(trained, current, path)

    # With as many classes and other names, at least one name differs.
    pairs = enumerate(zip(trained.names, current.names, strict=True))
    index = next(index for index, (before, now) in pairs if before != now)
    raise CheckpointError(
        f"{path} has other classes than the data: "
        f"number {index} is '{trained.names[index]}' there and '{current.names[index]}' here"
    )


def _check_same_names(trained: Classes, current: Classes, path: str | Path) -> None:
    """Raise a `CheckpointError` unless the names are the same, in whatever order."""
    _check_same_count(trained, current, path)

    in_data, in_checkpoint = set(current.names), set(trained.names)
    unknown = [name for name in trained.names if name not in in_data]
    if unknown:
        other = next(name for name in current.names if name not in in_checkpoint)
        raise CheckpointError(
            f"{path} has other classes than the data: the data has no '{unknown[0]}' "
            f"({len(unknown)} of {len(trained)}), the checkpoint no '{other}'; choose data with "
            f"its classes, or give it the data's names with --class-names FILE"
        )


def _check_same_count(trained: Classes, current: Classes, path: str | Path) -> None:
    """Raise a `CheckpointError` unless checkpoint and data have as many classes."""
    if len(trained) != len(current):
        raise CheckpointError(
            f"{path} knows {len(trained)} classes, the data has {len(current)}: "
            f"choose data with its classes"
        )
