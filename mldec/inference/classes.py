"""Other classes for a zero-shot model: names, and where their word vectors come from."""

import argparse
import logging
from collections import Counter
from dataclasses import replace

from mldec.checkpoint import Loaded, check_queries
from mldec.clip import PREFIX
from mldec.clip.prompts import DEFAULT
from mldec.data.base import Classes
from mldec.data.vector_origin import VectorOrigin
from mldec.data.zero_shot.word_vectors import WordVectors, made_alike, word_vectors
from mldec.errors import CheckpointError, ConfigError

log = logging.getLogger("mldec")

COMPARED = 16  # classes of the training whose word vectors are compared with those of a source


def check_class_options(args: argparse.Namespace) -> None:
    """Raise a `ConfigError` if the options that choose or name classes do not fit each other."""
    if args.vectors is not None and args.classes is None:
        raise ConfigError(
            f"--vectors {args.vectors} has no effect without --classes: name the classes too"
        )
    if args.classes is not None:
        class_names(args.classes)
    if args.classes is not None and args.class_names is not None:
        raise ConfigError(
            "--classes and --class-names exclude each other: other classes, or other names for "
            "those of the checkpoint"
        )


def class_names(text: str) -> tuple[str, ...]:
    """Return the names of classes in a text with commas between them.

    Raises:
        ConfigError: if there is none, or one is there twice.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ConfigError(f"--classes {text!r} names no class: pass names with commas between them")

    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise ConfigError(f"--classes names {name!r} twice: name each class once")
    return names


def read_classes(
    text: str, vectors: str | None, trained: Classes | None, *, keep: bool = True
) -> Classes:
    """Return classes that a zero-shot model is to score.

    Args:
        text: their names, see `class_names`.
        vectors: a file of their word vectors, or a text encoder, see `word_vectors`; of the kind
            that the model was trained with. None makes them as those of the training were made.
        trained: the classes of the training, with their word vectors; None if these are not known.
        keep: see `word_vectors`.

    Raises:
        ConfigError: if too few classes are named, or the text encoder cannot be had.
        CheckpointError: if the checkpoint does not say how word vectors are made, or those of the
            source are of another kind than those of the training.
        DataError: if a name has no vector, or the file cannot be read.
    """
    names = class_names(text)
    if trained is not None and trained.exclusive and len(names) < 2:
        raise ConfigError(
            f"--classes names {names[0]!r} alone, and the scores of this model are shares of the "
            f"classes: name at least two"
        )
    origin = None if trained is None else trained.origin
    if vectors is None:
        made = _as_before(names, origin, keep=keep)
    else:
        # A few classes of the training, whose vectors are known, are made too.
        known = () if trained is None else trained.names
        others = [name for name in known if name not in names][:COMPARED]
        templates = origin.templates if origin is not None and origin.is_encoder else (DEFAULT,)
        made = word_vectors(vectors, names, optional=others, templates=templates, keep=keep)

    if trained is not None:
        current = Classes(made.names, queries=made.queries, origin=made.origin)
        check_queries(trained, current, "the checkpoint")
    return Classes(
        names,
        exclusive=trained is not None and trained.exclusive,
        queries=made.queries[: len(names)],
        origin=made.origin,
    )


def can_make(trained: Classes) -> bool:
    """Tell whether a checkpoint says which text encoder makes the word vectors of other classes."""
    return trained.origin is not None and trained.origin.is_encoder


def _as_before(names: tuple[str, ...], origin: VectorOrigin | None, *, keep: bool) -> WordVectors:
    """Make word vectors as those of the training were made."""
    if origin is None:
        raise CheckpointError(
            "--classes: the checkpoint does not say how its word vectors were made; pass --vectors "
            f"with a file of the kind that it was trained with, or {PREFIX}MODEL:WEIGHTS"
        )
    if not origin.is_encoder:
        raise CheckpointError(
            f"--classes: the checkpoint was trained with the word vectors of {origin.described()}; "
            f"pass this file with --vectors FILE"
        )

    remedy = f"pass its weights with --vectors {PREFIX}MODEL:FILE"
    made = made_alike(names, origin, where="--classes", remedy=remedy, keep=keep)

    log.info("word vectors of %d classes by %s", len(names), origin.source)
    return made


def with_classes(loaded: Loaded, names: str, vectors: str | None) -> Loaded:
    """Return a zero-shot model that scores other classes; see `read_classes`.

    Args:
        loaded: from `checkpoint.load_model`.
        names: of the classes, separated by commas.
        vectors: see `read_classes`.

    Raises:
        CheckpointError: if the checkpoint is not a zero-shot one, or its word vectors are of
            another kind.
        UserError: if the classes cannot be read.
    """
    if loaded.classes.queries is None:
        raise CheckpointError(
            "--classes: the checkpoint knows its own classes only, "
            "it was not trained by word vectors"
        )
    return replace(loaded, classes=read_classes(names, vectors, loaded.classes))
