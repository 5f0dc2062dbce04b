"""Pascal VOC as multi-label classification."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from mldec.data.cache import cached_table
from mldec.data.photos import user_entries
from mldec.data.source import Source
from mldec.data.table import Table, TableBuilder, path_inside
from mldec.data.tasks import multi_label
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, log, naming_errors
from mldec.files.text import read_bytes, read_lines
from mldec.names import VOC, abbreviate, format_list, unknown_class

# Cached value of a class with difficult objects only.
DIFFICULT = 2
_LISTED = {"1": 1, "0": DIFFICULT, "-1": 0}  # values in the list of a class
MEANINGS = {"negative": 0, "positive": 1, "ignore": -1}

Difficult = Literal["negative", "positive", "ignore"]


def voc(
    *,
    root: str,
    year: int = 2007,
    train: str = "trainval",
    val: str = "test",
    val_year: int | None = None,
    difficult_train: Difficult = "negative",
    difficult_val: Difficult = "ignore",
    threshold: float = 0.5,
) -> Source:
    """Return Pascal VOC: 20 classes in the order of the devkit, images in the order of the lists.

    Args:
        root: Folder VOC{year}, its parent VOCdevkit, or the parent of VOCdevkit.
        year: 2007 or 2012. 2008 to 2011 have the same layout.
        train: Training split, a list in ImageSets/Main.
        val: Validation split. The labels of the test split of 2012 are not public.
        val_year: Year of the validation split, if it is another year.
        difficult_train: Training target of a class with difficult objects only: "negative" (0),
            "positive" (1) or "ignore" (-1). "ignore" requires a loss that accepts -1, such as
            loss=partial loss.mode=ignore.
        difficult_val: The same for validation. "ignore" omits the image for this class, as in the
            devkit.
    """
    evaluator = multi_label(threshold)
    base = check_folder(root, f"Pascal VOC {year}")
    folder = _find_folder(base, year)
    val_folder = folder if val_year is None else _find_folder(base, val_year)

    def load(split: str, cache_dir: str | None) -> StoredImages:
        # A fold is a part of the training split.
        split_folder = val_folder if split == val else folder
        return _load_split(split_folder, difficult_val, split, cache_dir)

    source = Source(load=load, train=train, val=val, where=folder, evaluator=evaluator)
    return replace(source, load_train=partial(_load_split, folder, difficult_train))


def _find_folder(root: Path, year: int) -> Path:
    candidates = [root / f"VOC{year}", root / "VOCdevkit" / f"VOC{year}"]

    # `root` may have any name except for the name of another year. Kaggle uses VOC2012_train_val.
    named_year = re.match(r"VOC(2\d{3})", root.name)
    if named_year is None or named_year[1] == str(year):
        candidates.insert(0, root)

    for folder in candidates:
        if (folder / "ImageSets").is_dir():
            return folder
    fault = f"there is no VOC{year}, a folder with ImageSets"
    raise DataError(f"data.root: {root}: {fault}; set data.root or data.year")


def _load_split(folder: Path, difficult: str, split: str, cache_dir: str | None) -> StoredImages:
    """Return the images of a split. `difficult` is a key of `MEANINGS`."""
    listing = folder / "ImageSets" / "Main" / f"{split}.txt"
    annotations = folder / "Annotations"
    if annotations.is_dir():
        parse = partial(_parse, listing, annotations)
        # An edit of a file does not change the time of its folder.
        files = map(Path, user_entries(annotations))
        newest = max(files, key=lambda path: path.stat().st_mtime_ns, default=annotations)
        table = cached_table("voc", [listing, annotations, newest], parse, cache_dir)
    else:
        table = _parse_lists(listing.parent, split)

    only_difficult = table.labels.counts(DIFFICULT).sum()
    what = f"{folder.name} {split}"
    log.info(f"{what}: {len(table):,} images, {len(table.classes)} classes")
    log.info(f"{what}: {only_difficult:,} labels of difficult objects only: {difficult}")

    # The cached table has a separate value for difficult objects, so it fits all settings.
    values = table.labels.values.copy()
    values[values == DIFFICULT] = MEANINGS[difficult]
    labels = replace(table.labels, values=values)
    return in_folder(replace(table, labels=labels), folder / "JPEGImages")


def _parse_lists(folder: Path, split: str) -> Table:
    """Read the lists of the classes, such as cat_train.txt: image ids with 1, 0 (difficult) or -1.

    The images are in the order of the list of the split, or else of the first class.
    """
    listing = folder / f"{split}.txt"
    labels: dict[str, dict[str, int]] = {}
    if listing.is_file():
        labels = {line.split()[0]: {} for line in read_lines(listing)}
    missing = []
    for name in VOC:
        path = folder / f"{name}_{split}.txt"
        if not path.is_file():
            missing.append(name)
            continue
        for number, line in enumerate(read_lines(path), 1):
            image, _, value = line.partition(" ")
            if value.strip() not in _LISTED:
                fault = f"{abbreviate(line)} is not an image id and 1, 0 or -1"
                raise DataError(f"{path}, line {number}: {fault}; correct it")
            labels.setdefault(image, {})[name] = _LISTED[value.strip()]

    if len(missing) == len(VOC):
        example = folder / f"{VOC[0]}_{split}.txt"
        raise DataError(f"{example}: neither this list nor Annotations exists; restore them")
    if missing:
        names = format_list(missing)
        log.warning(f"{folder}: no list of {split} for {names}; they count as absent")

    builder = TableBuilder(classes=VOC)
    for image, entries in labels.items():
        builder.add(f"{image}.jpg", entries, f"{folder}, {split}")
    return builder.build(folder)


def _parse(listing: Path, annotations: Path) -> Table:
    """Read the labels (1 or `DIFFICULT`) of a list with one image id per line."""
    builder = TableBuilder(classes=VOC)
    for number, line in enumerate(read_lines(listing), 1):
        # Lists of a single class have a second column.
        image = line.split()[0]
        path = annotations / f"{path_inside(image, f'{listing}, line {number}')}.xml"

        labels: dict[str, int] = {}
        content = read_bytes(path)
        with naming_errors(path, DataError, remedy="restore it"):
            # `findall` returns direct children only. Body parts of a person are nested objects.
            for element in ElementTree.fromstring(content).findall("{*}object"):
                name = element.findtext("{*}name", "").strip()
                if name not in VOC:
                    raise unknown_class(name[:40], VOC, str(path))

                # A class is present if any of its objects is not difficult.
                is_difficult = element.findtext("{*}difficult", "0").strip() == "1"
                labels[name] = labels.get(name, DIFFICULT) if is_difficult else 1
        builder.add(f"{image}.jpg", labels, f"{listing}, line {number}")
    return builder.build(listing)
