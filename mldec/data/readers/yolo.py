"""YOLO datasets, as exported by Roboflow and CVAT. The labels are the classes of the boxes.

Paths follow the documentation of Ultralytics, https://docs.ultralytics.com/datasets/detect.
"""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mldec.data.images import READ, UnsupportedFiles
from mldec.data.settings import Source
from mldec.data.splits import check_val, log_split
from mldec.data.table import TableBuilder, path_inside
from mldec.data.tasks import multi_label
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, naming_errors
from mldec.files.text import read_lines, read_text, read_yaml
from mldec.names import abbreviate, check_names

log = logging.getLogger("mldec")

NULL = ("", "null", "~")  # YAML without a value, read as text


def yolo(
    *,
    root: str,
    file: str = "data.yaml",
    train: str = "train",
    val: str = "val",
    threshold: float = 0.5,
    skip_empty: bool = True,
) -> Source:
    """Return the images of a YOLO dataset, sorted by path, or in the order of a text file.

    Args:
        file: YAML file in `root`. It has `names` (a list or a mapping of index to name), and for
            each split an image folder, a list of folders, or a text file with a path per line. The
            optional `path` is the parent of these folders.
        train: Key of the training split.
        val: Key of the validation split, such as "test".
    """
    evaluator = multi_label(threshold, skip_empty=skip_empty)
    folder = check_folder(root, "the YAML file")
    source = folder / path_inside(file, "data.file")

    def load(split: str, _: str | None) -> StoredImages:
        with naming_errors(source, DataError, remedy="write keys such as train: FOLDER"):
            content = dict(read_yaml(source, as_text=True))
            content = {key: value for key, value in content.items() if value not in NULL}
        if split == val:
            check_val(val, [key for key, value in content.items() if value], source)
        return _load_split(folder, source, content, split)

    return Source(load=load, train=train, val=val, where=source, evaluator=evaluator)


def _load_split(folder: Path, source: Path, content: Mapping[str, Any], split: str) -> StoredImages:
    """Return the images of a split. No cache: edited labels do not change the folder time."""
    names = _class_names(content.get("names"), source)
    images: list[Path] = []
    unsupported = UnsupportedFiles()
    for path in _paths(content, split, source):
        images += _images(path, unsupported)
    if unsupported and not images:
        raise DataError(f"{source}, {split}: no supported image; {unsupported}")

    label_files = [_label_file(image) for image in images]
    absent = {file for file in label_files if not file.is_file()}
    if images and len(absent) == len(images):
        fault = f"none of {len(images):,} images has a label file"
        raise DataError(f"{source}, {split}: {fault}; add files such as {label_files[0]}")

    # The common folder is `root`, or one of its parents if images are outside `root`.
    parents = {image.parent for image in images}
    image_folder = Path(os.path.commonpath(parents | {folder}))
    builder = TableBuilder(classes=names)
    for image, file in zip(images, label_files, strict=True):
        labels = {} if file in absent else _labels(file, len(names))
        builder.add(str(image.relative_to(image_folder)), labels, f"{source}, {split}")

    table = builder.build(source)
    log_split("yolo", split, table)
    if unsupported:
        log.warning(f"yolo {split}: {unsupported}")
    if absent:
        log.info(f"yolo {split}: {len(absent):,} images have no label file")
    return in_folder(table, image_folder)


def _class_names(names: object, source: Path) -> tuple[str, ...]:
    if isinstance(names, dict) and set(names) == set(map(str, range(len(names)))):
        names = [names[index] for index in sorted(names, key=int)]
    if not isinstance(names, list) or not names:
        fault = f"names is {abbreviate(names)}"
        raise DataError(f"{source}: {fault}; list the names, or map 0, 1, ... to names")
    return check_names(names, source)


def _paths(content: Mapping[str, Any], split: str, source: Path) -> list[Path]:
    value: Any = content.get(split)
    entries: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, str) for entry in entries):
        fault = f"{split} is {abbreviate(value)}"
        raise DataError(f"{source}: {fault}; set an image folder, a list or a text file of paths")

    # `path` is often a folder on another machine. Roboflow writes ../train/images for a folder next
    # to data.yaml.
    paths = []
    base = source.parent / str(content.get("path") or "")
    for entry in entries:
        relative = entry.replace("\\", "/")
        candidates = [base / relative, base / relative.removeprefix("../")]
        candidates += [source.parent / relative, source.parent / relative.removeprefix("../")]
        path = next(filter(Path.exists, candidates), None)
        if path is None:
            missing = os.path.normpath(candidates[0])
            raise DataError(f"{source}: {split}: {missing} does not exist; correct the path")
        paths.append(Path(os.path.normpath(path)))
    return paths


def _images(path: Path, unsupported: UnsupportedFiles) -> list[Path]:
    """Return the images in a folder (recursively) or in a text file. Counts unsupported files."""
    images = []
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.name[0] != ".":
                unsupported.add(str(file))
                if file.suffix.lower() in READ:
                    images.append(file)
        return images

    for line in read_lines(path):
        image = path.parent / line.replace("\\", "/")
        images.append(Path(os.path.normpath(image)))
    return images


def _label_file(image: Path) -> Path:
    """Return the label file of an image: the last folder "images" becomes "labels"."""
    before, images, after = str(image.with_suffix(".txt")).rpartition(f"{os.sep}images{os.sep}")
    return Path(before + images.replace("images", "labels") + after)


def _labels(path: Path, num_classes: int) -> dict[int, int]:
    """Return the classes of a label file. The first number of each line is a class index."""
    labels = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        fields = line.split()
        if not fields:
            continue

        # Some programs write the index as a decimal, such as 2.000000.
        index = re.fullmatch(r"(\d+)(\.0*)?", fields[0])
        if index is None or int(index[1]) >= num_classes:
            fault = f"the class {abbreviate(fields[0])} is not an index below {num_classes}"
            raise DataError(f"{path}, line {number}: {fault}; correct it")
        labels[int(index[1])] = 1
    return labels
