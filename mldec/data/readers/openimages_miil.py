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
_MID = re.compile(r"\s*(['\"])([^'\"\[\],]*[^'\"\[\],\s])\1\s*")


def openimages_miil(
    *,
    root: str,
    train: str = "train",
    val: str = "val",
    names: Literal["display", "mid"] = "display",
    class_list: str | None = None,
) -> Source:
    """Return Open Images in the MIIL form: images in the order of the file, classes sorted by MID.

    Source: Alibaba-MIIL/PartialLabelingCSL, OpenImages.md.

    Args:
        root: folder with data.csv, the images at the paths it gives, and mid_to_classes.pth if there is one.
        train: value of the `split` column to learn from.
        val: value of the `split` column to evaluate on; what the file calls "val" are the official test images.
        names: "display": the display name, with its index as in "Ball (12)" if classes share it; or "mid" (/m/01bqvp).
        class_list: file under `root` with one MID per line, for the classes and order of a given checkpoint; labels of
            other classes are left out. None is every class that the file names, of either split, sorted by MID.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
    """
    folder = check_folder(root, "Open Images", _SEE)
    load = partial(_load_split, folder, names=names, class_list=class_list)
    return Source(load=load, train=train, val=val, task=PartialLabels(), where=folder, see=_SEE)


def _load_split(
    root: Path, split: str, cache: TableCache, *, names: str, class_list: str | None
) -> LabelledImages:
    data, display = root / "data.csv", root / "mid_to_classes.pth"
    class_file = root / class_list if class_list else None
    display_file = display if names == "display" and display.exists() else None

    sources = [file for file in (data, class_file, display_file) if file is not None]
    parse = partial(_parse, data, split, class_file, display_file)
    table = cache.table(f"openimages_miil {split!r}", sources, parse)
    log_table(f"openimages_miil {split}", table)
    return in_folder(table, root, _SEE)


def _parse(data: Path, split: str, class_file: Path | None, display_file: Path | None) -> Table:
    codes = _Codes()
    files, splits, images, classes, values = _read(data, codes)
    _refuse_repeated(data, files)

    # Codes were given in the order of appearance: here they become columns of the class list, or -1.
    mids = read_mids(class_file, _SEE) if class_file else tuple(sorted(codes.mids))
    columns = {mid: column for column, mid in enumerate(mids)}
    classes = np.array([columns.get(mid, -1) for mid in codes.mids], np.int32)[classes]
    known = classes >= 0
    log_dropped(data, int(np.count_nonzero(~known)), len(known))

    labels, clashes = from_statements(
        images[known], classes[known], values[known], num_images=len(files), num_classes=len(mids)
    )
    log_clashes(data, clashes)
    display = _read_display(display_file) if display_file else {}
    table = Table(
        files, labels, class_names(mids, display, display_file or class_file or data, _SEE)
    )
    return table.select(splits == split)


def _read(data: Path, codes: "_Codes") -> tuple[np.ndarray, ...]:
    """Return file and split of each row [N], and of each statement its row, code and value [M]."""
    files, splits = [np.zeros(0, "S1")], [np.zeros(0, "U1")]
    rows, classes, values = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)], [np.zeros(0, np.int8)]

    for first, columns in csv_columns(
        data, ["image_id", "class_list", "class_list_neg", "split"], _SEE
    ):
        image_ids, positives, negatives, split = columns
        where = f"{data}, row"
        paths = [
            path_inside(path, f"{where} {row}", _SEE) for row, path in enumerate(image_ids, first)
        ]
        files.append(encode_paths(paths))
        splits.append(np.array(split))

        for lists, value in ((positives, 1), (negatives, 0)):
            codes_of_piece, lengths = _read_lists(data, first, lists, codes)
            # The header is row 1, so the first image is row 2 of the file and row 0 of the table.
            table_rows = np.arange(first - 2, first - 2 + len(lengths), dtype=np.int32)
            rows.append(np.repeat(table_rows, lengths))
            classes.append(codes_of_piece)
            values.append(np.full(len(codes_of_piece), value, np.int8))

    return tuple(np.concatenate(pieces) for pieces in (files, splits, rows, classes, values))


class _Codes:
    """Number the MIDs of the lists in the order of their appearance; a token is checked when it is first met."""

    def __init__(self) -> None:
        self.mids: dict[str, int] = {}
        self._of_token: dict[str, int] = {}  # a token of a list, quotes and blanks included

    def code(self, token: str) -> int:
        """Return the number of the MID in a token such as "'/m/02fq_6'".

        Raises:
            ValueError: if the token is not a quoted class id.
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
    data: Path, first: int, texts: Sequence[str], codes: _Codes
) -> tuple[np.ndarray, np.ndarray]:
    """Read texts such as "['/m/02fq_6', '/m/02jfl0']": all their codes, and how many each has. Nothing is evaluated."""
    all_codes, lengths = array("i"), array("i")
    for row, text in enumerate(texts, first):
        before = len(all_codes)
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
        lengths.append(len(all_codes) - before)
    return np.array(all_codes, np.int32), np.array(lengths, np.int32)


def _refuse_repeated(data: Path, files: np.ndarray) -> None:
    """Raise a `DataError` if two rows name the same image; of millions, hence no dictionary of paths."""
    order = np.argsort(files, kind="stable")
    repeated = np.flatnonzero(files[order][1:] == files[order][:-1])
    if len(repeated):
        one, two = order[repeated[0]], order[repeated[0] + 1]
        name = files[one].decode(errors="replace")
        raise DataError(
            f"{data}, row {two + 2}: the image {name} is listed twice, first in row {one + 2}: "
            f"leave one of them out; {_SEE}"
        )


def _read_display(path: Path) -> dict[str, str]:
    """Read mid_to_classes.pth; nothing in it can run."""
    try:
        display = read_torch(path)
    except CheckpointError as error:
        raise DataError(f"{error}; it must be a plain dict of MID to name, {_SEE}") from error
    if not isinstance(display, dict) or not all(
        isinstance(part, str) for item in display.items() for part in item
    ):
        raise DataError(f"{path} is not a dict of MID to name; {_SEE}")
    return display
