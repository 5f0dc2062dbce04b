"""Visual Genome 500 (multi-label), from the lists and the label file of SSGRL."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

from mldec.data.cache import cached_table
from mldec.data.photos import list_folder
from mldec.data.source import Source
from mldec.data.splits import log_split
from mldec.data.table import Table, TableBuilder, encode_paths
from mldec.data.tasks import multi_label
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, naming_errors
from mldec.files.text import member, read_json, read_lines
from mldec.names import given_names, numbered_names


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
        parse = partial(_parse, sources[0], sources[1], num_classes)
        table = cached_table(f"vg500 {num_classes}", sources, parse, cache_dir)

        # The names are not part of the cached table, so it fits all names.
        table = replace(table, classes=names)
        log_split("vg500", split, table)
        second = f"{images}_2"
        if not (folder / second).is_dir():
            return in_folder(table, folder / images)

        in_second = {os.fsencode(entry.name) for entry in list_folder(folder / second)}
        files = []
        for name in table.files.tolist():
            folder_of_image = second if name in in_second else images
            files.append(f"{folder_of_image}/{os.fsdecode(name)}")
        return in_folder(replace(table, files=encode_paths(files)), folder)

    return Source(load=load, train=train, val=val, where=folder, evaluator=evaluator)


def _parse(image_list: Path, label_file: Path, num_classes: int) -> Table:
    labels = read_json(label_file)
    builder = TableBuilder(list(map(str, range(num_classes))))
    with naming_errors(label_file, DataError, remedy="use the map of images to classes"):
        for number, name in enumerate(read_lines(image_list), 1):
            classes = member(labels, name, list)
            builder.add(name, dict.fromkeys(classes, 1), f"{image_list}, line {number}")
    return builder.build(image_list)
