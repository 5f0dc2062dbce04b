"""Evaluation of zero-shot models on arbitrary classes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mldec.checkpoint import Loaded
from mldec.checkpoint.classes import ScoredClassifier, can_encode, check_queries, same_names
from mldec.data.sampling import SampleRandom
from mldec.data.tasks import MakeEvaluator, warn_duplicate_names
from mldec.data.types import Classes, DataModule, ImageDataset, Split
from mldec.errors import CheckpointError, ConfigError, DataError, OptionError, log
from mldec.evaluation.options import EvalOptions
from mldec.evaluators import Evaluator
from mldec.evaluators.zero_shot import ZeroShotEvaluator
from mldec.files.text import read_lines
from mldec.names import check_names, format_list, unknown_class
from mldec.words.types import PREFIX, PROMPT
from mldec.words.vectors import encode_like_training, load_word_vectors, read_class_list

# Maximum number of training classes whose vectors in the file of --vectors are compared with those
# of the checkpoint.
_MAX_COMPARED = 16


def queries_for(
    names: Sequence[str],
    vectors: str | None,
    trained: Classes | None,
    *,
    option: str,
    keep: bool = True,
) -> Classes:
    """Return classes with word vectors for a zero-shot model.

    `vectors` is a file or text encoder, see `load_word_vectors`, or None for the text encoder of
    the training. `trained` are the classes of the training, if they are known. `option` names the
    option in messages. `keep` caches the word vectors on the disk.
    """
    origin = None if trained is None else trained.origin
    if vectors is not None:
        # Include a few training classes, to compare their vectors with the known ones.
        known = () if trained is None else trained.names
        others = [name for name in known if name not in names][:_MAX_COMPARED]
        templates: tuple[str, ...] = (PROMPT,)
        if origin is not None and origin.is_encoder:
            templates = origin.templates
        loaded = load_word_vectors(vectors, names, optional=others, templates=templates, keep=keep)
    elif origin is not None and origin.can_encode:
        remedy = f"pass its weights with --vectors {PREFIX}MODEL:FILE"
        loaded = encode_like_training(names, origin, where=option, remedy=remedy, keep=keep)
        log.info(f"word vectors of {len(names)} classes by {origin.source}")
    else:
        source = "unknown word vectors" if origin is None else origin.described()
        raise CheckpointError(
            f"{option}: the checkpoint was trained with {source}; pass vectors of these classes "
            f"with --vectors FILE"
        )

    if trained is not None:
        current = Classes(loaded.names, word_vectors=loaded.word_vectors, origin=loaded.origin)
        check_queries(trained, current, "the checkpoint")
    return Classes(
        tuple(names),
        exclusive=trained is not None and trained.exclusive,
        word_vectors=loaded.word_vectors[: len(names)],
        origin=loaded.origin,
    )


def read_classes(
    names: Sequence[str], vectors: str | None, trained: Classes | None, *, keep: bool = True
) -> Classes:
    """Return the classes of the option `classes`; see `queries_for`."""
    if trained is not None and trained.exclusive and len(names) < 2:
        fault = f"{names[0]!r}: the scores of this model are a softmax over the classes"
        raise OptionError("classes", f"{fault}; pass at least two classes")
    return queries_for(names, vectors, trained, option="--classes", keep=keep)


def with_classes(loaded: Loaded, names: Sequence[str], vectors: str | None) -> Loaded:
    """Return a zero-shot model with other classes; see `read_classes`."""
    if loaded.classes.word_vectors is None:
        raise CheckpointError("--classes: it requires a zero-shot model; leave it out")
    return replace(loaded, classes=read_classes(names, vectors, loaded.classes))


@dataclass(frozen=True)
class SelectedClasses:
    """A dataset with a selection of the target columns."""

    dataset: ImageDataset
    columns: Sequence[int]

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, H, W] and its target int8 [number of columns]."""
        image, target = self.dataset.load(index, rng)
        return image, target[list(self.columns)]

    def name(self, index: int) -> str:
        """Return the path of the image, or another name for messages."""
        return self.dataset.name(index)


def with_class_list(
    loaded: Loaded, data: DataModule, options: EvalOptions
) -> tuple[nn.Module, DataModule]:
    """Return a model for the K classes of --class-list, and the data with these classes.

    The score of a class is the maximum over its names. Without word vectors, at least one name of
    each class must be a class of the model.
    """
    assert options.class_list is not None
    path = Path(options.class_list)
    classes = data.val.classes
    if classes.exclusive:
        raise ConfigError("--class-list: it requires multi-label data; leave it out")

    groups = read_class_list(path)
    names = []
    columns = []
    for name, *_ in groups:
        if name not in classes.names:
            raise unknown_class(name, classes.names, str(path))
        names.append(name)
        columns.append(classes.names.index(name))
    omitted = [name for name in classes.names if name not in names]
    if omitted:
        log.info(f"{path}: {len(omitted):,} data classes are omitted: {format_list(omitted)}")

    split = Split(SelectedClasses(data.val.dataset, columns), Classes(tuple(names)))
    selected = replace(data, load_val=lambda: split)
    if loaded.classes.word_vectors is None:
        return _by_known_names(loaded, groups, options), selected

    names_of_groups = list(chain.from_iterable(groups))
    word_vectors = _word_vectors(names_of_groups, loaded.classes, classes, options)
    class_of_name = np.repeat(np.arange(len(groups)), list(map(len, groups))).tolist()
    model = ScoredClassifier(loaded.model, class_of_name=class_of_name, word_vectors=word_vectors)
    evaluator = _zero_shot_evaluator(loaded, data, groups, options)
    return model, replace(selected, make_evaluator=evaluator)


def _zero_shot_evaluator(
    loaded: Loaded, data: DataModule, groups: Sequence[Sequence[str]], options: EvalOptions
) -> MakeEvaluator:
    """Return the function that creates evaluators. Seen classes have a name of the training."""
    trained_names = _trained_names(loaded, options)
    unseen = []
    for number, group in enumerate(groups):
        if trained_names.isdisjoint(map(str.casefold, group)):
            unseen.append(number)
    num_names = sum(map(len, groups))
    log.info(
        f"{options.class_list}: {len(groups):,} classes by {num_names:,} names, "
        f"{len(groups) - len(unseen):,} seen and {len(unseen):,} unseen by {options.checkpoint}"
    )
    warn_duplicate_names(trained_names, [groups[number][0] for number in unseen])
    logit_threshold = data.evaluator().logit_threshold

    def evaluator(classes: Classes) -> Evaluator:
        zero_shot = ZeroShotEvaluator(len(classes), unseen=unseen, images="all")
        if logit_threshold is not None:
            zero_shot.logit_threshold = logit_threshold
        return zero_shot

    return evaluator


def _by_known_names(
    loaded: Loaded, groups: Sequence[Sequence[str]], options: EvalOptions
) -> nn.Module:
    for option, value in (("--vectors", options.vectors), ("--seen", options.seen)):
        if value is not None:
            raise ConfigError(f"{option} {value}: it requires a zero-shot model; leave it out")

    columns: list[int] = []
    class_of_name: list[int] = []
    missing = []
    for number, group in enumerate(groups):
        found = same_names(group, loaded.classes.names)
        known = [column for column in found if column is not None]
        columns += known
        class_of_name += [number] * len(known)
        if not known:
            missing.append(group[0])
    if missing:
        raise DataError(
            f"{options.class_list}: {len(missing):,} classes are unknown to {options.checkpoint}: "
            f"{format_list(missing)}; add a synonym, or leave them out"
        )
    log.info(f"{options.class_list}: {len(groups):,} classes by {len(columns):,} known names")
    return ScoredClassifier(loaded.model, columns=columns, class_of_name=class_of_name)


def _trained_names(loaded: Loaded, options: EvalOptions) -> set[str]:
    if options.seen is not None:
        names = check_names(read_lines(Path(options.seen)), options.seen)
        return {name.casefold() for name in names}

    # The authors' zero-shot files and open_clip models have no class names.
    if not loaded.classes.names:
        return set()
    if loaded.unseen is None:
        raise CheckpointError(
            f"--class-list: the training classes of {options.checkpoint} are unknown; pass "
            f"--seen FILE with one class name per line"
        )
    return {name.casefold() for name in set(loaded.classes.names) - set(loaded.unseen)}


def _word_vectors(
    names: list[str], trained: Classes, data: Classes, options: EvalOptions
) -> Tensor:
    vector_of: dict[str, Tensor] = {}
    for classes in (data, trained):
        if classes.word_vectors is not None:
            vector_of |= dict(zip(classes.names, classes.word_vectors, strict=True))
    missing = [name for name in names if name not in vector_of]

    if options.vectors is not None or (missing and can_encode(trained)):
        encoded = queries_for(names, options.vectors, trained, option="--class-list")
        assert encoded.word_vectors is not None
        return encoded.word_vectors

    if missing:
        raise DataError(
            f"{options.class_list}: {len(missing):,} names have no vector in checkpoint and data: "
            f"{format_list(missing)}; pass the word vectors of the training with --vectors"
        )
    word_vectors = torch.stack([vector_of[name] for name in names])
    check_queries(trained, Classes(tuple(names), word_vectors=word_vectors), options.checkpoint)
    return word_vectors
