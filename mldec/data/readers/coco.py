"""MS-COCO as multi-label classification: an image is labelled with every class of which it shows an object.

The annotation file (a quarter of a gigabyte for train2014) is parsed once; what is kept of it is a table of a few
megabytes in a cache folder, so that a second start reads no JSON and loader workers hold numpy arrays only.
"""

import io
import logging
from array import array
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools.coco import COCO

from mldec.data.base import LabelledImages
from mldec.data.cache import TableCache
from mldec.data.labels import Labels, from_flags
from mldec.data.names import as_name, shown
from mldec.data.partial_labels import fixed_per_class, random_drop
from mldec.data.source import Source
from mldec.data.storage.image_files import check_folder, in_folder
from mldec.data.table import Table, encode_paths, path_inside
from mldec.data.task import MultiLabel
from mldec.errors import DataError
from mldec.evaluators.sizes import SIZES
from mldec.files.text import read_json

log = logging.getLogger("mldec")

# In a cached table the value of a class is the sum of the sizes that its objects have.
NO_AREA = 8  # the annotation does not give it
PRESENT = dict.fromkeys(range(2, 2 * NO_AREA), 1)  # objects of any size are one label

_SEE = "see DATASETS.md, section MS-COCO"


def coco(
    *,
    root: str,
    train: str = "train2014",
    val: str = "val2014",
    annotated_only: bool = True,
    threshold: float = 0.5,
    sizes: bool = False,
    drop_labels: float = 0.0,
    keep_per_class: int | None = None,
    labels_seed: int = 0,
) -> Source:
    """Return MS-COCO: 80 classes in the order of the category ids, images in the order of the image ids.

    Args:
        root: folder with annotations/instances_{split}.json and the image folders {split}/.
        train: split to learn from.
        val: split to evaluate on.
        annotated_only: leave out images without any object, as the official code does: 82,081 and 40,137 images of
            the 2014 splits; all are 82,783 and 40,504.
        threshold: probability from which on a class counts as predicted, for precision, recall and F1.
        sizes: validation also reports the mAP of small (below 32 x 32 pixels), medium (96 x 96) and large objects.
        drop_labels: each label of the training split becomes -1 (not annotated) with this probability, to simulate
            partly annotated data; it needs a loss that takes -1, such as loss=partial.
        keep_per_class: or: this many positives and negatives of each class stay, all other labels become -1.
        labels_seed: decides which labels go.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ValueError: A value is out of range.
    """
    thin = _thinning(drop_labels, keep_per_class, labels_seed)
    task = MultiLabel(threshold, sizes)
    folder = check_folder(root, "MS-COCO", _SEE)

    load = partial(load_split, folder, annotated_only=annotated_only)
    return Source(
        load=partial(load, sizes=sizes),
        load_train=partial(load, thin=thin),
        train=train,
        val=val,
        task=task,
        where=folder,
        see=_SEE,
    )


def _thinning(drop: float, keep: int | None, seed: int) -> Callable[[Labels], Labels] | None:
    """Return what makes the training labels partial, if anything."""
    if not 0 <= drop < 1:
        raise ValueError(f"drop_labels is {drop}: it must be from 0 on and below 1")
    if keep is not None and keep < 1:
        raise ValueError(f"keep_per_class is {keep}: it must be at least 1; null keeps all labels")
    if seed < 0:
        raise ValueError(f"labels_seed is {seed}: it must be 0 or more")
    if drop and keep is not None:
        raise ValueError(
            f"drop_labels is {drop} and keep_per_class is {keep}: they exclude each other, leave one out"
        )

    if keep is not None:
        return partial(fixed_per_class, n=keep, seed=seed)
    return partial(random_drop, p=drop, seed=seed) if drop else None


def load_split(
    root: Path,
    split: str,
    cache: TableCache,
    *,
    annotated_only: bool,
    sizes: bool = False,
    thin: Callable[[Labels], Labels] | None = None,
) -> LabelledImages:
    """Return the images of one split; see `coco`."""
    annotations = root / "annotations" / f"instances_{split}.json"
    table = cache.table(
        "coco", [annotations], partial(_parse, annotations), values=range(2 * NO_AREA)
    )
    if annotated_only:
        table = table.select(np.diff(table.labels.starts) > 0)  # an entry is always an object
    if not len(table):
        raise DataError(
            f"{annotations}: no image {'with an object' if annotated_only else 'at all'}; {_SEE}"
        )

    if sizes and (table.labels.values >= NO_AREA).any():
        raise DataError(
            f"{annotations}: an object has no valid area, which data.sizes=true needs; {_SEE}"
        )
    labels = table.labels if sizes else table.labels.recode(PRESENT)
    which = "images with an object" if annotated_only else "images"
    log.info("coco %s: %s %s, %d classes", split, f"{len(table):,}", which, len(table.classes))

    if thin is not None:
        labels = thin(labels)
        left = f"{(labels.dense() >= 0).mean():.2%}"
        log.info(
            "coco %s: %s of the labels are kept, the others count as not annotated", split, left
        )
    return in_folder(replace(table, labels=labels), root / split, _SEE)


def _parse(annotations: Path) -> Table:
    content = read_json(annotations, _SEE)
    try:
        return _tabulate(annotations, _indexed(content))
    except KeyError as error:
        raise DataError(
            f"{annotations} is not a COCO instances file: no key {error}; {_SEE}"
        ) from error
    except DataError:
        raise
    except (TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{annotations} is not a COCO instances file ({error}); {_SEE}") from error


def _indexed(content: Any) -> COCO:
    """Return the content of an annotation file with images and categories by id."""
    if not isinstance(content, dict):
        raise TypeError(f"it holds a {type(content).__name__}")
    for key in ("images", "annotations", "categories"):
        if not isinstance(content.get(key), list):  # pycocotools takes absence for an empty list
            raise TypeError(f"it has no list of {key}")

    index = COCO()
    index.dataset = content
    with redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        index.createIndex()
    return index


def _tabulate(annotations: Path, index: COCO) -> Table:
    """Collapse the objects of each image, crowds included, into labels."""
    rows = {image: row for row, image in enumerate(sorted(index.imgs))}
    columns = {category: column for column, category in enumerate(sorted(index.cats))}

    # Arrays, not a matrix: of a hundred thousand categories an image shows a few.
    owners, classes, sizes = array("q"), array("q"), array("b")
    for annotation in index.dataset["annotations"]:
        row, column = rows.get(annotation["image_id"]), columns.get(annotation["category_id"])
        if row is None or column is None:
            what = (
                f"image {annotation['image_id']}"
                if row is None
                else f"category {annotation['category_id']}"
            )
            raise DataError(
                f"{annotations}: annotation {annotation.get('id')} names the unknown {what}; {_SEE}"
            )
        owners.append(row)
        classes.append(column)
        sizes.append(_size(annotation))
    labels = from_flags(
        np.array(owners, np.int64),
        np.array(classes, np.int64),
        np.array(sizes, np.int8),
        num_images=len(rows),
        num_classes=len(columns),
    )

    where = f"{annotations}: file_name of image"
    files = [
        path_inside(index.imgs[image]["file_name"], f"{where} {image}", _SEE) for image in rows
    ]
    names = {category: index.cats[category]["name"] for category in columns}
    return Table(encode_paths(files), labels, _names(annotations, names, columns))


def _names(annotations: Path, categories: dict[Any, Any], order: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of the categories; merged files may have two of one name, which a network could not tell."""
    ids: dict[str, Any] = {}
    for category in order:
        name = as_name(categories[category], f"{annotations}: category {category}", _SEE)
        if name in ids:
            both = f"the categories {ids[name]} and {category} are both called {shown(name)}"
            raise DataError(f"{annotations}: {both}: merge or rename them; {_SEE}")
        ids[name] = category
    return tuple(ids)


def _size(annotation: dict[str, Any]) -> int:
    """Return the size of an object by the area of its mask, with the limits of the official loader."""
    area = annotation.get("area")
    if isinstance(area, bool) or not isinstance(area, int | float) or not area >= 0:
        return NO_AREA  # which matters only to those who ask for sizes
    return SIZES["small" if area < 32**2 else "medium" if area < 96**2 else "large"]
