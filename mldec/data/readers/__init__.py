"""The readers: each makes a `Source` of the annotation files of one data set.

The settings name them here, as `mldec.data.readers.coco`, and not in their modules. Where a module
and a reader share a name, the name in this package is the reader's.

Arguments that a docstring does not name mean the same for all readers:

- root: folder of the data set.
- train, val: the splits to learn from and to evaluate on.
- threshold: see `mldec.data.tasks.MultiLabel`; top_k: see `SingleLabelEvaluator`.
- words: see `VectorSettings`. The columns of an array without a list of names beside it are the
  classes in their order.

Every reader raises a `DataError` for a file under `root` that is missing or broken, most of them
when a split is first used, see `Source.load`; and a `ValueError` for an argument out of its range.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mldec.data.readers.cars_cifar import cars, cifar100
    from mldec.data.readers.coco import coco, coco_zsl
    from mldec.data.readers.csv_table import csv_table
    from mldec.data.readers.folders import folders
    from mldec.data.readers.imagenet import imagenet
    from mldec.data.readers.nuswide import nuswide81, nuswide_official, nuswide_zsl
    from mldec.data.readers.openimages import openimages, openimages_miil
    from mldec.data.readers.shards import shards
    from mldec.data.readers.vg500 import vg500
    from mldec.data.readers.voc import voc
    from mldec.data.readers.yolo import yolo

__all__ = [
    "cars",
    "cifar100",
    "coco",
    "coco_zsl",
    "csv_table",
    "folders",
    "imagenet",
    "nuswide81",
    "nuswide_official",
    "nuswide_zsl",
    "openimages",
    "openimages_miil",
    "shards",
    "vg500",
    "voc",
    "yolo",
]

# The other modules that hold a reader; a run imports that of its data set alone.
_MODULES = {
    "cars": "cars_cifar",
    "cifar100": "cars_cifar",
    "coco_zsl": "coco",
    "nuswide81": "nuswide",
    "nuswide_official": "nuswide",
    "nuswide_zsl": "nuswide",
    "openimages_miil": "openimages",
}


def __getattr__(name: str) -> Any:
    """Import a reader when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, name)}"), name)


class _Readers(ModuleType):
    """Whose names are those of readers: Python would give them to imported modules."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Readers
