"""The classes of a checkpoint beside those of the data: names, order and word vectors."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from mldec.data.table import names_fault
from mldec.data.text_encoder import DEFAULT, PREFIX
from mldec.data.types import Classes, VectorOrigin
from mldec.data.word_vectors import WordVectors, made_alike, word_vectors
from mldec.errors import CheckpointError, ConfigError, DataError
from mldec.files.text import read_text

log = logging.getLogger("mldec")

# Mean cosine between two vectors of a name: near 0 if their sources were trained apart, well above
# one half between the prompts of one text encoder, and close to 1 after rounding.
_SAME_KIND, _EQUAL = 0.5, 0.995
_COMPARED = 16  # classes, where their vectors have to be made or read for it
_ONE_PER_LINE = "write one class name per line, in the checkpoint's order"


def read_class_names(path: Path) -> tuple[str, ...]:
    """Read a file that gives a checkpoint's classes their names, one per line.

    Nothing is stripped but the line ends, so that names are read as `--write-classes` writes them.
    """
    names = tuple(read_text(path, _ONE_PER_LINE).removesuffix("\n").split("\n"))
    if fault := names_fault(names):
        raise DataError(f"--class-names {path}: {fault}; {_ONE_PER_LINE}")
    return names


def check_count(names: Sequence[str], num_classes: int) -> None:
    """Raise a `ConfigError` unless there is a given name for each class of a checkpoint."""
    if len(names) != num_classes:
        raise ConfigError(
            f"--class-names: it has {num_classes} classes, the file names {len(names)}; "
            f"{_ONE_PER_LINE}"
        )


class _Reordered(nn.Module):
    """A classifier with logits [B, K] in another order: `columns` are those of the model's."""

    def __init__(self, model: nn.Module, columns: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("columns", torch.tensor(columns), persistent=False)

    def forward(self, images: Tensor, queries: Tensor | None = None) -> Tensor:
        return self.model(images, queries)[:, self.columns]


def scoring(model: nn.Module, trained: Classes, current: Classes, path: str | Path) -> nn.Module:
    """Return a checkpoint's model, with its logits in the order of the data's classes.

    A zero-shot model follows the order of the word vectors that it is given: nothing changes. The
    path is that of the checkpoint, for messages.
    """
    check_queries(trained, current, path)
    if trained.queries is not None or trained.names == current.names:
        return model

    log.info(f"{path} has the classes of the data in another order: its logits are reordered")
    column_of = {name: column for column, name in enumerate(trained.names)}
    return _Reordered(model, [column_of[name] for name in current.names])


def check_queries(trained: Classes, current: Classes, path: str | Path) -> None:
    """Raise a `CheckpointError` unless a checkpoint can score the classes of the data.

    A zero-shot model scores any classes that have word vectors of the width and kind of its
    training, another model only its own classes, in whatever order.
    """
    if trained.queries is None:
        _check_same_count(trained, current, path)
        in_data, in_checkpoint = set(current.names), set(trained.names)
        unknown = [name for name in trained.names if name not in in_data]
        if unknown:
            other = next(name for name in current.names if name not in in_checkpoint)
            raise CheckpointError(
                f"{path} has other classes than the data: the data has no '{unknown[0]}' "
                f"({len(unknown)} of {len(trained)}), the checkpoint no '{other}'; choose data "
                f"with its classes, or give it the data's names with --class-names FILE"
            )
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
    _check_same_kind(trained, current, path)


def _check_same_kind(trained: Classes, current: Classes, path: str | Path) -> None:
    """Compare the word vectors of the classes that checkpoint and data both know.

    Vectors of another source have nothing to do with those of the training, and the scores would
    mean nothing. Other prompts of the same text encoder change them a little, and that is allowed.
    """
    trained = _with_known(trained, current, path)
    assert trained.queries is not None
    assert current.queries is not None
    row_of = {name: row for row, name in enumerate(current.names)}
    shared = [row for row, name in enumerate(trained.names) if name in row_of]
    if not shared:
        return

    before = trained.queries[shared].float()
    now = current.queries[[row_of[trained.names[row]] for row in shared]].float()
    cosine = cosine_similarity(before, now).mean().item()
    if cosine < _SAME_KIND:
        origin = "" if trained.origin is None else f", {trained.origin.described()}"
        raise CheckpointError(
            f"{path} was trained with other word vectors: those of {len(shared)} classes that both "
            f"know, such as {trained.names[shared[0]]!r}, have a mean cosine of {cosine:.2f}; "
            f"choose the vectors of its training{origin}"
        )
    if cosine < _EQUAL:
        log.warning(
            f"{path}: its word vectors differ a little from those of its training, with a mean "
            f"cosine of {cosine:.3f} over {len(shared)} classes"
        )


def _with_known(trained: Classes, current: Classes, path: str | Path) -> Classes:
    """Return classes of a checkpoint whose word vectors are known.

    A model of open_clip has none: its text encoder makes those of some classes of the data, unless
    it made the vectors of the data itself.
    """
    origin = trained.origin
    if trained.names or origin is None or not origin.is_encoder:
        return trained
    if current.origin is not None and current.origin.sha256 == origin.sha256:
        return trained

    remedy = "put its weights there again"
    names = current.names[:_COMPARED]
    # A comparison is not a reason to write the names of classes to this machine.
    made = made_alike(names, origin, where=str(path), remedy=remedy, keep=False)
    return replace(trained, names=made.names, queries=made.queries)


def check_classes(trained: Classes, current: Classes, path: str | Path) -> None:
    """Raise a `CheckpointError` unless names, order and word vectors are those of the data."""
    if trained.names == current.names:
        before, now = trained.queries, current.queries
        # Those of a text encoder depend on the machine, by a rounding error.
        if (
            before is not None
            and now is not None
            and (before.shape != now.shape or not torch.allclose(before, now, rtol=1e-3, atol=1e-5))
        ):
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


def _check_same_count(trained: Classes, current: Classes, path: str | Path) -> None:
    """Raise a `CheckpointError` unless checkpoint and data have as many classes."""
    if len(trained) != len(current):
        raise CheckpointError(
            f"{path} knows {len(trained)} classes, the data has {len(current)}: "
            f"choose data with its classes"
        )


def queries_for(
    names: Sequence[str],
    vectors: str | None,
    trained: Classes | None,
    *,
    option: str,
    keep: bool = True,
) -> Classes:
    """Return classes with word vectors that a zero-shot model takes.

    Args:
        names: of the classes, each once.
        vectors: a file of their word vectors, or a text encoder, see `word_vectors`; of the kind
            that the model was trained with. None makes them as those of the training were made.
        trained: the classes of the training, with their word vectors; None if these are not known.
        option: that asked for these classes, for messages.
        keep: see `word_vectors`.
    """
    origin = None if trained is None else trained.origin
    if vectors is None:
        made = _as_before(names, origin, option, keep=keep)
    else:
        # A few classes of the training, whose vectors are known, are made too.
        known = () if trained is None else trained.names
        others = [name for name in known if name not in names][:_COMPARED]
        templates = origin.templates if origin is not None and origin.is_encoder else (DEFAULT,)
        made = word_vectors(vectors, names, optional=others, templates=templates, keep=keep)

    if trained is not None:
        current = Classes(made.names, queries=made.queries, origin=made.origin)
        check_queries(trained, current, "the checkpoint")
    return Classes(
        tuple(names),
        exclusive=trained is not None and trained.exclusive,
        queries=made.queries[: len(names)],
        origin=made.origin,
    )


def can_make(trained: Classes) -> bool:
    """Tell whether a checkpoint says which text encoder makes the word vectors of other classes."""
    return trained.origin is not None and trained.origin.is_encoder


def _as_before(
    names: Sequence[str], origin: VectorOrigin | None, option: str, *, keep: bool
) -> WordVectors:
    """Make word vectors as those of the training were made."""
    if origin is None:
        raise CheckpointError(
            f"{option}: the checkpoint does not say how its word vectors were made; pass --vectors "
            f"with a file of the kind that it was trained with, or {PREFIX}MODEL:WEIGHTS"
        )
    if not origin.is_encoder:
        raise CheckpointError(
            f"{option}: the checkpoint was trained with the word vectors of {origin.described()}; "
            f"pass this file with --vectors FILE"
        )

    remedy = f"pass its weights with --vectors {PREFIX}MODEL:FILE"
    made = made_alike(names, origin, where=option, remedy=remedy, keep=keep)

    log.info("word vectors of %d classes by %s", len(names), origin.source)
    return made
