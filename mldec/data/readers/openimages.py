"""Open Images V6: 57 million human-verified labels of 9,605 classes, which are read in pieces."""

import logging
import re
from array import array
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from typing import Literal

import numpy as np

from mldec.data.cache import cached_table
from mldec.data.labels import Labels, from_statements
from mldec.data.settings import Source
from mldec.data.splits import log_split
from mldec.data.table import Table, encode_paths, path_inside
from mldec.data.tasks import PartialLabels
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, refusing
from mldec.files.text import csv_columns, read_lines
from mldec.files.torch_files import read_torch
from mldec.names import check_names, shown, told_apart, without_quotes

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section Open Images"

# Split and image folder -> the file of its human-verified labels.
LABELS = {
    "train": "oidv6-train-annotations-human-imagelabels.csv",
    "validation": "validation-annotations-human-imagelabels.csv",
    "test": "test-annotations-human-imagelabels.csv",
}
TRAINABLE = "oidv6-classes-trainable.txt"
DESCRIPTIONS = "oidv6-class-descriptions.csv"

# The values of verified labels; machine-generated labels have others, such as 0.8.
_CONFIDENCE = {"1": 1, "0": 0, "1.0": 1, "0.0": 0}


def openimages(
    *,
    root: str,
    train: Literal["train", "validation", "test"] = "train",
    val: Literal["train", "validation", "test"] = "test",
    names: Literal["display", "mid"] = "display",
    prefix: int = 0,
    threshold: float = 0.5,
) -> Source:
    """Return Open Images: the classes in the order of the trainable list, images by image id.

    Targets are 1, 0 and mostly -1 (not annotated). An image without a verified label is in no
    official file. Many images are no longer on Flickr: see `data.absent`. The files of
    machine-generated labels are refused.

    Source: storage.googleapis.com/openimages, human-verified image-level labels.

    Args:
        root: folder with annotations/ (the official CSV and class files) and the image folders
            train/, validation/ and test/ of ID.jpg.
        val: split to evaluate on. Papers use "test" (125,436 images), not "validation" (41,620).
        names: "display": the display name, with the class index where classes share it, as in "Ball
            (12)"; or "mid": the class id, such as /m/01bqvp.
        prefix: length of the image folders' sub-folder names, which are the first characters of the
            image ids: 2 for train/0a/; 0 for no sub-folders.
    """
    task = PartialLabels(threshold)
    folder = check_folder(root, "Open Images", _SEE)
    load = partial(_load_split, folder, names, prefix)
    return Source(load=load, train=train, val=val, task=task, where=folder, see=_SEE)


def _load_split(
    root: Path, names: str, prefix: int, split: str, cache_dir: str | None
) -> StoredImages:
    """Return the images of a split."""
    sources = [root / "annotations" / name for name in (LABELS[split], TRAINABLE, DESCRIPTIONS)]
    parse = partial(_parse, sources, names, prefix)
    table = cached_table(f"openimages {names} {prefix}", sources, parse, cache_dir, _SEE)
    log_split("openimages", split, table)
    return in_folder(table, root / split, _SEE)


def _parse(sources: Sequence[Path], names: str, prefix: int) -> Table:
    """Read a split: its verified labels, the list of the classes and their display names."""
    statements, trainable, descriptions = sources
    mids = check_names(read_lines(trainable, _SEE), trainable, _SEE)
    run_ids, runs, classes, values = _read_statements(statements, mids)

    # The files are sorted by image, but do not promise it: an image may have several runs of rows.
    ids, image_of_run = np.unique(run_ids, return_inverse=True)
    files = np.char.add(ids, b".jpg")
    if prefix:
        folders = np.char.add(ids.astype(f"S{prefix}"), b"/")
        files = np.char.add(folders, files)

    display: dict[str, str] = {}
    if names == "display":
        header = ["LabelName", "DisplayName"]
        for _, (of_mids, texts) in csv_columns(descriptions, header, _SEE):
            display.update(zip(of_mids, texts, strict=True))

    labels = _labels(statements, image_of_run[runs], classes, values, (len(ids), len(mids)))
    return Table(files, labels, class_names(mids, display))


def _read_statements(
    path: Path, mids: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Read the verified labels of a split, a statement per row; rows of one image form a run.

    Returns the image id of each of the R runs, bytes [R], and of each of the M statements its run,
    int32 [M], its class, int32 [M], -1 for an unknown one, and its value, int8 [M]: 1 or 0.
    """
    columns = {mid: column for column, mid in enumerate(mids)}
    num_runs = 0

    # Pieces of the result; empty first ones give the types of a file without rows.
    types = ("S1", np.int32, np.int32, np.int8)
    empty = tuple(np.zeros(0, dtype) for dtype in types)
    pieces: list[tuple[np.ndarray, ...]] = [empty]

    header = ["ImageID", "Source", "LabelName", "Confidence"]
    for first_row, (image_ids, _, label_names, confidences) in csv_columns(path, header, _SEE):
        piece_values = _look_up(_CONFIDENCE, confidences, np.int8)
        if piece_values.min() < 0:
            index = int(piece_values.argmin())
            fault = f"row {first_row + index} has Confidence {confidences[index]!r}, not 1 or 0"
            raise DataError(f"{path}: {fault}: not human-verified labels? {_SEE}")

        # A run starts where the image id changes, and with a piece: `_parse` joins runs by id.
        piece_ids = np.array([image_id.encode() for image_id in image_ids], np.bytes_)
        starts_run = np.append(True, piece_ids[1:] != piece_ids[:-1])
        piece_runs = np.cumsum(starts_run) + (num_runs - 1)

        run_ids = piece_ids[starts_run]
        classes = _look_up(columns, label_names, np.int32)
        pieces.append((run_ids, piece_runs.astype(np.int32), classes, piece_values))
        num_runs += len(run_ids)

    run_ids, runs, classes, values = map(np.concatenate, zip(*pieces, strict=True))
    return run_ids, runs, classes, values


def _look_up(
    table: Mapping[str, int], texts: Sequence[str], dtype: type[np.signedinteger]
) -> np.ndarray:
    """Return the number of each text, [len(texts)] of the given type; -1 if the table lacks it."""
    # `fromiter` over a `map` builds no list of Python integers: there are 57 million texts.
    return np.fromiter(map(table.get, texts, repeat(-1)), dtype, len(texts))


def _labels(
    source: Path, images: np.ndarray, classes: np.ndarray, values: np.ndarray, size: tuple[int, int]
) -> Labels:
    """Return the labels of M statements, but those of class -1; `size` is (N, K)."""
    known = classes >= 0
    if not known.all():
        dropped = f"{np.count_nonzero(~known):,} of {len(known):,} labels"
        log.info(f"{source}: {dropped} are of classes outside the class list: left out")
        images, classes, values = images[known], classes[known], values[known]

    sizes = {"num_images": size[0], "num_classes": size[1]}
    labels, clashes = from_statements(images, classes, values, **sizes)
    if clashes:
        log.warning(f"{source}: {clashes:,} labels are both present and absent: taken as present")
    return labels


def class_names(mids: Sequence[str], display: Mapping[str, str]) -> tuple[str, ...]:
    """Return a unique name per class: its display name, see `told_apart`, or else its MID."""
    # Some names in the official files have stray quotes or blanks around them.
    return told_apart([without_quotes(display.get(mid, "")) or mid for mid in mids])


# A class id in single or double quotes, with optional white space around it.
_MID = re.compile(r"\s*(['\"])([^'\"\[\],]*[^'\"\[\],\s])\1\s*")


def openimages_miil(
    *,
    root: str,
    train: str = "train",
    val: str = "val",
    names: Literal["display", "mid"] = "display",
    class_list: str | None = None,
    threshold: float = 0.5,
) -> Source:
    """Return Open Images in the MIIL form: images in the order of the file, classes by MID.

    Source: Alibaba-MIIL/PartialLabelingCSL, OpenImages.md.

    Args:
        root: folder with data.csv, the images at the paths in it, and optionally
            mid_to_classes.pth.
        val: value of the column split in the rows to evaluate on, as `train`; the "val" of the file
            are the official test images.
        names: as of `openimages`.
        class_list: file in `root` with one MID per line: the classes of a given checkpoint, in its
            order. Labels of other classes are left out. None takes every class that the file names
            in either split, sorted by MID.
    """
    task = PartialLabels(threshold)
    folder = check_folder(root, "Open Images", _SEE)
    load = partial(_load_miil_split, folder, names=names, class_list=class_list)
    return Source(load=load, train=train, val=val, task=task, where=folder, see=_SEE)


def _load_miil_split(
    root: Path, split: str, cache_dir: str | None, *, names: str, class_list: str | None
) -> StoredImages:
    """Return the images of a split."""
    data, display = root / "data.csv", root / "mid_to_classes.pth"
    class_file = root / class_list if class_list else None
    display_file = display if names == "display" and display.exists() else None

    sources = [file for file in (data, class_file, display_file) if file is not None]
    parse = partial(_parse_miil, data, split, class_file, display_file)
    table = cached_table(f"openimages_miil {split!r}", sources, parse, cache_dir, _SEE)
    log_split("openimages_miil", split, table)
    return in_folder(table, root, _SEE)


def _parse_miil(
    data: Path, split: str, class_file: Path | None, display_file: Path | None
) -> Table:
    """Read a split; without a file of classes they are all of the CSV file, sorted by MID."""
    codes: dict[str, int] = {}
    files, splits, images, classes, values = _read(data, codes)

    # Sorting millions of paths takes less memory than a dictionary of them.
    ordered = np.sort(files)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        name = repeated[0].decode(errors="replace")
        raise DataError(f"{data}: the image {name} is listed twice: leave one of them out; {_SEE}")

    # The codes of the MIDs become columns of the class list, or -1.
    mids = tuple(sorted(codes))
    if class_file:
        mids = check_names(read_lines(class_file, _SEE), class_file, _SEE)
    columns = {mid: column for column, mid in enumerate(mids)}
    column_of_code = np.array([columns.get(mid, -1) for mid in codes], np.int32)
    labels = _labels(data, images, column_of_code[classes], values, (len(files), len(mids)))

    display: dict[str, str] = {}
    if display_file:
        with refusing(display_file, DataError, remedy=f"it is no dict of MID to name, {_SEE}"):
            display = {mid: str(name) for mid, name in read_torch(display_file).items()}

    # The split is selected last: by default the classes are those of both splits.
    return Table(files, labels, class_names(mids, display)).select(splits == split)


def _read(data: Path, codes: dict[str, int]) -> tuple[np.ndarray, ...]:
    """Read the CSV file of both splits, and number its MIDs in the order of their appearance.

    Returns the path and the split of each of the N images, bytes [N] and text [N], and of each of
    the M statements its image, int32 [M], the code of its MID, int32 [M], and its value, int8 [M].
    """
    # Pieces of the result; an empty first one gives the type of a file without rows.
    files = [np.zeros(0, "S1")]
    splits = [np.zeros(0, "U1")]

    # `array` holds plain integers, not objects.
    images, classes, values = array("i"), array("i"), array("b")

    # The lists repeat some thousand tokens millions of times: each is checked only once.
    @cache
    def code(token: str) -> int:
        match = _MID.fullmatch(token)
        if match is None:
            raise ValueError(token)
        return codes.setdefault(match[2].strip(), len(codes))

    header = ["image_id", "class_list", "class_list_neg", "split"]
    for first_row, (image_ids, positives, negatives, split) in csv_columns(data, header, _SEE):
        paths = []
        rows = zip(image_ids, positives, negatives, strict=True)
        for row, (path, *lists) in enumerate(rows, first_row):
            paths.append(path_inside(path, f"{data}, row {row}", _SEE))

            # A list is "['/m/02fq_6', '/m/02jfl0']"; it is not evaluated as Python.
            for text, value in zip(lists, (1, 0), strict=True):
                try:
                    if not (text.startswith("[") and text.endswith("]")):
                        raise ValueError(text)
                    inner = text[1:-1].strip()
                    codes_of_list = [code(token) for token in inner.split(",")] if inner else []
                except ValueError as error:
                    fault = f"row {row} has {shown(text)}, not a list of quoted class ids"
                    raise DataError(f"{data}: {fault}; {_SEE}") from error

                # The header is row 1 of the file, so image 0 is row 2.
                images.extend([row - 2] * len(codes_of_list))
                classes.extend(codes_of_list)
                values.extend([value] * len(codes_of_list))

        files.append(encode_paths(paths))
        splits.append(np.array(split))

    statements = (np.array(images), np.array(classes), np.array(values))
    return np.concatenate(files), np.concatenate(splits), *statements
