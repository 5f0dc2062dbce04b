"""NUS-WIDE as the authors of ML-Decoder share it: one CSV of images, labels and splits.

`nuswide_zsl` is their zero-shot form (925 seen and 81 unseen classes), `nuswide81` the multi-label
form with the 81 concepts. `mldec.data.readers.nuswide_official` reads the original files instead.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mldec.data.base import LabelledImages
from mldec.data.cache import TableCache
from mldec.data.names import split_names
from mldec.data.source import Source
from mldec.data.storage.image_files import check_folder, in_folder
from mldec.data.table import Table, TableBuilder
from mldec.data.task import MultiLabel
from mldec.data.zero_shot.task import Roles, ZeroShot, split_classes
from mldec.data.zero_shot.word_vectors import DEFAULT_VECTORS, VectorSettings
from mldec.errors import DataError
from mldec.files.text import csv_rows, open_binary, read_json, reading

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section NUS-WIDE"
_SPLITS = ("train", "val")
_LIST_MARKS = str.maketrans("", "", "[]'\"")


def nuswide_zsl(
    *,
    root: str,
    csv_file: str = "data.csv",
    split_file: str = "benchmark_81_v0.json",
    val_images: str = "unseen",
    threshold: float = 0.5,
    words: VectorSettings = DEFAULT_VECTORS,
) -> Source:
    """Return NUS-WIDE zero-shot: training on the seen classes, validation on all.

    Classes are in alphabetical order.

    Source: official train_zsl_nus.py; its files have 1,006 classes, 925 of them seen.

    Args:
        root: folder with the three files and the images that the CSV names.
        csv_file: image path, labels and split of each image. The columns are known by their order,
            not by their names.
        split_file: JSON with the unseen classes, "test class", and optionally the seen ones, "train
            class".
        val_images: "unseen": only images with an unseen class, as in the official code; or "all".
        threshold: see `MultiLabel`.
        words: see `VectorSettings`. The columns of an array without a list of names beside it are
            the sorted classes of the CSV.

    Raises:
        DataError: see `Source.load`.
        ValueError: An argument is out of range.
    """
    folder = check_folder(root, "NUS-WIDE", _SEE)
    task = ZeroShot(
        roles=partial(_roles, folder / split_file),
        vectors=lambda names: words.of_classes(folder, names, order=names),
        val_images=val_images,
        where=f"{folder / csv_file} ({_SEE})",
        threshold=threshold,
    )
    load = partial(_load_split, folder, csv_file)
    return Source(load=load, train="train", val="val", task=task, where=folder, see=_SEE)


def nuswide81(*, root: str, csv_file: str = "nus_wid_data.csv", threshold: float = 0.5) -> Source:
    """Return NUS-WIDE with the 81 concepts, in alphabetical order.

    Source: the CSV of ASL, with 119,103 training and 50,720 validation images. Images without any
    concept are not in it.

    Args:
        root: folder with the CSV and the images that it names.
        csv_file: image path, labels and split of each image. The columns are known by their order,
            not by their names.
        threshold: see `MultiLabel`.

    Raises:
        DataError: A file under `root` is missing or broken; see `Source.load`.
        ValueError: An argument is out of range.
    """
    task = MultiLabel(threshold)
    folder = check_folder(root, "NUS-WIDE", _SEE)
    load = partial(_load_split, folder, csv_file)
    return Source(load=load, train="train", val="val", task=task, where=folder, see=_SEE)


class _Row(NamedTuple):
    """One image of the CSV; `number` is its line in the file."""

    number: int
    file: str
    labels: list[str]
    split: str


def _load_split(root: Path, csv_file: str, split: str, cache: TableCache) -> LabelledImages:
    """Return the images of a split."""
    source = root / csv_file
    table = cache.table(f"nuswide-{split}", [source], partial(_parse, source, split))

    log.info(
        "nuswide %s: %s images, %s classes", split, f"{len(table):,}", f"{len(table.classes):,}"
    )
    return in_folder(table, root, _SEE)


def _parse(source: Path, split: str) -> Table:
    """Return the images of a split; the classes are the sorted labels of both splits."""
    rows = list(_rows(source))
    other_splits = Counter(row.split for row in rows if row.split not in _SPLITS)
    if other_splits:
        log.warning(
            "%s: rows of other splits than train and val are left out: %s",
            source,
            dict(other_splits),
        )

    label_names: set[str] = set()
    for row in rows:
        if row.split in _SPLITS:
            label_names.update(row.labels)
    if not label_names:
        raise DataError(f"{source}: no row of train or val has a label; {_SEE}")

    # Rows of other splits are added too, without labels: so the builder still refuses an image that
    # is in such a split and in train or val.
    builder = TableBuilder(_SEE, classes=sorted(label_names))
    for row in rows:
        labels = row.labels if row.split in _SPLITS else []
        builder.add(row.file, dict.fromkeys(labels, 1), f"{source}, row {row.number:,}")

    in_split = np.array([row.split == split for row in rows], bool)
    return builder.build(source).select(in_split)


def _rows(source: Path) -> Iterator[_Row]:
    """Yield the rows after the header: path, labels as "[sky, sun]" or "['sky', 'sun']", split."""
    _refuse_swapped(source)

    for number, (line, fields) in enumerate(csv_rows(source, _SEE), 1):
        where = f"{source}, row {line:,}"
        _check_row(fields, number, where)
        if number == 1:
            continue

        # An empty list gives one blank name. The official MultiLabelBinarizer makes a class of it,
        # which shifts all other columns; here it is no label.
        labels = split_names(fields[1].translate(_LIST_MARKS), ",", where, _SEE)
        yield _Row(line, fields[0], labels, fields[2].strip())


def _refuse_swapped(source: Path) -> None:
    """Raise a `DataError` if the CSV is in fact the file of word vectors."""
    with reading(source, _SEE), open_binary(source) as file:
        # A torch file is a zip archive, which starts with PK.
        is_archive = file.read(2) == b"PK"

    if is_archive:
        raise DataError(
            f"{source} is not text but a torch file: the official README swaps the links of "
            f"data.csv and wordvec_array.pth; swap the two files back, {_SEE}"
        )


def _check_row(row: list[str], number: int, where: str) -> None:
    """Raise a `DataError` for a row of another length, or for an image in place of the header."""
    if len(row) != 3:
        raise DataError(f'{where}: {len(row)} columns, not 3 (path, "[labels]", split); {_SEE}')

    # Without a header the first image would silently be lost.
    if number == 1 and row[2].strip() in _SPLITS:
        raise DataError(
            f"{where}: an image, where a header is wanted; add one such as path,label,split, {_SEE}"
        )


def _roles(source: Path, names: Sequence[str]) -> Roles:
    """Read which of the classes are seen and which are unseen.

    Args:
        source: JSON file with the list "test class" and optionally the list "train class".
        names: all class names, in the order of the columns.

    Raises:
        DataError: A list is missing or is not a list of names.
    """
    content = read_json(source, _SEE)
    if not isinstance(content, dict):
        content = {}
    unseen, seen = content.get("test class", ""), content.get("train class")

    # The list of seen classes is optional: null and absence mean all other classes.
    lists = {"test class": unseen, "train class": [] if seen is None else seen}
    for key, class_list in lists.items():
        if not isinstance(class_list, list) or not all(
            isinstance(name, str) for name in class_list
        ):
            raise DataError(f"{source} has no list of names '{key}'; {_SEE}")

    return split_classes(names, unseen=unseen, seen=seen, where=f"{source} ({_SEE})")
