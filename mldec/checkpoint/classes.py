"""Match the classes of a checkpoint and of the data: names, order and word vectors."""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from mldec.checkpoint.state import Calibration
from mldec.data.types import Classes
from mldec.errors import CheckpointError, ConfigError, DataError
from mldec.files.text import read_text
from mldec.names import disambiguate, format_list, names_fault

log = logging.getLogger("mldec")

# Threshold of the mean cosine similarity between the vectors of the same names. It is near 0 for
# different sources, and well above 0.5 for different prompts of one text encoder.
_SAME_KIND = 0.5
COMPARED = 16  # number of compared classes if their vectors must be computed or read
_ONE_PER_LINE = "write one class name per line, in the checkpoint's order"


def read_class_names(path: Path) -> tuple[str, ...]:
    """Read a file with a class name per line, in the checkpoint's order.

    Only the line ends are stripped, as in the output of `--write-classes`. Duplicates, such as
    translations of different classes, are numbered.

    Raises:
        DataError: If the file cannot be read, or a name is invalid.
    """
    lines = tuple(read_text(path).removesuffix("\n").split("\n"))
    names = disambiguate(lines)
    if names != lines:
        changed = [name for name, line in zip(names, lines, strict=True) if name != line]
        log.warning(f"--class-names {path}: {len(changed)} share a name: {format_list(changed)}")
    fault = names_fault(names)
    if fault:
        raise DataError(f"--class-names {path}: {fault}; {_ONE_PER_LINE}")
    return names


def check_count(names: Sequence[str], num_classes: int) -> None:
    """Raise ConfigError unless the number of names is the number of classes."""
    if len(names) != num_classes:
        raise ConfigError(
            f"--class-names: it has {num_classes} classes, the file names {len(names)}; "
            f"{_ONE_PER_LINE}"
        )


def same_names(
    names: Sequence[str], known: Sequence[str], synonyms: Sequence[Sequence[str]] = ()
) -> list[int | None]:
    """Find each name among the known class names.

    Equal names have precedence, then names that differ in case, spaces, hyphens or underscores,
    then synonyms.

    Args:
        names: Names to find.
        known: Known class names.
        synonyms: Groups of names of the same class.

    Returns:
        The index of each name in `known`, or None.
    """
    exact = {name: index for index, name in enumerate(known)}
    # Reversed, so that the first of several equal names is kept.
    folded = {_fold(name): index for name, index in reversed(exact.items())}
    groups = [[_fold(name) for name in group] for group in synonyms]

    indices = []
    for name in names:
        alternatives = [_fold(name)]
        for group in groups:
            if alternatives[0] in group:
                alternatives += group
        found = (folded[other] for other in alternatives if other in folded)
        indices.append(exact.get(name, next(found, None)))
    return indices


def _fold(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).casefold()


class ScoredClassifier(nn.Module):
    """A model with calibrated, selected and merged logits.

    All steps are optional, and applied in the order of the arguments.

    Args:
        model: Maps images [B, 3, H, W] and queries to logits [B, C].
        calibration: Scales the logits of all C classes in float32.
        columns: Indices of the N logits to keep, in their new order.
        class_of_name: Class of each of the N logits, from 0 to K - 1. The logit of a class is the
            maximum over its names.
        word_vectors: [C, D_w], passed to the model instead of the queries.
    """

    columns: Tensor | None
    class_of_name: Tensor | None
    word_vectors: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        *,
        calibration: Calibration | None = None,
        columns: Sequence[int] | None = None,
        class_of_name: Sequence[int] | None = None,
        word_vectors: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.calibration = calibration
        self.num_classes = None if class_of_name is None else max(class_of_name) + 1
        buffers = {
            "columns": None if columns is None else torch.tensor(columns),
            "class_of_name": None if class_of_name is None else torch.tensor(class_of_name),
            "word_vectors": word_vectors,
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, images: Tensor, word_vectors: Tensor | None = None) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, K]."""
        if self.word_vectors is not None:
            word_vectors = self.word_vectors
        logits = self.model(images, word_vectors)

        if self.calibration is not None:
            logits = self.calibration.scaled(logits.float())
        if self.columns is not None:
            logits = logits[:, self.columns]
        if self.class_of_name is not None:
            best = logits.new_full((len(logits), self.num_classes), -torch.inf)
            index = self.class_of_name.expand_as(logits)
            logits = best.scatter_reduce(1, index, logits, "amax")
        return logits


def scoring(
    model: nn.Module,
    trained: Classes,
    current: Classes,
    path: str | Path,
    calibration: Calibration | None = None,
) -> nn.Module:
    """Return the model of a checkpoint with its logits in the order of the data's classes.

    The logits of a zero-shot model have the order of its word vectors, and are not reordered.

    Args:
        model: Maps images [B, 3, H, W] and queries to logits [B, K].
        trained: Classes of the checkpoint.
        current: Classes of the data.
        path: Path of the checkpoint, for messages.
        calibration: Calibration of the logits.

    Raises:
        CheckpointError: If the model cannot score the classes of the data.
    """
    check_queries(trained, current, path)
    columns = None
    if trained.word_vectors is None and trained.names != current.names:
        log.info(f"{path} has the classes of the data in another order: its logits are reordered")
        column_of = {name: column for column, name in enumerate(trained.names)}
        columns = [column_of[name] for name in current.names]

    if columns is None and calibration is None:
        return model
    return ScoredClassifier(model, calibration=calibration, columns=columns)


def check_queries(trained: Classes, current: Classes, path: str | Path) -> None:
    """Raise CheckpointError unless a checkpoint can score the classes of the data.

    A zero-shot model requires word vectors from the source of its training. Other models require
    their own classes, in any order.

    Args:
        trained: Classes of the checkpoint.
        current: Classes of the data.
        path: Path of the checkpoint, for messages.
    """
    if trained.word_vectors is None:
        if set(trained.names) != set(current.names):
            raise _other_classes(trained, current, path)
        return

    width = trained.word_vectors.shape[1]
    vectors = "none"
    if current.word_vectors is not None:
        vectors = f"vectors of {current.word_vectors.shape[1]} numbers"
    if vectors != f"vectors of {width} numbers":
        raise CheckpointError(
            f"{path} asks by word vectors of {width} numbers, the data has {vectors}: "
            f"choose the vectors of its training"
        )
    _check_same_kind(trained, current, path)


def _check_same_kind(trained: Classes, current: Classes, path: str | Path) -> None:
    """Compare the word vectors of common classes. Different prompts are allowed."""
    trained = _with_known(trained, current, path)
    assert trained.word_vectors is not None
    assert current.word_vectors is not None
    row_of = {name: row for row, name in enumerate(current.names)}
    shared = [row for row, name in enumerate(trained.names) if name in row_of]
    if not shared:
        return

    before = trained.word_vectors[shared].float()
    now = current.word_vectors[[row_of[trained.names[row]] for row in shared]].float()
    cosine = cosine_similarity(before, now).mean().item()
    if cosine < _SAME_KIND:
        origin = "" if trained.origin is None else f", {trained.origin.described()}"
        raise CheckpointError(
            f"{path} was trained with other word vectors: those of {len(shared)} classes that both "
            f"know, such as {trained.names[shared[0]]!r}, have a mean cosine of {cosine:.2f}; "
            f"choose the vectors of its training{origin}"
        )


def _with_known(trained: Classes, current: Classes, path: str | Path) -> Classes:
    """Return the classes of a checkpoint, or some encoded class names for an open_clip model."""
    origin = trained.origin
    if trained.names or origin is None or not origin.is_encoder:
        return trained
    if current.origin is not None and current.origin.sha256 == origin.sha256:
        return trained

    from mldec.words.vectors import made_alike

    remedy = "put its weights there again"
    names = current.names[:COMPARED]
    # The vectors are only compared, so class names are not written to the cache.
    made = made_alike(names, origin, where=str(path), remedy=remedy, keep=False)
    return replace(trained, names=made.names, word_vectors=made.word_vectors)


def check_classes(trained: Classes, current: Classes, path: str | Path) -> None:
    """Raise CheckpointError unless checkpoint and data have the same classes.

    Args:
        trained: Classes of the checkpoint.
        current: Classes of the data. Names, order and word vectors must be the same.
        path: Path of the checkpoint, for messages.
    """
    if trained.names != current.names:
        raise _other_classes(trained, current, path)

    before = trained.word_vectors
    now = current.word_vectors
    if before is None or now is None:
        return
    # Word vectors of a text encoder differ between machines by rounding errors.
    if before.shape != now.shape or not torch.allclose(before, now, rtol=1e-3, atol=1e-5):
        raise CheckpointError(
            f"{path} is of other word vectors than the data: put the same data.vectors back"
        )


def _other_classes(trained: Classes, current: Classes, path: str | Path) -> CheckpointError:
    """Return the error with the first difference between the class names."""
    pairs = enumerate(zip_longest(trained.names, current.names))
    index, (there, here) = next((number, pair) for number, pair in pairs if len(set(pair)) > 1)
    return CheckpointError(
        f"{path} has other classes than the data, {len(trained)} and {len(current)}: number "
        f"{index} is {there!r} there and {here!r} here; choose its classes, or pass --class-names"
    )


def can_make(trained: Classes) -> bool:
    """Return True if the source of the word vectors can encode other classes."""
    return trained.origin is not None and trained.origin.makes_others
