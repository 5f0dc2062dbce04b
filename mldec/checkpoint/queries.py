"""Word vectors of any class names, of the kind that a checkpoint was trained with."""

import logging
from collections.abc import Sequence

from mldec.checkpoint.classes import check_queries
from mldec.clip import PREFIX
from mldec.clip.prompts import DEFAULT
from mldec.data.base import Classes
from mldec.data.vector_origin import VectorOrigin
from mldec.data.zero_shot.word_vectors import WordVectors, made_alike, word_vectors
from mldec.errors import CheckpointError

log = logging.getLogger("mldec")

COMPARED = 16  # classes of the training whose word vectors are compared with those of a source


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

    Raises:
        ConfigError: if the text encoder cannot be had.
        CheckpointError: if the checkpoint does not say how word vectors are made, or those of the
            source are of another kind than those of the training.
        DataError: if a name has no vector, or the file cannot be read.
    """
    origin = None if trained is None else trained.origin
    if vectors is None:
        made = _as_before(names, origin, option, keep=keep)
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
