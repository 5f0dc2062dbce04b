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
]
