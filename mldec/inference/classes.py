"""Other classes for a zero-shot model: names, and where their word vectors come from."""

import argparse
from collections import Counter
from dataclasses import replace

from mldec.checkpoint import Loaded
from mldec.checkpoint.classes import queries_for
from mldec.data.base import Classes
from mldec.errors import CheckpointError, ConfigError


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
    return queries_for(names, vectors, trained, option="--classes", keep=keep)


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
