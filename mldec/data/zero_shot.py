"""Zero-shot data: learn from the seen classes of a labelled table, evaluate on all of its classes at once."""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from PIL import Image
from torch import Tensor

from mldec.data.base import Classes, DataModule, Split
from mldec.data.files import ImageFiles, check_present, check_same_classes
from mldec.data.tables import Table
from mldec.data.transforms import EvalTransform
from mldec.data.vector_text import listed
from mldec.data.vectors import nearest, twins
from mldec.errors import ConfigError, DataError
from mldec.evaluators.zero_shot import IMAGES, ZeroShotEvaluator

log = logging.getLogger("mldec")

Roles = tuple[list[int], list[int]]  # indices of the seen and of the unseen classes, ascending


def zero_shot_data(
    load: Callable[[str], tuple[Path, Table]],
    *,
    train: str,
    val: str,
    roles: Callable[[Sequence[str]], Roles],
    vectors: Callable[[Sequence[str]], Tensor],
    val_images: str,
    learn: Callable[[Image.Image], Tensor],
    check: EvalTransform,
    where: str | Path,
    see: str,
    bad_images: str = "stop",
) -> DataModule:
    """Return a `DataModule` whose training classes are the seen ones and whose validation classes are all.

    One validation pass over all classes serves the zero-shot and the generalised numbers, because queries do not see
    one another; the evaluator knows which classes are unseen. Training images without a seen class are left out.

    Args:
        load: a split's name -> its image folder and table of all classes.
        train: name of the split to learn from.
        val: name of the split to evaluate on.
        roles: names of all classes -> which are seen and unseen, see `split_classes`.
        vectors: names of all K classes -> word vectors [K, D].
        val_images: "unseen": only images with an unseen class, as the official code; "all": as LESA and BiAM.
        learn: what a training image goes through.
        check: what a validation image goes through.
        where: the data set's folder, for messages.
        see: where help is.
        bad_images: see `DataModule`.

    Raises:
        ConfigError: `val_images` is unknown.
        DataError: when a split is used that has no image left, or lacks files.
    """
    if val_images not in IMAGES:
        raise ConfigError(f"data.val_images {val_images!r} is not known: choose unseen or all")

    @cache
    def known(names: tuple[str, ...]) -> tuple[Roles, Tensor]:
        seen, unseen = roles(names)
        warn_of_twins([names[i] for i in seen], [names[i] for i in unseen])
        return (seen, unseen), vectors(names)

    def load_train() -> Split:
        folder, table = load(train)
        check_same_classes(table.classes, data.val.classes.names, where, see)
        (seen, _), queries = known(table.classes)
        part = _with_label(table, seen, train, "a seen class", where, see).select_classes(seen)
        check_present(folder, part.files, see)
        return Split(ImageFiles(folder, part, learn), Classes(part.classes, queries=queries[seen]))

    def load_val() -> Split:
        folder, table = load(val)
        (_, unseen), queries = known(table.classes)
        part = _with_label(table, unseen, val, "an unseen class", where, see, keep_all=val_images == "all")
        check_present(folder, part.files, see)
        return Split(ImageFiles(folder, part, check), Classes(part.classes, queries=queries))

    def evaluator() -> ZeroShotEvaluator:
        names = data.val.classes.names
        return ZeroShotEvaluator(known(names)[0][1], num_classes=len(names), images=val_images)

    data = DataModule(load_train, load_val, evaluator, check, bad_images)
    return data


def split_classes(names: Sequence[str], *, unseen: Sequence[str], seen: Sequence[str] | None, where: str) -> Roles:
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
        "are named twice": [name for group in (seen, unseen) for name in set(group) if group.count(name) > 1],
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
    return nearest(val.names, val.queries, [place for place, name in enumerate(val.names) if name in seen])


def warn_of_twins(seen: Sequence[str], unseen: Sequence[str]) -> None:
    """Log the plurals and singulars across the split, which make unseen classes easier than they should be."""
    pairs = twins(seen, unseen)
    if pairs:
        count = f"{len({name for name, _ in pairs})} of {len(unseen):,}"
        text = "%s unseen classes have a seen singular or plural: %s"
        log.warning(text, count, listed([f"{name}/{twin}" for name, twin in pairs]))


def _with_label(
    table: Table, classes: list[int], split: str, what: str, where: str | Path, see: str, *, keep_all: bool = False
) -> Table:
    """Return the images that have one of the classes, or all if there are such, and log their number."""
    part = table.select(table.labels.select_classes(classes).counts_per_image() > 0)
    total, found = f"{len(table):,}", f"{len(part):,}"
    if not len(part):
        raise DataError(f"{where}: {split} has {total} images, none with {what}; {see}")
    log.info("zero-shot %s: %s images (with %s) of %s%s", split, found, what, total, ", all used" if keep_all else "")
    return table if keep_all else part
