"""Your own images with one or several labels each, from one CSV file: path, labels, and perhaps negatives and split."""

import csv
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from mldec.data.base import DataModule
from mldec.data.files import check_folder, file_data
from mldec.data.folders import check_fraction, held_out, log_split
from mldec.data.labels import from_lists
from mldec.data.names import as_name, check_names, given_names, unknown_class
from mldec.data.tables import Table, cached, inside, paths
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.errors import ConfigError, DataError
from mldec.evaluators import Evaluator
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.inputs import open_binary, read_text

_SEE = "see DATASETS.md, section Your own data"
_COLUMNS = ("path", "labels", "negatives", "split")


def csv_table(
    *,
    root: str,
    file: str = "data.csv",
    images: str = "",
    separator: str = ";",
    classes: str | list[str] | None = None,
    exclusive: bool = False,
    train: str = "train",
    val: str = "val",
    val_fraction: float = 0.1,
    seed: int = 0,
    image_size: int = 448,
    augment: str = "official",
    cutout: float = 0.5,
    flip: bool = False,
    crop: float = 1.0,
    interpolation: str = "bilinear",
    erase: float = 0.0,
    test_crop: float | None = None,
    threshold: float = 0.5,
    top_k: int | None = None,
    bad_images: str = "stop",
    cache_dir: str | None = None,
) -> DataModule:
    """Return the images of a CSV file, in its order.

    The first row names the columns, in any order: path and labels, perhaps negatives and split, and no other. An image
    without a label is a negative of every class; with a column negatives, what is in neither list is not annotated
    (-1), and the metric is `mAP_partial`.

    Args:
        root: folder of the file.
        file: the CSV file in it: UTF-8, commas, fields quoted with " where they hold commas.
        images: folder in root that the paths start from.
        separator: between the labels of an image.
        classes: class names in their order, or a text file with one a line; None is the sorted labels of all rows.
        exclusive: every image has exactly one label: top-1 instead of mAP.
        train: the rows to learn from, by their value of the column split.
        val: the rows to evaluate on.
        val_fraction: without a column split: the share of the images to hold out, by a hash of each path.
        seed: which images are held out.
        image_size: side of the square input in pixels.
        augment: this and the next five are described at `mldec.data.transforms.TrainTransform`.
        cutout: see there.
        flip: see there.
        crop: see there.
        interpolation: see there; "random" evaluates with bicubic.
        erase: see there.
        test_crop: side of the evaluated centre as a fraction of the shorter side; None squashes the whole image.
        threshold: of several labels: probability from which on a class counts as predicted.
        top_k: of one label: see `SingleLabelEvaluator`.
        bad_images: "stop" at an image that cannot be read, or "skip" and count it.
        cache_dir: folder for the parsed file; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ConfigError: A value is out of range.
    """
    learn = TrainTransform(
        image_size=image_size,
        augment=augment,
        cutout=cutout,
        flip=flip,
        crop=crop,
        interpolation=interpolation,
        erase=erase,
    )
    check = EvalTransform(
        image_size=image_size, crop=test_crop, interpolation=interpolation.replace("random", "bicubic")
    )
    check_fraction(val_fraction)
    if not separator.strip():
        raise ConfigError("data.separator is blank: give the sign between two labels, such as ';'")
    folder = check_folder(root, "the CSV file", _SEE)
    form = Form(separator, given_names(classes, folder, _SEE), exclusive, val, val_fraction, seed)
    source = folder / inside(file, "data.file", _SEE)
    evaluator = _evaluator(source, exclusive, threshold, top_k)
    pictures = folder / inside(images, "data.images", _SEE) if images else folder
    return file_data(
        lambda split: (pictures, _read_split(source, split, form, cache_dir)),
        train=train,
        val=val,
        learn=learn,
        check=check,
        evaluator=evaluator,
        where=source,
        see=_SEE,
        exclusive=exclusive,
        bad_images=bad_images,
        folder_setting="data.images",
    )


@dataclass(frozen=True)
class Form:
    """How a file is to be understood."""

    separator: str
    classes: tuple[str, ...] | None
    exclusive: bool
    val: str
    val_fraction: float
    seed: int


@dataclass
class Rows:
    """What a file says of its N images."""

    files: dict[str, int] = field(default_factory=dict)  # path -> number of its row
    positives: list[list[str]] = field(default_factory=list)
    negatives: list[list[str]] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    partial: bool = False  # there is a column of negatives
    divided: bool = False  # there is a column of splits


def _evaluator(source: Path, exclusive: bool, threshold: float, top_k: int | None) -> Callable[[], Evaluator]:
    if exclusive:
        made: Callable[[], Evaluator] = partial(SingleLabelEvaluator, top_k=top_k)
    elif top_k is not None:
        raise ConfigError(f"data.top_k {top_k} is for one label an image: set data.exclusive=true or leave it out")
    else:
        made = partial(MultiLabelEvaluator, threshold=threshold)
    made()  # refuses a wrong value now, not after the first epoch
    try:
        with open_binary(source) as file:
            unannotated = b"negatives" in file.readline().lower()
    except OSError:  # which is said when a split is read
        unannotated = False
    return PartialLabelEvaluator if unannotated and not exclusive else made


def _read_split(source: Path, split: str, form: Form, cache_dir: str | None) -> Table:
    settings = sha256(repr((split, form)).encode()).hexdigest()
    parse = partial(_parse, source, split, form)
    table = cached(f"csv {settings}", [source], parse, cache_dir=cache_dir, see=_SEE)
    log_split("csv", split, table)
    return table


def _parse(source: Path, split: str, form: Form) -> Table:
    rows = _read(source, form)
    names = form.classes or _found_classes(rows, source)
    columns = {name: column for column, name in enumerate(names)}

    def numbers(lists: list[list[str]]) -> list[list[int]]:
        for row, labels in zip(rows.files.values(), lists, strict=True):
            for label in labels:
                if label not in columns:
                    raise unknown_class(label, names, f"{source}, row {row}", _SEE)
        return [[columns[label] for label in labels] for labels in lists]

    negatives = numbers(rows.negatives) if rows.partial else None
    labels = from_lists(numbers(rows.positives), negatives, num_classes=len(names), rest=-1 if rows.partial else 0)
    table = Table(paths(list(rows.files)), labels, names)
    if rows.divided:
        chosen = [place for place, value in enumerate(rows.splits) if value == split]
        if not chosen:
            known = ", ".join(sorted(set(rows.splits))[:5])
            raise DataError(f"{source}: no row of the split {split!r}; it has {known}; {_SEE}")
        return table.select(np.array(chosen))
    held = held_out(table.files.tolist(), form.val_fraction, form.seed)
    return table.select(held if split == form.val else ~held)


def _found_classes(rows: Rows, source: Path) -> tuple[str, ...]:
    found = {label for lists in (rows.positives, rows.negatives) for labels in lists for label in labels}
    if not found:
        raise DataError(f"{source}: no row has a label; {_SEE}")
    return check_names(sorted(found), source, _SEE)


def _read(source: Path, form: Form) -> Rows:
    rows = Rows()
    lines = _lines(source)
    header = [name.strip().lower() for name in next(lines, (1, [""]))[1]]
    if not {"path", "labels"} <= set(header) <= set(_COLUMNS) or len(set(header)) < len(header):
        raise DataError(f"{source}: the columns {', '.join(header)} are not path, labels[, negatives][, split]; {_SEE}")
    rows.partial, rows.divided = "negatives" in header, "split" in header
    for number, line in lines:
        where = f"{source}, row {number}"
        if len(line) != len(header):
            raise DataError(
                f"{where} has {len(line)} fields, the header {len(header)}: quote fields with commas; {_SEE}"
            )
        values = dict(zip(header, map(str.strip, line), strict=True))
        path = inside(values["path"], where, _SEE)
        if path in rows.files:
            raise DataError(f"{where}: the image {path} is in row {rows.files[path]} too; {_SEE}")
        rows.files[path] = number
        positives, negatives = (_labels(values.get(name, ""), form, where) for name in ("labels", "negatives"))
        if both := set(positives) & set(negatives):
            raise DataError(f"{where}: the class {min(both)!r} is in labels and in negatives; {_SEE}")
        if form.exclusive and len(positives) != 1:
            raise DataError(f"{where} has {len(positives)} labels; data.exclusive=true wants one; {_SEE}")
        rows.positives.append(positives)
        rows.negatives.append(negatives)
        rows.splits.append(values.get("split", ""))
    return rows


def _labels(text: str, form: Form, where: str) -> list[str]:
    labels = [label.strip() for label in text.split(form.separator) if label.strip()]
    if len(set(labels)) < len(labels):
        raise DataError(f"{where}: {text!r} has a label twice; {_SEE}")
    return [as_name(label, where, _SEE) for label in labels]


def _lines(source: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line that is not blank, as an editor counts, and its fields."""
    reader = csv.reader(io.StringIO(read_text(source, _SEE), newline=""), strict=True)
    try:
        for fields in reader:
            if fields:
                yield reader.line_num, fields
    except csv.Error as error:
        raise DataError(f"{source}, row {reader.line_num} is not CSV ({error}): mind its quotes; {_SEE}") from error
