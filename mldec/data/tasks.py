"""Evaluators of the label types, and zero-shot classification with word vectors."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from mldec.data.types import Classes, StoredImages
from mldec.errors import ConfigError, DataError, documented, log
from mldec.evaluators import Evaluator
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.files.text import expand_user
from mldec.names import format_list, indices_of
from mldec.words.types import PREFIX, PROMPT, WordVectors

WORDS_DOCS = "DATASETS.md, section Word vectors"

MakeEvaluator = Callable[[Classes], Evaluator]  # maps the validation classes to a new evaluator
Roles = tuple[list[int], list[int]]  # sorted indices of the seen and of the unseen classes


def multi_label(
    threshold: float = 0.5, *, top_k: int | None = None, skip_empty: bool = False
) -> MakeEvaluator:
    """Return the function that creates evaluators of multi-label data with complete labels.

    Args:
        threshold: Probability above which a class is predicted, in (0, 1).
        top_k: See `MultiLabelEvaluator`.
        skip_empty: Use mAP_skip_empty, the mean over classes with positives, as the first metric.
    """
    return _maker(MultiLabelEvaluator, threshold=threshold, top_k=top_k, skip_empty=skip_empty)


def partial_labels(threshold: float = 0.5, *, top_k: int | None = None) -> MakeEvaluator:
    """Return the function that creates evaluators of multi-label data with labels of -1."""
    from mldec.evaluators.partial import PartialLabelEvaluator

    return _maker(PartialLabelEvaluator, threshold=threshold, top_k=top_k)


def single_label(top_k: int | None = None, *, suffix: str = "") -> MakeEvaluator:
    """Return the function that creates evaluators of single-label data.

    `top_k` is the k of the second accuracy, at least 2. None means 5, omitted with fewer classes.
    `suffix` is appended to the metric names, such as "_real" for ImageNet ReaL. Raises ConfigError
    if `top_k` is out of range, or later if there are fewer classes.
    """
    from mldec.evaluators.single_label import SingleLabelEvaluator

    return _maker(SingleLabelEvaluator, top_k=top_k, suffix=suffix)


def _maker(kind: Callable[..., Evaluator], *, top_k: int | None, **settings: Any) -> MakeEvaluator:
    evaluator = partial(kind, top_k=top_k, **settings)
    # Validate the settings now. The number of classes is known only when the data is read, and an
    # error after an epoch would waste it.
    evaluator(top_k or 1)
    return lambda classes: evaluator(len(classes))


@dataclass
class ZeroShot:
    """Train on the seen classes and evaluate on all classes.

    The queries of ML-Decoder do not attend to each other. One validation pass over all classes
    therefore gives both zero-shot and generalized metrics. Training images without a seen class are
    omitted.
    """

    # Maps the names of all classes to the indices of seen and unseen classes, see `split_classes`.
    roles: Callable[[tuple[str, ...]], Roles]
    vectors: Callable[[tuple[str, ...]], WordVectors]  # maps their names to their word vectors

    # "unseen": only images with an unseen class, as in the official code. "all": all images, as in
    # LESA and BiAM.
    val_images: str
    where: str  # folder of the dataset, for messages
    threshold: float = 0.5  # see `multi_label`

    def __post_init__(self) -> None:
        # Validate the threshold now, not after an epoch.
        multi_label(self.threshold)

        # Both are slow to read and needed by both splits.
        self.roles = cache(self.roles)
        self.vectors = cache(self.vectors)

    def training(self, images: StoredImages) -> tuple[StoredImages, Classes]:
        """Return the images with a seen class, and the seen classes."""
        seen, _ = self.roles(images.classes)
        vectors = self.vectors(images.classes)
        with_seen, counts = self._with_classes(images, seen, "training images have a seen class")
        log.info(f"zero-shot: {counts}")

        used = with_seen.select_classes(seen)
        word_vectors = vectors.word_vectors[seen]
        return used, Classes(used.classes, word_vectors=word_vectors, origin=vectors.origin)

    def validation(self, images: StoredImages) -> tuple[StoredImages, Classes]:
        """Return the images with an unseen class, or all images, and all classes."""
        seen, unseen = self.roles(images.classes)
        names = images.classes
        warn_duplicate_names([names[i] for i in seen], [names[i] for i in unseen])

        vectors = self.vectors(names)
        what = "validation images have an unseen class"
        with_unseen, counts = self._with_classes(images, unseen, what)

        # All classes are kept in either case. The evaluator selects the unseen classes.
        used = images if self.val_images == "all" else with_unseen
        log.info(f"zero-shot: {counts}, {len(used):,} are used")
        return used, Classes(names, word_vectors=vectors.word_vectors, origin=vectors.origin)

    def evaluator(self, classes: Classes) -> Evaluator:
        """Return a new evaluator for the seen and unseen classes."""
        from mldec.evaluators.zero_shot import ZeroShotEvaluator

        _, unseen = self.roles(classes.names)
        return ZeroShotEvaluator(
            len(classes), unseen=unseen, images=self.val_images, threshold=self.threshold
        )

    def _with_classes(
        self, images: StoredImages, columns: list[int], what: str
    ) -> tuple[StoredImages, str]:
        """Return the images with at least one of the classes, and a text with their number."""
        has_class = images.labels.select_classes(columns).counts_per_image() > 0
        chosen = images.select(has_class)

        counts = f"{len(chosen):,} of {len(images):,} {what}"
        if not len(chosen):
            raise DataError(f"{self.where}: {counts}; check the classes")
        return chosen, counts


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
            path = folder / expand_user(self.descriptions)
            return with_descriptions(vectors, self.vectors, path, cache_dir=self.cache_dir)

        path = folder / expand_user(self.vectors)
        has_names_file = path.suffix != ".txt" and path.with_suffix(".txt").is_file()
        return load_word_vectors(str(path), names, order=None if has_names_file else order)


DEFAULT_VECTORS = VectorSettings()
NO_VECTORS = VectorSettings(vectors=None)


def split_classes(
    names: Sequence[str], *, unseen: Sequence[str], seen: Sequence[str] | None, where: str
) -> Roles:
    """Return the sorted indices of the seen and of the unseen classes.

    `seen` is by default all classes that are not unseen. Raises DataError if classes are listed
    twice, are both seen and unseen, are neither, or do not occur in the data.
    """
    if seen is None:
        unseen_names = set(unseen)
        seen = [name for name in names if name not in unseen_names]

    # Report all classes with the same fault at once.
    assigned = set(seen) | set(unseen)
    repeated = Counter(seen) - Counter(set(seen))
    repeated |= Counter(unseen) - Counter(set(unseen))
    faults: dict[str, Collection[str]] = {
        "are listed twice": repeated,
        "are both seen and unseen": set(seen) & set(unseen),
        "do not occur in the data": assigned - set(names),
        "of the data are neither seen nor unseen": set(names) - assigned,
    }

    for fault, faulty in faults.items():
        if faulty:
            faulty_names = format_list(sorted(faulty))
            raise DataError(f"{where}: {len(faulty):,} classes {fault}: {faulty_names}; correct it")

    indices = indices_of(names)
    seen_indices = sorted(indices[name] for name in seen)
    return seen_indices, sorted(indices[name] for name in unseen)


def warn_duplicate_names(seen: Collection[str], unseen: Collection[str]) -> None:
    """Log a warning about unseen classes with a seen regular singular or plural.

    These classes are not new to the model, which makes the metrics optimistic. They are 30 of the
    81 unseen classes of NUS-WIDE.
    """
    # Pairs of an unseen and a seen class.
    pairs = set()
    for name in unseen:
        for plural in _plurals(name).intersection(seen):
            pairs.add((name, plural))
    for name in seen:
        for plural in _plurals(name).intersection(unseen):
            pairs.add((plural, name))
    if not pairs:
        return

    names = format_list([f"{name}/{other}" for name, other in sorted(pairs)])
    affected = {name for name, _ in pairs}  # a class may be in two pairs
    counts = f"{len(affected)} of {len(unseen):,} unseen classes"
    log.warning(f"{counts} have a seen singular or plural: {names}")


def _plurals(name: str) -> set[str]:
    return {name + "s", name + "es", re.sub("y$", "ies", name)} - {name}
