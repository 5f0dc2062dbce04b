"""MS-COCO as multi-label classification: an image is labelled with every class of which it shows an object.

The annotation file (a quarter of a gigabyte for train2014) is parsed once; what is kept of it is a table of a few
megabytes in a cache folder, so that a second start reads no JSON and loader workers hold numpy arrays only.
"""

import io
import json
import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pycocotools.coco import COCO
from torch import Tensor

from mldec.data.base import Classes, DataModule, Split
from mldec.data.transforms import EvalTransform, TrainTransform, read_image
from mldec.errors import DataError
from mldec.evaluators.multi_label import MultiLabelEvaluator

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section MS-COCO"
_FORMAT = 1  # of the cached table; raise it when the meaning of a stored array changes


def coco(
    *,
    root: str,
    image_size: int = 448,
    train: str = "train2014",
    val: str = "val2014",
    annotated_only: bool = True,
    augment: str = "official",
    cutout: float = 0.5,
    flip: bool = False,
    crop: float = 1.0,
    threshold: float = 0.5,
    cache_dir: str | None = None,
) -> DataModule:
    """Return MS-COCO: 80 classes in the order of the category ids, images in the order of the image ids.

    Args:
        root: folder with annotations/instances_{split}.json and the image folders {split}/.
        image_size: side of the square input in pixels.
        train: split to learn from.
        val: split to evaluate on.
        annotated_only: leave out images without any object, as the official code does: 82,081 and 40,137 images of
            the 2014 splits; all are 82,783 and 40,504.
        augment: "official", "randaugment" or "none"; this and the next three are described at `TrainTransform`.
        cutout: side of the covered square as a fraction of the image side; 0 turns it off.
        flip: mirror half of the training images.
        crop: smallest area of a random crop as a fraction of the image; 1 turns it off.
        threshold: probability from which on a class counts as predicted, for precision, recall and F1.
        cache_dir: folder for the parsed annotations; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ConfigError: A value is out of range.
    """
    learn = TrainTransform(image_size=image_size, augment=augment, cutout=cutout, flip=flip, crop=crop)
    check = EvalTransform(image_size=image_size)
    evaluator = partial(MultiLabelEvaluator, threshold=threshold)
    evaluator()  # refuses a wrong threshold now, not after the first epoch
    folder = Path(root).expanduser().absolute()
    _check_root(folder)
    read = partial(_read_split, folder, annotated_only=annotated_only, cache_dir=cache_dir)

    def load_train() -> Split:
        split = read(train, transform=learn)
        _check_same_classes(folder, split.classes.names, data.val.classes.names)
        return split

    load_val = partial(read, val, transform=check)
    data = DataModule(load_train=load_train, load_val=load_val, evaluator=evaluator, transform=check)
    return data


@dataclass(frozen=True)
class Table:
    """What is kept of an annotation file with N images, by ascending id, and K classes, by ascending id."""

    files: np.ndarray  # [N] bytes of a fixed width: paths in the image folder
    labels: np.ndarray  # [N, K] int8: 1 if the image shows an object of the class, else 0
    classes: np.ndarray  # [K] str of a fixed width


class CocoDataset:
    """The images of one split with their labels; see `mldec.data.base.ImageDataset`."""

    def __init__(self, *, folder: Path, table: Table, transform: Callable[[Image.Image], Tensor]) -> None:
        self.folder = folder
        # Arrays, not lists of strings: reference counts would make each forked worker copy those bit by bit.
        self.files = table.files
        self.labels = table.labels
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the image uint8 [3, S, S] and its target int8 [K] of 1 and 0."""
        target = torch.tensor(self.labels[index])  # a copy: the caller may write to it
        return self.transform(read_image(self.name(index))), target

    def name(self, index: int) -> str:
        """Return the path of the image file."""
        return str(self.folder / os.fsdecode(self.files[index]))


def _read_split(
    root: Path,
    split: str,
    *,
    transform: Callable[[Image.Image], Tensor],
    annotated_only: bool,
    cache_dir: str | None,
) -> Split:
    annotations = root / "annotations" / f"instances_{split}.json"
    table = _read_table(annotations, cache_dir)
    if annotated_only:
        kept = table.labels.any(axis=1)
        table = Table(table.files[kept], table.labels[kept], table.classes)
    if not len(table.files):
        raise DataError(f"{annotations}: no image {'with an object' if annotated_only else 'at all'}; {_SEE}")
    _check_present(root / split, table.files)
    num_images, num_classes = table.labels.shape
    which = "annotated only" if annotated_only else "all"
    log.info("coco %s: %s images (%s), %d classes", split, f"{num_images:,}", which, num_classes)
    dataset = CocoDataset(folder=root / split, table=table, transform=transform)
    return Split(dataset=dataset, classes=Classes(names=tuple(table.classes.tolist())))


def _check_root(root: Path) -> None:
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; set data.root to the folder of MS-COCO or {_SEE}")
    if not any(root.iterdir()):
        raise DataError(f"{root} is empty; {_SEE}")


def _check_same_classes(root: Path, train: tuple[str, ...], val: tuple[str, ...]) -> None:
    if train != val:
        alone = sorted(set(train) ^ set(val))
        what = f"{alone[0]!r} is in one only" if alone else "their order differs"
        raise DataError(f"{root}: the classes of train ({len(train)}) and val ({len(val)}) differ: {what}; {_SEE}")


def _check_present(folder: Path, files: np.ndarray) -> None:
    """Compare the listed files with the folder: one listing, where a question for each file takes minutes over NFS."""
    present: dict[str, set[str]] = {}
    absent = []
    for file in map(os.fsdecode, files.tolist()):
        inner, _, leaf = file.rpartition("/")  # a custom file_name may name a folder inside
        if inner not in present:
            present[inner] = _list(folder / inner)
        if leaf not in present[inner]:
            absent.append(file)
    if absent:
        count = f"{len(absent):,} of {len(files):,}"
        raise DataError(f"{folder}: {count} listed images are absent, the first is {absent[0]}; {_SEE}")


def _list(folder: Path) -> set[str]:
    try:
        return {entry.name for entry in os.scandir(folder)}
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror}); {_SEE}") from error


def _read_table(annotations: Path, cache_dir: str | None) -> Table:
    """Return the parsed annotation file, from the cache if that was made from this very file."""
    try:
        stat = annotations.stat()
    except OSError as error:
        raise DataError(f"{annotations} cannot be read ({error.strerror}); {_SEE}") from error
    key = f"{_FORMAT} {stat.st_size} {stat.st_mtime_ns} {annotations}"
    cache = _cache_file(annotations, cache_dir)
    table = _load(cache, key)
    if table is None:
        table = _parse(annotations)
        _store(cache, key, table)
    return table


def _cache_file(annotations: Path, cache_dir: str | None) -> Path:
    """Return one file for each path, so that a changed annotation file replaces its old table."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mldec")
    try:
        folder = Path(cache_dir or default).expanduser()
    except RuntimeError:  # an account without a home, as in some containers
        folder = Path(tempfile.gettempdir(), "mldec")
    return folder / f"coco-{sha256(os.fsencode(annotations)).hexdigest()[:16]}.npz"


def _load(cache: Path, key: str) -> Table | None:
    try:
        with np.load(cache, allow_pickle=False) as stored:
            table = Table(stored["files"], stored["labels"], stored["classes"])
            fits = str(stored["key"]) == key and table.labels.shape == (len(table.files), len(table.classes))
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error):
        return None  # absent, cut short, or not ours: parse again
    return table if fits else None


def _store(cache: Path, key: str, table: Table) -> None:
    """Write to the side, then rename: ranks that start together each see a whole file or none."""
    temporary = None
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache.parent, suffix=".tmp", delete=False) as temporary:
            np.savez(temporary, key=key, files=table.files, labels=table.labels, classes=table.classes)
        Path(temporary.name).replace(cache)
    except OSError as error:
        log.warning("%s cannot be written (%s): the annotations are parsed at every start", cache, error.strerror)
        if temporary is not None:
            Path(temporary.name).unlink(missing_ok=True)


def _parse(annotations: Path) -> Table:
    try:
        with redirect_stdout(io.StringIO()):  # pycocotools prints its progress
            index = COCO(str(annotations))
        return _tabulate(annotations, index)
    except OSError as error:
        raise DataError(f"{annotations} cannot be read ({error.strerror}); {_SEE}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{annotations} is not valid JSON ({error}); restore it, {_SEE}") from error
    except KeyError as error:
        raise DataError(f"{annotations} is not a COCO instances file: no key {error}; {_SEE}") from error
    except (AssertionError, TypeError, AttributeError) as error:
        raise DataError(f"{annotations} is not a COCO instances file ({error}); {_SEE}") from error


def _tabulate(annotations: Path, index: Any) -> Table:
    """Collapse the objects of each image, crowds included, into labels."""
    for key in ("images", "annotations", "categories"):
        if not isinstance(index.dataset.get(key), list):  # pycocotools takes absence for an empty list
            raise TypeError(f"it has no list of {key}")
    rows = {image: row for row, image in enumerate(sorted(index.imgs))}
    columns = {category: column for column, category in enumerate(sorted(index.cats))}
    labels = np.zeros((len(rows), len(columns)), np.int8)
    for annotation in index.dataset["annotations"]:
        row, column = rows.get(annotation["image_id"]), columns.get(annotation["category_id"])
        if row is None or column is None:
            what = f"image {annotation['image_id']}" if row is None else f"category {annotation['category_id']}"
            raise DataError(f"{annotations}: annotation {annotation['id']} names the unknown {what}; {_SEE}")
        labels[row, column] = 1
    files = np.array([os.fsencode(index.imgs[image]["file_name"]) for image in rows], np.bytes_)
    return Table(files, labels, np.array([index.cats[category]["name"] for category in columns], np.str_))
