"""Open Images V6: 57 million human-verified labels of 9,605 classes, read in chunks."""

import json
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mldec.data.cache import cached_table
from mldec.data.labels import Labels, from_statements
from mldec.data.source import Source
from mldec.data.splits import log_split
from mldec.data.table import Table, encode_paths, path_inside
from mldec.data.tasks import partial_labels
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, log, naming_errors
from mldec.files.tables import csv_columns
from mldec.files.text import read_lines
from mldec.files.torch_files import read_torch
from mldec.names import abbreviate, check_names, disambiguate, indices_of, without_quotes

# Maps a split (and image folder) to the file of its human-verified labels.
LABELS = {
    "train": "oidv6-train-annotations-human-imagelabels.csv",
    "validation": "validation-annotations-human-imagelabels.csv",
    "test": "test-annotations-human-imagelabels.csv",
}
TRAINABLE = "oidv6-classes-trainable.txt"
DESCRIPTIONS = "oidv6-class-descriptions.csv"

# Values of verified labels. Machine-generated labels have other values, such as 0.8.
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
    """Return Open Images: classes in the order of the trainable list, images sorted by id.

    Targets are 1, 0 and mostly -1 (not annotated). Images without a verified label are not listed.
    Many images are no longer on Flickr, see `data.absent`. Machine-generated labels raise an error.

    Source: storage.googleapis.com/openimages, human-verified image-level labels.

    Args:
        root: Folder with annotations/ (the official CSV and class files) and the image folders
            train/, validation/ and test/ with ID.jpg.
        train: Training split.
        val: Validation split. Papers use "test" (125,436 images), not "validation" (41,620 images).
        names: "display": the display name, with the class index if it is not unique, such as "Ball
            (12)". "mid": the class id, such as /m/01bqvp.
        prefix: Length of the sub-folder names, which are the first characters of the image ids: 2
            for train/0a/, 0 for no sub-folders.
    """
    evaluator = partial_labels(threshold)
    folder = check_folder(root, "Open Images")
    load = partial(_load_split, folder, names, prefix)
    return Source(load=load, train=train, val=val, where=folder, evaluator=evaluator)


def _load_split(
    root: Path, names: str, prefix: int, split: str, cache_dir: str | None
) -> StoredImages:
    annotations = root / "annotations"
    sources = [annotations / LABELS[split], annotations / TRAINABLE, annotations / DESCRIPTIONS]
    parse = partial(_parse, sources, names, prefix)
    table = cached_table(f"openimages {names} {prefix}", sources, parse, cache_dir)
    return log_split("openimages", split, in_folder(table, root / split))


def _parse(sources: Sequence[Path], names: str, prefix: int) -> Table:
    statements, trainable, descriptions = sources
    mids = check_names(read_lines(trainable), trainable)
    chunk_ids, rows, classes, values = _read_statements(statements, mids)

    # An image may be in several chunks.
    ids, images = np.unique(chunk_ids, return_inverse=True)
    files = np.char.add(ids, b".jpg")
    if prefix:
        folders = np.char.add(ids.astype(f"S{prefix}"), b"/")
        files = np.char.add(folders, files)

    display: dict[str, str] = {}
    if names == "display":
        header = ["LabelName", "DisplayName"]
        for _, (of_mids, texts) in csv_columns(descriptions, header):
            display.update(zip(of_mids, texts, strict=True))

    labels = _labels(statements, images[rows], classes, values, (len(ids), len(mids)))
    return Table(files, labels, class_names(mids, display))


def _read_statements(
    path: Path, mids: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the image ids of all chunks, bytes [M], and each row's id, class and value."""
    columns = indices_of(mids)
    num_ids = 0

    # The empty first chunk sets the types if the file has no rows.
    no_integers = np.zeros(0, np.int32)
    pieces: list[tuple[np.ndarray, ...]]
    pieces = [(np.zeros(0, "S1"), no_integers, no_integers, np.zeros(0, np.int8))]

    header = ["ImageID", "Source", "LabelName", "Confidence"]
    for first_row, (image_ids, _, label_names, confidences) in csv_columns(path, header):
        values = _look_up(_CONFIDENCE, confidences, np.int8)
        if values.min() < 0:
            index = int(values.argmin())
            fault = f"Confidence is {confidences[index]!r} in row {first_row + index}"
            raise DataError(f"{path}: {fault}; use the human-verified labels, which are 1 or 0")

        encoded = np.array([image_id.encode() for image_id in image_ids], np.bytes_)
        # Each id is stored once per chunk. The ids of all rows would take a gigabyte.
        ids, id_of_row = np.unique(encoded, return_inverse=True)
        classes = _look_up(columns, label_names, np.int32)
        pieces.append((ids, (id_of_row + num_ids).astype(np.int32), classes, values))
        num_ids += len(ids)

    all_ids, rows, classes, values = map(np.concatenate, zip(*pieces, strict=True))
    return all_ids, rows, classes, values


def _look_up(table: Mapping[str, int], texts: Sequence[str], dtype: type[Any]) -> np.ndarray:
    # `fromiter` over a `map` does not create a list of 57 million Python integers.
    return np.fromiter(map(table.get, texts, repeat(-1)), dtype, len(texts))


def _labels(
    source: Path, images: np.ndarray, classes: np.ndarray, values: np.ndarray, size: tuple[int, int]
) -> Labels:
    """Return the labels of M statements, without class -1. `size` is (N, K)."""
    known = classes >= 0
    if not known.all():
        dropped = f"{np.count_nonzero(~known):,} of {len(known):,} labels"
        log.info(f"{source}: {dropped} are omitted: their class is not in the class list")
        images = images[known]
        classes = classes[known]
        values = values[known]

    labels, num_both = from_statements(
        images, classes, values, num_images=size[0], num_classes=size[1]
    )
    if num_both:
        log.warning(f"{source}: {num_both:,} labels are both present and absent; present is used")
    return labels


def class_names(mids: Sequence[str], display: Mapping[str, str]) -> tuple[str, ...]:
    """Return a unique name per class: its display name, see `disambiguate`, or its MID."""
    # Some names in the official files have extra quotes or whitespace.
    return disambiguate([without_quotes(display.get(mid, "")) or mid for mid in mids])


def openimages_miil(
    *,
    root: str,
    train: str = "train",
    val: str = "val",
    names: Literal["display", "mid"] = "display",
    class_list: str | None = None,
    threshold: float = 0.5,
) -> Source:
    """Return Open Images in the MIIL format: images in file order, classes sorted by MID.

    Source: Alibaba-MIIL/PartialLabelingCSL, OpenImages.md.

    Args:
        root: Folder with data.csv, its images, and optionally mid_to_classes.pth.
        train: Value of the split column in training rows.
        val: Value of the split column in validation rows. "val" has the official test images.
        names: See `openimages`.
        class_list: File in `root` with one MID per line, the classes of a checkpoint in order.
            Labels of other classes are omitted. None takes all classes of both splits.
    """
    evaluator = partial_labels(threshold)
    folder = check_folder(root, "Open Images")
    load = partial(_load_miil_split, folder, names=names, class_list=class_list)
    return Source(load=load, train=train, val=val, where=folder, evaluator=evaluator)


def _load_miil_split(
    root: Path, split: str, cache_dir: str | None, *, names: str, class_list: str | None
) -> StoredImages:
    data = root / "data.csv"
    class_file = root / class_list if class_list else None
    display = root / "mid_to_classes.pth"
    display_file = display if names == "display" and display.exists() else None

    sources = [file for file in (data, class_file, display_file) if file is not None]
    parse = partial(_parse_miil, data, split, class_file, display_file)
    table = cached_table(f"openimages_miil {split!r}", sources, parse, cache_dir)
    return log_split("openimages_miil", split, in_folder(table, root))


def _parse_miil(
    data: Path, split: str, class_file: Path | None, display_file: Path | None
) -> Table:
    """Read a split. `class_file` defaults to all classes of the CSV file, sorted by MID."""
    codes: dict[str, int] = {}
    files, splits, images, classes, values = _read_csv(data, codes)

    # Sorting millions of paths takes less memory than a dictionary.
    names_of_files, counts = np.unique(files, return_counts=True)
    if len(names_of_files) < len(files):
        name = names_of_files[counts.argmax()].decode(errors="replace")
        raise DataError(f"{data}: the image {name} is listed twice; remove one")

    # Map the code of each MID to a column of the class list, or -1.
    mids = tuple(sorted(codes))
    if class_file:
        mids = check_names(read_lines(class_file), class_file)
    columns = indices_of(mids)
    column_of_code = np.array([columns.get(mid, -1) for mid in codes], np.int32)
    labels = _labels(data, images, column_of_code[classes], values, (len(files), len(mids)))

    display: dict[str, str] = {}
    if display_file:
        with naming_errors(display_file, DataError, remedy="use a dict of MID to name"):
            display = {mid: str(name) for mid, name in read_torch(display_file).items()}

    # Select the split last, because the default classes are the classes of both splits.
    return Table(files, labels, class_names(mids, display)).select(splits == split)


def _read_csv(data: Path, codes: dict[str, int]) -> tuple[np.ndarray, ...]:
    """Return path and split of each image, and image, code of the MID and value of each label.

    The MIDs get codes in `codes` in order of appearance.
    """
    # Chunks of the result. The empty first chunk sets the type if the file has no rows.
    files = [np.zeros(0, "S1")]
    splits = [np.zeros(0, "U1")]

    # `array` stores plain integers, not objects.
    images = array("i")
    classes = array("i")
    values = array("b")

    header = ["image_id", "class_list", "class_list_neg", "split"]
    for first_row, (image_ids, positives, negatives, split) in csv_columns(data, header):
        paths = []
        rows = zip(image_ids, positives, negatives, strict=True)
        for row, (path, *lists) in enumerate(rows, first_row):
            paths.append(path_inside(path, f"{data}, row {row}"))

            for text, value in zip(lists, (1, 0), strict=True):
                try:
                    # A list such as "['/m/02fq_6', '/m/02jfl0']" is not evaluated as Python.
                    mids = json.loads(text.replace("'", '"'))
                    codes_of_list = [codes.setdefault(mid.strip(), len(codes)) for mid in mids]
                except (ValueError, TypeError, AttributeError) as error:
                    fault = f"row {row} has {abbreviate(text)}, not a list of quoted class ids"
                    raise DataError(f"{data}: {fault}; correct it") from error

                # The header is row 1 of the file, so image 0 is row 2.
                images.extend([row - 2] * len(codes_of_list))
                classes.extend(codes_of_list)
                values.extend([value] * len(codes_of_list))

        files.append(encode_paths(paths))
        splits.append(np.array(split))

    statements = (np.array(images), np.array(classes), np.array(values))
    return np.concatenate(files), np.concatenate(splits), *statements
