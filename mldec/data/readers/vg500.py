"""Visual Genome 500: several labels per image, from the lists and the label file of SSGRL."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mldec.data.cache import TableCache
from mldec.data.settings import Source
from mldec.data.table import Table, TableBuilder, are_indices, given_names, log_split, path_inside
from mldec.data.tasks import MultiLabel
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError
from mldec.files.text import read_json, read_lines

_SEE = "see DATASETS.md, section Visual Genome 500"


def vg500(
    *,
    root: str,
    train: str = "train_list_500.txt",
    val: str = "test_list_500.txt",
    labels: str = "vg_category_500_labels_index.json",
    images: str = "VG_100K",
    num_classes: int = 500,
    classes: str | None = None,
    threshold: float = 0.5,
) -> Source:
    """Return Visual Genome 500, images in the order of the lists.

    VG-200 has the same form.

    Args:
        root: folder of the lists, the label file and the folder of the images.
        train: list of the images to learn from, one name per line.
        val: list of the images to evaluate on.
        labels: JSON file: image name -> class indices.
        images: folder of the images of both archives, VG_100K and VG_100K_2.
        num_classes: number K of classes.
        classes: text file with one class name per line. None calls the classes "class 0" to "class
            499": no list of names was published with the labels.
        threshold: see `MultiLabel`.

    Raises:
        DataError: A file under `root` is missing or broken; see `Source.load`.
        ValueError: An argument is out of range.
    """
    task = MultiLabel(threshold)
    if num_classes < 1:
        raise ValueError(f"num_classes is {num_classes}: it must be at least 1")
    folder = check_folder(root, "Visual Genome 500", _SEE)

    names = given_names(classes, folder, _SEE) or _numbered(num_classes)
    if len(names) != num_classes:
        raise DataError(
            f"{folder / str(classes)} names {len(names)} classes, data.num_classes is "
            f"{num_classes}; {_SEE}"
        )

    def load(split: str, cache: TableCache) -> StoredImages:
        sources = [folder / split, folder / labels]

        # Training compares its list with that of validation; an evaluation needs only its own.
        if split == train and val != train:
            sources.append(folder / val)
        table = cache.table(f"vg500 {num_classes}", sources, partial(_parse, sources, num_classes))

        # The names are not part of the cached table, so other names need no new one.
        log_split("vg500", split, table)
        return in_folder(replace(table, classes=names), folder / images, _SEE)

    return Source(load=load, train=train, val=val, task=task, where=folder, see=_SEE)


def _numbered(num_classes: int) -> tuple[str, ...]:
    """Return the names of classes that have none: "class 0", "class 1", ..."""
    return tuple(f"class {column}" for column in range(num_classes))


def _parse(sources: list[Path], num_classes: int) -> Table:
    """Return the images of a list, with the classes called "0" to "K - 1".

    Args:
        sources: the list, the label file, and lists that must not share an image with the first.
        num_classes: number K of classes.
    """
    image_list, label_file, *other_lists = sources
    images = _read_list(image_list)

    for other in other_lists:
        if shared := set(images).intersection(_read_list(other)):
            raise DataError(
                f"{image_list} and {other} share {len(shared):,} images, such as {min(shared)}; "
                f"{_SEE}"
            )

    labels = _read_labels(label_file)
    absent = [name for name in images if name not in labels]
    if absent:
        count = f"{len(absent):,} images of {image_list.name}"
        raise DataError(f"{label_file} lacks {count}, the first is {absent[0]}; {_SEE}")

    builder = TableBuilder(_SEE, classes=[str(column) for column in range(num_classes)])
    for number, name in enumerate(images, 1):
        indices = labels[name]
        if not are_indices(indices, num_classes):
            raise DataError(
                f"{label_file}: {name} has the labels {str(indices)[:60]}, "
                f"not indices below {num_classes}; {_SEE}"
            )
        builder.add(name, dict.fromkeys(indices, 1), f"{image_list}, line {number}")

    return builder.build(image_list)


def _read_list(file: Path) -> list[str]:
    """Return the image names of a list; each is checked to be a path inside the image folder."""
    lines = enumerate(read_lines(file, _SEE), 1)
    return [path_inside(line, f"{file}, line {number}", _SEE) for number, line in lines]


def _read_labels(file: Path) -> dict[str, Any]:
    """Read the label file: image name -> class indices, which are not yet checked."""
    content = read_json(file, _SEE)
    if not isinstance(content, dict):
        raise DataError(
            f"{file} is JSON of another task: not image name -> indices of classes; {_SEE}"
        )
    return content
