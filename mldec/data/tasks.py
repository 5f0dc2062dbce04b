"""Tasks: multi-label, single-label and zero-shot. Each task creates its evaluator."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

from torch import Tensor

from mldec.data.types import Classes, StoredImages
from mldec.errors import DataError
from mldec.evaluators import Evaluator
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.names import format_list
from mldec.words.types import VectorOrigin, WordVectors

log = logging.getLogger("mldec")

Roles = tuple[list[int], list[int]]  # sorted indices of the seen and of the unseen classes


@dataclass(frozen=True)
class _KnownClasses:
    """Base class of tasks with the same classes in both splits. Every image is used.

    `vectors` maps the names of the K classes to word queries [K, D] and their origin.
    """

    vectors: Callable[[tuple[str, ...]], tuple[Tensor, VectorOrigin | None]] | None = field(
        default=None, kw_only=True
    )

    # Whether each image has exactly one label.
    exclusive: ClassVar[bool] = False

    def training(self, images: StoredImages) -> tuple[StoredImages, Classes]:
        """Return the training images and their target classes."""
        word_vectors = None
        origin = None
        if self.vectors is not None:
            word_vectors, origin = self.vectors(images.classes)
        return images, Classes(images.classes, self.exclusive, word_vectors, origin)

    def validation(self, images: StoredImages) -> tuple[StoredImages, Classes]:
        """Return the validation images and their target classes."""
        return self.training(images)


@dataclass(frozen=True)
class MultiLabel(_KnownClasses):
    """Multi-label classification with complete labels.

    Args:
        threshold: Probability above which a class is predicted, in (0, 1).
        skip_empty: Use mAP_skip_empty, the mean over classes with positives, as the first metric.

    Raises:
        ConfigError: If the threshold is out of range.
    """

    threshold: float = 0.5
    skip_empty: bool = False

    def __post_init__(self) -> None:
        # Validate the threshold now, not after an epoch.
        self.evaluator(Classes(("any",)))

    def evaluator(self, classes: Classes) -> Evaluator:
        """Return a new evaluator for the classes of the validation split."""
        return MultiLabelEvaluator(
            len(classes), threshold=self.threshold, skip_empty=self.skip_empty
        )


class PartialLabels(MultiLabel):
    """Multi-label classification with partial labels; others are -1 (not annotated)."""

    def evaluator(self, classes: Classes) -> Evaluator:
        """Return a new evaluator for the classes of the validation split."""
        from mldec.evaluators.partial import PartialLabelEvaluator

        return PartialLabelEvaluator(len(classes), threshold=self.threshold)


@dataclass(frozen=True)
class SingleLabel(_KnownClasses):
    """Single-label classification.

    Args:
        top_k: k of the second accuracy, at least 2. None means 5, omitted with fewer classes.
        suffix: Suffix of the metric names, such as "_real" for ImageNet ReaL.
    """

    top_k: int | None = None
    suffix: str = ""

    exclusive = True

    def __post_init__(self) -> None:
        # Validate top_k now, not after an epoch.
        self._evaluator(self.top_k or 1)

    def evaluator(self, classes: Classes) -> Evaluator:
        """Return a new evaluator. Raises ConfigError if top-k does not fit the classes."""
        return self._evaluator(len(classes))

    def _evaluator(self, num_classes: int) -> Evaluator:
        from mldec.evaluators.single_label import SingleLabelEvaluator

        return SingleLabelEvaluator(num_classes, top_k=self.top_k, suffix=self.suffix)


@dataclass
class ZeroShot:
    """Train on the seen classes and evaluate on all classes.

    The queries of ML-Decoder do not attend to each other. One validation pass over all classes
    therefore gives both zero-shot and generalized metrics. Training images without a seen class are
    omitted.

    Args:
        roles: Maps the names of all classes to the indices of seen and unseen classes, see
            `split_classes`.
        vectors: Maps the names of all K classes to their word vectors.
        val_images: "unseen": only images with an unseen class, as in the official code. "all": all
            images, as in LESA and BiAM.
        where: Folder of the dataset and documentation hint, for messages.
        threshold: See `MultiLabel`.
    """

    roles: Callable[[tuple[str, ...]], Roles]
    vectors: Callable[[tuple[str, ...]], WordVectors]
    val_images: str
    where: str
    threshold: float = 0.5

    def __post_init__(self) -> None:
        # Validate the settings now, not after an epoch.
        self._evaluator(2, [0])

        # Both are slow to read and needed by both splits.
        self.roles = cache(self.roles)
        self.vectors = cache(self.vectors)

    def training(self, images: StoredImages) -> tuple[StoredImages, Classes]:
        """Return the images with a seen class, and the seen classes."""
        seen, _ = self.roles(images.classes)
        vectors = self.vectors(images.classes)
        with_seen, counts = self._showing(images, seen, "training images have a seen class")
        log.info("zero-shot: %s", counts)

        with_seen = with_seen.select_classes(seen)
        word_vectors = vectors.word_vectors[seen]
        return with_seen, Classes(
            with_seen.classes, word_vectors=word_vectors, origin=vectors.origin
        )

    def validation(self, images: StoredImages) -> tuple[StoredImages, Classes]:
        """Return the images with an unseen class, or all images, and all classes."""
        seen, unseen = self.roles(images.classes)
        names = images.classes
        warn_duplicate_names([names[i] for i in seen], [names[i] for i in unseen])

        vectors = self.vectors(names)
        what = "validation images have an unseen class"
        with_unseen, counts = self._showing(images, unseen, what)

        # All classes are kept in either case. The evaluator selects the unseen classes.
        used = images if self.val_images == "all" else with_unseen
        log.info("zero-shot: %s, %s are used", counts, f"{len(used):,}")
        return used, Classes(names, word_vectors=vectors.word_vectors, origin=vectors.origin)

    def evaluator(self, classes: Classes) -> Evaluator:
        """Return a new evaluator for the seen and unseen classes."""
        _, unseen = self.roles(classes.names)
        return self._evaluator(len(classes), unseen)

    def _evaluator(self, num_classes: int, unseen: list[int]) -> Evaluator:
        from mldec.evaluators.zero_shot import ZeroShotEvaluator

        return ZeroShotEvaluator(
            num_classes, unseen=unseen, images=self.val_images, threshold=self.threshold
        )

    def _showing(
        self, images: StoredImages, columns: list[int], what: str
    ) -> tuple[StoredImages, str]:
        """Return the images with at least one of the classes, and a text with their number."""
        is_shown = images.labels.select_classes(columns).counts_per_image() > 0
        showing = images.select(is_shown)

        counts = f"{len(showing):,} of {len(images):,} {what}"
        if not len(showing):
            raise DataError(f"{self.where}: {counts}")
        return showing, counts


# The task of a dataset determines its classes, images and metrics.
Task = MultiLabel | SingleLabel | ZeroShot


def split_classes(
    names: Sequence[str], *, unseen: Sequence[str], seen: Sequence[str] | None, where: str
) -> Roles:
    """Return the sorted indices of the seen and of the unseen classes.

    Args:
        names: Names of all classes.
        unseen: Names of the unseen classes.
        seen: Names of the seen classes. None means all other classes.
        where: Prefix of error messages.

    Raises:
        DataError: If classes are listed twice, are both seen and unseen, are neither, or do not
            occur in the data.
    """
    if seen is None:
        unseen_names = set(unseen)
        seen = [name for name in names if name not in unseen_names]

    # Report all classes with the same fault at once.
    assigned = set(seen) | set(unseen)
    faults: dict[str, Collection[str]] = {
        "are named twice": _repeated(seen) + _repeated(unseen),
        "are both seen and unseen": set(seen) & set(unseen),
        "do not occur in the data": assigned - set(names),
        "of the data are neither seen nor unseen": set(names) - assigned,
    }

    for fault, faulty in faults.items():
        if faulty:
            names_of_faulty = format_list(sorted(faulty))
            raise DataError(f"{where}: {len(faulty):,} classes {fault}: {names_of_faulty}")

    indices = {name: index for index, name in enumerate(names)}
    seen_indices = sorted(indices[name] for name in seen)
    unseen_indices = sorted(indices[name] for name in unseen)
    return seen_indices, unseen_indices


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def warn_duplicate_names(seen: Collection[str], unseen: Collection[str]) -> None:
    """Log a warning about unseen classes with a seen regular singular or plural.

    These classes are not new to the model, which makes the metrics optimistic. They are 30 of the
    81 unseen classes of NUS-WIDE.
    """
    pairs = set()
    for singulars, plurals in ((unseen, set(seen)), (seen, set(unseen))):
        for name in singulars:
            forms = {name + "s", name + "es", re.sub("y$", "ies", name)}
            for plural in forms & plurals - {name}:
                pair = (name, plural) if singulars is unseen else (plural, name)
                pairs.add(pair)
    if not pairs:
        return

    affected = {name for name, _ in pairs}  # a class may be in two pairs
    count = f"{len(affected)} of {len(unseen):,}"
    twins = [f"{name}/{twin}" for name, twin in sorted(pairs)]
    message = "%s unseen classes have a seen singular or plural: %s"
    log.warning(message, count, format_list(twins))
