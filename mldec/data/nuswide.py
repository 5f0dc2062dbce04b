"""NUS-WIDE as the authors of ML-Decoder share it: one CSV of images, labels and splits.

`nuswide_zsl` is their zero-shot form (925 seen, 81 unseen classes), `nuswide81` the multi-label form of the 81
concepts. The files of the data set's makers are read by `mldec.data.nuswide_official`.
"""

import csv
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mldec.data.base import DataModule
from mldec.data.files import check_folder, file_data
from mldec.data.labels import from_lists
from mldec.data.names import as_name
from mldec.data.tables import Table, cached, inside, paths
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.data.vectors import class_vectors
from mldec.data.zero_shot import Roles, split_classes, zero_shot_data
from mldec.errors import DataError
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.inputs import open_binary, open_text, read_json

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section NUS-WIDE"
_SPLITS = ("train", "val")
_LIST_MARKS = str.maketrans("", "", "[]'\"")


def nuswide_zsl(
    *,
    root: str,
    image_size: int = 224,
    csv_file: str = "data.csv",
    split_file: str = "benchmark_81_v0.json",
    vectors: str = "wordvec_array.pth",
    val_images: str = "unseen",
    augment: str = "official",
    cutout: float = 0.5,
    flip: bool = False,
    crop: float = 1.0,
    bad_images: str = "stop",
    cache_dir: str | None = None,
) -> DataModule:
    """Return NUS-WIDE zero-shot: training on the seen classes, validation on all, both in alphabetical order.

    Source: official train_zsl_nus.py; its files have 1,006 classes, 925 of them seen.

    Args:
        root: folder with the three files and the images that the CSV names.
        image_size: side of the square input in pixels.
        csv_file: image path, labels and split of each image; the place of a column counts, not its name.
        split_file: JSON with the unseen classes, "test class", and optionally the seen ones, "train class".
        vectors: file in `root` (or elsewhere, by an absolute path), or "clip:MODEL:WEIGHTS"; see `read_vectors`. The
            columns of an array without a list of names beside it are the sorted classes of the CSV.
        val_images: "unseen": only images with an unseen class, as the official code; or "all".
        augment: "official", "randaugment" or "none"; this and the next three are described at `TrainTransform`.
        cutout: side of the covered square as a fraction of the image side; 0 turns it off.
        flip: mirror half of the training images.
        crop: smallest area of a random crop as a fraction of the image; 1 turns it off.
        bad_images: "stop" at an image that cannot be read, or "skip" and count it.
        cache_dir: folder for the parsed CSV; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

    Raises:
        DataError: Something under `root` is missing, broken or does not fit; of a split, when it is first used.
        ConfigError: A value is out of range.
    """
    learn = TrainTransform(image_size=image_size, augment=augment, cutout=cutout, flip=flip, crop=crop)
    folder = check_folder(root, "NUS-WIDE", _SEE)
    return zero_shot_data(
        partial(_read_split, folder, csv_file, cache_dir=cache_dir),
        train="train",
        val="val",
        roles=partial(_roles, folder / split_file),
        vectors=lambda names: class_vectors(folder, vectors, names, order=names),
        val_images=val_images,
        learn=learn,
        check=EvalTransform(image_size=image_size),
        where=folder,
        see=_SEE,
        bad_images=bad_images,
    )


def nuswide81(
    *,
    root: str,
    image_size: int = 448,
    csv_file: str = "nus_wid_data.csv",
    augment: str = "official",
    cutout: float = 0.5,
    flip: bool = False,
    crop: float = 1.0,
    threshold: float = 0.5,
    bad_images: str = "stop",
    cache_dir: str | None = None,
) -> DataModule:
    """Return NUS-WIDE with the 81 concepts, in alphabetical order; images without a concept are not in the CSV.

    Source: the CSV of ASL, 119,103 training and 50,720 validation images.

    Args:
        root: folder with the CSV and the images that it names.
        image_size: side of the square input in pixels.
        csv_file: image path, labels and split of each image; the place of a column counts, not its name.
        augment: see `nuswide_zsl`.
        cutout: see `nuswide_zsl`.
        flip: see `nuswide_zsl`.
        crop: see `nuswide_zsl`.
        threshold: probability from which on a class counts as predicted, for precision, recall and F1.
        bad_images: see `nuswide_zsl`.
        cache_dir: see `nuswide_zsl`.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ConfigError: A value is out of range.
    """
    learn = TrainTransform(image_size=image_size, augment=augment, cutout=cutout, flip=flip, crop=crop)
    evaluator = partial(MultiLabelEvaluator, threshold=threshold)
    evaluator()  # refuses a wrong threshold now, not after the first epoch
    folder = check_folder(root, "NUS-WIDE", _SEE)
    return file_data(
        partial(_read_split, folder, csv_file, cache_dir=cache_dir),
        train="train",
        val="val",
        learn=learn,
        check=EvalTransform(image_size=image_size),
        evaluator=evaluator,
        where=folder,
        see=_SEE,
        bad_images=bad_images,
    )


class _Row(NamedTuple):
    file: str
    labels: list[str]
    split: str


def _read_split(root: Path, csv_file: str, split: str, *, cache_dir: str | None) -> tuple[Path, Table]:
    source = root / csv_file
    table = cached(f"nuswide-{split}", [source], partial(_parse, source, split), cache_dir=cache_dir, see=_SEE)
    log.info("nuswide %s: %s images, %s classes", split, f"{len(table):,}", f"{len(table.classes):,}")
    return root, table


def _parse(source: Path, split: str) -> Table:
    """Return the images of a split; the classes are those of both splits, sorted."""
    rows = list(_rows(source))
    others = Counter(row.split for row in rows if row.split not in _SPLITS)
    if others:
        log.warning("%s: rows of other splits than train and val are left out: %s", source, dict(others))
    names = sorted({name for row in rows if row.split in _SPLITS for name in row.labels})
    if not names:
        raise DataError(f"{source}: no row of train or val has a label; {_SEE}")
    columns = {name: column for column, name in enumerate(names)}
    kept = [row for row in rows if row.split == split]
    labels = from_lists([[columns[name] for name in row.labels] for row in kept], num_classes=len(names))
    return Table(paths([row.file for row in kept]), labels, tuple(names))


def _rows(source: Path) -> Iterator[_Row]:
    """Yield the rows after the header: path, labels such as "[sky, sun]" or "['sky', 'sun']", split."""
    first_seen: dict[str, int] = {}
    try:
        with open_binary(source) as file:
            if file.read(2) == b"PK":
                raise DataError(
                    f"{source} is not text but a torch file: the official README swaps the links of data.csv and "
                    f"wordvec_array.pth; swap the two files back, {_SEE}"
                )
        with open_text(source, newline="") as file:
            for number, row in enumerate(csv.reader(file, strict=True), 1):
                where = f"{source}, row {number:,}"
                _check_row(row, number, where)
                if number == 1:
                    continue
                path = inside(row[0], where, _SEE)
                if first_seen.setdefault(path, number) != number:
                    raise DataError(f"{where}: {path} is in row {first_seen[path]:,} already; leave one out, {_SEE}")
                # An empty list would be a class '' that shifts every column; MultiLabelBinarizer makes it one.
                labels = [name.strip() for name in row[1].translate(_LIST_MARKS).split(",")]
                yield _Row(path, [as_name(name, where, _SEE) for name in labels if name], row[2].strip())
    except OSError as error:
        raise DataError(f"{source} cannot be read ({error.strerror}); {_SEE}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{source} is not UTF-8 text ({error.reason} at byte {error.start:,}); {_SEE}") from error
    except csv.Error as error:
        raise DataError(f"{source} is not a CSV file ({error}); {_SEE}") from error


def _check_row(row: list[str], number: int, where: str) -> None:
    if len(row) != 3:
        raise DataError(f'{where}: {len(row)} columns, not 3 (path, "[labels]", split); {_SEE}')
    if number == 1 and row[2].strip() in _SPLITS:
        raise DataError(f"{where}: an image, where a header is wanted; add one such as path,label,split, {_SEE}")


def _roles(source: Path, names: Sequence[str]) -> Roles:
    """Read which of the classes are unseen."""
    stated = read_json(source, _SEE)
    stated = stated if isinstance(stated, dict) else {}
    unseen, seen = stated.get("test class", ""), stated.get("train class")
    for names_of, key in ((unseen, "test class"), ([] if seen is None else seen, "train class")):
        if not isinstance(names_of, list) or not all(isinstance(name, str) for name in names_of):
            raise DataError(f"{source} has no list of names '{key}'; {_SEE}")
    return split_classes(names, unseen=unseen, seen=seen, where=f"{source} ({_SEE})")
