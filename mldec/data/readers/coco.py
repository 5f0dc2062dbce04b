"""MS-COCO as multi-label classification, and its zero-shot split."""

import io
import logging
from array import array
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from pycocotools.coco import COCO

from mldec.data.cache import cached_table
from mldec.data.labels import Labels, fixed_per_class, from_statements, random_drop
from mldec.data.settings import DEFAULT_VECTORS, NO_VECTORS, Source, VectorSettings
from mldec.data.splits import warn_empty_classes
from mldec.data.table import Table, encode_paths, path_inside
from mldec.data.tasks import ZeroShot, multi_label, split_classes
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, naming_errors
from mldec.files.text import read_json
from mldec.names import COCO_NAMES, as_name, indices_of, names_fault

log = logging.getLogger("mldec")

_ROBOFLOW = "_annotations.coco.json"  # in the image folder of a split


def coco(
    *,
    root: str,
    train: str = "train2014",
    val: str = "val2014",
    annotated_only: bool = True,
    threshold: float = 0.5,
    skip_empty: bool = False,
    drop_labels: float = 0.0,
    keep_per_class: int | None = None,
    labels_seed: int = 0,
    words: VectorSettings = NO_VECTORS,
) -> Source:
    """Return MS-COCO: 80 classes sorted by category id, images sorted by image id.

    Args:
        root: Folder with annotations/instances_{split}.json and the image folders {split}/, or a
            Roboflow export with {split}/_annotations.coco.json.
        annotated_only: Omit images without objects, as in the official code. 82,081 of 82,783
            training images and 40,137 of 40,504 validation images of 2014 remain.
        drop_labels: Probability that a training label is set to -1 (not annotated), in [0, 1). It
            simulates partial labels and requires a loss that accepts -1, such as loss=partial.
        keep_per_class: Keep this number of positives and negatives per class, and set all other
            training labels to -1. It excludes `drop_labels`.
        labels_seed: Seed of the dropped labels, 0 or more.
        words: Word vectors for a head with word queries.
    """
    thin = _thinning(drop_labels, keep_per_class, labels_seed)
    evaluator = multi_label(threshold, skip_empty=skip_empty)
    folder = check_folder(root, "MS-COCO")
    load = partial(_load_split, folder, annotated_only=annotated_only)

    source = Source(load=load, train=train, val=val, where=folder, evaluator=evaluator)
    source = replace(source, load_train=partial(load, thin=thin))
    if words.vectors is None:
        return source
    return replace(source, vectors=lambda names: words.of_classes(folder, names, names)[1:])


def _thinning(drop: float, keep: int | None, seed: int) -> Callable[[Labels], Labels] | None:
    """Return the function that makes training labels partial, or None."""
    if not 0 <= drop < 1:
        raise ValueError(f"drop_labels is {drop}; it must be in [0, 1)")
    if keep is not None and keep < 1:
        raise ValueError(f"keep_per_class is {keep}; it must be at least 1, or null for all labels")
    if drop and keep is not None:
        raise ValueError(f"drop_labels is {drop} and keep_per_class is {keep}; set only one")

    if keep is not None:
        return partial(fixed_per_class, n=keep, seed=seed)
    if drop:
        return partial(random_drop, p=drop, seed=seed)
    return None


def _load_split(
    root: Path,
    split: str,
    cache_dir: str | None,
    *,
    annotated_only: bool,
    thin: Callable[[Labels], Labels] | None = None,
) -> StoredImages:
    annotations = root / "annotations" / f"instances_{split}.json"
    roboflow = root / split / _ROBOFLOW
    if roboflow.is_file():
        annotations = roboflow
    table = cached_table("coco labels", [annotations], partial(_parse, annotations), cache_dir)

    # Each entry of the sparse labels is positive, so images without objects have no entry.
    if annotated_only:
        table = table.select(np.diff(table.labels.starts) > 0)
    condition = " with an object" if annotated_only else ""
    if not len(table):
        raise DataError(f"{annotations}: no image{condition}; restore it")
    log.info(f"coco {split}: {len(table):,} images{condition}, {len(table.classes)} classes")
    warn_empty_classes("coco", split, table)

    if thin is not None:
        table = replace(table, labels=thin(table.labels))
        share = f"{(table.labels.dense() >= 0).mean():.2%} of the labels are kept"
        log.info(f"coco {split}: {share}, the others count as not annotated")

    return in_folder(table, root / split)


def _parse(annotations: Path) -> Table:
    """Read an "instances" file: one label per class with an object, including crowds."""
    content = read_json(annotations)
    with naming_errors(annotations, DataError, remedy="use a COCO instances file"):
        # Suppress the messages of `createIndex`.
        index = COCO()
        index.dataset = content
        with redirect_stdout(io.StringIO()):
            index.createIndex()

        rows = {image: row for row, image in enumerate(sorted(index.imgs))}
        categories = sorted(index.cats)

        # The first category of Roboflow is usually the project, the supercategory of all others.
        first = index.cats[categories[0]]
        if annotations.name == _ROBOFLOW and first.get("supercategory") == "none":
            groups = {category.get("supercategory") for category in index.cats.values()}
            if first["name"] in groups:
                del categories[0]
        columns = indices_of(categories)

        # Use flat arrays, not a matrix. There may be thousands of categories, and few per image.
        image_rows = array("q")
        class_columns = array("q")
        for annotation in content["annotations"]:
            image_rows.append(rows[annotation["image_id"]])
            class_columns.append(columns[annotation["category_id"]])

        files = []
        names = []
        for image in rows:
            where = f"{annotations}: file_name of image {image}"
            files.append(path_inside(index.imgs[image]["file_name"], where))
        for category in columns:
            where = f"{annotations}: category {category}"
            names.append(as_name(index.cats[category]["name"], where))

    # Categories of merged files may have the same name, which would be ambiguous.
    fault = names_fault(names)
    if fault is not None:
        raise DataError(f"{annotations}: {fault}; merge or rename them")

    labels, _ = from_statements(
        np.array(image_rows, np.int64),
        np.array(class_columns, np.int64),
        np.ones(len(image_rows), np.int8),
        num_images=len(rows),
        num_classes=len(columns),
        default=0,
    )
    return Table(encode_paths(files), labels, tuple(names))


_UNSEEN = (
    "airplane,bus,cat,dog,cow,elephant,umbrella,tie,snowboard,skateboard,cup,knife,cake,couch,"
    "keyboard,sink,scissors"
)
_UNUSED = (
    "traffic light,fire hydrant,stop sign,parking meter,sports ball,baseball bat,"
    "baseball glove,tennis racket,wine glass,hot dog,potted plant,dining table,cell phone,"
    "teddy bear,hair drier"
)

UNSEEN = tuple(_UNSEEN.split(","))
_NOT_SEEN = set(UNSEEN) | set(_UNUSED.split(","))
SEEN = tuple(name for name in COCO_NAMES if name not in _NOT_SEEN)


def coco_zsl(
    *,
    root: str,
    train: str = "train2014",
    val: str = "val2014",
    val_images: Literal["unseen", "all"] = "unseen",
    threshold: float = 0.5,
    words: VectorSettings = DEFAULT_VECTORS,
) -> Source:
    """Return zero-shot MS-COCO: 48 training and 65 validation classes, sorted by category id.

    The training images are all images with a seen class. Unseen objects in them are not labeled.

    Args:
        root: Folder of MS-COCO, see `coco`.
        val_images: "unseen": only images with an unseen class. "all": images with any of the 65
            classes.
        words: Word vectors. The columns of an array without names are the 80 classes, sorted by
            category id.
    """
    folder = check_folder(root, "MS-COCO")
    task = ZeroShot(
        roles=partial(split_classes, unseen=UNSEEN, seen=SEEN, where=str(folder)),
        vectors=lambda names: words.of_classes(folder, names, order=COCO_NAMES),
        val_images=val_images,
        where=str(folder),
        threshold=threshold,
    )
    load = partial(_load_zero_shot, folder)
    source = Source(load=load, train=train, val=val, where=folder, evaluator=task.evaluator)
    return replace(source, zero_shot=task)


def _load_zero_shot(folder: Path, split: str, cache_dir: str | None) -> StoredImages:
    """Return the images with at least one of the 65 classes, without the 15 unused classes."""
    images = _load_split(folder, split, cache_dir, annotated_only=False)

    # Select the classes first: images with unused classes only have no label left.
    used = np.flatnonzero(np.isin(images.classes, SEEN + UNSEEN)).tolist()
    images = images.select_classes(used)
    return images.select(images.labels.counts_per_image() > 0)
