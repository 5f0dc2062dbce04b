"""Evaluate a zero-shot model on any list of classes, each of which may have several names."""

import argparse
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from mldec.checkpoint import Loaded, check_queries
from mldec.checkpoint.classes import can_make, queries_for
from mldec.data.base import Classes, DataModule, ImageDataset, Split
from mldec.data.names import check_names
from mldec.data.randomness import SampleRandom
from mldec.data.zero_shot.class_list import ClassList, read_class_list
from mldec.data.zero_shot.task import warn_of_twins
from mldec.data.zero_shot.vector_text import lacking, listed
from mldec.errors import CheckpointError, ConfigError, DataError
from mldec.evaluators import Evaluator, Thresholded
from mldec.evaluators.zero_shot import ZeroShotEvaluator
from mldec.files.text import read_lines

log = logging.getLogger("mldec")

_SEE = "see docs/zero_shot.md, section Any class list"


class BestName(nn.Module):
    """Score each class by the best of its names.

    Args:
        model: images [B, 3, H, W] and word queries [N, D_w] -> logits [B, N].
        vectors: of the N names, [N, D_w].
        class_of_name: the class of each name, from 0 to K - 1; every class has one.
    """

    vectors: Tensor
    class_of_name: Tensor

    def __init__(self, model: nn.Module, vectors: Tensor, class_of_name: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self.num_classes = max(class_of_name) + 1
        self.register_buffer("vectors", vectors, persistent=False)
        self.register_buffer("class_of_name", torch.tensor(class_of_name), persistent=False)

    def forward(self, images: Tensor, queries: Tensor | None = None) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, K]; its own vectors replace the queries."""
        logits = self.model(images, self.vectors)
        best = logits.new_full((len(logits), self.num_classes), -torch.inf)
        return best.scatter_reduce(1, self.class_of_name.expand_as(logits), logits, "amax")


class SomeClasses:
    """A dataset with the targets of some of its classes; see `ImageDataset`.

    Args:
        dataset: its targets are [K], of 1, 0 and -1.
        columns: of the wanted classes, in the wanted order.
    """

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
        """Describe the image in messages: its path, if it has one."""
        return self.dataset.name(index)


@dataclass(frozen=True)
class Vocabulary:
    """The classes to evaluate, and what the command line says of them.

    Attributes:
        class_list: the K classes and their N names.
        vectors: source of the names' word vectors, see `word_vectors`; None for those of the data
            and of the checkpoint, by name, or by the text encoder of the training.
        seen: names of the classes of the training; None for what the checkpoint says.
    """

    class_list: ClassList
    vectors: str | None = None
    seen: tuple[str, ...] | None = None


def read_vocabulary(args: argparse.Namespace) -> Vocabulary | None:
    """Return what --class-list, --vectors and --seen stand for; None for the classes of the data.

    Raises:
        ConfigError: for --vectors or --seen without --class-list.
        DataError: if a file cannot be read, or has a fault.
    """
    if args.class_list is None:
        for option, value in (("--vectors", args.vectors), ("--seen", args.seen)):
            if value is not None:
                raise ConfigError(f"{option} has no effect without --class-list: leave it out")
        return None

    seen = None
    if args.seen is not None:
        seen = check_names(read_lines(Path(args.seen), _SEE), args.seen, _SEE)
    return Vocabulary(read_class_list(Path(args.class_list)), args.vectors, seen)


def open_vocabulary(
    loaded: Loaded, data: DataModule, vocabulary: Vocabulary, path: str
) -> tuple[nn.Module, DataModule]:
    """Return a model that scores a class list, and the data with these classes.

    A class counts as seen if the checkpoint was trained on it, under any of its names. The metrics
    are those of `ZeroShotEvaluator` over all images of the data.

    Args:
        loaded: the checkpoint, of a zero-shot model.
        data: whose validation images have several labels each; its other classes are left out.
        vocabulary: the K classes and their N names.
        path: of the checkpoint, for messages.

    Returns:
        The model, images -> logits [B, K], and the data.

    Raises:
        CheckpointError: if the model takes no word vectors or has others, or the classes of its
            training are not known.
        ConfigError: if an image of the data has one label.
        DataError: if the data does not have a class, or a name has no vector.
    """
    if loaded.classes.queries is None:
        raise CheckpointError(
            f"--class-list: {path} knows its own classes only, it was not trained by word vectors; "
            f"leave it out"
        )
    class_list = vocabulary.class_list
    trained_names = _trained_names(loaded, path, vocabulary.seen)

    classes = data.val.classes
    if classes.exclusive:
        raise ConfigError(
            "--class-list: an image of this data has one label, and the metrics of seen and unseen "
            "classes are those of several; leave it out"
        )
    columns = class_list.columns(classes.names)
    queries = _queries(class_list, vocabulary.vectors, loaded.classes, classes, path)

    unseen = _unseen(class_list, trained_names)
    _report(class_list, classes, trained_names, unseen, path)

    names = tuple(classes.names[column] for column in columns)
    split = Split(SomeClasses(data.val.dataset, columns), Classes(names))
    own_evaluator = data.evaluator()

    def evaluator(classes: Classes) -> Evaluator:
        zero_shot = ZeroShotEvaluator(len(classes), unseen=unseen, images="all")
        if isinstance(own_evaluator, Thresholded):
            zero_shot.logit_threshold = own_evaluator.logit_threshold
        return zero_shot

    model = BestName(loaded.model, queries, class_list.class_of_name)
    return model, replace(data, load_val=lambda: split, make_evaluator=evaluator)


def _trained_names(loaded: Loaded, path: str, seen: Sequence[str] | None) -> set[str]:
    """Return the names of the classes of a training, without differences of case."""
    if seen is not None:
        return {name.casefold() for name in seen}

    # Neither the authors' files nor a tagger without a training name any class.
    if not loaded.classes.names:
        return set()
    if loaded.unseen is None:
        raise CheckpointError(
            f"--class-list: {path} is of an earlier version, which did not save the classes of the "
            f"training: pass --seen FILE, with one of their names per line"
        )
    return {name.casefold() for name in set(loaded.classes.names) - set(loaded.unseen)}


def _queries(
    class_list: ClassList, vectors: str | None, trained: Classes, data: Classes, path: str
) -> Tensor:
    """Return the word vectors of all names, [N, D_w], of the kind of the training.

    Without a source they are those of the checkpoint and of the data, by name, or else made by the
    text encoder of the training.

    Raises:
        ConfigError: if the text encoder cannot be had.
        CheckpointError: if they are of another kind.
        DataError: if a name has no vector.
    """
    vector_of: dict[str, Tensor] = {}
    for classes in (data, trained):
        if classes.queries is not None:
            vector_of |= dict(zip(classes.names, classes.queries, strict=True))
    missing = [name for name in class_list.names if name not in vector_of]

    if vectors is not None or (missing and can_make(trained)):
        made = queries_for(class_list.names, vectors, trained, option="--class-list")
        assert made.queries is not None
        return made.queries

    if missing:
        raise DataError(
            f"{class_list.path}: in the checkpoint and the data, "
            f"{lacking(missing, len(class_list.names))}; "
            f"pass --vectors, the word vectors of the training, {_SEE}"
        )
    queries = torch.stack([vector_of[name] for name in class_list.names])
    check_queries(trained, Classes(class_list.names, queries=queries), path)
    return queries


def _unseen(class_list: ClassList, trained_names: set[str]) -> list[int]:
    """Return the indices of the classes of which no name was trained."""
    return [
        index
        for index, names in enumerate(class_list.classes)
        if not any(name.casefold() in trained_names for name in names)
    ]


def _report(
    class_list: ClassList,
    classes: Classes,
    trained_names: Collection[str],
    unseen: Sequence[int],
    path: str,
) -> None:
    """Log which classes are evaluated, and which numbers there cannot be.

    Args:
        class_list: the classes.
        classes: those of the data.
        trained_names: see `_trained_names`.
        unseen: see `_unseen`.
        path: of the checkpoint.
    """
    own_names = [names[0] for names in class_list.classes]
    left_out = [name for name in classes.names if name not in set(own_names)]
    if left_out:
        log.info(
            f"{class_list.path} leaves out {len(left_out):,} of {len(classes):,} classes of the "
            f"data: {listed(left_out)}"
        )

    seen = len(class_list) - len(unseen)
    log.info(
        f"{class_list.path}: {len(class_list):,} classes by {len(class_list.names):,} names, "
        f"{seen:,} seen and {len(unseen):,} unseen by {path}"
    )
    warn_of_twins(trained_names, [own_names[index] for index in unseen])

    # The evaluator leaves these numbers out.
    if not unseen:
        log.warning("no class is unseen: there is no metric zsl, zsl_all and harmonic_mAP")
    if not seen:
        log.warning("no class is seen: there is no seen_mAP and no harmonic_mAP")
