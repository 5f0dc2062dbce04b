"""The classes of a checkpoint beside those of the data: names, order and word vectors."""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from mldec.checkpoint.state import Calibration
from mldec.data.types import Classes
from mldec.errors import CheckpointError, ConfigError, DataError
from mldec.files.text import read_text
from mldec.names import listed, names_fault, told_apart

log = logging.getLogger("mldec")

# Mean cosine between two vectors of a name: near 0 if their sources were trained apart, well above
# one half between the prompts of one text encoder.
_SAME_KIND = 0.5
COMPARED = 16  # classes, where their vectors have to be made or read for it
_ONE_PER_LINE = "write one class name per line, in the checkpoint's order"


def read_class_names(path: Path) -> tuple[str, ...]:
    """Read a file that gives a checkpoint's classes their names, one per line.

    Nothing is stripped but the line ends, so that names are read as `--write-classes` writes them.
    A name that several classes have in another language gets their numbers.
    """
    lines = tuple(read_text(path, _ONE_PER_LINE).removesuffix("\n").split("\n"))
    names = told_apart(lines)
    if names != lines:
        changed = [name for name, line in zip(names, lines, strict=True) if name != line]
        log.warning(f"--class-names {path}: {len(changed)} share a name: {listed(changed)}")
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


def same_names(
    names: Sequence[str], known: Sequence[str], synonyms: Sequence[Sequence[str]] = ()
) -> list[int | None]:
    """Return for each name the index of its class among the known ones, or None.

    An equal name comes first, then one that differs in case, spaces, hyphens and underscores, then
    a synonym: names of the same sequence.
    """
    exact = {name: index for index, name in enumerate(known)}
    folded = {_folded(name): index for name, index in reversed(exact.items())}
    groups = [[_folded(name) for name in group] for group in synonyms]

    indices = []
    for name in names:
        own = _folded(name)
        alternatives = [own, *chain.from_iterable(group for group in groups if own in group)]
        found = (folded[other] for other in alternatives if other in folded)
        indices.append(exact.get(name, next(found, None)))
    return indices


def _folded(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).casefold()


class ScoredClassifier(nn.Module):
    """A model that scores given classes: its logits are calibrated, selected and merged.

    Each step is optional. They are applied in the order of the arguments.

    Args:
        model: images [B, 3, H, W] and queries -> logits [B, C].
        calibration: scales the logits of all C classes, in float32.
        columns: indices of the N logits to keep, in their new order.
        class_of_name: class of each of the N logits, from 0 to K - 1. A class scores the maximum
            over its names.
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

    def forward(self, images: Tensor, queries: Tensor | None = None) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, K]."""
        if self.word_vectors is not None:
            queries = self.word_vectors
        logits = self.model(images, queries)

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
    """Return a checkpoint's model, with its logits in the order of the data's classes.

    A zero-shot model follows the order of the word vectors that it is given: nothing is reordered.
    """
    check_queries(trained, current, path)
    columns = None
    if trained.queries is None and trained.names != current.names:
        log.info(f"{path} has the classes of the data in another order: its logits are reordered")
        column_of = {name: column for column, name in enumerate(trained.names)}
        columns = [column_of[name] for name in current.names]

    if columns is None and calibration is None:
        return model
    return ScoredClassifier(model, calibration=calibration, columns=columns)


def check_queries(trained: Classes, current: Classes, path: str | Path) -> None:
    """Raise a `CheckpointError` unless a checkpoint can score the classes of the data.

    A zero-shot model needs word vectors of the width and kind of its training, another model its
    own classes in whatever order.
    """
    if trained.queries is None:
        if set(trained.names) != set(current.names):
            raise _other_classes(trained, current, path)
        return

    width = trained.queries.shape[1]
    vectors = "none"
    if current.queries is not None:
        vectors = f"vectors of {current.queries.shape[1]} numbers"
    if vectors != f"vectors of {width} numbers":
        raise CheckpointError(
            f"{path} asks by word vectors of {width} numbers, the data has {vectors}: "
            f"choose the vectors of its training"
        )
    _check_same_kind(trained, current, path)


def _check_same_kind(trained: Classes, current: Classes, path: str | Path) -> None:
    """Compare the word vectors of classes that both know: prompts may change them a little."""
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


def _with_known(trained: Classes, current: Classes, path: str | Path) -> Classes:
    """Return the classes of a checkpoint; for a model of open_clip some of the data, encoded."""
    origin = trained.origin
    if trained.names or origin is None or not origin.is_encoder:
        return trained
    if current.origin is not None and current.origin.sha256 == origin.sha256:
        return trained

    from mldec.words.vectors import made_alike

    remedy = "put its weights there again"
    names = current.names[:COMPARED]
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

    raise _other_classes(trained, current, path)


def _other_classes(trained: Classes, current: Classes, path: str | Path) -> CheckpointError:
    """Return the error for a checkpoint whose classes are not those of the data."""
    # One of them may have the names of the other and more.
    pairs = enumerate(zip_longest(trained.names, current.names))
    index, (there, here) = next((number, pair) for number, pair in pairs if len(set(pair)) > 1)
    return CheckpointError(
        f"{path} has other classes than the data, {len(trained)} and {len(current)}: number "
        f"{index} is {there!r} there and {here!r} here; choose its classes, or pass --class-names"
    )


def can_make(trained: Classes) -> bool:
    """Whether the word vectors of other classes can be made as those of the training were."""
    return trained.origin is not None and trained.origin.makes_others
