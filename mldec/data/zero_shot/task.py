"""Zero-shot: learn from the seen classes of a labelled table, evaluate on all of its classes at once."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mldec.data.base import Classes, LabelledImages
from mldec.data.zero_shot.vector_text import listed
from mldec.data.zero_shot.vectors import nearest, twins
from mldec.errors import DataError
from mldec.evaluators import Evaluator
from mldec.evaluators.zero_shot import IMAGES, ZeroShotEvaluator

log = logging.getLogger("mldec")

Roles = tuple[list[int], list[int]]  # indices of the seen and of the unseen classes, ascending


@dataclass
class ZeroShot:
    """The training classes are the seen ones, the validation classes are all; see `mldec.data.task.Task`.

    One validation pass over all classes serves the zero-shot and the generalised numbers, because queries do not see
    one another; the evaluator knows which classes are unseen. Training images without a seen class are left out.

    Args:
        roles: names of all classes -> which are seen and unseen, see `split_classes`.
        vectors: names of all K classes -> word vectors [K, D].
        val_images: "unseen": only images with an unseen class, as the official code; "all": as LESA and BiAM.
        where: the data set's folder, and where help is, for messages.

    Raises:
        ValueError: `val_images` is unknown.
    """

    roles: Callable[[Sequence[str]], Roles]
    vectors: Callable[[Sequence[str]], Tensor]
    val_images: str
    where: str
    _known: dict[tuple[str, ...], tuple[Roles, Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.val_images not in IMAGES:
            raise ValueError(f"val_images is {self.val_images!r}: it must be unseen or all")

    def training(self, images: LabelledImages) -> tuple[LabelledImages, Classes]:
        """Return the images with a seen class, and the seen classes."""
        (seen, _), queries = self._of(images.classes)
        with_seen = _with_class(images, seen)
        counts = f"{len(with_seen):,} of {len(images):,} training images have a seen class"
        if not len(with_seen):
            raise DataError(f"{self.where}: {counts}")

        log.info("zero-shot: %s", counts)
        learnt = with_seen.select_classes(seen)
        return learnt, Classes(learnt.classes, queries=queries[seen])

    def validation(self, images: LabelledImages) -> tuple[LabelledImages, Classes]:
        """Return the images with an unseen class, or all, and all classes."""
        (_, unseen), queries = self._of(images.classes)
        with_unseen = _with_class(images, unseen)
        counts = f"{len(with_unseen):,} of {len(images):,} validation images have an unseen class"
        if not len(with_unseen):
            raise DataError(f"{self.where}: {counts}")

        used = images if self.val_images == "all" else with_unseen
        log.info("zero-shot: %s, %s are used", counts, f"{len(used):,}")
        return used, Classes(images.classes, queries=queries)

    def evaluator(self, classes: Classes) -> Evaluator:
        """Return an evaluator that knows which of the classes are unseen."""
        (_, unseen), _ = self._of(classes.names)
        return ZeroShotEvaluator(len(classes), unseen=unseen, images=self.val_images)

    def _of(self, names: tuple[str, ...]) -> tuple[Roles, Tensor]:
        """Return the roles and the word vectors of all classes; both are read once."""
        if names not in self._known:
            seen, unseen = self.roles(names)
            warn_of_twins([names[i] for i in seen], [names[i] for i in unseen])
            self._known[names] = ((seen, unseen), self.vectors(names))
        return self._known[names]


def _with_class(images: LabelledImages, columns: list[int]) -> LabelledImages:
    """Return the images that show one of the classes."""
    return images.select(images.labels.select_classes(columns).counts_per_image() > 0)


def split_classes(
    names: Sequence[str], *, unseen: Sequence[str], seen: Sequence[str] | None, where: str
) -> Roles:
    """Return the indices of the seen and of the unseen classes among all names, each ascending.

    The official code takes them from Python sets, whose order is the hash table's; sorted ones keep tables readable.

    Args:
        names: of all classes in the data.
        unseen: names never to be learnt.
        seen: names to learn; None: all others.
        where: the file that says so, and where help is, for messages.

    Raises:
        DataError: a name twice, both seen and unseen, or not in the data; a class that is neither; no class of a kind.
    """
    seen = [name for name in names if name not in set(unseen)] if seen is None else seen
    faults = {
        "are named twice": [
            name for group in (seen, unseen) for name in set(group) if group.count(name) > 1
        ],
        "are both seen and unseen": set(seen) & set(unseen),
        "do not occur in the data": {*seen, *unseen} - set(names),
        "of the data are neither seen nor unseen": set(names) - {*seen, *unseen},
    }
    for fault, found in faults.items():
        if found:
            raise DataError(f"{where}: {len(found):,} classes {fault}: {listed(sorted(found))}")
    if not seen or not unseen:
        raise DataError(
            f"{where}: {len(seen):,} seen and {len(unseen):,} unseen classes; at least one of each is needed"
        )
    places = {name: place for place, name in enumerate(names)}
    return sorted(places[name] for name in seen), sorted(places[name] for name in unseen)


def neighbours(train: Classes, val: Classes) -> dict[str, list[tuple[str, float]]]:
    """Return the three seen classes nearest to each unseen one by their vectors, with the cosine; see `nearest`.

    Args:
        train: the seen classes.
        val: all classes.
    """
    if val.queries is None:
        return {}
    seen = set(train.names)
    return nearest(
        val.names, val.queries, [place for place, name in enumerate(val.names) if name in seen]
    )


def warn_of_twins(seen: Sequence[str], unseen: Sequence[str]) -> None:
    """Log the plurals and singulars across the split, which make unseen classes easier than they should be."""
    pairs = twins(seen, unseen)
    if pairs:
        count = f"{len({name for name, _ in pairs})} of {len(unseen):,}"
        text = "%s unseen classes have a seen singular or plural: %s"
        log.warning(text, count, listed([f"{name}/{twin}" for name, twin in pairs]))
