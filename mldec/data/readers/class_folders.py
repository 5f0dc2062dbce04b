"""Single-label images with one folder per class, and ImageNet-1k with a folder per WordNet id."""

import os
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Literal

import numpy as np

from mldec.data.cache import cached_table
from mldec.data.images import READ
from mldec.data.labels import from_single
from mldec.data.photos import SkippedFiles, files_below, user_entries
from mldec.data.source import Source
from mldec.data.splits import HELD_OUT_BY_HASH, SPLITS, HoldOut, check_val, find_split, log_split
from mldec.data.table import Table, TableBuilder, encode_paths
from mldec.data.tasks import single_label
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, log, naming_errors, visible
from mldec.files.tables import csv_columns
from mldec.files.text import expand_user, expect, read_json, read_lines
from mldec.names import (
    as_name,
    check_names,
    disambiguate,
    given_names,
    indices_of,
    unknown_class,
)


def read_class_folders(
    parent: Path,
    present: Mapping[str, str],
    order: Sequence[str],
    names: tuple[str, ...],
    skipped: SkippedFiles,
) -> Table:
    """Return the images of the class folders in `parent`, sorted by class and file name.

    `present` are the folders, see `list_class_folders`, and `order` their classes in order, of
    which some may be absent. The table has the class names `names`. Raises DataError for an image
    in an inner folder, which may be a class of its own.
    """
    columns = indices_of(order)
    for name in present:
        if name not in columns:
            raise unknown_class(name, order, str(parent))

    files: list[str] = []
    classes: list[int] = []
    for name in sorted(present, key=columns.__getitem__):
        folder = parent / present[name]
        for file in filter(skipped.accepts, files_below(folder, skipped)):
            image = file.removeprefix(f"{folder}/")
            if "/" in image:
                fault = f"it has images in inner folders, such as {visible(image)}"
                remedy = "move them, or set data.root to the folder around them"
                raise DataError(f"{folder}: {fault}; {remedy}")
            files.append(f"{present[name]}/{image}")
            classes.append(columns[name])
    labels = from_single(np.array(classes, np.int32), len(names))
    return Table(encode_paths(files), labels, names)


def list_class_folders(folder: Path, skipped: SkippedFiles | None = None) -> dict[str, str]:
    """Return the names of the user's folders by the names of their classes, see `as_name`."""
    folders: dict[str, str] = {}
    for entry in user_entries(folder, skipped):
        if entry.is_dir():
            other = folders.setdefault(as_name(entry.name, folder), entry.name)
            if other != entry.name:
                fault = f"{other!a} and {entry.name!a} have the same name"
                raise DataError(f"{folder}: {fault}; move the images into one of them")
    return dict(sorted(folders.items()))


def folders(
    *,
    root: str,
    train: str = "train",
    val: str = "val",
    classes: str | list[str] | None = None,
    exclusive: Literal[True] = True,
    division: HoldOut = HELD_OUT_BY_HASH,
    top_k: int | None = None,
) -> Source:
    """Return single-label images. The label is the name of the folder.

    The layout is root/train/CLASS/*.jpg and root/val/CLASS/*.jpg, or other common names of both
    folders such as Training and valid. root/CLASS/*.jpg, or a training folder without another
    folder of classes, is split in a reproducible way. Images outside the class folders that are
    used are counted.

    Args:
        classes: Class names in order, or a text file with one name per line. None takes the sorted
            folder names of `train`.
        exclusive: Always True: each image has exactly one label, see `csv_table`.
        division: Held-out images if `root` has no folder of a validation split.
    """
    evaluator = single_label(top_k)
    folder = check_folder(root, "a folder per class")
    names = given_names(classes, folder)

    # The folder of a split contains class folders. If there are also folders with other names, and
    # train/ contains only images, train is a class, and so is valid next to invalid.
    present = list_class_folders(folder)
    parts = [folder / present.get(find_split(name, present), name) for name in (train, val)]
    existing = [part for part in parts if part.is_dir()]
    is_divided = bool(existing)
    if not all(name in (train, val) or name.lower() in SPLITS for name in present):
        is_divided = any(list_class_folders(part) for part in existing)

    # A single training folder is divided, too. A test folder often has images without classes. A
    # split that the user has named, such as test, must exist.
    others = [folder / name for name in present.values() if folder / name != parts[0]]
    is_single = not is_divided
    if not is_divided:
        parts = [folder, folder]
    elif val == "val" and not parts[1].is_dir() and not any(map(list_class_folders, others)):
        is_single = True
        parts = [parts[0], parts[0]]

    @cache
    def read(part: Path) -> tuple[Table, SkippedFiles]:
        # An undivided folder is listed once, because that takes seconds for 100,000 images.
        skipped = SkippedFiles()
        class_folders = list_class_folders(part, skipped)
        # Both splits use the class folders of the training split.
        of_train = list_class_folders(parts[0]) if parts[0].is_dir() else class_folders
        class_names = check_names(names or of_train, folder)
        table = read_class_folders(part, class_folders, class_names, class_names, skipped)
        return table, skipped

    def load(split: str, _: str | None) -> StoredImages:
        # There is no cache, because the folders are listed anyway to count the skipped files.
        part = parts[split == val]
        if split == val and not part.is_dir():
            check_val(find_split(val, present), present, folder)
        table, skipped = read(part)
        if not len(table):
            hint = str(skipped) or "write them as CLASS/IMAGE.jpg"
            raise DataError(f"{part}: no supported image in folders of classes; {hint}")
        if split == train or not is_single:
            skipped.log(f"folders {split}")
        if split == train:
            used: set[str] = set()
            for place in filter(Path.is_dir, parts):
                used |= {f"{place}/{name}" for name in list_class_folders(place).values()}
            files = files_below(folder, SkippedFiles(), used)
            unused = [file for file in files if PurePath(file).suffix.lower() in READ]
            if unused:
                count = f"{len(unused):,} images are outside the class folders that are used"
                log.warning(f"folders: {count}, such as {visible(unused[0])}")
        images = in_folder(table, part)
        if is_single:
            images = division.select(images, val=split == val)
            if is_divided:
                log.info(f"folders: {part} is the only folder of classes and is divided")
        return log_split("folders", split, images)

    return Source(
        load=load, train=train, val=val, where=folder, evaluator=evaluator, exclusive=True
    )


_KAGGLE = Path("ILSVRC", "Data", "CLS-LOC")
_SOLUTION = "LOC_val_solution.csv"


def imagenet(
    *,
    root: str,
    train: str = "train",
    val: str = "val",
    class_map: str = "imagenet1k",
    real_labels: str | None = None,
    top_k: int | None = None,
) -> Source:
    """Return ImageNet-1k, or a subset of its classes, sorted by class and file name.

    The class index is the position of the WordNet id (wnid) in the sorted class map, as in
    torchvision, Keras and timm, so that a missing class folder does not shift other classes. The
    ILSVRC2012_ID of the devkit (1 to 1,000) has another order and is not used.

    Args:
        root: Folder with train/WNID/*.JPEG and val/WNID/*.JPEG, or the Kaggle folder with
            ILSVRC/Data/CLS-LOC/{train,val} and LOC_val_solution.csv.
        class_map: "imagenet1k": the 1,000 classes. "folders": the class folders of `train`.
            Otherwise a text file with a wnid at the start of each line, in any order.
        real_labels: File of the ReaL labels, a JSON list of the valid class indices of each
            validation image, sorted by image number. timm has it as
            data/_info/imagenet_real_labels.json. The labels replace the labels of `val`. Images may
            have several labels, and images without labels are omitted. The metrics get the suffix
            "_real", such as top1_real.
    """
    evaluator = single_label(top_k, suffix="_real" if real_labels else "")
    folder = check_folder(root, "ImageNet")
    if (folder / _KAGGLE).is_dir():
        folder = folder / _KAGGLE
    wnids = _wnids(class_map, folder / train)

    def load(split: str, cache_dir: str | None) -> StoredImages:
        table = _read_split(folder, split, wnids, cache_dir)
        if real_labels and split == val:
            table = _with_real_labels(table, expand_user(real_labels))

        return log_split("imagenet", split, in_folder(table, folder / split))

    return Source(
        load=load, train=train, val=val, where=folder, evaluator=evaluator, exclusive=True
    )


def readable(wnids: list[str]) -> tuple[str, ...]:
    """Return a unique class name for each wnid, such as "tench, Tinca tinca".

    The wnid is appended to names that are not unique, such as "crane". A wnid that is unknown to
    timm is used as the name.
    """
    lines = _read_info("imagenet_synset_to_lemma.txt").splitlines()
    lemmas = dict(line.split("\t", 1) for line in lines)
    return disambiguate([lemmas.get(wnid, wnid) for wnid in wnids], wnids)


def _read_info(name: str) -> str:
    return (files("timm.data") / "_info" / name).read_text(encoding="utf-8")


def _wnids(class_map: str, train: Path) -> list[str]:
    if class_map == "imagenet1k":
        return sorted(_read_info("imagenet_synsets.txt").split())
    if class_map == "folders":
        return sorted(list_class_folders(train).values())

    file = expand_user(class_map)
    # Such lists often have the name of the class after the id.
    wnids = [line.split()[0] for line in read_lines(file)]
    return sorted(check_names(wnids, file))


def _read_split(root: Path, split: str, wnids: list[str], cache_dir: str | None) -> Table:
    """Return the images of a split with class folders or of Kaggle's flat folder."""
    folder = root / split
    names = readable(wnids)
    present = list_class_folders(folder)
    if present:
        parse = partial(read_class_folders, folder, present, wnids, names, SkippedFiles())
        sources = [folder] + [folder / name for name in present.values()]
        return cached_table(f"folders 4 {wnids} {sorted(READ)}", sources, parse, cache_dir)

    # The classes of a flat folder are in Kaggle's table, in the folder or up to three levels above.
    candidates = [root / _SOLUTION]
    candidates += [parent / _SOLUTION for parent in root.parents[:3]]
    solution = next((file for file in candidates if file.is_file()), None)
    if solution is None or not user_entries(folder):
        fault = f"there is neither a folder per class nor {_SOLUTION}"
        raise DataError(f"{folder}: {fault}; unpack and sort the official archives")
    parse = partial(_parse_solution, solution, wnids, names)
    return cached_table(f"imagenet {wnids}", [solution], parse, cache_dir)


def _parse_solution(solution: Path, wnids: list[str], names: tuple[str, ...]) -> Table:
    columns = indices_of(wnids)
    images = []
    for first_row, chunk in csv_columns(solution, ["ImageId", "PredictionString"]):
        for row, (image, boxes) in enumerate(zip(*chunk, strict=True), first_row):
            # All boxes of an image have the same class, so use the first wnid.
            where = f"{solution}, row {row}"
            wnid = boxes.partition(" ")[0]
            if wnid not in columns:
                raise unknown_class(wnid, wnids, where)
            images.append((columns[wnid], f"{image}.JPEG", where))

    # Sort by class and name, so that the order is the same as with class folders.
    builder = TableBuilder(classes=names)
    for column, file, where in sorted(images):
        builder.add(file, {column: 1}, where)
    return builder.build(solution)


def _with_real_labels(table: Table, file: Path) -> Table:
    real_labels = read_json(file)
    builder = TableBuilder(classes=table.classes)
    for name in map(os.fsdecode, table.files.tolist()):
        where = f"{file}: {name}"
        with naming_errors(where, DataError, remedy="use the list of class indices per image"):
            # The number in ILSVRC2012_val_00000293.JPEG. Numbers start at 1.
            number = int(name.rpartition("_")[2].partition(".")[0])
            classes = expect(expect(real_labels, list, "it")[number - 1], list, f"entry {number}")
            builder.add(name, dict.fromkeys(classes, 1), where)

    # Omit images without a valid class, as the authors do.
    real = builder.build(file)
    return real.select(real.labels.counts_per_image() > 0)
