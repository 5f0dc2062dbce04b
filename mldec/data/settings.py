"""Settings shared by all readers, and the conversion of a source to a data module."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from mldec.data.labels import (
    Labels,
    fixed_per_class,
    listed_positives,
    random_drop,
    random_positives,
)
from mldec.data.sampling import SHUFFLED, Sampling
from mldec.data.splits import Grouping, fold_numbers, parse_fold
from mldec.data.tasks import MakeEvaluator, ZeroShot
from mldec.data.transforms import TrainTransform, View
from mldec.data.types import Classes, DataModule, ImageFiles, Split, StoredImages
from mldec.errors import ConfigError, DataError, documented
from mldec.files.text import read_lines
from mldec.words.types import PREFIX, PROMPT, VectorOrigin, WordVectors

log = logging.getLogger("mldec")

# Settings without random augmentation: a training image is the same in every epoch.
NO_AUGMENTATION = {"augment": "none", "cutout": 0.0, "flip": False, "crop": 1.0, "erase": 0.0}

MAX_CELLS = 10**9  # largest number of labels that become a matrix, of one byte each

WORDS_DOCS = "DATASETS.md, section Word vectors"


@dataclass(frozen=True, kw_only=True)
class FileSettings(Grouping):
    """File settings of a `data` node, shared by all readers of image files."""

    # Handling of unreadable images. "skip" omits, logs and counts them.
    bad_images: Literal["stop", "skip"] = "stop"

    # Handling of missing files. "unchecked" saves a minute for millions of files.
    absent: Literal["stop", "skip", "unchecked"] = "stop"

    cache_dir: str | None = None  # cache folder; None: $XDG_CACHE_HOME/mldec or ~/.cache/mldec


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Settings of a `data` node that simulate missing training labels.

    They are shared by all readers of multi-label data. Set at most one of the first three and of
    `drop_labels` and `keep_per_class`. The first three select positives, see `random_positives` and
    `listed_positives`. The other two set labels to -1 (not annotated), which not every loss
    accepts, see `random_drop` and `fixed_per_class`.
    """

    single_positive: int | None = None  # seed; one random positive per image is observed
    observed: float | None = None  # fraction of observed positives, in (0, 1]
    observed_list: str | None = None  # file that lists the observed positives

    observed_seed: int = 0  # seed of `observed`

    # Value of all other labels: 0, or -1 (not annotated).
    unobserved: Literal["negative", "unknown"] = "negative"

    drop_labels: float = 0.0  # probability that a label becomes -1, in [0, 1)
    # Number of positives and negatives of each class that are kept. All other labels become -1.
    keep_per_class: int | None = None
    labels_seed: int = 0  # seed of `drop_labels` and `keep_per_class`, 0 or more

    def __post_init__(self) -> None:
        if not 0 <= self.drop_labels < 1:
            raise ValueError(f"drop_labels is {self.drop_labels}; it must be in [0, 1)")
        if self.keep_per_class is not None and self.keep_per_class < 1:
            raise ValueError(
                f"keep_per_class is {self.keep_per_class}; it must be at least 1, or null for all "
                f"labels"
            )
        if self.observed is not None and not 0 < self.observed <= 1:
            raise ValueError(f"observed is {self.observed}; it must be in (0, 1]")
        if self.single_positive is not None and self.single_positive < 0:
            raise ValueError(f"single_positive is {self.single_positive}; a seed is 0 or more")
        if len(self.given) > 1:
            raise ValueError(f"{self.given[0]} and {self.given[1]} exclude each other; remove one")

    @property
    def given(self) -> list[str]:
        """Names of the settings that select the observed labels."""
        names = ("single_positive", "observed", "observed_list", "keep_per_class")
        given = [name for name in names if getattr(self, name) is not None]
        if self.drop_labels:
            given.append("drop_labels")
        return given

    def of_images(self, images: StoredImages, what: str) -> StoredImages:
        """Return training images with their observed labels only. `what` names them in the log."""
        labels = images.labels
        if self.keep_per_class is not None or self.drop_labels:
            return replace(images, labels=self._partly_annotated(labels, what))
        if self.observed_list is not None:
            files = [images.name(index) for index in range(len(images))]
            chosen = listed_positives(labels, files, Path(self.observed_list).expanduser())
        elif self.observed is not None:
            chosen = random_positives(labels, self.observed_seed, self.observed)
        elif self.single_positive is not None:
            chosen = random_positives(labels, self.single_positive)
        else:
            return images

        counts = f"{chosen.sum():,} of {labels.counts().sum():,} positives"
        log.info(f"{what}: {counts} are observed, all other labels count as {self.unobserved}")
        default = 0 if self.unobserved == "negative" else -1
        return replace(images, labels=replace(labels.select_entries(chosen), default=default))

    def _partly_annotated(self, labels: Labels, what: str) -> Labels:
        """Return the labels with -1 where `drop_labels` or `keep_per_class` removes a label."""
        # Each pair of image and class has a random number, so the labels become a matrix.
        cells = len(labels) * labels.num_classes
        if cells > MAX_CELLS:
            raise ConfigError(
                f"data.{self.given[0]}: {len(labels):,} images and {labels.num_classes:,} classes "
                f"have more than {MAX_CELLS:,} labels; pass data.observed instead"
            )
        if self.keep_per_class is not None:
            kept = fixed_per_class(labels, self.keep_per_class, self.labels_seed)
        else:
            kept = random_drop(labels, self.drop_labels, self.labels_seed)
        annotated = kept.all_counts(1).sum() + kept.all_counts(0).sum()
        share = f"{annotated / cells:.2%} of the labels are kept"
        log.info(f"{what}: {share}, the others count as not annotated")
        return kept


ALL_OBSERVED = Observed()


@dataclass(frozen=True, kw_only=True)
class VectorSettings:
    """Word vector settings of a zero-shot `data` node."""

    # File relative to `root`, or a text encoder: clip:MODEL:WEIGHTS. None: no word vectors.
    vectors: str | None = "wordvec_array.pth"

    prompts: str = PROMPT  # prompt of a text encoder, or a text file of prompts

    # JSON file of sentences about the classes, see `with_descriptions`. They replace the prompts.
    descriptions: str | None = None

    cache_dir: str | None = None  # cache of text encoder vectors, see `cache_folder`

    def __post_init__(self) -> None:
        if self.descriptions is not None and not str(self.vectors).startswith(PREFIX):
            raise ValueError(
                f"descriptions is {self.descriptions} and data.vectors is {self.vectors}; "
                f"sentences need a text encoder: pass data.vectors=clip:MODEL:WEIGHTS"
            )

    @documented(WORDS_DOCS)
    def of_classes(self, folder: Path, names: Sequence[str], order: Sequence[str]) -> WordVectors:
        """Return the word vectors of the classes. `folder` is the folder of the dataset.

        `order` has the names of the columns of an array file without a text file of names. Raises
        ConfigError if `vectors` is None.
        """
        # Import them here, because most datasets have no word vectors.
        from mldec.words.encoder import read_templates
        from mldec.words.vectors import load_word_vectors, with_descriptions

        if self.vectors is None:
            raise ConfigError(f"data.vectors is null; set the word vectors; see {WORDS_DOCS}")
        if self.vectors.startswith(PREFIX):
            templates = read_templates(self.prompts, folder)
            vectors = load_word_vectors(
                self.vectors, names, templates=templates, cache_dir=self.cache_dir
            )
            if self.descriptions is None:
                return vectors
            path = folder / Path(self.descriptions).expanduser()
            return with_descriptions(vectors, self.vectors, path, cache_dir=self.cache_dir)

        path = folder / Path(self.vectors).expanduser()
        has_names_file = path.suffix != ".txt" and path.with_suffix(".txt").is_file()
        return load_word_vectors(str(path), names, order=None if has_names_file else order)


DEFAULT_VECTORS = VectorSettings()
NO_VECTORS = VectorSettings(vectors=None)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Result of a reader: the location of the images and the meaning of their labels."""

    # Maps the name of a split and the cache folder, see `cache_folder`, to images and labels. It is
    # called when the split is first used.
    load: Callable[[str, str | None], StoredImages]
    load_train: Callable[[str, str | None], StoredImages] | None = None  # overrides it in training

    train: str = "train"  # name of the training split
    val: str = "val"  # name of the validation split
    where: Path  # folder or file of the dataset, for messages

    evaluator: MakeEvaluator  # such as `multi_label(threshold)`
    exclusive: bool = False  # whether each image has exactly one label
    zero_shot: ZeroShot | None = None  # if set, both splits have different classes

    # Maps the names of the K classes to word vectors [K, D] and their origin.
    vectors: Callable[[tuple[str, ...]], tuple[Tensor, VectorOrigin | None]] | None = None

    folder_setting: str | None = None  # key of the image folder, such as "data.images"

    def classes(self, names: tuple[str, ...]) -> Classes:
        """Return the classes of both splits, if the task is not zero-shot."""
        if self.vectors is None:
            return Classes(names, self.exclusive)
        return Classes(names, self.exclusive, *self.vectors(names))


def assemble(
    source: Source,
    view: View,
    files: FileSettings,
    sampling: Sampling = SHUFFLED,
    observed: Observed = ALL_OBSERVED,
    docs: str = "",
) -> DataModule:
    """Return the data module of a source. Raises ConfigError if a setting does not fit the task.

    A split is validated on first use: it has images, the files exist, and both splits have the same
    classes. `docs` is the documentation of the dataset for messages, see `documented`.
    """
    zero_shot = source.zero_shot
    if observed.given and (source.exclusive or zero_shot):
        raise ConfigError(f"data.{observed.given[0]} is for multi-label data; leave it out")
    if sampling.fold is not None and zero_shot:
        raise ConfigError("data.fold: zero-shot data has no folds; leave it out")
    eval_transform = view.eval()

    # A fold is taken from the training images, with the label rules of validation.
    val = source.val if sampling.fold is None else source.train

    def with_groups(images: StoredImages) -> StoredImages:
        return replace(images, groups=files.find_groups(images.storage.keys, images.groups))

    @cache
    @documented(docs)
    def load_val() -> Split:
        images = with_groups(source.load(val, files.cache_dir))
        if sampling.fold is not None:
            images = _select_listed(images, sampling.train_list)
            images = _select_fold(source, images, sampling.fold, held_out=True)
        if zero_shot is None:
            classes = source.classes(images.classes)
        else:
            images, classes = zero_shot.validation(images)

        # Validate the evaluator settings at the start, not after an epoch.
        source.evaluator(classes)
        images = _without_absent(source, val, images, files.absent)
        _log_groups(source.val, images)
        return Split(replace(images, transform=eval_transform), classes, images.groups)

    @documented(docs)
    def load_train() -> Split:
        load = source.load_train or source.load
        images = with_groups(load(source.train, files.cache_dir))
        images = _select_listed(images, sampling.train_list)
        images = observed.of_images(images, source.train)
        if sampling.fold is not None:
            images = _select_fold(source, images, sampling.fold, held_out=False)

        # Column c of the targets must be the same class in training and evaluation.
        classes = load_val().classes
        if images.classes != classes.names:
            only = sorted(set(images.classes) ^ set(classes.names))
            difference = f"{only[0]!r} is in one only" if only else "their order differs"
            counts = f"train ({len(images.classes)}) and val ({len(classes.names)})"
            raise DataError(
                f"{source.where}: the classes of {counts} differ: {difference}; correct one"
            )
        if zero_shot is not None:
            images, classes = zero_shot.training(images)
        images = _without_absent(source, source.train, images, files.absent)
        _log_groups(source.train, images)
        return Split(replace(images, transform=TrainTransform(view)), classes, images.groups)

    return DataModule(
        load_train,
        load_val,
        source.evaluator,
        eval_transform,
        bad_images=files.bad_images,
        sampling=sampling,
    )


def _select_listed(images: StoredImages, train_list: str | None) -> StoredImages:
    """Return the training images of a list, see `Sampling.train_list`, or all without a list."""
    if train_list is None:
        return images

    path = Path(train_list).expanduser()
    ids = [Path(images.name(index)).stem.lstrip("0") for index in range(len(images))]
    listed = {Path(line).stem.lstrip("0") for line in read_lines(path)}
    unknown = listed.difference(ids)
    if unknown:
        fault = f"{len(unknown):,} listed images are not in the training split"
        raise DataError(f"{path}: {fault}, such as {min(unknown)}; set data.train or correct it")

    log.info(f"{path}: {len(listed):,} of {len(images):,} training images are listed")
    return images.select(np.isin(ids, list(listed)))


def _select_fold(
    source: Source, images: StoredImages, fold: str, *, held_out: bool
) -> StoredImages:
    number, count = parse_fold(fold)
    keys = images.storage.keys if images.groups is None else images.groups
    is_held_out = fold_numbers(keys, count) == number
    part = images.select(is_held_out == held_out)
    if not len(part):
        split = "validation" if held_out else "training"
        fault = f"data.fold={fold} leaves no {split} image of {len(images):,}"
        raise DataError(f"{source.where}: {fault}; choose fewer folds")
    return part


def _log_groups(split: str, images: StoredImages) -> None:
    if images.groups is not None:
        _, sizes = np.unique(images.groups, return_counts=True)
        counts = f"{len(images):,} images are in {len(sizes):,} groups"
        log.info(f"{split}: {counts}; the largest has {sizes.max():,}")


def _without_absent(source: Source, split: str, images: StoredImages, absent: str) -> StoredImages:
    """Return the existing images of a split. `absent` is the setting of `FileSettings`."""
    if not len(images):
        raise DataError(f"{source.where}: {split} has no image; check the name of the split")
    storage = images.storage
    if absent == "unchecked" or not isinstance(storage, ImageFiles):
        return images

    is_absent = storage.absent()
    if is_absent.any():
        storage = storage.located(is_absent)
        images = replace(images, storage=storage)
        is_absent = storage.absent()
    count = int(is_absent.sum())
    if not count:
        return images

    summary = f"{source.where}: {count:,} of {len(images):,} listed images are absent"
    # A split without any image is an error, even if missing images may be skipped.
    if absent == "skip" and count < len(images):
        log.warning(f"{summary} and left out")
        return images.select(~is_absent)

    # Lists often contain file names without their folder. All files are absent then.
    advice = "restore them, or pass data.absent=skip"
    if 2 * count > len(images) and source.folder_setting is not None:
        advice = f"set {source.folder_setting} to the folder that the paths are relative to"
    raise DataError(f"{summary}, the first is {images.name(int(is_absent.argmax()))}; {advice}")
