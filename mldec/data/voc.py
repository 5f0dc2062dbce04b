"""Pascal VOC as multi-label classification: an image is labelled with every class of which it shows an object.

An object may be marked as difficult. A class of which an image shows difficult objects only is neither clearly there
nor clearly absent, and code bases differ in what they make of it: a setting for training, and one for evaluation.
"""

import logging
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from mldec.data.base import DataModule
from mldec.data.files import check_folder, file_data
from mldec.data.labels import from_dense
from mldec.data.tables import Table, cached, paths
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.errors import ConfigError, DataError, suggest
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.inputs import open_binary, read_text

log = logging.getLogger("mldec")

# The order of the devkit, which is that of every published label matrix and word vector.
CLASSES = (
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)
DIFFICULT = 2  # in a cached table: the class has objects, but difficult ones only
MEANINGS = {"negative": 0, "positive": 1, "ignore": -1}
LARGEST_XML = 2**20  # bytes; the official ones have less than 40,000

_SEE = "see DATASETS.md, section Pascal VOC"

Difficult = Literal["negative", "positive", "ignore"]


def voc(
    *,
    root: str,
    year: int = 2007,
    image_size: int = 448,
    train: str = "trainval",
    val: str = "test",
    difficult_train: Difficult = "negative",
    difficult_val: Difficult = "ignore",
    augment: str = "official",
    cutout: float = 0.5,
    flip: bool = False,
    crop: float = 1.0,
    threshold: float = 0.5,
    bad_images: str = "stop",
    cache_dir: str | None = None,
) -> DataModule:
    """Return Pascal VOC: 20 classes in the order of the devkit, images in the order of the list of their split.

    Args:
        root: folder VOC{year}, the folder VOCdevkit that holds it, or the one that holds VOCdevkit.
        year: 2007 or 2012; 2008 to 2011 have the same layout.
        image_size: side of the square input in pixels.
        train: split to learn from, a list in ImageSets/Main.
        val: split to evaluate on; the labels of the test split of 2012 are not public.
        difficult_train: what a class with difficult objects only is in training: "negative", "positive" or "ignore",
            which is -1 and needs a loss that takes it (loss=partial loss.mode=ignore).
        difficult_val: the same in evaluation; "ignore" leaves the image out for this class, as the devkit does.
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
    for name, difficult in (("difficult_train", difficult_train), ("difficult_val", difficult_val)):
        if difficult not in MEANINGS:
            raise ConfigError(f"data.{name} {difficult!r} is not known: choose negative, positive or ignore")
    folder = _find(check_folder(root, f"Pascal VOC {year}", _SEE), year)
    read = partial(_read_split, folder, year=year, cache_dir=cache_dir)
    return file_data(
        partial(read, difficult=difficult_val),
        load_train=partial(read, difficult=difficult_train),
        train=train,
        val=val,
        learn=learn,
        check=check,
        evaluator=evaluator,
        where=folder,
        see=_SEE,
        bad_images=bad_images,
    )


def _find(root: Path, year: int) -> Path:
    """Return the folder of a year in any of the three roots that people give."""
    inner = [root / f"VOC{year}", root / "VOCdevkit" / f"VOC{year}"]
    other_year = root.name.startswith("VOC2") and root.name != f"VOC{year}"
    for folder in inner if other_year else [root, *inner]:
        if (folder / "ImageSets").is_dir():
            return folder
    raise DataError(f"{root} holds no VOC{year} (a folder with ImageSets); set data.root or data.year, {_SEE}")


def _read_split(
    folder: Path, split: str, *, year: int, difficult: Difficult, cache_dir: str | None
) -> tuple[Path, Table]:
    listing, annotations = folder / "ImageSets" / "Main" / f"{split}.txt", folder / "Annotations"
    parse = partial(_parse, listing, annotations)
    values = range(DIFFICULT + 1)
    table = cached("voc", [listing, annotations], parse, values=values, cache_dir=cache_dir, see=_SEE)
    unclear = int(table.labels.counts(DIFFICULT).sum())
    log.info(
        "voc%d %s: %s images, %d classes; %s labels of difficult objects only: %s",
        *(year, split, f"{len(table):,}", len(table.classes), f"{unclear:,}", difficult),
    )
    labels = table.labels.recode({DIFFICULT: MEANINGS[difficult]})
    return folder / "JPEGImages", Table(table.files, labels, table.classes)


def _parse(listing: Path, annotations: Path) -> Table:
    images = _read_list(listing)
    labels = np.zeros((len(images), len(CLASSES)), np.int8)
    for row, image in enumerate(images):
        path = annotations / f"{image}.xml"
        for name, difficult in _objects(path):
            if name not in CLASSES:
                raise DataError(f"{path}: the class {name[:40]!r} is unknown{suggest(name, list(CLASSES))}; {_SEE}")
            column = CLASSES.index(name)
            if not difficult:
                labels[row, column] = 1
            elif not labels[row, column]:
                labels[row, column] = DIFFICULT
    return Table(paths([f"{image}.jpg" for image in images]), from_dense(labels), CLASSES)


def _read_list(listing: Path) -> list[str]:
    """Return the image ids, as text: those of 2012 are no numbers."""
    lines = read_text(listing, _SEE).split("\n")
    # The lists of a class hold a second word, at a distance of one or two blanks.
    found = [(number, line.split()[0]) for number, line in enumerate(lines, 1) if line.strip()]
    first: dict[str, int] = {}
    for number, image in found:
        if "/" in image or "\\" in image or ".." in image or "\0" in image:
            raise DataError(f"{listing}, line {number}: {image!r} is not an image id; {_SEE}")
        if image in first:
            raise DataError(f"{listing}, line {number}: {image} is in line {first[image]} already; {_SEE}")
        first[image] = number
    if not first:
        raise DataError(f"{listing} names no image; restore it, {_SEE}")
    return list(first)


def _objects(path: Path) -> list[tuple[str, bool]]:
    """Return the class of each object in an annotation file, and whether it is difficult.

    Direct children only: the parts of a person have names too.
    """
    root = _read_xml(path)
    if root.tag != "annotation":
        raise DataError(f"{path} is not a VOC annotation: its root is <{root.tag[:40]}>, not <annotation>; {_SEE}")
    found = []
    for thing in root.findall("object"):
        name, difficult = thing.findtext("name", "").strip(), thing.findtext("difficult", "0").strip()
        if not name:
            raise DataError(f"{path} is not a VOC annotation: an <object> has no <name>; {_SEE}")
        if difficult not in ("0", "1"):
            raise DataError(f"{path}: <difficult> is {difficult[:40]!r}, not 0 or 1; {_SEE}")
        found.append((name, difficult == "1"))
    return found


def _read_xml(path: Path) -> ElementTree.Element:
    """Parse a small XML file without a document type: so there are no entities to expand or to fetch.

    The text is decoded here, and the parser then ignores the encoding that the file claims: it sees what was checked.
    """
    try:
        with open_binary(path) as file:
            data = file.read(LARGEST_XML + 1)
        if len(data) > LARGEST_XML:
            raise DataError(f"{path} has more than {LARGEST_XML:,} bytes: not a VOC annotation; {_SEE}")
        text = data.decode("utf-8-sig")
        if "<!DOCTYPE" in text.upper() or "<!ENTITY" in text.upper():
            raise DataError(f"{path} declares a document type or entities, which is refused; {_SEE}")
        return ElementTree.fromstring(text)
    except FileNotFoundError as error:
        what = "is absent, though its image is listed (no labels of the test split of 2012 are public)"
        raise DataError(f"{path} {what}; {_SEE}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {_SEE}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8; restore it, {_SEE}") from error
    except ElementTree.ParseError as error:
        raise DataError(f"{path} is not valid XML ({error}); restore it, {_SEE}") from error
