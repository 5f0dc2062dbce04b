"""Open Images V6 from the official files, with the human-verified labels: present, absent, unknown.

The nine million training images have 57 million verified labels of 9,605 classes. They are read
once, in pieces, into arrays of half a gigabyte, which the cache folder keeps and loader workers
share.
"""

import logging
import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Literal

import numpy as np

from mldec.data.cache import TableCache
from mldec.data.settings import Source
from mldec.data.table import (
    Table,
    as_name,
    encode_paths,
    from_statements,
    path_inside,
    told_apart,
    without_quotes,
)
from mldec.data.tasks import PartialLabels
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import CheckpointError, DataError
from mldec.files.text import csv_columns, read_text
from mldec.files.torch_files import read_torch

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section Open Images"

# Split, which is also the image folder -> the file of its human-verified labels.
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
    train: str = "train",
    val: str = "test",
    names: Literal["display", "mid"] = "display",
    prefix: int = 0,
    threshold: float = 0.5,
) -> Source:
    """Return Open Images: the classes in the order of the trainable list, images by image id.

    Targets are 1, 0 and mostly -1 (not annotated). An image without a verified label is in no
    official file and therefore left out. Many images are no longer on Flickr: see `data.absent`.

    Source: storage.googleapis.com/openimages, human-verified image-level labels. The files of
    machine-generated labels are refused.

    Args:
        root: folder with annotations/ (the official CSV and class files) and the image folders
            train/, validation/ and test/ of ID.jpg.
        train: split to learn from.
        val: split to evaluate on. Papers use "test" (125,436 images), not "validation" (41,620).
        names: "display": the display name, with the class index where classes share it, as in "Ball
            (12)"; or "mid": the class id, such as /m/01bqvp.
        prefix: length of the image folders' sub-folder names, which are the first characters of the
            image ids: 2 for train/0a/; 0 for no sub-folders.
        threshold: probability from which on a class counts as predicted, for precision, recall and
            F1.

    Raises:
        DataError: A file under `root` is missing or broken; see `Source.load`.
        ValueError: An argument is out of range.
    """
    for key, split in (("train", train), ("val", val)):
        if split not in LABELS:
            raise ValueError(f"{key} is {split!r}: it must be one of {', '.join(LABELS)}")
    if prefix < 0:
        raise ValueError(f"prefix is {prefix}: it must be 0 (no sub-folders) or more")

    task = PartialLabels(threshold)
    folder = check_folder(root, "Open Images", _SEE)
    load = partial(_load_split, folder, names=names, prefix=prefix)
    return Source(load=load, train=train, val=val, task=task, where=folder, see=_SEE)


def _load_split(
    root: Path, split: str, cache: TableCache, *, names: str, prefix: int
) -> StoredImages:
    """Return the images of a split."""
    statements = root / "annotations" / LABELS[split]
    trainable = root / "annotations" / TRAINABLE
    descriptions = root / "annotations" / DESCRIPTIONS
    parse = partial(_parse, statements, trainable, descriptions, names, prefix)
    table = cache.table(
        f"openimages {names} {prefix}", (statements, trainable, descriptions), parse
    )

    log_table(f"openimages {split}", table)
    return in_folder(table, root / split, _SEE)


def log_table(what: str, table: Table) -> None:
    """Log the numbers of images, classes and labels of a split."""
    num_labels = len(table.labels.values)
    num_present = int(np.count_nonzero(table.labels.values == 1))
    counts = f"{len(table):,} images, {len(table.classes):,} classes"
    log.info(
        "%s: %s, %s present and %s absent",
        what,
        counts,
        f"{num_present:,}",
        f"{num_labels - num_present:,}",
    )


def _parse(statements: Path, trainable: Path, descriptions: Path, names: str, prefix: int) -> Table:
    """Read a split.

    Args:
        statements: CSV file of the human-verified labels.
        trainable: list of the classes, one MID per line.
        descriptions: CSV file of the display names.
        names: "display" or "mid", see `openimages`.
        prefix: as for `openimages`.
    """
    mids = read_mids(trainable, _SEE)
    run_ids, runs, classes, values = _read_statements(statements, mids)

    # The official files are sorted by image, but they do not promise it: an image may have several
    # runs of rows.
    ids, image_of_run = np.unique(run_ids, return_inverse=True)

    # An id becomes a path, so it must not hold a separator or dots.
    is_valid = np.char.isalnum(ids)
    if not is_valid.all():
        raise DataError(f"{statements}: {ids[~is_valid][0].decode()!r} is not an image id; {_SEE}")

    labels, clashes = from_statements(
        image_of_run[runs], classes, values, num_images=len(ids), num_classes=len(mids)
    )
    log_clashes(statements, clashes)

    files = np.char.add(ids, b".jpg")
    if prefix:
        sub_folders = np.char.add(ids.astype(f"S{prefix}"), b"/")
        files = np.char.add(sub_folders, files)

    # Without display names the classes are called by their MIDs, and no message blames the other
    # file.
    display = {} if names == "mid" else read_descriptions(descriptions, _SEE)
    names_from = descriptions if display else trainable
    return Table(files, labels, class_names(mids, display, names_from, _SEE))


def _read_statements(
    path: Path, mids: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Read the verified labels of a split, one statement about an image and a class per row.

    Consecutive rows of one image form a run. Statements about classes outside the list are dropped.

    Args:
        path: CSV file of the labels.
        mids: the classes, in the order of the columns.

    Returns:
        The image id of each of the R runs, bytes [R], and for each of the M statements its run,
        int32 [M], its class, int32 [M], and its value, int8 [M]: 1 present, 0 absent.

    Raises:
        DataError: The file is broken, or its labels are not human-verified.
    """
    columns = {mid: column for column, mid in enumerate(mids)}
    num_runs = num_rows = 0

    # Pieces of the result; an empty first one gives the type of a file without rows.
    run_ids: list[np.ndarray] = [np.zeros(0, "S1")]
    runs = [np.zeros(0, np.int32)]
    classes = [np.zeros(0, np.int32)]
    values = [np.zeros(0, np.int8)]

    header = ["ImageID", "Source", "LabelName", "Confidence"]
    for first_row, (image_ids, _, label_names, confidences) in csv_columns(path, header, _SEE):
        piece_values = _look_up(_CONFIDENCE, confidences, np.int8)
        if piece_values.min() < 0:
            index = int(piece_values.argmin())
            raise DataError(
                f"{path}: row {first_row + index} has Confidence {confidences[index]!r}, "
                f"not 1 or 0: not human-verified labels? {_SEE}"
            )

        piece_classes = _look_up(columns, label_names, np.int32)
        is_known = piece_classes >= 0

        try:
            piece_ids = np.array(image_ids, np.bytes_)
        except UnicodeEncodeError as error:
            raise DataError(
                f"{path}: an image id after row {first_row - 1} is not ASCII; {_SEE}"
            ) from error

        # A run starts where the image id differs from that of the row before. The first row of a
        # piece starts a new run even if it continues the last one: `_parse` joins runs by id.
        starts_run = np.append(True, piece_ids[1:] != piece_ids[:-1])
        piece_runs = np.cumsum(starts_run) + (num_runs - 1)

        run_ids.append(piece_ids[starts_run])
        runs.append(piece_runs[is_known].astype(np.int32))
        classes.append(piece_classes[is_known])
        values.append(piece_values[is_known])
        num_runs += len(run_ids[-1])
        num_rows += len(label_names)

    known_classes = np.concatenate(classes)
    log_dropped(path, num_rows - len(known_classes), num_rows)
    return np.concatenate(run_ids), np.concatenate(runs), known_classes, np.concatenate(values)


def _look_up(
    table: Mapping[str, int], texts: Sequence[str], dtype: type[np.signedinteger]
) -> np.ndarray:
    """Return the number of each text, [len(texts)] of the given type; -1 if the table lacks it."""
    # `fromiter` over a `map` builds no list of Python integers: there are 57 million texts.
    return np.fromiter(map(table.get, texts, repeat(-1)), dtype, len(texts))


def log_dropped(path: Path, dropped: int, rows: int) -> None:
    """Log how many labels are dropped because their class is not in the class list."""
    if dropped:
        log.info(
            "%s: %s of %s labels are of classes outside the class list: left out",
            path,
            f"{dropped:,}",
            f"{rows:,}",
        )


def log_clashes(path: Path, clashes: int) -> None:
    """Log how many pairs of an image and a class are stated to be both present and absent."""
    if clashes:
        log.warning(
            "%s: %s labels are both present and absent: taken as present", path, f"{clashes:,}"
        )


def read_mids(path: Path, see: str) -> tuple[str, ...]:
    """Read a list of classes, one MID per line.

    Raises:
        DataError: The file cannot be read, is empty, or names a class twice.
    """
    mids = tuple(read_text(path, see).split())
    if not mids:
        raise DataError(f"{path} names no class; {see}")

    mid, count = Counter(mids).most_common(1)[0]
    if count > 1:
        raise DataError(f"{path} names {mid} {count} times; {see}")
    return mids


def read_descriptions(path: Path, see: str) -> dict[str, str]:
    """Read the display name of each MID from a CSV file.

    Raises:
        DataError: The file cannot be read or has another header.
    """
    display: dict[str, str] = {}
    for _, (mids, names) in csv_columns(path, ["LabelName", "DisplayName"], see):
        display.update(zip(mids, names, strict=True))
    return display


def class_names(
    mids: Sequence[str], display: Mapping[str, str], source: Path, see: str
) -> tuple[str, ...]:
    """Return a unique name per class: its display name, or its MID if it has none.

    Classes that share a display name get their index appended, as in "Ball (12)".

    Args:
        mids: the class ids, in the order of the columns.
        display: MID -> display name.
        source: the file that the names are from, for messages.
        see: where to find help, for messages.

    Raises:
        DataError: A name is not a valid class name.
    """
    names = []
    for mid in mids:
        # Some names in the official files have stray quotes or blanks around them.
        name = without_quotes(display.get(mid, "")) or mid
        names.append(as_name(name, f"{source}: {mid!r}", see))
    return told_apart(names)


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
        train: value of the column split in the rows to learn from.
        val: value of the column split in the rows to evaluate on; the "val" of the file are the
            official test images.
        names: "display": the display name, with the class index where classes share it, as in "Ball
            (12)"; or "mid": the class id, such as /m/01bqvp.
        class_list: file in `root` with one MID per line: the classes of a given checkpoint, in its
            order. Labels of other classes are left out. None takes every class that the file names
            in either split, sorted by MID.
        threshold: probability from which on a class counts as predicted, for precision, recall and
            F1.

    Raises:
        DataError: A file under `root` is missing or broken; see `Source.load`.
    """
    task = PartialLabels(threshold)
    folder = check_folder(root, "Open Images", _SEE)
    load = partial(_load_miil_split, folder, names=names, class_list=class_list)
    return Source(load=load, train=train, val=val, task=task, where=folder, see=_SEE)


def _load_miil_split(
    root: Path, split: str, cache: TableCache, *, names: str, class_list: str | None
) -> StoredImages:
    """Return the images of a split."""
    data, display = root / "data.csv", root / "mid_to_classes.pth"
    class_file = root / class_list if class_list else None
    display_file = display if names == "display" and display.exists() else None

    sources = [file for file in (data, class_file, display_file) if file is not None]
    parse = partial(_parse_miil, data, split, class_file, display_file)
    table = cache.table(f"openimages_miil {split!r}", sources, parse)

    log_table(f"openimages_miil {split}", table)
    return in_folder(table, root, _SEE)


def _parse_miil(
    data: Path, split: str, class_file: Path | None, display_file: Path | None
) -> Table:
    """Read a split.

    Args:
        data: the CSV file of both splits.
        split: value of the column split.
        class_file: list of the classes; None takes all classes of the CSV, sorted by MID.
        display_file: file of the display names; None names the classes by their MIDs.
    """
    codes = _Codes()
    files, splits, images, classes, values = _read(data, codes)
    _refuse_repeated(data, files)

    # Codes number the MIDs by first appearance: they become columns of the class list, or -1.
    mids = read_mids(class_file, _SEE) if class_file else tuple(sorted(codes.mids))
    columns = {mid: column for column, mid in enumerate(mids)}
    column_of_code = np.array([columns.get(mid, -1) for mid in codes.mids], np.int32)
    classes = column_of_code[classes]
    is_known = classes >= 0
    log_dropped(data, int(np.count_nonzero(~is_known)), len(is_known))

    labels, clashes = from_statements(
        images[is_known],
        classes[is_known],
        values[is_known],
        num_images=len(files),
        num_classes=len(mids),
    )
    log_clashes(data, clashes)

    # The split is selected last: by default the classes are those of both splits.
    display = _read_display(display_file) if display_file else {}
    names_from = display_file or class_file or data
    table = Table(files, labels, class_names(mids, display, names_from, _SEE))
    return table.select(splits == split)


def _read(data: Path, codes: "_Codes") -> tuple[np.ndarray, ...]:
    """Read the CSV file of both splits.

    Args:
        data: the file.
        codes: numbers the MIDs; those of the file are added to it.

    Returns:
        The path and the split of each of the N images, bytes [N] and text [N], and for each of the
        M statements its image, int32 [M], the code of its MID, int32 [M], and its value, int8 [M]:
        1 present, 0 absent.
    """
    # Pieces of the result; an empty first one gives the type of a file without rows.
    files = [np.zeros(0, "S1")]
    splits = [np.zeros(0, "U1")]
    images = [np.zeros(0, np.int32)]
    classes = [np.zeros(0, np.int32)]
    values = [np.zeros(0, np.int8)]

    header = ["image_id", "class_list", "class_list_neg", "split"]
    for first_row, (image_ids, positives, negatives, split) in csv_columns(data, header, _SEE):
        paths = []
        for row, path in enumerate(image_ids, first_row):
            paths.append(path_inside(path, f"{data}, row {row}", _SEE))
        files.append(encode_paths(paths))
        splits.append(np.array(split))

        for lists, value in ((positives, 1), (negatives, 0)):
            list_codes, lengths = _read_lists(data, first_row, lists, codes)

            # The header is row 1 of the file, so image 0 is row 2.
            first_image = first_row - 2
            piece = np.arange(first_image, first_image + len(lengths), dtype=np.int32)
            images.append(np.repeat(piece, lengths))
            classes.append(list_codes)
            values.append(np.full(len(list_codes), value, np.int8))

    return tuple(np.concatenate(pieces) for pieces in (files, splits, images, classes, values))


class _Codes:
    """Numbers for MIDs, in the order of their first appearance.

    The lists of the file repeat some thousand tokens millions of times, so a token is checked only
    once and then looked up.
    """

    def __init__(self) -> None:
        self.mids: dict[str, int] = {}
        self._of_token: dict[str, int] = {}  # a token of a list, quotes and blanks included

    def code(self, token: str) -> int:
        """Return the number of the MID in a token such as "'/m/02fq_6'".

        Raises:
            ValueError: The token is not a quoted class id.
        """
        code = self._of_token.get(token)
        if code is None:
            match = _MID.fullmatch(token)
            if match is None:
                raise ValueError(token)

            code = self.mids.setdefault(match[2].strip(), len(self.mids))
            self._of_token[token] = code
        return code


def _read_lists(
    data: Path, first_row: int, texts: Sequence[str], codes: _Codes
) -> tuple[np.ndarray, np.ndarray]:
    """Read lists of MIDs such as "['/m/02fq_6', '/m/02jfl0']" without evaluating them as Python.

    Args:
        data: the CSV file, for messages.
        first_row: row of the first list in the file, for messages.
        texts: the lists of L images.
        codes: numbers the MIDs.

    Returns:
        The codes of all lists, one list after the other, int32, and their lengths, int32 [L].

    Raises:
        DataError: A text is not a list of quoted class ids.
    """
    # `array` holds plain 32-bit integers, which numpy copies in one go.
    all_codes, lengths = array("i"), array("i")
    for row, text in enumerate(texts, first_row):
        length_before = len(all_codes)
        try:
            if text[:1] != "[" or text[-1:] != "]" or len(text) < 2:
                raise ValueError(text)
            if inner := text[1:-1].strip():
                all_codes.extend([codes.code(token) for token in inner.split(",")])
        except ValueError as error:
            shown = text if len(text) < 80 else f"{text[:77]}..."
            raise DataError(
                f"{data}: row {row} has {shown!r}, not a list of quoted class ids; {_SEE}"
            ) from error
        lengths.append(len(all_codes) - length_before)

    return np.array(all_codes, np.int32), np.array(lengths, np.int32)


def _refuse_repeated(data: Path, files: np.ndarray) -> None:
    """Raise a `DataError` if two rows name the same image."""
    # Sorting millions of paths takes less memory than a dictionary of them.
    order = np.argsort(files, kind="stable")
    repeated = np.flatnonzero(files[order][1:] == files[order][:-1])
    if len(repeated):
        first, second = order[repeated[0]], order[repeated[0] + 1]
        name = files[first].decode(errors="replace")
        raise DataError(
            f"{data}, row {second + 2}: the image {name} is listed twice, first in row "
            f"{first + 2}: leave one of them out; {_SEE}"
        )


def _read_display(path: Path) -> dict[str, str]:
    """Read the display name of each MID from a torch file; no code in it is run.

    Raises:
        DataError: The file cannot be read or does not hold a plain dict of texts.
    """
    try:
        display = read_torch(path)
    except CheckpointError as error:
        raise DataError(f"{error}; it must be a plain dict of MID to name, {_SEE}") from error

    if not isinstance(display, dict) or not all(
        isinstance(mid, str) and isinstance(name, str) for mid, name in display.items()
    ):
        raise DataError(f"{path} is not a dict of MID to name; {_SEE}")
    return display
