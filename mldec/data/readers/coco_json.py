"""MS-COCO and other JSON files of its form as multi-label data, and its zero-shot split."""

import os
from array import array
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mldec.data.cache import cached_table
from mldec.data.labels import from_statements
from mldec.data.photos import find_list
from mldec.data.readers.tables import find_tables
from mldec.data.source import Source
from mldec.data.splits import HELD_OUT, SPLITS, HoldOut, check_val, find_split, log_split
from mldec.data.table import Table, encode_paths, path_inside
from mldec.data.tasks import (
    DEFAULT_VECTORS,
    NO_VECTORS,
    VectorSettings,
    ZeroShot,
    multi_label,
    split_classes,
)
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, log, naming_errors
from mldec.files.text import member, read_json, unique
from mldec.names import COCO_NAMES, abbreviate, check_names, format_list, indices_of

_ROBOFLOW = "_annotations.coco.json"  # in the image folder of a split
_REMEDY = "correct it, or use a COCO instances file"


def coco(
    *,
    root: str,
    train: str = "train2014",
    val: str = "val2014",
    annotated_only: bool = True,
    division: HoldOut = HELD_OUT,
    threshold: float = 0.5,
    skip_empty: bool = False,
    words: VectorSettings = NO_VECTORS,
) -> Source:
    """Return MS-COCO: 80 classes sorted by category id, images sorted by image id.

    Args:
        root: Folder with annotations/instances_{split}.json and the image folders {split}/ or
            images/{split}/, a Roboflow export with {split}/_annotations.coco.json, other files
            with the name of a split, such as train.json, or an export with a single JSON file and
            images/ or data/, such as those of CVAT, Label Studio and FiftyOne.
        annotated_only: Omit images without objects, as in the official code. 82,081 of 82,783
            training images and 40,137 of 40,504 validation images of 2014 remain.
        division: Held-out images if there is a single file without the name of a validation split.
        words: Word vectors for a head with word queries.
    """
    evaluator = multi_label(threshold, skip_empty=skip_empty)
    folder = check_folder(root, "MS-COCO")

    def load(split: str, cache_dir: str | None) -> StoredImages:
        files = _find_files(folder)
        name = find_split(split, files)
        # A single file of training images is divided. An official split such as train2014 is not,
        # because its validation split has a file of its own, and a split that the user has named,
        # such as test, must exist.
        is_single = len(files) == 1 and (train, val) == ("train", "val")
        is_single &= all(SPLITS.get(found.lower(), "train") == "train" for found in files)
        if is_single:
            name = next(iter(files))
        elif split == train and division.fraction not in (0, HELD_OUT.fraction):
            log.warning("coco: data.val_fraction is not used, because the data has both splits")
        if not is_single and split == val:
            # Before the file is opened, because a hint to the existing splits helps more than a
            # missing file.
            check_val(name, files, folder)
        images = _load_split(folder, files, name, cache_dir, annotated_only=annotated_only)
        if is_single:
            images = division.select(images, val=split == val)
            log.info(f"coco: {files[name]} is the only file: {len(images):,} images for {split}")
        return images

    source = Source(load=load, train=train, val=val, where=folder, evaluator=evaluator)
    if words.vectors is None:
        return source
    return replace(source, vectors=lambda names: words.of_classes(folder, names, names)[1:])


def _find_files(root: Path) -> dict[str, Path]:
    """Return the annotation files by split. The split of a single file of another name is ""."""
    files = {}
    for path in root.glob("annotations/instances_*.json"):
        files[path.stem.removeprefix("instances_")] = path
    for path in root.glob(f"*/{_ROBOFLOW}"):
        files[path.parent.name] = path
    if files:
        return files

    # Files with the name of a split, such as train.json or train/annotations.json, or one file.
    found = find_tables(root, (".json",))
    if (root / "annotations").is_dir():
        for split, paths in find_tables(root / "annotations", (".json",)).items():
            found.setdefault(split, []).extend(paths)
    if find_split("train", found) in found:
        found.pop("", None)
    names = [str(path.relative_to(root)) for split in found.values() for path in split]
    if len(names) > len(found):
        fault = f"several files may have the annotations, {format_list(names)}"
        raise DataError(f"{root}: {fault}; leave one, or call them train.json and val.json")
    return {split: path for split, [path] in found.items()}


def _load_split(
    root: Path,
    files: Mapping[str, Path],
    split: str,
    cache_dir: str | None,
    *,
    annotated_only: bool,
) -> StoredImages:
    annotations = files.get(split, root / "annotations" / f"instances_{split}.json")
    table = cached_table("coco labels", [annotations], partial(_parse, annotations), cache_dir)

    # Each entry of the sparse labels is positive, so images without objects have no entry.
    if annotated_only:
        table = table.select(np.diff(table.labels.starts) > 0)
    if not len(table):
        condition = " with an object" if annotated_only else ""
        raise DataError(f"{annotations}: no image{condition}; restore it")

    # FiftyOne calls the image folder data.
    folders = [root / split, root / "images" / split, root / "images", root / "data", root]
    folder, paths = find_list(list(map(os.fsdecode, table.files)), folders)
    table = replace(table, files=encode_paths(paths))
    return log_split("coco", split, in_folder(table, folder))


def _parse(annotations: Path) -> Table:
    """Read an "instances" file: one label per class with an object, including crowds."""
    content = read_json(annotations)
    with naming_errors(annotations, DataError, remedy=_REMEDY):
        objects = member(content, "annotations", list)
        images = _by_id(content, "images", "file_name", annotations)
        categories = _by_id(content, "categories", "name", annotations)

        # The first category of Roboflow is usually the project, the supercategory of all others.
        groups = {_id(entry, "id"): entry.get("supercategory") for entry in content["categories"]}
        first = next(iter(categories), 0)
        is_project = groups.get(first) == "none" and categories[first] in groups.values()
        if annotations.name == _ROBOFLOW and is_project:
            del categories[first]

        files = []
        for image, file in images.items():
            where = f"{annotations}: file_name of image {image}"
            path = path_inside(file, where, without_root=True)
            files.append((path, f"the id {image}"))
        unique(files, "the file")
        # Categories of merged files may have the same name, which would be ambiguous.
        names = check_names(categories.values(), f"{annotations}: categories")

    # Use flat arrays, not a matrix. There may be thousands of categories, and few per image.
    rows = indices_of(images)
    columns = indices_of(categories)
    image_rows = array("q")
    class_columns = array("q")
    for number, entry in enumerate(objects, 1):
        with naming_errors(f"{annotations}, annotation {number}", DataError, remedy=_REMEDY):
            image_rows.append(_find(rows, entry, "image_id"))
            class_columns.append(_find(columns, entry, "category_id"))

    labels, _ = from_statements(
        np.array(image_rows, np.int64),
        np.array(class_columns, np.int64),
        np.ones(len(image_rows), np.int8),
        num_images=len(rows),
        num_classes=len(columns),
        default=0,
    )
    return Table(encode_paths([path for path, _ in files]), labels, names)


def _by_id(content: Any, key: str, text: str, annotations: Path) -> dict[int | str, Any]:
    """Return a value of each entry of a list by the ids of the entries, sorted by id."""
    kind = str if key == "images" else object
    pairs = []
    for number, entry in enumerate(member(content, key, list), 1):
        with naming_errors(f"{annotations}, {key}, entry {number}", DataError, remedy=_REMEDY):
            pairs.append((_id(entry, "id"), member(entry, text, kind)))
    by_id = unique(pairs, f"{key}: the id")
    # Numbers before text, which cannot be compared with each other.
    return dict(sorted(by_id.items(), key=lambda item: (isinstance(item[0], str), item[0])))


def _id(entry: Any, key: str) -> int | str:
    """Return an id. Some programs write numbers as text, or as decimals such as 1.0."""
    value = member(entry, key, object)
    if isinstance(value, str):
        is_number = value.isdecimal() and str(int(value)) == value
        return int(value) if is_number else value
    if isinstance(value, int | float) and value % 1 == 0:
        return int(value)
    raise ValueError(f"{key} is {abbreviate(value)}, not an id")


def _find(places: Mapping[int | str, int], entry: Any, key: str) -> int:
    """Return the row or column of the image or category of an annotation."""
    identity = _id(entry, key)
    if identity not in places:
        raise ValueError(f"{key} is {identity!r}, which is not listed")
    return places[identity]


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
    images = _load_split(folder, _find_files(folder), split, cache_dir, annotated_only=False)

    # Select the classes first: images with unused classes only have no label left.
    used = np.flatnonzero(np.isin(images.classes, SEEN + UNSEEN)).tolist()
    images = images.select_classes(used)
    return images.select(images.labels.counts_per_image() > 0)
