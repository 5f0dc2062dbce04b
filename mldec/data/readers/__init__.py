"""Readers: functions that return the `Source` of a dataset.

Settings refer to readers by their name in this package, such as `mldec.data.readers.coco`. Modules
have other names than readers.

Arguments with the same meaning for all readers are described here and in `mldec.data.tasks`.

Args:
    root: Folder of the dataset.
    train: Name of the training split.
    val: Name of the validation split.
    words: See `VectorSettings`. The columns of an array without a text file of names are the
        classes in order.

Raises:
    DataError: If a file in `root` is missing or damaged, usually when a split is first used, see
        `Source.load`.
    ValueError: If an argument is out of range.
"""

from collections.abc import Callable
from typing import Any

from mldec import lazily

# Maps readers to their module and their section of DATASETS.md. A run imports the module of its
# dataset only, because all of them together take more than a tenth of a second.
_READERS = {
    "cars": ("cars_cifar", "Stanford-Cars"),
    "cifar100": ("cars_cifar", "CIFAR-100"),
    "coco": ("coco_json", "MS-COCO"),
    "coco_zsl": ("coco_json", "MS-COCO zero-shot"),
    "cub": ("cub_vg500", "CUB-200-2011"),
    "csv_table": ("tables", "Your own data"),
    "dataset": ("hugging_face", "Your own data"),
    "cvat": ("labeling", "Labeling tools"),
    "fiftyone": ("labeling", "Labeling tools"),
    "folders": ("class_folders", "Your own data"),
    "imagenet": ("class_folders", "ImageNet"),
    "keywords": ("photo_library", "Your own data"),
    "label_studio": ("labeling", "Labeling tools"),
    "nuswide81": ("nuswide", "NUS-WIDE"),
    "nuswide_official": ("nuswide", "NUS-WIDE"),
    "nuswide_zsl": ("nuswide", "NUS-WIDE"),
    "openimages": ("open_images", "Open Images"),
    "openimages_miil": ("open_images", "Open Images"),
    "shards": ("tar_shards", "Tar shards"),
    "vg500": ("cub_vg500", "Visual Genome 500"),
    "voc": ("pascal_voc", "Pascal VOC"),
    "yolo": ("yolo_labels", "YOLO folders"),
}
__all__ = list(_READERS)
__getattr__ = lazily(__name__, {name: module for name, (module, _) in _READERS.items()})


OWN = ("Your own data", "Labeling tools", "Tar shards", "YOLO folders")  # sections for own images


def public_name(reader: str) -> str | None:
    """Return the name of the public dataset of a reader, such as "MS-COCO"; None for own data."""
    _, section = _READERS.get(reader, ("", OWN[0]))
    return None if section in OWN else section


def docs_of(reader: Callable[..., Any]) -> str:
    """Return the documentation of a reader, such as "DATASETS.md, section MS-COCO", or ""."""
    if not reader.__module__.startswith(f"{__name__}.") or reader.__name__ not in _READERS:
        return ""
    return f"DATASETS.md, section {_READERS[reader.__name__][1]}"
