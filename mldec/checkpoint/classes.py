"""Match the classes of a checkpoint and of the data: names, order and word vectors."""

import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from mldec.checkpoint.state import Calibration
from mldec.data.types import Classes
from mldec.errors import CheckpointError, ConfigError, DataError, log
from mldec.files.text import read_text
from mldec.names import disambiguate, format_list, indices_of, names_fault

# Threshold of the mean cosine similarity between the vectors of the same names. It is near 0 for
# different sources, and well above 0.5 for different prompts of one text encoder.
_SAME_KIND = 0.5
_ONE_PER_LINE = "write one class name per line, in the checkpoint's order"


def read_class_names(path: Path) -> tuple[str, ...]:
    """Read a file with a class name per line, in the checkpoint's order.

    Only the line ends are stripped, as in the output of `--write-classes`. Duplicates are numbered.
    """
    # A name may begin or end with a space, and must stay equal to the name in the data.
    lines = tuple(read_text(path).removesuffix("\n").split("\n"))
    names = disambiguate(lines)
    if names != lines:
        changed = [name for name in names if name not in lines]
        log.warning(f"--class-names {path}: duplicate names are numbered: {format_list(changed)}")
    fault = names_fault(names)
    if fault:
        raise DataError(f"--class-names {path}: {fault}; {_ONE_PER_LINE}")
    return names


def check_count(names: Sequence[str], num_classes: int) -> None:
    """Raise ConfigError unless the number of names is the number of classes."""
    if len(names) != num_classes:
        raise ConfigError(
            f"--class-names: the file has {len(names)} names for {num_classes} classes; "
            f"{_ONE_PER_LINE}"
        )


def same_names(
    names: Sequence[str], known: Sequence[str], synonyms: Sequence[Sequence[str]] = ()
) -> list[int | None]:
    """Return the index of each name among the known class names, or None.

    Equal names have precedence, then names that differ in case, spaces, hyphens or underscores,
    then synonyms: groups of names of the same class.
    """
    # The first known name counts if several are equal after the normalization.
    exact = indices_of(known)
    normalized: dict[str, int] = {}
    for index, name in enumerate(known):
        normalized.setdefault(_normalize(name), index)
    groups = []
    for group in synonyms:
        groups.append([_normalize(name) for name in group])

    indices = []
    for name in names:
        alternatives = [_normalize(name)]
        for group in groups:
            if alternatives[0] in group:
                alternatives += group
        first = next((normalized[other] for other in alternatives if other in normalized), None)
        indices.append(exact.get(name, first))
    return indices


def _normalize(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).casefold()


class ScoredClassifier(nn.Module):
    """A model [B, 3, H, W] -> [B, C] with calibrated, selected and merged logits, in this order.

    `calibration` scales the logits of all C classes in float32. `columns` are the indices of the N
    logits to keep, in their new order. `class_of_name` is the class of each of the N logits, from 0
    to K - 1; the logit of a class is the maximum over its names. `word_vectors` [C, D_w] replace
    the argument of `forward`. Each is optional.
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
        # Buffers move with the model. They are not stored, because they follow from the data.
        for name, indices in (("columns", columns), ("class_of_name", class_of_name)):
            buffer = None if indices is None else torch.tensor(indices)
            self.register_buffer(name, buffer, persistent=False)
        self.register_buffer("word_vectors", word_vectors, persistent=False)
        self.num_classes = None if class_of_name is None else max(class_of_name) + 1

    def forward(self, images: Tensor, word_vectors: Tensor | None = None) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, K]."""
        if self.word_vectors is not None:
            word_vectors = self.word_vectors
        logits = self.model(images, word_vectors)

        # Calibrate first, because the scales belong to the classes of the checkpoint.
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
    """Return a model with calibrated logits in the order of the data's classes.

    The logits of a zero-shot model have the order of its word vectors, and are not reordered.
    `trained` are the classes of the checkpoint and `current` the classes of the data. Raises
    CheckpointError if the model cannot score the classes of the data. `path` is for messages.
    """
    check_queries(trained, current, path)
    columns = None
    if trained.word_vectors is None and trained.names != current.names:
        log.info(f"{path}: the logits are reordered to the class order of the data")
        column_of = indices_of(trained.names)
        columns = [column_of[name] for name in current.names]

    if columns is None and calibration is None:
        return model
    return ScoredClassifier(model, calibration=calibration, columns=columns)


def check_queries(trained: Classes, current: Classes, path: str | Path) -> None:
    """Raise CheckpointError unless a checkpoint can score the classes of the data.

    A zero-shot model requires word vectors from the source of its training. Other models require
    their own classes, in any order. `path` is for messages.
    """
    # The order may differ, because `scoring` reorders the logits.
    if trained.word_vectors is None:
        if set(trained.names) != set(current.names):
            raise _other_classes(trained, current, path)
        return

    origin = trained.origin
    remedy = "use the word vectors of its training"
    if origin is not None:
        remedy += f", {origin.described()}"
    width = trained.word_vectors.shape[1]
    vectors = current.word_vectors
    if vectors is None or vectors.shape[1] != width:
        found = "none" if vectors is None else f"{vectors.shape[1]}-dim word vectors"
        raise CheckpointError(
            f"{path} expects {width}-dim word vectors, the data provides {found}; {remedy}"
        )

    # open_clip models have no class names to compare, but a known text encoder.
    if origin is not None and not trained.names:
        if current.origin is None or current.origin.sha256 != origin.sha256:
            raise CheckpointError(f"{path} was trained with other word vectors; {remedy}")
        return

    # Compare the word vectors of common classes. Other prompts of a text encoder are allowed.
    row_of = indices_of(current.names)
    shared = [row for row, name in enumerate(trained.names) if name in row_of]
    if not shared:
        return
    before = trained.word_vectors[shared].float()
    now = vectors[[row_of[trained.names[row]] for row in shared]].float()
    cosine = cosine_similarity(before, now).mean().item()
    if cosine < _SAME_KIND:
        raise CheckpointError(
            f"{path} was trained with other word vectors (mean cosine similarity {cosine:.2f} "
            f"over {len(shared)} common classes, such as {trained.names[shared[0]]!r}); {remedy}"
        )


def check_classes(trained: Classes, current: Classes, path: str | Path) -> None:
    """Raise CheckpointError unless checkpoint and data have the same classes.

    Names, order and word vectors must be equal. `path` is for messages.
    """
    if trained.names != current.names:
        raise _other_classes(trained, current, path)

    before = trained.word_vectors
    now = current.word_vectors
    if before is None or now is None:
        return
    # Word vectors of a text encoder differ between machines by rounding errors.
    if before.shape != now.shape or not torch.allclose(before, now, rtol=1e-3, atol=1e-5):
        raise CheckpointError(f"{path} was trained with other word vectors; restore data.vectors")


def _other_classes(trained: Classes, current: Classes, path: str | Path) -> CheckpointError:
    # One of the lists may be the beginning of the other.
    pairs = enumerate(zip_longest(trained.names, current.names))
    index, (saved, now) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
    return CheckpointError(
        f"{path} has {len(trained)} classes and the data {len(current)}: class {index} is "
        f"{saved!r} in the checkpoint and {now!r} in the data; use the data of its training, or "
        f"pass --class-names"
    )


def can_encode(trained: Classes) -> bool:
    """Return True if the source of the word vectors can encode other classes."""
    return trained.origin is not None and trained.origin.can_encode
