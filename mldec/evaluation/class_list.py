"""Evaluation of zero-shot models on arbitrary classes."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from mldec.checkpoint import Loaded
from mldec.checkpoint.classes import (
    COMPARED,
    ScoredClassifier,
    can_make,
    check_queries,
    same_names,
)
from mldec.data.sampling import SampleRandom
from mldec.data.tasks import warn_duplicate_names
from mldec.data.types import Classes, DataModule, ImageDataset, Split
from mldec.errors import CheckpointError, ConfigError, DataError
from mldec.evaluation.options import EvalOptions
from mldec.evaluators import Evaluator
from mldec.evaluators.zero_shot import ZeroShotEvaluator
from mldec.files.text import read_lines
from mldec.names import check_names, format_list
from mldec.words.types import PREFIX, PROMPT, VectorOrigin, WordVectors
from mldec.words.vectors import ClassList, load_word_vectors, made_alike, read_class_list

log = logging.getLogger("mldec")

_SEE = "see docs/zero_shot.md, section Any class list"


def queries_for(
    names: Sequence[str],
    vectors: str | None,
    trained: Classes | None,
    *,
    option: str,
    keep: bool = True,
) -> Classes:
    """Return classes with word vectors for a zero-shot model.

    Args:
        names: Unique class names.
        vectors: File or text encoder, see `word_vectors`. None: the text encoder of the training.
        trained: Classes of the training, or None if they are unknown.
        option: Command-line option of the names, for messages.
        keep: Whether to cache the word vectors on the disk.

    Raises:
        UserError: If the word vectors cannot be read, computed or used by the model.
    """
    origin = None if trained is None else trained.origin
    if vectors is None:
        made = _encode_as_in_training(names, origin, option, keep=keep)
    else:
        # Include a few training classes, to compare their vectors with the known ones.
        known = () if trained is None else trained.names
        others = [name for name in known if name not in names][:COMPARED]
        templates: tuple[str, ...] = (PROMPT,)
        if origin is not None and origin.is_encoder:
            templates = origin.templates
        made = load_word_vectors(vectors, names, optional=others, templates=templates, keep=keep)

    if trained is not None:
        current = Classes(made.names, word_vectors=made.word_vectors, origin=made.origin)
        check_queries(trained, current, "the checkpoint")
    return Classes(
        tuple(names),
        exclusive=trained is not None and trained.exclusive,
        word_vectors=made.word_vectors[: len(names)],
        origin=made.origin,
    )


def _encode_as_in_training(
    names: Sequence[str], origin: VectorOrigin | None, option: str, *, keep: bool
) -> WordVectors:
    """Compute word vectors with the text encoder of the training."""
    if origin is None or not origin.makes_others:
        source = "the checkpoint does not say how its word vectors were made"
        if origin is not None:
            source = f"the checkpoint was trained with the word vectors of {origin.described()}"
        raise CheckpointError(f"{option}: {source}; pass vectors of that kind with --vectors FILE")

    remedy = f"pass its weights with --vectors {PREFIX}MODEL:FILE"
    made = made_alike(names, origin, where=option, remedy=remedy, keep=keep)

    log.info("word vectors of %d classes by %s", len(names), origin.source)
    return made


def check_class_options(classes: str | None, class_names_file: str | None) -> None:
    """Raise ConfigError if --classes is invalid, or combined with --class-names."""
    if classes is None:
        return
    class_names(classes)
    if class_names_file is not None:
        raise ConfigError(
            "--classes and --class-names exclude each other: other classes, or other names for "
            "those of the checkpoint"
        )


def class_names(text: str) -> tuple[str, ...]:
    """Parse comma-separated class names.

    Raises:
        ConfigError: If the text contains no name or a duplicate.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ConfigError(f"--classes {text!r} names no class: pass names with commas between them")

    for name in set(names):
        if names.count(name) > 1:
            raise ConfigError(f"--classes names {name!r} twice: name each class once")
    return names


def read_classes(
    text: str, vectors: str | None, trained: Classes | None, *, keep: bool = True
) -> Classes:
    """Return the classes of comma-separated names; see `queries_for`."""
    names = class_names(text)
    if trained is not None and trained.exclusive and len(names) < 2:
        raise ConfigError(
            f"--classes names {names[0]!r} alone, and the scores of this model are shares of the "
            f"classes: name at least two"
        )
    return queries_for(names, vectors, trained, option="--classes", keep=keep)


def with_classes(loaded: Loaded, names: str, vectors: str | None) -> Loaded:
    """Return a zero-shot model with other classes; see `read_classes`."""
    if loaded.classes.word_vectors is None:
        raise CheckpointError(
            "--classes: the checkpoint knows its own classes only, "
            "it was not trained by word vectors"
        )
    return replace(loaded, classes=read_classes(names, vectors, loaded.classes))


class SelectedClasses:
    """A dataset with a selection of the target columns."""

    def __init__(self, dataset: ImageDataset, columns: Sequence[int]) -> None:
        self.dataset = dataset
        self.columns = torch.tensor(columns)

    def __len__(self) -> int:
        return len(self.dataset)

    def load(self, index: int, rng: SampleRandom) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, H, W] and its target int8 [number of columns]."""
        image, target = self.dataset.load(index, rng)
        return image, target[self.columns]

    def name(self, index: int) -> str:
        """Return the path of the image, or another name for messages."""
        return self.dataset.name(index)


def with_class_list(
    loaded: Loaded, data: DataModule, options: EvalOptions
) -> tuple[nn.Module, DataModule]:
    """Return a model for the K classes of --class-list, and the data with these classes.

    A model without word vectors must know one name of each class. For a zero-shot model, a class is
    seen if the checkpoint was trained with any of its names.

    Args:
        loaded: Model and metadata of the checkpoint.
        data: Multi-label data.
        options: Options with a `class_list`.

    Raises:
        UserError: If the class list does not fit the model or the data.
    """
    path = options.checkpoint
    classes = data.val.classes
    if classes.exclusive:
        raise ConfigError(
            "--class-list: an image of this data has one label, and the metrics of seen and unseen "
            "classes are those of several; leave it out"
        )

    assert options.class_list is not None
    class_list = read_class_list(Path(options.class_list))
    columns = class_list.columns(classes.names)
    own_names = tuple(names[0] for names in class_list.classes)
    left_out = [name for name in classes.names if name not in own_names]
    if left_out:
        log.info(
            f"{class_list.path} leaves out {len(left_out):,} of {len(classes):,} classes of the "
            f"data: {format_list(left_out)}"
        )
    split = Split(SelectedClasses(data.val.dataset, columns), Classes(own_names))
    if loaded.classes.word_vectors is None:
        return _by_known_names(loaded, class_list, options), replace(data, load_val=lambda: split)

    word_vectors = _queries(class_list, options.vectors, loaded.classes, classes, path)
    trained_names = _trained_names(loaded, options)
    unseen = []
    for index, names in enumerate(class_list.classes):
        if trained_names.isdisjoint(name.casefold() for name in names):
            unseen.append(index)

    seen = len(class_list) - len(unseen)
    log.info(
        f"{class_list.path}: {len(class_list):,} classes by {len(class_list.names):,} names, "
        f"{seen:,} seen and {len(unseen):,} unseen by {path}"
    )
    warn_duplicate_names(trained_names, [own_names[index] for index in unseen])

    own_evaluator = data.evaluator()

    def evaluator(classes: Classes) -> Evaluator:
        zero_shot = ZeroShotEvaluator(len(classes), unseen=unseen, images="all")
        if own_evaluator.logit_threshold is not None:
            zero_shot.logit_threshold = own_evaluator.logit_threshold
        return zero_shot

    model = ScoredClassifier(
        loaded.model, class_of_name=class_list.class_of_name, word_vectors=word_vectors
    )
    return model, replace(data, load_val=lambda: split, make_evaluator=evaluator)


def _by_known_names(loaded: Loaded, class_list: ClassList, options: EvalOptions) -> nn.Module:
    """Return a model without word vectors for the classes of a list, by known names."""
    for option, value in (("--vectors", options.vectors), ("--seen", options.seen)):
        if value is not None:
            raise ConfigError(
                f"{option} {value}: {options.checkpoint} knows its own classes only, it was not "
                f"trained by word vectors; leave it out"
            )

    found = same_names(class_list.names, loaded.classes.names)
    own_columns = []
    class_of_name = []
    for column, number in zip(found, class_list.class_of_name, strict=True):
        if column is not None:
            own_columns.append(column)
            class_of_name.append(number)
    missing = [names[0] for n, names in enumerate(class_list.classes) if n not in class_of_name]
    if missing:
        raise DataError(
            f"{class_list.path}: {options.checkpoint} knows no name of {len(missing):,} of "
            f"{len(class_list):,} classes: {format_list(missing)}; add a synonym, or leave them out"
        )
    log.info(f"{class_list.path}: {len(class_list):,} classes by {len(own_columns):,} known names")
    return ScoredClassifier(loaded.model, columns=own_columns, class_of_name=class_of_name)


def _trained_names(loaded: Loaded, options: EvalOptions) -> set[str]:
    """Return the case-folded names of the training classes."""
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


def _queries(
    class_list: ClassList, vectors: str | None, trained: Classes, data: Classes, path: str
) -> Tensor:
    """Return the word vectors [N, D_w] of all names."""
    vector_of: dict[str, Tensor] = {}
    for classes in (data, trained):
        if classes.word_vectors is not None:
            vector_of |= dict(zip(classes.names, classes.word_vectors, strict=True))
    missing = [name for name in class_list.names if name not in vector_of]

    if vectors is not None or (missing and can_make(trained)):
        made = queries_for(class_list.names, vectors, trained, option="--class-list")
        assert made.word_vectors is not None
        return made.word_vectors

    if missing:
        raise DataError(
            f"{class_list.path}: in the checkpoint and the data, {len(missing):,} of "
            f"{len(class_list.names):,} names have no vector: {format_list(missing)}; "
            f"pass --vectors, the word vectors of the training, {_SEE}"
        )
    word_vectors = torch.stack([vector_of[name] for name in class_list.names])
    check_queries(trained, Classes(class_list.names, word_vectors=word_vectors), path)
    return word_vectors
