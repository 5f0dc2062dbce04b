"""MS-COCO as multi-label classification: an image is labelled with every class of which it shows an object.

The annotation file (a quarter of a gigabyte for train2014) is parsed once; what is kept of it is a table of a few
megabytes in a cache folder, so that a second start reads no JSON and loader workers hold numpy arrays only.
"""

import logging
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mldec.data.base import DataModule
from mldec.data.files import check_folder, file_data
from mldec.data.labels import Labels, from_flags
from mldec.data.names import as_name, shown
from mldec.data.partial_labels import fixed_per_class, random_drop
from mldec.data.tables import Table, cached, inside, paths
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.errors import ConfigError, DataError
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.sizes import SIZES, SizesEvaluator
from mldec.inputs import read_json

log = logging.getLogger("mldec")

# A cached table says of which sizes the objects of a class are: a sum of these.
NO_AREA = 8  # the annotation does not say it
PRESENT = dict.fromkeys(range(2, 2 * NO_AREA), 1)  # objects of any size are one label

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
    sizes: bool = False,
    drop_labels: float = 0.0,
    keep_per_class: int | None = None,
    labels_seed: int = 0,
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
        sizes: validation also reports the mAP of small (below 32 x 32 pixels), medium (96 x 96) and large objects.
        drop_labels: each label of the training split becomes -1 (not annotated) with this probability, to simulate
            partly annotated data; it needs a loss that takes -1, such as loss=partial.
        keep_per_class: or: this many positives and negatives of each class stay, all other labels become -1.
        labels_seed: decides which labels go.
        bad_images: "stop" at an image that cannot be read, or "skip" and count it.
        cache_dir: folder for the parsed annotations; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ConfigError: A value is out of range.
    """
    learn = TrainTransform(image_size=image_size, augment=augment, cutout=cutout, flip=flip, crop=crop)
    check = EvalTransform(image_size=image_size)
    thin = _thinning(drop_labels, keep_per_class, labels_seed)
    evaluator = partial(SizesEvaluator if sizes else MultiLabelEvaluator, threshold=threshold)
    evaluator()  # refuses a wrong threshold now, not after the first epoch
    folder = check_folder(root, "MS-COCO", _SEE)
    read = partial(read_split, folder, annotated_only=annotated_only, cache_dir=cache_dir)
    return file_data(
        partial(read, sizes=sizes),
        load_train=partial(read, thin=thin),
        train=train,
        val=val,
        learn=learn,
        check=check,
        evaluator=evaluator,
        where=folder,
        see=_SEE,
        bad_images=bad_images,
    )


def _thinning(drop: float, keep: int | None, seed: int) -> Callable[[Labels], Labels] | None:
    """Return what makes the training labels partial, if anything."""
    if not 0 <= drop < 1:
        raise ConfigError(f"data.drop_labels {drop} is not in [0, 1)")
    if keep is not None and keep < 1:
        raise ConfigError(f"data.keep_per_class {keep} is not a whole number from 1 on; null keeps all labels")
    if seed < 0:
        raise ConfigError(f"data.labels_seed {seed} is below 0")
    if drop and keep is not None:
        raise ConfigError(f"data.drop_labels={drop} and data.keep_per_class={keep} exclude each other: leave one out")
    if keep is not None:
        return partial(fixed_per_class, n=keep, seed=seed)
    return partial(random_drop, p=drop, seed=seed) if drop else None


def read_split(
    root: Path,
    split: str,
    *,
    annotated_only: bool,
    cache_dir: str | None,
    sizes: bool = False,
    thin: Callable[[Labels], Labels] | None = None,
) -> tuple[Path, Table]:
    """Return the image folder and the table of one split; see `coco`."""
    annotations = root / "annotations" / f"instances_{split}.json"
    parse = partial(_parse, annotations)
    sizes_known = range(2 * NO_AREA)
    table = cached("coco", [annotations], parse, values=sizes_known, cache_dir=cache_dir, see=_SEE)
    if annotated_only:
        table = table.select(np.diff(table.labels.starts) > 0)  # nothing is stated but what is present
    if not len(table):
        raise DataError(f"{annotations}: no image {'with an object' if annotated_only else 'at all'}; {_SEE}")
    if sizes and (table.labels.values >= NO_AREA).any():
        raise DataError(f"{annotations}: an object has no valid area, which data.sizes=true needs; {_SEE}")
    labels = table.labels if sizes else table.labels.recode(PRESENT)
    which = "images with an object" if annotated_only else "images"
    log.info("coco %s: %s %s, %d classes", split, f"{len(table):,}", which, len(table.classes))
    if thin is not None:
        labels = thin(labels)
        left = f"{(labels.dense() >= 0).mean():.2%}"
        log.info("coco %s: %s of the labels are kept, the others count as not annotated", split, left)
    return root / split, replace(table, labels=labels)


def _parse(annotations: Path) -> Table:
    content = read_json(annotations, _SEE)
    try:
        return _tabulate(annotations, content)
    except KeyError as error:
        raise DataError(f"{annotations} is not a COCO instances file: no key {error}; {_SEE}") from error
    except DataError:
        raise
    except (TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{annotations} is not a COCO instances file ({error}); {_SEE}") from error


def _tabulate(annotations: Path, content: Any) -> Table:
    """Collapse the objects of each image, crowds included, into labels."""
    if not isinstance(content, dict):
        raise TypeError(f"it holds a {type(content).__name__}")
    for key in ("images", "annotations", "categories"):
        if not isinstance(content.get(key), list):
            raise TypeError(f"it has no list of {key}")
    images = {image["id"]: image["file_name"] for image in content["images"]}
    categories = {category["id"]: category["name"] for category in content["categories"]}
    rows = {image: row for row, image in enumerate(sorted(images))}
    columns = {category: column for column, category in enumerate(sorted(categories))}

    # Arrays, not a matrix: of a hundred thousand categories an image shows a few.
    owners, classes, sizes = array("q"), array("q"), array("b")
    for annotation in content["annotations"]:
        row, column = rows.get(annotation["image_id"]), columns.get(annotation["category_id"])
        if row is None or column is None:
            what = f"image {annotation['image_id']}" if row is None else f"category {annotation['category_id']}"
            raise DataError(f"{annotations}: annotation {annotation.get('id')} names the unknown {what}; {_SEE}")
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
    files = paths([inside(images[image], f"{where} {image}", _SEE) for image in rows])
    return Table(files, labels, _names(annotations, categories, columns))


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
