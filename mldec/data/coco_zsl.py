"""MS-COCO zero-shot: 48 seen and 17 unseen of the 80 classes; the other 15 are not used.

Source: `cls_ids.pickle` of SDL (github.com/Alibaba-MIIL/ZS_SDL), whose numbers count in the order of the category ids.
"""

from functools import partial
from pathlib import Path

from mldec.data.base import DataModule
from mldec.data.coco import read_split
from mldec.data.files import check_folder
from mldec.data.tables import Table
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.data.vectors import class_vectors
from mldec.data.zero_shot import split_classes, zero_shot_data
from mldec.errors import DataError

_SEE = "see DATASETS.md, section MS-COCO zero-shot"

SEEN = (
    "person",
    "bicycle",
    "car",
    "motorcycle",
    "train",
    "truck",
    "boat",
    "bench",
    "bird",
    "horse",
    "sheep",
    "bear",
    "zebra",
    "giraffe",
    "backpack",
    "handbag",
    "suitcase",
    "frisbee",
    "skis",
    "kite",
    "surfboard",
    "bottle",
    "fork",
    "spoon",
    "bowl",
    "banana",
    "apple",
    "sandwich",
    "orange",
    "broccoli",
    "carrot",
    "pizza",
    "donut",
    "chair",
    "bed",
    "toilet",
    "tv",
    "laptop",
    "mouse",
    "remote",
    "microwave",
    "oven",
    "toaster",
    "refrigerator",
    "book",
    "clock",
    "vase",
    "toothbrush",
)
UNSEEN = (
    "airplane",
    "bus",
    "cat",
    "dog",
    "cow",
    "elephant",
    "umbrella",
    "tie",
    "snowboard",
    "skateboard",
    "cup",
    "knife",
    "cake",
    "couch",
    "keyboard",
    "sink",
    "scissors",
)


def coco_zsl(
    *,
    root: str,
    vectors: str,
    image_size: int = 224,
    train: str = "train2014",
    val: str = "val2014",
    val_images: str = "unseen",
    augment: str = "official",
    cutout: float = 0.5,
    flip: bool = False,
    crop: float = 1.0,
    bad_images: str = "stop",
    cache_dir: str | None = None,
) -> DataModule:
    """Return MS-COCO zero-shot: training on 48 classes, validation on 65, both in the order of the category ids.

    Training images are all with a seen class, whatever else they show; unseen objects on them are not labelled.

    Args:
        root: folder of MS-COCO, see `mldec.data.coco.coco`.
        vectors: file in `root` (or elsewhere, by an absolute path), or "clip:MODEL:WEIGHTS"; see `read_vectors`. The
            columns of an array without a list of names beside it are the 80 classes in the order of the category ids.
        image_size: side of the square input in pixels.
        train: split to learn from.
        val: split to evaluate on.
        val_images: "unseen": only images with an unseen class; or "all" with one of the 65.
        augment: "official", "randaugment" or "none"; this and the next three are described at `TrainTransform`.
        cutout: side of the covered square as a fraction of the image side; 0 turns it off.
        flip: mirror half of the training images.
        crop: smallest area of a random crop as a fraction of the image; 1 turns it off.
        bad_images: "stop" at an image that cannot be read, or "skip" and count it.
        cache_dir: folder for the parsed annotations; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

    Raises:
        DataError: Something under `root` is missing, broken or does not fit; of a split, when it is first used.
        ConfigError: A value is out of range.
    """
    learn = TrainTransform(image_size=image_size, augment=augment, cutout=cutout, flip=flip, crop=crop)
    folder = check_folder(root, "MS-COCO", _SEE)
    load = partial(read_split, folder, annotated_only=False, cache_dir=cache_dir)
    return zero_shot_data(
        lambda split: _used(*load(split)),
        train=train,
        val=val,
        roles=lambda names: split_classes(names, unseen=UNSEEN, seen=SEEN, where=f"{folder} ({_SEE})"),
        vectors=lambda names: class_vectors(folder, vectors, names, order=load(val)[1].classes),
        val_images=val_images,
        learn=learn,
        check=EvalTransform(image_size=image_size),
        where=folder,
        see=_SEE,
        bad_images=bad_images,
    )


def _used(folder: Path, table: Table) -> tuple[Path, Table]:
    """Drop the 15 classes that are neither seen nor unseen, and the images without any other."""
    absent = sorted({*SEEN, *UNSEEN} - set(table.classes))
    if absent:
        raise DataError(
            f"{folder}: {len(absent)} of the 65 classes are not in its annotations, as {absent[0]!r}; {_SEE}"
        )
    used = table.select_classes([place for place, name in enumerate(table.classes) if name in {*SEEN, *UNSEEN}])
    return folder, used.select(used.labels.counts_per_image() > 0)
