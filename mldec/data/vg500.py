"""Visual Genome 500: several labels an image, from the lists and the label file of SSGRL."""

from functools import partial
from pathlib import Path
from typing import Any

from mldec.data.base import DataModule
from mldec.data.files import check_folder, file_data
from mldec.data.folders import log_split
from mldec.data.labels import from_lists
from mldec.data.names import given_names, read_lines
from mldec.data.tables import Table, cached, inside, paths
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.errors import ConfigError, DataError
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.inputs import read_json

_SEE = "see DATASETS.md, section Visual Genome 500"


def vg500(
    *,
    root: str,
    image_size: int = 448,
    train: str = "train_list_500.txt",
    val: str = "test_list_500.txt",
    labels: str = "vg_category_500_labels_index.json",
    images: str = "VG_100K",
    num_classes: int = 500,
    classes: str | None = None,
    augment: str = "official",
    cutout: float = 0.5,
    flip: bool = False,
    crop: float = 1.0,
    threshold: float = 0.5,
    bad_images: str = "stop",
    cache_dir: str | None = None,
) -> DataModule:
    """Return Visual Genome 500, images in the order of the lists; VG-200 has the same form.

    Args:
        root: folder of the lists, the label file and the images' folder.
        image_size: side of the square input in pixels.
        train: list of the images to learn from, one name a line.
        val: list of the images to evaluate on.
        labels: JSON file: image name -> indices of its classes.
        images: folder of the images; the archives VG_100K and VG_100K_2 go into one.
        num_classes: number K of classes.
        classes: text file with one class name a line; None: no list was published with the labels, so the names are
            "class 0" to "class 499".
        augment: this and the next three are described at `mldec.data.transforms.TrainTransform`.
        cutout: see there.
        flip: see there.
        crop: see there.
        threshold: probability from which on a class counts as predicted, for precision, recall and F1.
        bad_images: "stop" at an image that cannot be read, or "skip" and count it.
        cache_dir: folder for the parsed lists; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ConfigError: A value is out of range.
    """
    learn = TrainTransform(image_size=image_size, augment=augment, cutout=cutout, flip=flip, crop=crop)
    check = EvalTransform(image_size=image_size)
    evaluator = partial(MultiLabelEvaluator, threshold=threshold)
    evaluator()  # refuses a wrong threshold now, not after the first epoch
    if num_classes < 1:
        raise ConfigError(f"data.num_classes {num_classes} is below 1")
    folder = check_folder(root, "Visual Genome 500", _SEE)
    names = given_names(classes, folder, _SEE) or tuple(f"class {column}" for column in range(num_classes))
    if len(names) != num_classes:
        raise DataError(
            f"{folder / str(classes)} names {len(names)} classes, data.num_classes is {num_classes}; {_SEE}"
        )

    def read(split: str) -> tuple[Path, Table]:
        sources = [folder / split, folder / labels]
        if split == train and val != train:
            sources.append(folder / val)  # to compare; an evaluation needs its own list only
        parse = partial(_parse, sources, num_classes)
        table = cached(f"vg500 {num_classes}", sources, parse, cache_dir=cache_dir, see=_SEE)
        log_split("vg500", split, table)
        return folder / images, Table(table.files, table.labels, names)

    return file_data(
        read,
        train=train,
        val=val,
        learn=learn,
        check=check,
        evaluator=evaluator,
        where=folder,
        see=_SEE,
        bad_images=bad_images,
    )


def read_list(file: Path) -> list[str]:
    """Return the image names of a list; its last line may lack an end.

    Raises:
        DataError: for a file that cannot be read, a name that leads elsewhere, a name that is there twice.
    """
    names: dict[str, None] = {}
    for number, line in enumerate(read_lines(file, _SEE), 1):
        name = inside(line, f"{file}, line {number}", _SEE)
        if name in names:
            raise DataError(f"{file}, line {number}: the image {name} is there twice; {_SEE}")
        names[name] = None
    return list(names)


def _parse(sources: list[Path], num_classes: int) -> Table:
    split, labels, *others = sources
    names = read_list(split)
    for other in others:
        if both := set(names).intersection(read_list(other)):
            raise DataError(f"{split} and {other} share {len(both):,} images, such as {min(both)}; {_SEE}")
    by_name = _read_labels(labels)
    absent = [name for name in names if name not in by_name]
    if absent:
        raise DataError(f"{labels} lacks {len(absent):,} images of {split.name}, the first is {absent[0]}; {_SEE}")
    for name in names:
        row = by_name[name]
        if not isinstance(row, list) or not all(type(column) is int and 0 <= column < num_classes for column in row):
            raise DataError(f"{labels}: {name} has the labels {str(row)[:60]}, not indices below {num_classes}; {_SEE}")
    rows = from_lists([by_name[name] for name in names], num_classes=num_classes)
    return Table(paths(names), rows, tuple(map(str, range(num_classes))))


def _read_labels(file: Path) -> dict[str, Any]:
    content = read_json(file, _SEE)
    if not isinstance(content, dict):
        raise DataError(f"{file} is JSON of another task: not image name -> indices of classes; {_SEE}")
    return content
