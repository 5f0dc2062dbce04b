"""Data sets of Hugging Face, by name or in memory, and torch data sets in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, IterableDataset

from mldec.data.columns import LABELS, Rules
from mldec.data.images import as_file
from mldec.data.readers.tables import csv_table, parse
from mldec.data.source import Source
from mldec.data.splits import HELD_OUT, HoldOut, check_val, find_split
from mldec.data.types import ImagesInMemory
from mldec.errors import ConfigError, DataError, naming_errors
from mldec.files.tables import simple_name
from mldec.names import abbreviate, format_list, given_names
from mldec.runtime.console import progress_bar
from mldec.runtime.environment import quick_hub

if TYPE_CHECKING:
    from pandas import DataFrame

READER = "mldec.data.readers.dataset"  # full name of the reader in settings
_RULES = Rules()


def dataset(
    *,
    name: str | None = None,
    subset: str | None = None,
    revision: str | None = None,
    rules: Rules = _RULES,
    classes: str | list[str] | None = None,
    exclusive: bool = False,
    train: str = "train",
    val: str = "val",
    division: HoldOut = HELD_OUT,
    threshold: float = 0.5,
    skip_empty: bool = True,
    top_k: int | None = None,
    in_memory: Any = None,
) -> Source:
    """Return the images of a Hugging Face data set, or of data sets that are passed in Python.

    The columns follow the rules of `csv_table`, except for the images, whose column has the type
    `Image`, and for labels that are numbers, see `_named`. For the other arguments see `csv_table`.

    Args:
        name: OWNER/NAME on the Hub, or a folder. None for a data set that is passed in Python.
        subset: Name of the configuration, if the data set has several.
        revision: Branch, tag or commit on the Hub.
        rules: Rules of `csv_table`. `path_column` is the column of images.
        classes: Class names in order, or a text file with one name per line. None for the names of
            the feature `ClassLabel`, or the sorted labels if there is no such feature.
        exclusive: Each image has exactly one label. `mldec.fit` detects it in a data set in memory.
        in_memory: A `datasets.Dataset`, a torch `Dataset` of (image, target), or a mapping from the
            names of splits to these. A target is a class name, a list of these, or numbers.
    """
    where = "data" if name is None else f"data.name={name}"
    if in_memory is None:
        in_memory = _load(name, subset, revision)
    splits = as_splits(in_memory)

    # Other splits, such as test, are often without labels.
    wanted = [""] if "" in splits else [find_split(split, splits) for split in (train, val)]
    used = [split for split in dict.fromkeys(wanted) if split in splits]
    if not used:
        check_val(val, splits, Path(where))
        raise DataError(f"{where}: the splits are {format_list(list(splits))}; set data.train")

    parts = [_open(splits[split], split, where, rules) for split in used]
    first = parts[0]
    frames = {}
    for split, part in zip(used, parts, strict=True):
        frames[f"{where}, split {split}" if split else where] = part.table

    # The columns that `_named` returns replace the numbers of all splits.
    rules = replace(rules, path_column=first.image_column)
    given = given_names(classes, Path.cwd()) or first.classes
    cells = [cell for part in parts for cell in part.table.get(first.label_column, ())]
    named = _named(cells, given, where, are_indices=first.classes is not None)
    for column, values in zip((first.label_column, "negatives"), map(iter, named), strict=False):
        for frame in frames.values():
            frame[column] = np.fromiter(values, object, len(frame))

    annotations = parse(
        frames,
        rules,
        given,
        exclusive=exclusive,
        has_files=False,
        label_columns=(*LABELS, simple_name(first.label_column or LABELS[0])),
    )
    files = annotations.table.files
    # The images have no paths, so their hashes are their keys. They are computed when a key is
    # needed.
    digests = np.zeros((len(files), 32), np.uint8)
    images: ConcatDataset[bytes] = ConcatDataset(part.images for part in parts)
    storage = ImagesInMemory(images, files, digests, np.arange(len(files)))
    others = {split: len(part) for split, part in splits.items() if split not in used}
    return csv_table(
        root="",
        file=where,
        rules=rules,
        exclusive=exclusive,
        train=train,
        val=val,
        division=division,
        threshold=threshold,
        skip_empty=skip_empty,
        top_k=top_k,
        in_memory=replace(annotations, storage=storage, others=others),
    )


def is_dataset(value: object) -> bool:
    """Return True for an object of `datasets`, a torch `Dataset`, or a mapping to these."""
    if isinstance(value, Mapping):
        return bool(value) and all(map(is_dataset, value.values()))
    return isinstance(value, Dataset) or _is_hugging_face(value)


def is_single_label(data: Any, rules: Rules) -> bool:
    """Return True if the labels have the type `ClassLabel`, or the first target is an index."""
    split = next(iter(as_splits(data).values()))
    if _is_hugging_face(split):
        return hasattr(split.features.get(_label_column(split, rules)), "names")
    target = np.asarray(_pair(split, 0, "data[0]")[1])
    return target.ndim == 0 and target.dtype.kind in "iu"


def as_splits(data: Any) -> dict[str, Any]:
    """Return the data sets by the name of their split in lower case, "" for a single one."""
    splits = data if isinstance(data, Mapping) else {"": data}
    for split in splits.values():
        has_rows = hasattr(split, "__len__") and not isinstance(split, IterableDataset)
        if not has_rows or (_is_hugging_face(split) and not hasattr(split, "select_columns")):
            kinds = "a datasets.Dataset or a torch Dataset with a length"
            raise DataError(f"data: {type(split).__name__} is not supported; pass {kinds}")
    return {str(name).lower(): split for name, split in splits.items()}


def _is_hugging_face(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "datasets"


def _load(name: str | None, subset: str | None, revision: str | None) -> Any:
    if name is None:
        remedy = "set it to OWNER/NAME, or pass the data set in Python: run.evaluate(data=...)"
        raise ConfigError(f"data.name: null; {remedy}")
    remedy = "check the name and the connection, and run pip install -e '.[datasets]'"
    with quick_hub(), naming_errors(f"data.name={name}", DataError, remedy=remedy):
        import datasets

        # Earlier versions can run the loading script of a data set, which is code of its author.
        if int(datasets.__version__.partition(".")[0]) < 4:
            raise ImportError(f"datasets {datasets.__version__} is too old")
        return datasets.load_dataset(name, subset, revision=revision)


class _Images(Dataset[bytes]):
    """The images of a Hugging Face data set with this column only, or of a torch data set."""

    def __init__(self, data: Any, split: str) -> None:
        self._data = data
        self._split = split

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, row: int) -> bytes:
        """Return an image file. Raises DataError if it cannot be read."""
        name = f"{self._split}[{row}]"
        if not _is_hugging_face(self._data):
            return as_file(_pair(self._data, row, name)[0], name)
        [image] = self._data[row].values()
        return as_file(image and (image["bytes"] or image["path"]), name)


def _pair(data: Any, row: int, name: str) -> tuple[Any, Any]:
    """Return the image and the target of a row of a torch data set."""
    with naming_errors(name, DataError, remedy="correct the data set"):
        pair = data[row]
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise DataError(f"{name}: {type(pair).__name__} is not a pair (image, target)")
    return pair[0], pair[1]


@dataclass(frozen=True)
class _Part:
    """One split of a data set."""

    images: _Images
    table: "DataFrame"  # the other columns, and names of the images in `image_column`
    image_column: str = "image"
    label_column: str | None = "labels"
    classes: tuple[str, ...] | None = None  # names of the numbers in the column of labels


def _open(data: Any, split: str, where: str, rules: Rules) -> _Part:
    """Open a split of the data set `where`. The name of a single split is ""."""
    name = split or where
    images = [f"{name}[{row}]" for row in range(len(data))]
    of_split = {"split": split} if split else {}
    if not _is_hugging_face(data):
        from pandas import DataFrame

        targets = []
        for row, image in enumerate(progress_bar(images, desc="read targets")):
            target = _pair(data, row, image)[1]
            # A list of one name, because a separator in a name must not divide it.
            targets.append([target] if isinstance(target, str) else target)
        cells = np.fromiter(targets, object, len(targets))
        frame = DataFrame({"labels": cells, "image": images, **of_split})
        return _Part(_Images(data, name), frame)

    from datasets import ClassLabel, Image, Value

    data = data.with_format(None)  # a format or transform of the user would decode the images
    features = data.features
    columns = [column for column, feature in features.items() if isinstance(feature, Image)]
    if rules.path_column is not None:
        columns = [column for column in columns if column == rules.path_column]
    if len(columns) != 1:
        counts = f"{len(columns)} of the columns {format_list(list(features))} have images"
        remedy = "set data.path_column to one, or convert one with cast_column to datasets.Image()"
        raise DataError(f"{name}: {counts}; {remedy}")

    # Columns of other types, such as boxes, have no labels.
    label_column = _label_column(data, rules)
    kept = []
    for column, feature in features.items():
        if isinstance(getattr(feature, "feature", feature), Value | ClassLabel):
            kept.append(column)
    table = data.select_columns(kept).to_pandas()
    for column in kept:
        if column != label_column and isinstance(features[column], ClassLabel):
            names = np.array([*features[column].names, ""], object)
            table[column] = names[table[column].fillna(-1).astype(int)]

    # A table without columns has no rows either, so the number of rows is given.
    table = table.reindex(range(len(data))).assign(**{columns[0]: images}, **of_split)
    files = data.select_columns(columns).cast_column(columns[0], Image(decode=False))
    names_of_labels = _class_names(features.get(label_column))
    return _Part(_Images(files, name), table, columns[0], label_column, names_of_labels)


def _class_names(feature: Any) -> tuple[str, ...] | None:
    """Return the names of a feature `ClassLabel`, or of a list of these."""
    names = getattr(getattr(feature, "feature", feature), "names", None)
    return None if names is None else tuple(names)


def _label_column(data: Any, rules: Rules) -> str | None:
    """Return the column that is named like labels, or the only one of type `ClassLabel`.

    Two names, such as no and yes, may also belong to a column of one class.
    """
    chosen = rules.labels_column
    for name in LABELS if chosen is None else [simple_name(chosen)]:
        for column in data.features:
            if simple_name(column) == name:
                return column
    labeled = []
    for column, feature in data.features.items():
        if _class_names(feature) and len(getattr(feature, "names", ())) != 2:
            labeled.append(column)
    return labeled[0] if len(labeled) == 1 and chosen is None else None


def _named(
    cells: Sequence[Any], classes: Sequence[str] | None, where: str, *, are_indices: bool
) -> list[list[list[str]]]:
    """Convert labels that are numbers to class names.

    A label is an index of a class, a list of indices, or, unless `are_indices`, a vector of 1, 0
    and -1 (not annotated). The index -1 is an unknown class, and None is an image without labels.

    Returns:
        The classes of each image and, if some are not annotated, its absent classes. The result is
        empty if the labels are not numbers, or if they are names because no classes are given.
    """
    rows = []
    for cell in cells:
        row = np.ravel([] if cell is None else cell)
        if row.dtype.kind not in "biuf":
            return []
        rows.append(row[row == row])  # pandas replaces None by NaN

    size = len(rows[0]) if rows else 0
    is_vector = size > 1 and not are_indices and {len(row) for row in rows} == {size}
    if is_vector and np.isin(rows, (-1, 0, 1)).all():
        if classes is None or len(classes) != size:
            fault = f"the labels are vectors of {size} numbers for {len(classes or ())} classes"
            raise DataError(f"{where}: {fault}; set data.classes to the name of each number")
        names = np.array(classes, object)
        values = [1, 0] if (np.array(rows) == -1).any() else [1]
        return [[names[row == value].tolist() for row in rows] for value in values]

    if classes is None or not rows:
        return []
    is_wrong = ~np.isin(np.concatenate(rows), np.arange(-1, len(classes)))
    if is_wrong.any():
        number = np.repeat(np.arange(len(rows)), list(map(len, rows)))[is_wrong.argmax()]
        fault = f"{abbreviate(rows[number].tolist())} of image {number} is not an index"
        raise DataError(f"{where}: the label {fault} of {len(classes)} classes; correct it")
    return [[[classes[int(index)] for index in row if index >= 0] for row in rows]]
