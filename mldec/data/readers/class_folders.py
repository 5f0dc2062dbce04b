"""Single-label images with one folder per class, and ImageNet-1k with a folder per WordNet id."""

import os
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
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
    folder: Path,
    class_names: Sequence[str],
    display_names: tuple[str, ...],
    cache_dir: str | None,
) -> Table:
    """Return the images of the class folders in `folder`, sorted by class and file name.

    `class_names` are the folder names in the order of the classes. Folders may be absent.
    `display_names` are the class names of the table, one per folder.
    """
    present = list_class_folders(folder)
    for name in present:
        if name not in class_names:
            raise unknown_class(name, class_names, str(folder))

    def parse() -> Table:
        columns = indices_of(class_names)
        files: list[str] = []
        classes: list[int] = []
        # The order of the given classes, so that the images are sorted by class index.
        for name in sorted(present, key=columns.__getitem__):
            images = list_images(folder / present[name])
            files += [f"{present[name]}/{image}" for image in images]
            classes += [columns[name]] * len(images)

        labels = from_single(np.array(classes, np.int32), len(display_names))
        return Table(encode_paths(files), labels, display_names)

    chosen = (tuple(class_names), display_names, sorted(READ))
    sources = [folder] + [folder / name for name in present.values()]
    return cached_table(f"folders 3 {chosen}", sources, parse, cache_dir)


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


def list_images(folder: Path) -> list[str]:
    """Return the sorted names of the user's image files in a folder."""
    entries = user_entries(folder)
    files = [entry.name for entry in entries if not entry.is_dir()]
    images = [name for name in files if Path(name).suffix.lower() in READ]

    # Do not silently ignore images in inner folders.
    inner = [entry.path for entry in entries if entry.is_dir() and not entry.is_symlink()]
    below = [Path(file) for path in inner for file in files_below(path, SkippedFiles())]
    if (inner and not images) or any(file.suffix.lower() in READ for file in below):
        fault = "it has images in inner folders" + (" and of its own" if images else " only")
        raise DataError(f"{folder}: {fault}; move them, or set data.root to the folder around them")
    return images


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
    folders such as Training and valid. If `root` has neither of these folders, root/CLASS/*.jpg is
    split in a reproducible way. Images outside the folders that are used are counted.

    Args:
        classes: Class names in order, or a text file with one name per line. None takes the sorted
            folder names of `train`.
        exclusive: Always True: each image has exactly one label, see `csv_table`.
        division: Held-out images if `root` has no folders of splits.
    """
    evaluator = single_label(top_k)
    folder = check_folder(root, "a folder per class")
    names = given_names(classes, folder)

    # If only one split has a folder, this folder must not be used as a class folder. Other names of
    # splits may be classes, such as valid and invalid, unless there is a training folder, too.
    divided = (folder / train).is_dir() or (folder / val).is_dir()
    present = list_class_folders(folder)
    train_name = find_split(train, present)
    num_splits = sum(name in (train, val) or name.lower() in SPLITS for name in present)
    if not divided and train_name in present:
        divided = num_splits > 1
    # The folder of a split contains class folders. If there are also folders with other names, and
    # train/ contains only images, train is the name of a class.
    parts = [folder / present.get(name, name) for name in (train_name, find_split(val, present))]
    if num_splits < len(present):
        divided &= any(list_class_folders(part) for part in parts if part.is_dir())

    def load(split: str, cache_dir: str | None) -> StoredImages:
        if divided and split == val and not parts[1].is_dir():
            check_val(find_split(val, present), present, folder)

        # Both splits use the class folders of the training split.
        parent = parts[0] if divided else folder
        class_names = check_names(names or list_class_folders(parent), folder)

        parent = parts[split == val] if divided else folder
        table = read_class_folders(parent, class_names, class_names, cache_dir)
        images = in_folder(table, parent)
        skipped = SkippedFiles()
        for class_folder in list_class_folders(parent, skipped).values():
            for entry in user_entries(parent / class_folder, skipped):
                skipped.accepts(f"{class_folder}/{entry.name}")
        if skipped and not len(images):
            raise DataError(f"{parent}: no supported image; {skipped}")
        # An undivided folder has the same files for both splits. Warn only once.
        if divided or split == train:
            skipped.log(f"folders {split}")
        if split == train:
            used = set()
            for part in filter(Path.is_dir, parts if divided else [folder]):
                used |= {f"{part}/{inner}" for inner in list_class_folders(part).values()}
            files = files_below(folder, SkippedFiles())
            others = [file for file in files if file.rpartition("/")[0] not in used]
            unused = [file for file in others if Path(file).suffix.lower() in READ]
            if unused:
                count = f"{len(unused):,} images are outside the class folders that are used"
                log.warning(f"folders: {count}, such as {visible(unused[0])}")
        if not divided:
            images = division.select(images, val=split == val)
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
    if list_class_folders(folder):
        return read_class_folders(folder, wnids, names, cache_dir)

    # The classes of a flat folder are in Kaggle's table, in the folder or up to three levels above.
    candidates = [root / _SOLUTION]
    candidates += [parent / _SOLUTION for parent in root.parents[:3]]
    solution = next((file for file in candidates if file.is_file()), None)
    if solution is None or not list_images(folder):
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
