"""What labels mean: several per image, one, or of unseen classes; each makes its evaluator."""

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
from mldec.names import listed
from mldec.words.types import VectorOrigin, WordVectors

log = logging.getLogger("mldec")

Roles = tuple[list[int], list[int]]  # indices of the seen and of the unseen classes, ascending


@dataclass(frozen=True)
class _KnownClasses:
    """The common part of the tasks whose splits have the same classes; every image is used.

    `vectors` maps the names of the K classes to word queries [K, D] and how they were made.
    """

    vectors: Callable[[tuple[str, ...]], tuple[Tensor, VectorOrigin | None]] | None = field(
        default=None, kw_only=True
    )

    # Whether each image has exactly one label.
    exclusive: ClassVar[bool] = False

    def training(self, images: StoredImages) -> tuple[StoredImages, Classes]:
        """Return the images of the training split to train on, and their target classes."""
        queries, origin = None, None
        if self.vectors is not None:
            queries, origin = self.vectors(images.classes)
        return images, Classes(images.classes, self.exclusive, queries, origin)

    def validation(self, images: StoredImages) -> tuple[StoredImages, Classes]:
        """Return the images of the validation split to evaluate, and their target classes."""
        return self.training(images)


@dataclass(frozen=True)
class MultiLabel(_KnownClasses):
    """Several labels per image, all of them known.

    `threshold` is the probability above which a class counts as predicted, in (0, 1), for
    precision, recall and F1; a `ConfigError` refuses others. With `skip_empty` the first metric is
    the mean over the classes with positives, mAP_skip_empty.
    """

    threshold: float = 0.5
    skip_empty: bool = False

    def __post_init__(self) -> None:
        # The evaluator checks the threshold: a wrong one must fail now, not after an epoch.
        self.evaluator(Classes(("any",)))

    def evaluator(self, classes: Classes) -> Evaluator:
        """Return a new evaluator for the classes of the validation split."""
        return MultiLabelEvaluator(
            len(classes), threshold=self.threshold, skip_empty=self.skip_empty
        )


class PartialLabels(MultiLabel):
    """Several labels per image, of which only some are known; the others are -1 (not annotated)."""

    def evaluator(self, classes: Classes) -> Evaluator:
        """Return a new evaluator, as `MultiLabel`."""
        from mldec.evaluators.partial import PartialLabelEvaluator

        return PartialLabelEvaluator(len(classes), threshold=self.threshold)


@dataclass(frozen=True)
class SingleLabel(_KnownClasses):
    """One label per image.

    Args:
        top_k: k of the second accuracy, 2 or more; None is 5, omitted if there are fewer classes.
        suffix: appended to the names of the metrics, such as "_real" for ImageNet ReaL.
    """

    top_k: int | None = None
    suffix: str = ""

    exclusive = True

    def __post_init__(self) -> None:
        # The evaluator checks top_k: a wrong one must fail now, not after an epoch.
        self._evaluator(self.top_k or 1)

    def evaluator(self, classes: Classes) -> Evaluator:
        """Return a new evaluator; a `ConfigError` says that top-k does not fit the classes."""
        return self._evaluator(len(classes))

    def _evaluator(self, num_classes: int) -> Evaluator:
        from mldec.evaluators.single_label import SingleLabelEvaluator

        return SingleLabelEvaluator(num_classes, top_k=self.top_k, suffix=self.suffix)


@dataclass
class ZeroShot:
    """Train on the seen classes and evaluate on all classes.

    One validation pass over all classes gives the zero-shot and the generalised metrics, because
    the queries of ML-Decoder do not attend to each other. Training images without a seen class are
    left out.

    Args:
        roles: maps the names of all classes to the indices of the seen and unseen ones, see
            `split_classes`.
        vectors: maps the names of all K classes to their word vectors.
        val_images: "unseen": only images with an unseen class, as in the official code; "all": as
            in LESA and BiAM.
        where: folder of the data set and pointer to the documentation, for messages.
        threshold: see `MultiLabel`.
    """

    roles: Callable[[tuple[str, ...]], Roles]
    vectors: Callable[[tuple[str, ...]], WordVectors]
    val_images: str
    where: str
    threshold: float = 0.5

    def __post_init__(self) -> None:
        # The evaluator checks its settings: a wrong one must fail now, not after an epoch.
        self._evaluator(2, [0])

        # Both are slow to read, and each split asks for them.
        self.roles = cache(self.roles)
        self.vectors = cache(self.vectors)

    def training(self, images: StoredImages) -> tuple[StoredImages, Classes]:
        """Return the images with a seen class, and the seen classes."""
        seen, _ = self.roles(images.classes)
        vectors = self.vectors(images.classes)
        with_seen, counts = self._showing(images, seen, "training images have a seen class")
        log.info("zero-shot: %s", counts)

        with_seen = with_seen.select_classes(seen)
        queries = vectors.queries[seen]
        return with_seen, Classes(with_seen.classes, queries=queries, origin=vectors.origin)

    def validation(self, images: StoredImages) -> tuple[StoredImages, Classes]:
        """Return the images with an unseen class, or all images, and all classes."""
        seen, unseen = self.roles(images.classes)
        names = images.classes
        warn_of_twins([names[i] for i in seen], [names[i] for i in unseen])

        vectors = self.vectors(names)
        what = "validation images have an unseen class"
        with_unseen, counts = self._showing(images, unseen, what)

        # The classes are all of them either way: the evaluator selects the unseen ones.
        used = images if self.val_images == "all" else with_unseen
        log.info("zero-shot: %s, %s are used", counts, f"{len(used):,}")
        return used, Classes(names, queries=vectors.queries, origin=vectors.origin)

    def evaluator(self, classes: Classes) -> Evaluator:
        """Return an evaluator that knows which of the classes are unseen."""
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
        """Return the images that show at least one of the classes, and how many they are."""
        is_shown = images.labels.select_classes(columns).counts_per_image() > 0
        showing = images.select(is_shown)

        counts = f"{len(showing):,} of {len(images):,} {what}"
        if not len(showing):
            raise DataError(f"{self.where}: {counts}")
        return showing, counts


# What the labels of a data set mean: it determines classes, images and metrics.
Task = MultiLabel | SingleLabel | ZeroShot


def split_classes(
    names: Sequence[str], *, unseen: Sequence[str], seen: Sequence[str] | None, where: str
) -> Roles:
    """Return the indices of the seen and of the unseen classes among all names, each ascending.

    Without a list of seen classes, these are all others. A `DataError` that begins with `where`
    names classes that are listed twice, both seen and unseen, neither, or not in the data.
    """
    if seen is None:
        unseen_names = set(unseen)
        seen = [name for name in names if name not in unseen_names]

    # All names with the same fault are reported at once, so that a file is corrected in one go.
    faults: dict[str, Collection[str]] = {
        "are named twice": [*_repeated(seen), *_repeated(unseen)],
        "are both seen and unseen": set(seen) & set(unseen),
        "do not occur in the data": {*seen, *unseen} - set(names),
        "of the data are neither seen nor unseen": set(names) - {*seen, *unseen},
    }

    for fault, faulty in faults.items():
        if faulty:
            names_of_faulty = listed(sorted(faulty))
            raise DataError(f"{where}: {len(faulty):,} classes {fault}: {names_of_faulty}")

    indices = {name: index for index, name in enumerate(names)}
    return sorted(indices[name] for name in seen), sorted(indices[name] for name in unseen)


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def warn_of_twins(seen: Collection[str], unseen: Collection[str]) -> None:
    """Warn of unseen classes whose regular singular or plural is seen, which makes them too easy.

    They are not new to the model: 30 of the 81 unseen classes of NUS-WIDE.
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

    affected = {name for name, _ in pairs}  # a class may have two twins
    count = f"{len(affected)} of {len(unseen):,}"
    twins = [f"{name}/{twin}" for name, twin in sorted(pairs)]
    message = "%s unseen classes have a seen singular or plural: %s"
    log.warning(message, count, listed(twins))
