"""Readers: functions that return the `Source` of a dataset.

Settings refer to readers by their name in this package, such as `mldec.data.readers.coco`. If a
module and a reader have the same name, the name refers to the reader.

Common arguments of all readers:

- root: Folder of the dataset.
- train, val: Names of the training and validation split.
- threshold, skip_empty: See `mldec.data.tasks.MultiLabel`.
- top_k: See `SingleLabelEvaluator`.
- words: See `VectorSettings`. The columns of an array without a text file of names are the classes
  in order.

All readers raise DataError for missing or damaged files in `root`, usually when a split is first
used, see `Source.load`. They raise ValueError for arguments out of range.
"""

import sys
from types import ModuleType
from typing import Any

from mldec import lazily

# Maps readers to modules. A run only imports the module of its dataset.
_ALONE = ("csv_table", "folders", "imagenet", "shards", "vg500", "voc", "yolo")
_MODULES = {
    **dict(zip(_ALONE, _ALONE, strict=True)),
    **dict.fromkeys(("cars", "cifar100"), "cars_cifar"),
    **dict.fromkeys(("coco", "coco_zsl"), "coco"),
    **dict.fromkeys(("nuswide81", "nuswide_official", "nuswide_zsl"), "nuswide"),
    **dict.fromkeys(("openimages", "openimages_miil"), "openimages"),
}
__all__ = list(_MODULES)
__getattr__ = lazily(__name__, _MODULES)


class _Readers(ModuleType):
    """Module type that keeps readers when Python sets an imported submodule of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Readers
