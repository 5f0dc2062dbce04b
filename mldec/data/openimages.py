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

import numpy as np

from mldec.data.base import DataModule
from mldec.data.csv_file import read_csv
from mldec.data.files import check_folder, file_data
from mldec.data.labels import from_statements
from mldec.data.names import as_name, told_apart, without_quotes
from mldec.data.tables import Table, cached
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.errors import ConfigError, DataError
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.inputs import read_text

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
NAMES = ("display", "mid")
_CONFIDENCE = {"1": 1, "0": 0, "1.0": 1, "0.0": 0}


def openimages(
    *,
    root: str,
    image_size: int = 224,
    train: str = "train",
    val: str = "test",
    names: str = "display",
    prefix: int = 0,
    absent: str = "stop",
    augment: str = "official",
    cutout: float = 0.5,
    flip: bool = False,
    crop: float = 1.0,
    bad_images: str = "stop",
    cache_dir: str | None = None,
) -> DataModule:
    """Return Open Images: the classes of the trainable list in its order, images in the order of their ids.

    An image without a verified label is in no official file, and so not here. Targets are 1, 0 and mostly -1.

    Source: storage.googleapis.com/openimages, human-verified image-level labels; machine-generated ones are refused.

    Args:
        root: folder with annotations/ (the official CSV and class files) and the image folders train/, validation/,
            test/ of ID.jpg.
        image_size: side of the square input in pixels.
        train: split to learn from.
        val: split to evaluate on: papers use "test" (125,436 images), not "validation" (41,620).
        names: "display": the display name, with its place as in "Ball (12)" if classes share it; or "mid" (/m/01bqvp).
        prefix: images lie in sub-folders called by this many first characters of their ids, such as train/0a/ for 2.
        absent: what to do about a listed image that is not on the disk, see `file_data`; many left Flickr for good.
        augment: "official", "randaugment" or "none"; this and the next three are described at `TrainTransform`.
        cutout: side of the covered square as a fraction of the image side; 0 turns it off.
        flip: mirror half of the training images.
        crop: smallest area of a random crop as a fraction of the image; 1 turns it off.
        bad_images: "stop" at an image that cannot be read, or "skip" and count it.
        cache_dir: folder for the parsed annotations; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ConfigError: A value is out of range.
    """
    for key, split in (("train", train), ("val", val)):
        if split not in LABELS:
            raise ConfigError(f"data.{key} {split!r} is not a split of Open Images: choose {', '.join(LABELS)}")
    check_names(names)
    if prefix < 0:
        raise ConfigError(f"data.prefix is {prefix}: it must be 0 (no sub-folders) or more")
    folder = check_folder(root, "Open Images", _SEE)
    return file_data(
        partial(_read_split, folder, names=names, prefix=prefix, cache_dir=cache_dir),
        train=train,
        val=val,
        learn=TrainTransform(image_size=image_size, augment=augment, cutout=cutout, flip=flip, crop=crop),
        check=EvalTransform(image_size=image_size),
        evaluator=PartialLabelEvaluator,
        where=folder,
        see=_SEE,
        bad_images=bad_images,
        absent=absent,
    )


def check_names(names: str) -> None:
    """Raise a `ConfigError` for an unknown kind of class name."""
    if names not in NAMES:
        raise ConfigError(f"data.names {names!r} is not known: choose {' or '.join(NAMES)}")


def _read_split(root: Path, split: str, *, names: str, prefix: int, cache_dir: str | None) -> tuple[Path, Table]:
    folder = root / "annotations"
    sources = statements, trainable, descriptions = folder / LABELS[split], folder / TRAINABLE, folder / DESCRIPTIONS
    parse = partial(_parse, statements, trainable, descriptions, names, prefix)
    table = cached(f"openimages {names} {prefix}", sources, parse, cache_dir=cache_dir, see=_SEE)
    log_table(f"openimages {split}", table)
    return root / split, table


def log_table(what: str, table: Table) -> None:
    """Log the size of a split."""
    present = int(np.count_nonzero(table.labels.values == 1))
    counts = f"{len(table):,} images, {len(table.classes):,} classes"
    log.info(
        "%s: %s, %s present and %s absent", what, counts, f"{present:,}", f"{len(table.labels.values) - present:,}"
    )


def _parse(statements: Path, trainable: Path, descriptions: Path, names: str, prefix: int) -> Table:
    mids = read_mids(trainable, _SEE)
    ids, images, classes, values = _read_statements(statements, mids)
    ids, places = np.unique(ids, return_inverse=True)  # the file is sorted, but nothing says that it must be
    if not np.char.isalnum(ids).all():  # it becomes a path
        raise DataError(f"{statements}: {ids[~np.char.isalnum(ids)][0].decode()!r} is not an image id; {_SEE}")
    labels, clashes = from_statements(places[images], classes, values, num_images=len(ids), num_classes=len(mids))
    log_clashes(statements, clashes)
    files = np.char.add(ids, b".jpg")
    if prefix:
        files = np.char.add(np.char.add(ids.astype(f"S{prefix}"), b"/"), files)
    display = {} if names == "mid" else read_descriptions(descriptions, _SEE)
    return Table(files, labels, class_names(mids, display, descriptions if display else trainable, _SEE))


def _read_statements(path: Path, mids: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the ids of runs of rows [R], and of each statement on a known class its run, class and value [M]."""
    index = {mid: place for place, mid in enumerate(mids)}
    ids: list[np.ndarray] = [np.zeros(0, "S1")]
    kept: list[tuple[np.ndarray, ...]] = [(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int8))]
    runs = rows = 0
    for first, (images, _, labels, confidences) in read_csv(
        path, ["ImageID", "Source", "LabelName", "Confidence"], _SEE
    ):
        values = np.fromiter(map(_CONFIDENCE.get, confidences, repeat(-1)), np.int8, len(labels))
        if values.min() < 0:
            row = int(values.argmin())
            fault = f"row {first + row} has Confidence {confidences[row]!r}, not 1 or 0: not human-verified labels?"
            raise DataError(f"{path}: {fault} {_SEE}")
        classes = np.fromiter(map(index.get, labels, repeat(-1)), np.int32, len(labels))
        try:
            names = np.array(images, np.bytes_)
        except UnicodeEncodeError as error:
            raise DataError(f"{path}: an image id after row {first - 1} is not ASCII; {_SEE}") from error
        new = np.append(True, names[1:] != names[:-1])
        known = classes >= 0
        kept.append(((np.cumsum(new) + (runs - 1))[known].astype(np.int32), classes[known], values[known]))
        ids.append(names[new])
        runs += len(ids[-1])
        rows += len(labels)
    owners, classes, values = (np.concatenate(part) for part in zip(*kept, strict=True))
    log_dropped(path, rows - len(classes), rows)
    return np.concatenate(ids), owners, classes, values


def log_dropped(path: Path, dropped: int, rows: int) -> None:
    """Log how many labels are of classes outside the list."""
    if dropped:
        log.info(
            "%s: %s of %s labels are of classes outside the class list: left out", path, f"{dropped:,}", f"{rows:,}"
        )


def log_clashes(path: Path, clashes: int) -> None:
    """Log how many labels are said to be both present and absent."""
    if clashes:
        log.warning("%s: %s labels are both present and absent: taken as present", path, f"{clashes:,}")


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
    pieces = read_csv(path, ["LabelName", "DisplayName"], see)
    return {mid: name for _, (mids, names) in pieces for mid, name in zip(mids, names, strict=True)}


def class_names(mids: Sequence[str], display: Mapping[str, str], source: Path, see: str) -> tuple[str, ...]:
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
    return told_apart([as_name(name, f"{source}: {mid!r}", see) for mid, name in zip(mids, names, strict=True)])
