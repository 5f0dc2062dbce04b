"""The readers: each makes a `Source` of the annotation files of one data set.

The settings name them here, as `mldec.data.readers.coco`, and not in their modules. Where a module
and a reader share a name, the name in this package is the reader's.

Arguments that a docstring does not name mean the same for all readers:

- root: folder of the data set.
- train, val: the splits to learn from and to evaluate on.
- threshold, skip_empty: see `mldec.data.tasks.MultiLabel`; top_k: see `SingleLabelEvaluator`.
- words: see `VectorSettings`. The columns of an array without a list of names beside it are the
  classes in their order.

Every reader raises a `DataError` for a file under `root` that is missing or broken, most of them
when a split is first used, see `Source.load`; and a `ValueError` for an argument out of its range.
"""

import sys
from types import ModuleType
from typing import Any

from mldec import lazily

# The module of each reader; a run imports that of its data set alone.
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
    """Whose names are those of readers: Python would give them to imported modules."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Readers
