"""MS-COCO zero-shot: 48 seen and 17 unseen of the 80 classes; the other 15 are not used.

Source: `cls_ids.pickle` of SDL (github.com/Alibaba-MIIL/ZS_SDL), whose class numbers follow the
order of the category ids.
"""

from functools import partial
from pathlib import Path

from mldec.data.base import LabelledImages
from mldec.data.cache import TableCache
from mldec.data.class_names import COCO
from mldec.data.readers.coco import load_split
from mldec.data.source import Source
from mldec.data.storage.image_files import check_folder
from mldec.data.zero_shot.task import ZeroShot, split_classes
from mldec.data.zero_shot.word_vectors import DEFAULT_VECTORS, VectorSettings
from mldec.errors import DataError

_SEE = "see DATASETS.md, section MS-COCO zero-shot"

_UNSEEN = (
    "airplane,bus,cat,dog,cow,elephant,umbrella,tie,snowboard,skateboard,cup,knife,cake,couch,"
    "keyboard,sink,scissors"
)
_UNUSED = (
    "traffic light,fire hydrant,stop sign,parking meter,sports ball,baseball bat,"
    "baseball glove,tennis racket,wine glass,hot dog,potted plant,dining table,cell phone,"
    "teddy bear,hair drier"
)

UNSEEN = tuple(_UNSEEN.split(","))
SEEN = tuple(name for name in COCO if name not in {*UNSEEN, *_UNUSED.split(",")})


def coco_zsl(
    *,
    root: str,
    train: str = "train2014",
    val: str = "val2014",
    val_images: str = "unseen",
    threshold: float = 0.5,
    words: VectorSettings = DEFAULT_VECTORS,
) -> Source:
    """Return MS-COCO zero-shot: training on 48 classes, validation on 65, by category id.

    Training images are all that show a seen class. Unseen objects in them are not labelled.

    Args:
        root: folder of MS-COCO, see `mldec.data.readers.coco.coco`.
        train: split to learn from.
        val: split to evaluate on.
        val_images: "unseen": only images with an unseen class; "all": images with any of the 65.
        threshold: see `MultiLabel`.
        words: see `VectorSettings`. The columns of an array without a list of names beside it are
            the 80 classes in the order of the category ids.

    Raises:
        DataError: see `Source.load`.
        ValueError: An argument is out of range.
    """
    folder = check_folder(root, "MS-COCO", _SEE)
    where = f"{folder} ({_SEE})"
    task = ZeroShot(
        roles=partial(split_classes, unseen=UNSEEN, seen=SEEN, where=where),
        vectors=lambda names: words.of_classes(folder, names, order=COCO),
        val_images=val_images,
        where=where,
        threshold=threshold,
    )

    return Source(
        load=partial(_load_split, folder), train=train, val=val, task=task, where=folder, see=_SEE
    )


def _load_split(folder: Path, split: str, cache: TableCache) -> LabelledImages:
    """Return the images with at least one of the 65 classes, without the other 15 columns."""
    images = load_split(folder, split, cache, annotated_only=False)

    absent = sorted({*SEEN, *UNSEEN} - set(images.classes))
    if absent:
        raise DataError(
            f"{folder}: {len(absent)} of the 65 classes are not in its annotations, "
            f"such as {absent[0]!r}; {_SEE}"
        )

    # The images are selected last: one that shows only unused classes has no label left.
    used = [column for column, name in enumerate(images.classes) if name in {*SEEN, *UNSEEN}]
    images = images.select_classes(used)
    return images.select(images.labels.counts_per_image() > 0)
