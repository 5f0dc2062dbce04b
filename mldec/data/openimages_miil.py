"""Open Images V6 as MIIL prepared it: one `data.csv` of verified positives and negatives."""

import logging
import re
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mldec.data.base import DataModule
from mldec.data.csv_file import read_csv
from mldec.data.files import check_folder, file_data
from mldec.data.labels import from_statements
from mldec.data.openimages import check_names, class_names, log_clashes, log_dropped, log_table, read_mids
from mldec.data.tables import Table, cached, paths
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.errors import CheckpointError, DataError
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.storage import read_torch

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section Open Images"
_MID = re.compile(r"\s*(['\"])([^'\"\[\],]*[^'\"\[\],\s])\1\s*")


def openimages_miil(
    *,
    root: str,
    image_size: int = 224,
    train: str = "train",
    val: str = "val",
    names: str = "display",
    class_list: str | None = None,
    absent: str = "stop",
    augment: str = "official",
    cutout: float = 0.5,
    flip: bool = False,
    crop: float = 1.0,
    bad_images: str = "stop",
    cache_dir: str | None = None,
) -> DataModule:
    """Return Open Images in the MIIL form: images in the order of the file, classes sorted by MID.

    Source: Alibaba-MIIL/PartialLabelingCSL, OpenImages.md.

    Args:
        root: folder with data.csv, the images at the paths it gives, and mid_to_classes.pth if there is one.
        image_size: side of the square input in pixels.
        train: value of the `split` column to learn from.
        val: value of the `split` column to evaluate on; what the file calls "val" are the official test images.
        names: "display": the display name, with its place as in "Ball (12)" if classes share it; or "mid" (/m/01bqvp).
        class_list: file under `root` with one MID a line, for the classes and order of a given checkpoint; labels of
            other classes are left out. None is every class that the file names, of either split, sorted by MID.
        absent: what to do about a listed image that is not on the disk, see `file_data`.
        augment: "official", "randaugment" or "none"; this and the next three are described at `TrainTransform`.
        cutout: side of the covered square as a fraction of the image side; 0 turns it off.
        flip: mirror half of the training images.
        crop: smallest area of a random crop as a fraction of the image; 1 turns it off.
        bad_images: "stop" at an image that cannot be read, or "skip" and count it.
        cache_dir: folder for the parsed annotations; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ConfigError: A value is out of range.
    """
    check_names(names)
    folder = check_folder(root, "Open Images", _SEE)
    return file_data(
        partial(_read_split, folder, names=names, class_list=class_list, cache_dir=cache_dir),
        train=train,
        val=val,
        learn=TrainTransform(image_size=image_size, augment=augment, cutout=cutout, flip=flip, crop=crop),
        check=EvalTransform(image_size=image_size),
        evaluator=PartialLabelEvaluator,
        where=folder,
        see=_SEE,
        bad_images=bad_images,
        absent=absent,
    )


def _read_split(
    root: Path, split: str, *, names: str, class_list: str | None, cache_dir: str | None
) -> tuple[Path, Table]:
    data, listed, display = root / "data.csv", class_list and root / class_list, root / "mid_to_classes.pth"
    shown = display if names == "display" and display.exists() else None
    sources = [data, *([listed] if listed else []), *([shown] if shown else [])]
    parse = partial(_parse, data, split, listed or None, shown)
    table = cached(f"openimages_miil {split!r}", sources, parse, cache_dir=cache_dir, see=_SEE)
    log_table(f"openimages_miil {split}", table)
    return root, table


def _parse(data: Path, split: str, listed: Path | None, display: Path | None) -> Table:
    codes = _Codes()
    files, splits, owners, classes, values = _read(data, codes)
    _refuse_twice(data, files)
    # Codes were given in the order of appearance: here they become places in the class list, or -1.
    mids = read_mids(listed, _SEE) if listed else tuple(sorted(codes.mids))
    place = {mid: number for number, mid in enumerate(mids)}
    classes = np.array([place.get(mid, -1) for mid in codes.mids], np.int32)[classes]
    known = classes >= 0
    log_dropped(data, int(np.count_nonzero(~known)), len(known))
    labels, clashes = from_statements(
        owners[known], classes[known], values[known], num_images=len(files), num_classes=len(mids)
    )
    log_clashes(data, clashes)
    shown = _read_display(display) if display else {}
    table = Table(files, labels, class_names(mids, shown, display or listed or data, _SEE))
    return table.select(splits == split)


def _read(data: Path, codes: "_Codes") -> tuple[np.ndarray, ...]:
    """Return file and split of each row [N], and of each statement its row, code and value [M]."""
    files, splits = [np.zeros(0, "S1")], [np.zeros(0, "U1")]
    said: list[tuple[np.ndarray, ...]] = [(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int8))]
    for first, columns in read_csv(data, ["image_id", "class_list", "class_list_neg", "split"], _SEE):
        files.append(paths([_path(data, row, name) for row, name in enumerate(columns[0], first)]))
        splits.append(np.array(columns[3]))
        for column, value in ((1, 1), (2, 0)):
            found, lengths = _read_lists(data, first, columns[column], codes)
            owners = np.repeat(np.arange(first - 2, first - 2 + len(lengths), dtype=np.int32), lengths)
            said.append((owners, found, np.full(len(found), value, np.int8)))
    parts = (np.concatenate(part) for part in zip(*said, strict=True))
    return np.concatenate(files), np.concatenate(splits), *parts


class _Codes(dict[str, int]):
    """Token of a list, quotes and blanks included -> number of its MID; a new token is checked once."""

    def __init__(self) -> None:
        self.mids: dict[str, int] = {}

    def __missing__(self, token: str) -> int:
        match = _MID.fullmatch(token)
        if match is None:
            raise ValueError(token)
        code = self.mids.setdefault(match[2].strip(), len(self.mids))
        self[token] = code
        return code


def _read_lists(data: Path, first: int, texts: Sequence[str], codes: _Codes) -> tuple[np.ndarray, np.ndarray]:
    """Read texts such as "['/m/02fq_6', '/m/02jfl0']": all their codes, and how many each has. Nothing is evaluated."""
    found, lengths = array("i"), array("i")
    for row, text in enumerate(texts, first):
        before = len(found)
        try:
            if text[:1] != "[" or text[-1:] != "]" or len(text) < 2:
                raise ValueError(text)
            if inner := text[1:-1].strip():
                found.extend([codes[token] for token in inner.split(",")])
        except ValueError as error:
            shown = text if len(text) < 80 else f"{text[:77]}..."
            raise DataError(f"{data}: row {row} has {shown!r}, not a list of quoted class ids; {_SEE}") from error
        lengths.append(len(found) - before)
    return np.array(found, np.int32), np.array(lengths, np.int32)


def _path(data: Path, row: int, name: str) -> str:
    """Return a path inside the data folder."""
    path = name.replace("\\", "/")
    if not path or path[0] == "/" or path[1:2] == ":" or (".." in path and ".." in path.split("/")):
        raise DataError(f"{data}: row {row} names the image {name!r}, not a path inside the folder; {_SEE}")
    return path


def _refuse_twice(data: Path, files: np.ndarray) -> None:
    order = np.argsort(files, kind="stable")
    again = np.flatnonzero(files[order][1:] == files[order][:-1])
    if len(again):
        one, two = order[again[0]], order[again[0] + 1]
        name = files[one].decode(errors="replace")
        raise DataError(f"{data}: row {two + 2} names the image {name} of row {one + 2} again; {_SEE}")


def _read_display(path: Path) -> dict[str, str]:
    """Read mid_to_classes.pth; nothing in it can run."""
    try:
        display = read_torch(path)
    except CheckpointError as error:
        raise DataError(f"{error}; it must be a plain dict of MID to name, {_SEE}") from error
    if not isinstance(display, dict) or not all(isinstance(part, str) for item in display.items() for part in item):
        raise DataError(f"{path} is not a dict of MID to name; {_SEE}")
    return display
