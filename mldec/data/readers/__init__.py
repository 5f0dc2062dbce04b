"""The readers: each makes a `Source` of the annotation files of one data set.

The settings name them here, as `mldec.data.readers.coco`, and not in their modules.

Every reader raises a `DataError` for a file under `root` that is missing or broken, most of them
when a split is first used, see `Source.load`; and a `ValueError` for an argument out of its range.
"""

from mldec import lazily

# A run has one data set: it does not import the readers of the others.
__getattr__ = lazily(
    __name__,
    {
        **{name: name for name in ("coco", "csv_table", "folders", "imagenet", "openimages")},
        **{name: name for name in ("shards", "vg500", "voc")},
        **dict.fromkeys(("cars", "cifar100"), "cars_cifar"),
        **dict.fromkeys(("nuswide81", "nuswide_official", "nuswide_zsl"), "nuswide"),
        "coco_zsl": "coco",
        "openimages_miil": "openimages",
    },
)

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
