"""Other classes for a zero-shot model: names, and a file with their word vectors."""

import argparse
from dataclasses import replace

from mldec.checkpoint import Loaded, check_queries
from mldec.data.base import Classes
from mldec.data.zero_shot.vectors import read_vectors
from mldec.errors import CheckpointError, ConfigError


def check_class_options(args: argparse.Namespace) -> None:
    """Raise a `ConfigError` if the options that choose or name classes do not fit each other."""
    if (args.classes is None) != (args.vectors is None):
        raise ConfigError(
            "--classes and --vectors need each other: names, and a file with their word vectors"
        )
    if args.classes is not None and args.class_names is not None:
        raise ConfigError(
            "--classes and --class-names exclude each other: other classes, or other names for "
            "those of the checkpoint"
        )


def read_classes(names: str, vectors: str) -> Classes:
    """Return classes that a zero-shot model is to score.

    Args:
        names: of the classes, separated by commas.
        vectors: a file of their word vectors, of the kind that the model was trained with; see
            `read_vectors`.

    Raises:
        ConfigError: if no class is named.
        DataError: if a name occurs twice or has no vector, or the file cannot be read.
    """
    class_names = tuple(name.strip() for name in names.split(",") if name.strip())
    if not class_names:
        raise ConfigError(
            f"--classes {names!r} names no class: pass names with commas between them"
        )
    return Classes(class_names, queries=read_vectors(vectors, class_names))


def with_classes(loaded: Loaded, names: str, vectors: str) -> Loaded:
    """Return a zero-shot model that scores other classes; see `read_classes`.

    Args:
        loaded: from `checkpoint.load_model`.
        names: of the classes, separated by commas.
        vectors: a file of their word vectors.

    Raises:
        CheckpointError: if the checkpoint is not a zero-shot one, or its word vectors have another
            width.
        UserError: if the classes cannot be read.
    """
    if loaded.classes.queries is None:
        raise CheckpointError(
            "--classes: the checkpoint knows its own classes only, "
            "it was not trained by word vectors"
        )

    classes = read_classes(names, vectors)
    check_queries(loaded.classes, classes, "the checkpoint")
    return replace(loaded, classes=classes)
