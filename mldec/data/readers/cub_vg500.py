"""CUB-200-2011 (312 attributes) and Visual Genome 500 as multi-label classification."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mldec.data.cache import cached_table
from mldec.data.photos import list_folder
from mldec.data.source import Source
from mldec.data.splits import log_split
from mldec.data.table import Table, TableBuilder, encode_paths
from mldec.data.tasks import multi_label
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, naming_errors
from mldec.files.text import member, open_binary, read_json, read_lines, reading, unique
from mldec.names import check_names, given_names, numbered_names


def cub(*, root: str, threshold: float = 0.5) -> Source:
    """Return CUB-200-2011 with its attributes as classes, and the official split.

    There are 312 attributes, 5,994 training images and 5,794 test images. An attribute is present
    if an annotator selected it, with any certainty.

    Source: preproc/format_cub.py of elijahcole/single-positive-multi-label.

    Args:
        root: Folder of the unpacked archive, with attributes.txt and CUB_200_2011/.
    """
    evaluator = multi_label(threshold)
    folder = check_folder(root, "CUB-200-2011")
    base = folder / "CUB_200_2011"
    # Some copies have attributes.txt among the other files about attributes.
    names = folder / "attributes.txt"
    if not names.exists():
        names = base / "attributes" / "attributes.txt"
    labels = base / "attributes" / "image_attribute_labels.txt"
    sources = [base / "images.txt", base / "train_test_split.txt", names, labels]

    def load(split: str, cache_dir: str | None) -> StoredImages:
        parse = partial(_parse_cub, sources, split)
        table = cached_table(f"cub {split}", sources, parse, cache_dir)
        return log_split("cub", split, in_folder(table, base / "images"))

    return Source(load=load, val="test", where=folder, evaluator=evaluator)


def _parse_cub(sources: list[Path], split: str) -> Table:
    """Return the images of one split in the order of images.txt."""
    images, split_file, names, labels = sources
    files = _read_pairs(images)
    is_train = _read_pairs(split_file)
    classes = check_names(list(_read_pairs(names).values()), names)
    attributes = _read_attributes(labels, list(files), len(classes))

    builder = TableBuilder(classes)
    with naming_errors(split_file, DataError, remedy="restore it"):
        for image, file in files.items():
            if (is_train[image] == "1") is (split == "train"):
                builder.add(file, dict.fromkeys(attributes[image], 1), f"{images}, image {image}")
    return builder.build(images)


def _read_pairs(path: Path) -> dict[str, str]:
    """Read lines such as `12 value`, and return the values by their numbers."""
    with naming_errors(path, DataError, remedy="restore it"):
        pairs: list[Any] = [line.split(maxsplit=1) for line in read_lines(path)]
        return unique(pairs)


def _read_attributes(path: Path, images: list[str], num_attributes: int) -> dict[str, list[int]]:
    """Return the indices of the attributes of each image.

    Lines have the image, the attribute, 0 or 1, the certainty and the time. Some lines of the
    official file have more fields.
    """
    attributes: dict[str, list[int]] = {image: [] for image in images}
    num_lines = 0
    with naming_errors(path, DataError, remedy="restore it"), reading(path):
        with open_binary(path) as file:
            for line in file:
                image, attribute, present = line.split(maxsplit=3)[:3]
                num_lines += 1
                if present == b"1":
                    attributes[image.decode()].append(int(attribute) - 1)
        expected = len(images) * num_attributes
        if num_lines != expected:
            raise ValueError(f"{num_lines:,} lines, but {expected:,} pairs of image and attribute")
    return attributes


def vg500(
    *,
    root: str,
    train: str = "train_list_500.txt",
    val: str = "test_list_500.txt",
    labels: str = "vg_category_500_labels_index.json",
    images: str = "VG_100K",
    num_classes: int = 500,
    classes: str | None = None,
    threshold: float = 0.5,
) -> Source:
    """Return Visual Genome 500, images in the order of the lists. VG-200 has the same format.

    Args:
        root: Folder of the lists, the label file and the image folders.
        train: List of training images, one name per line.
        val: List of validation images.
        labels: JSON file that maps image names to class indices.
        images: Image folder. Images are also searched in the folder with the suffix "_2", if it
            exists, because there are two archives.
        num_classes: Number K of classes.
        classes: Text file with one class name per line. None uses "class 0" to "class 499", because
            no class names were published.
    """
    evaluator = multi_label(threshold)
    folder = check_folder(root, "Visual Genome 500")

    names = given_names(classes, folder) or numbered_names(num_classes)
    if len(names) != num_classes:
        raise ValueError(f"num_classes is {num_classes}, but data.classes has {len(names)} names")

    def load(split: str, cache_dir: str | None) -> StoredImages:
        sources = [folder / split, folder / labels]
        parse = partial(_parse_vg500, sources[0], sources[1], num_classes)
        table = cached_table(f"vg500 {num_classes}", sources, parse, cache_dir)

        # The names are not part of the cached table, so it fits all names.
        table = replace(table, classes=names)
        second = f"{images}_2"
        if not (folder / second).is_dir():
            return log_split("vg500", split, in_folder(table, folder / images))

        in_second = {os.fsencode(entry.name) for entry in list_folder(folder / second)}
        files = []
        for name in table.files.tolist():
            folder_of_image = second if name in in_second else images
            files.append(f"{folder_of_image}/{os.fsdecode(name)}")
        listed = in_folder(replace(table, files=encode_paths(files)), folder)
        return log_split("vg500", split, listed)

    return Source(load=load, train=train, val=val, where=folder, evaluator=evaluator)


def _parse_vg500(image_list: Path, label_file: Path, num_classes: int) -> Table:
    labels = read_json(label_file)
    # The file has indices, and the names are set after the cache.
    builder = TableBuilder(list(map(str, range(num_classes))))
    with naming_errors(label_file, DataError, remedy="use the map of images to classes"):
        for number, name in enumerate(read_lines(image_list), 1):
            classes = member(labels, name, list)
            builder.add(name, dict.fromkeys(classes, 1), f"{image_list}, line {number}")
    return builder.build(image_list)
