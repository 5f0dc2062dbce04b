"""Readers: functions that return the `Source` of a dataset.

Settings refer to readers by their name in this package, such as `mldec.data.readers.coco`. If a
module and a reader have the same name, the name refers to the reader.

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

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mldec import lazily

# Maps readers to their module and their section of DATASETS.md. A run only imports the module of
# its dataset.
_READERS = {
    "cars": ("cars_cifar", "Stanford-Cars"),
    "cifar100": ("cars_cifar", "CIFAR-100"),
    "coco": ("coco", "MS-COCO"),
    "coco_zsl": ("coco", "MS-COCO zero-shot"),
    "cub": ("cub", "CUB-200-2011"),
    "csv_table": ("csv_table", "Your own data"),
    "dataset": ("dataset", "Your own data"),
    "cvat": ("labeling", "Labeling tools"),
    "fiftyone": ("labeling", "Labeling tools"),
    "folders": ("folders", "Your own data"),
    "imagenet": ("imagenet", "ImageNet"),
    "keywords": ("keywords", "Your own data"),
    "label_studio": ("labeling", "Labeling tools"),
    "nuswide81": ("nuswide", "NUS-WIDE"),
    "nuswide_official": ("nuswide", "NUS-WIDE"),
    "nuswide_zsl": ("nuswide", "NUS-WIDE"),
    "openimages": ("openimages", "Open Images"),
    "openimages_miil": ("openimages", "Open Images"),
    "shards": ("shards", "Tar shards"),
    "vg500": ("vg500", "Visual Genome 500"),
    "voc": ("voc", "Pascal VOC"),
    "yolo": ("yolo", "YOLO folders"),
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


class _Readers(ModuleType):
    """Module type that drops imported submodules, which would replace readers of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Readers
