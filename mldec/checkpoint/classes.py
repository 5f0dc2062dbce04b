"""Whether a checkpoint knows the classes of the data."""

from pathlib import Path

import torch

from mldec.data.base import Classes
from mldec.errors import CheckpointError


def check_queries(trained: Classes, current: Classes, path: str | Path) -> None:
    """Check that a checkpoint can score the classes of the data.

    A zero-shot model scores any classes that have word vectors, another model only its own classes.

    Args:
        trained: the classes of the checkpoint.
        current: the classes of the data.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: if the classes differ, or word vectors of the same width are missing.
    """
    if trained.queries is None:
        check_classes(trained, current, path)
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

    if len(trained) != len(current):
        raise CheckpointError(
            f"{path} knows {len(trained)} classes, the data has {len(current)}: "
            f"choose data with its classes"
        )

    # With as many classes and other names, at least one name differs.
    pairs = enumerate(zip(trained.names, current.names, strict=True))
    index = next(index for index, (before, now) in pairs if before != now)
    raise CheckpointError(
        f"{path} has other classes than the data: "
        f"number {index} is '{trained.names[index]}' there and '{current.names[index]}' here"
    )
