"""Open Images V6 as MIIL prepared it: one `data.csv` of verified positives and negatives."""

import logging
import re
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from mldec.data.base import LabelledImages
from mldec.data.cache import TableCache
from mldec.data.labels import from_statements
from mldec.data.readers.openimages import (
    class_names,
    log_clashes,
    log_dropped,
    log_table,
    read_mids,
)
from mldec.data.source import Source
from mldec.data.storage.image_files import check_folder, in_folder
from mldec.data.table import Table, encode_paths, path_inside
from mldec.data.task import PartialLabels
from mldec.errors import CheckpointError, DataError
from mldec.files.text import csv_columns
from mldec.files.torch_files import read_torch

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section Open Images"

# A class id in single or double quotes, with optional white space around it.
_MID = re.compile(r"\s*(['\"])([^'\"\[\],]*[^'\"\[\],\s])\1\s*")


def openimages_miil(
    *,
    root: str,
    train: str = "train",
    val: str = "val",
    names: Literal["display", "mid"] = "display",
    class_list: str | None = None,
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

    Raises:
        DataError: A file under `root` is missing or broken; see `Source.load`.
    """
    folder = check_folder(root, "Open Images", _SEE)
    load = partial(_load_split, folder, names=names, class_list=class_list)
    return Source(load=load, train=train, val=val, task=PartialLabels(), where=folder, see=_SEE)


def _load_split(
    root: Path, split: str, cache: TableCache, *, names: str, class_list: str | None
) -> LabelledImages:
    """Return the images of a split."""
    data, display = root / "data.csv", root / "mid_to_classes.pth"
    class_file = root / class_list if class_list else None
    display_file = display if names == "display" and display.exists() else None

    sources = [file for file in (data, class_file, display_file) if file is not None]
    parse = partial(_parse, data, split, class_file, display_file)
    table = cache.table(f"openimages_miil {split!r}", sources, parse)

    log_table(f"openimages_miil {split}", table)
    return in_folder(table, root, _SEE)


def _parse(data: Path, split: str, class_file: Path | None, display_file: Path | None) -> Table:
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
