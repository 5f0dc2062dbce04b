"""Open Images V6 from the official files: labels that people verified, present or absent; all others are unknown.

Nine million training images have 57 million such labels of 9,605 classes. They are read in pieces into arrays, once;
what is kept in the cache folder is half a gigabyte that loader workers share.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Literal

import numpy as np

from mldec.data.base import LabelledImages
from mldec.data.cache import TableCache
from mldec.data.labels import from_statements
from mldec.data.names import as_name, told_apart, without_quotes
from mldec.data.source import Source
from mldec.data.storage.image_files import check_folder, in_folder
from mldec.data.table import Table
from mldec.data.task import PartialLabels
from mldec.errors import DataError
from mldec.files.text import csv_columns, read_text

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section Open Images"
# Split (and image folder) -> its human-verified labels, as the official site names the file.
LABELS = {
    "train": "oidv6-train-annotations-human-imagelabels.csv",
    "validation": "validation-annotations-human-imagelabels.csv",
    "test": "test-annotations-human-imagelabels.csv",
}
TRAINABLE = "oidv6-classes-trainable.txt"
DESCRIPTIONS = "oidv6-class-descriptions.csv"
_CONFIDENCE = {"1": 1, "0": 0, "1.0": 1, "0.0": 0}


def openimages(
    *,
    root: str,
    train: str = "train",
    val: str = "test",
    names: Literal["display", "mid"] = "display",
    prefix: int = 0,
) -> Source:
    """Return Open Images: the classes of the trainable list in its order, images in the order of their ids.

    An image without a verified label is in no official file, and so not here. Targets are 1, 0 and mostly -1. Many
    images left Flickr for good: see `data.absent`.

    Source: storage.googleapis.com/openimages, human-verified image-level labels; machine-generated ones are refused.

    Args:
        root: folder with annotations/ (the official CSV and class files) and the image folders train/, validation/,
            test/ of ID.jpg.
        train: split to learn from.
        val: split to evaluate on: papers use "test" (125,436 images), not "validation" (41,620).
        names: "display": the display name, with its index as in "Ball (12)" if classes share it; or "mid" (/m/01bqvp).
        prefix: images lie in sub-folders called by this many first characters of their ids, such as train/0a/ for 2.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ValueError: A value is out of range.
    """
    for key, split in (("train", train), ("val", val)):
        if split not in LABELS:
            raise ValueError(f"{key} is {split!r}: it must be one of {', '.join(LABELS)}")
    if prefix < 0:
        raise ValueError(f"prefix is {prefix}: it must be 0 (no sub-folders) or more")
    folder = check_folder(root, "Open Images", _SEE)

    load = partial(_load_split, folder, names=names, prefix=prefix)
    return Source(load=load, train=train, val=val, task=PartialLabels(), where=folder, see=_SEE)


def _load_split(
    root: Path, split: str, cache: TableCache, *, names: str, prefix: int
) -> LabelledImages:
    folder = root / "annotations"
    sources = statements, trainable, descriptions = (
        folder / LABELS[split],
        folder / TRAINABLE,
        folder / DESCRIPTIONS,
    )
    parse = partial(_parse, statements, trainable, descriptions, names, prefix)
    table = cache.table(f"openimages {names} {prefix}", sources, parse)

    log_table(f"openimages {split}", table)
    return in_folder(table, root / split, _SEE)


def log_table(what: str, table: Table) -> None:
    """Log the size of a split."""
    present = int(np.count_nonzero(table.labels.values == 1))
    counts = f"{len(table):,} images, {len(table.classes):,} classes"
    log.info(
        "%s: %s, %s present and %s absent",
        what,
        counts,
        f"{present:,}",
        f"{len(table.labels.values) - present:,}",
    )


def _parse(statements: Path, trainable: Path, descriptions: Path, names: str, prefix: int) -> Table:
    mids = read_mids(trainable, _SEE)
    run_ids, runs, classes, values = _read_statements(statements, mids)

    # The file is sorted by image, but nothing says that it must be: several runs of rows may be of one image.
    ids, image_of_run = np.unique(run_ids, return_inverse=True)
    if not np.char.isalnum(ids).all():  # an id becomes a path
        raise DataError(
            f"{statements}: {ids[~np.char.isalnum(ids)][0].decode()!r} is not an image id; {_SEE}"
        )
    labels, clashes = from_statements(
        image_of_run[runs], classes, values, num_images=len(ids), num_classes=len(mids)
    )
    log_clashes(statements, clashes)

    files = np.char.add(ids, b".jpg")
    if prefix:
        files = np.char.add(np.char.add(ids.astype(f"S{prefix}"), b"/"), files)
    display = {} if names == "mid" else read_descriptions(descriptions, _SEE)
    return Table(
        files, labels, class_names(mids, display, descriptions if display else trainable, _SEE)
    )


def _read_statements(
    path: Path, mids: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the ids of runs of rows [R], and of each statement on a known class its run, class and value [M]."""
    columns = {mid: column for column, mid in enumerate(mids)}
    run_ids: list[np.ndarray] = [np.zeros(0, "S1")]
    runs, classes, values = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)], [np.zeros(0, np.int8)]
    num_runs = num_rows = num_known = 0

    header = ["ImageID", "Source", "LabelName", "Confidence"]
    for first, (image_ids, _, label_names, confidences) in csv_columns(path, header, _SEE):
        values_here = np.fromiter(
            map(_CONFIDENCE.get, confidences, repeat(-1)), np.int8, len(confidences)
        )
        if values_here.min() < 0:
            row = int(values_here.argmin())
            fault = f"row {first + row} has Confidence {confidences[row]!r}, not 1 or 0: not human-verified labels?"
            raise DataError(f"{path}: {fault} {_SEE}")
        classes_here = np.fromiter(
            map(columns.get, label_names, repeat(-1)), np.int32, len(label_names)
        )
        try:
            ids_here = np.array(image_ids, np.bytes_)
        except UnicodeEncodeError as error:
            raise DataError(
                f"{path}: an image id after row {first - 1} is not ASCII; {_SEE}"
            ) from error

        # A run starts where the image id is not that of the row before.
        starts_run = np.append(True, ids_here[1:] != ids_here[:-1])
        runs_here = np.cumsum(starts_run) + (num_runs - 1)
        known = classes_here >= 0

        run_ids.append(ids_here[starts_run])
        runs.append(runs_here[known].astype(np.int32))
        classes.append(classes_here[known])
        values.append(values_here[known])
        num_runs += len(run_ids[-1])
        num_rows += len(label_names)
        num_known += len(classes[-1])

    log_dropped(path, num_rows - num_known, num_rows)
    return (
        np.concatenate(run_ids),
        np.concatenate(runs),
        np.concatenate(classes),
        np.concatenate(values),
    )


def log_dropped(path: Path, dropped: int, rows: int) -> None:
    """Log how many labels are of classes outside the list."""
    if dropped:
        log.info(
            "%s: %s of %s labels are of classes outside the class list: left out",
            path,
            f"{dropped:,}",
            f"{rows:,}",
        )


def log_clashes(path: Path, clashes: int) -> None:
    """Log how many labels are said to be both present and absent."""
    if clashes:
        log.warning(
            "%s: %s labels are both present and absent: taken as present", path, f"{clashes:,}"
        )


def read_mids(path: Path, see: str) -> tuple[str, ...]:
    """Read a list of classes, one MID a line.

    Raises:
        DataError: if it cannot be read, is empty, or names a class twice.
    """
    mids = tuple(read_text(path, see).split())
    if not mids:
        raise DataError(f"{path} names no class; {see}")
    mid, count = Counter(mids).most_common(1)[0]
    if count > 1:
        raise DataError(f"{path} names {mid} {count} times; {see}")
    return mids


def read_descriptions(path: Path, see: str) -> dict[str, str]:
    """Read the display name of each MID; names hold commas and quotes."""
    pieces = csv_columns(path, ["LabelName", "DisplayName"], see)
    return {mid: name for _, (mids, names) in pieces for mid, name in zip(mids, names, strict=True)}


def class_names(
    mids: Sequence[str], display: Mapping[str, str], source: Path, see: str
) -> tuple[str, ...]:
    """Return one name a class: its display name, told apart from others by its place; the MID where there is none.

    Args:
        mids: of the classes.
        display: MID -> display name.
        source: the file that the names are from, for messages.
        see: where help is.

    Raises:
        DataError: for a name that no class may have.
    """
    names = [without_quotes(display.get(mid, "")) or mid for mid in mids]
    return told_apart(
        [as_name(name, f"{source}: {mid!r}", see) for mid, name in zip(mids, names, strict=True)]
    )
