"""MS-COCO as multi-label classification: an image is labelled with every class of which it shows an object.

The annotation file (a quarter of a gigabyte for train2014) is parsed once; what is kept of it is a table of a few
megabytes in a cache folder, so that a second start reads no JSON and loader workers hold numpy arrays only.
"""

import io
import json
import logging
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools.coco import COCO

from mldec.data.base import DataModule
from mldec.data.files import Table, cached, check_folder, file_data, paths
from mldec.data.labels import from_dense
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.errors import DataError
from mldec.evaluators.multi_label import MultiLabelEvaluator

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section MS-COCO"


def coco(
    *,
    root: str,
    image_size: int = 448,
    train: str = "train2014",
    val: str = "val2014",
    annotated_only: bool = True,
    augment: str = "official",
    cutout: float = 0.5,
    flip: bool = False,
    crop: float = 1.0,
    threshold: float = 0.5,
    bad_images: str = "stop",
    cache_dir: str | None = None,
) -> DataModule:
    """Return MS-COCO: 80 classes in the order of the category ids, images in the order of the image ids.

    Args:
        root: folder with annotations/instances_{split}.json and the image folders {split}/.
        image_size: side of the square input in pixels.
        train: split to learn from.
        val: split to evaluate on.
        annotated_only: leave out images without any object, as the official code does: 82,081 and 40,137 images of
            the 2014 splits; all are 82,783 and 40,504.
        augment: "official", "randaugment" or "none"; this and the next three are described at `TrainTransform`.
        cutout: side of the covered square as a fraction of the image side; 0 turns it off.
        flip: mirror half of the training images.
        crop: smallest area of a random crop as a fraction of the image; 1 turns it off.
        threshold: probability from which on a class counts as predicted, for precision, recall and F1.
        bad_images: "stop" at an image that cannot be read, or "skip" and count it.
        cache_dir: folder for the parsed annotations; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ConfigError: A value is out of range.
    """
    learn = TrainTransform(image_size=image_size, augment=augment, cutout=cutout, flip=flip, crop=crop)
    check = EvalTransform(image_size=image_size)
    evaluator = partial(MultiLabelEvaluator, threshold=threshold)
    evaluator()  # refuses a wrong threshold now, not after the first epoch
    folder = check_folder(root, "MS-COCO", _SEE)
    return file_data(
        partial(read_split, folder, annotated_only=annotated_only, cache_dir=cache_dir),
        train=train,
        val=val,
        learn=learn,
        check=check,
        evaluator=evaluator,
        where=folder,
        see=_SEE,
        bad_images=bad_images,
    )


def read_split(root: Path, split: str, *, annotated_only: bool, cache_dir: str | None) -> tuple[Path, Table]:
    """Return the image folder and the table of one split; see `coco`."""
    annotations = root / "annotations" / f"instances_{split}.json"
    table = cached("coco", [annotations], partial(_parse, annotations), cache_dir=cache_dir, see=_SEE)
    if annotated_only:
        table = table.select(table.labels.counts_per_image() > 0)
    if not len(table):
        raise DataError(f"{annotations}: no image {'with an object' if annotated_only else 'at all'}; {_SEE}")
    which = "annotated only" if annotated_only else "all"
    log.info("coco %s: %s images (%s), %d classes", split, f"{len(table):,}", which, len(table.classes))
    return root / split, table


def _parse(annotations: Path) -> Table:
    try:
        with redirect_stdout(io.StringIO()):  # pycocotools prints its progress
            index = COCO(str(annotations))
        return _tabulate(annotations, index)
    except OSError as error:
        raise DataError(f"{annotations} cannot be read ({error.strerror}); {_SEE}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{annotations} is not valid JSON ({error}); restore it, {_SEE}") from error
    except KeyError as error:
        raise DataError(f"{annotations} is not a COCO instances file: no key {error}; {_SEE}") from error
    except (AssertionError, TypeError, AttributeError) as error:
        raise DataError(f"{annotations} is not a COCO instances file ({error}); {_SEE}") from error


def _tabulate(annotations: Path, index: Any) -> Table:
    """Collapse the objects of each image, crowds included, into labels."""
    for key in ("images", "annotations", "categories"):
        if not isinstance(index.dataset.get(key), list):  # pycocotools takes absence for an empty list
            raise TypeError(f"it has no list of {key}")
    rows = {image: row for row, image in enumerate(sorted(index.imgs))}
    columns = {category: column for column, category in enumerate(sorted(index.cats))}
    labels = np.zeros((len(rows), len(columns)), np.int8)
    for annotation in index.dataset["annotations"]:
        row, column = rows.get(annotation["image_id"]), columns.get(annotation["category_id"])
        if row is None or column is None:
            what = f"image {annotation['image_id']}" if row is None else f"category {annotation['category_id']}"
            raise DataError(f"{annotations}: annotation {annotation['id']} names the unknown {what}; {_SEE}")
        labels[row, column] = 1
    files = paths([index.imgs[image]["file_name"] for image in rows])
    return Table(files, from_dense(labels), tuple(index.cats[category]["name"] for category in columns))
