"""Pascal VOC as multi-label classification: an image is labelled with every class of which it shows an object.

An object may be marked as difficult. A class of which an image shows difficult objects only is neither clearly there
nor clearly absent, and code bases differ in what they make of it: a setting for training, and one for evaluation.
"""

import logging
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from mldec.data.base import LabelledImages
from mldec.data.cache import TableCache
from mldec.data.class_names import VOC
from mldec.data.names import unknown_class
from mldec.data.source import Source
from mldec.data.storage.image_files import check_folder, in_folder
from mldec.data.table import Table, TableBuilder
from mldec.data.task import MultiLabel
from mldec.errors import DataError
from mldec.files.text import open_binary, read_text

log = logging.getLogger("mldec")

DIFFICULT = 2  # in a cached table: the class has objects, but difficult ones only
MEANINGS = {"negative": 0, "positive": 1, "ignore": -1}
LARGEST_XML = 2**20  # bytes; the official ones have less than 40,000

_SEE = "see DATASETS.md, section Pascal VOC"

Difficult = Literal["negative", "positive", "ignore"]


def voc(
    *,
    root: str,
    year: int = 2007,
    train: str = "trainval",
    val: str = "test",
    difficult_train: Difficult = "negative",
    difficult_val: Difficult = "ignore",
    threshold: float = 0.5,
) -> Source:
    """Return Pascal VOC: 20 classes in the order of the devkit, images in the order of the list of their split.

    Args:
        root: folder VOC{year}, the folder VOCdevkit that holds it, or the one that holds VOCdevkit.
        year: 2007 or 2012; 2008 to 2011 have the same layout.
        train: split to learn from, a list in ImageSets/Main.
        val: split to evaluate on; the labels of the test split of 2012 are not public.
        difficult_train: what a class with difficult objects only is in training: "negative", "positive" or "ignore",
            which is -1 and needs a loss that takes it (loss=partial loss.mode=ignore).
        difficult_val: the same in evaluation; "ignore" leaves the image out for this class, as the devkit does.
        threshold: probability from which on a class counts as predicted, for precision, recall and F1.

    Raises:
        DataError: Something under `root` is missing or broken; of a split, when it is first used.
        ValueError: A value is out of range.
    """
    task = MultiLabel(threshold)
    folder = _find(check_folder(root, f"Pascal VOC {year}", _SEE), year)

    return Source(
        load=partial(_load_split, folder, difficult=difficult_val),
        load_train=partial(_load_split, folder, difficult=difficult_train),
        train=train,
        val=val,
        task=task,
        where=folder,
        see=_SEE,
    )


def _find(root: Path, year: int) -> Path:
    """Return the folder of a year in any of the three roots that people give."""
    inner = [root / f"VOC{year}", root / "VOCdevkit" / f"VOC{year}"]
    other_year = root.name.startswith("VOC2") and root.name != f"VOC{year}"
    for folder in inner if other_year else [root, *inner]:
        if (folder / "ImageSets").is_dir():
            return folder
    raise DataError(
        f"{root} holds no VOC{year} (a folder with ImageSets); set data.root or data.year, {_SEE}"
    )


def _load_split(
    folder: Path, split: str, cache: TableCache, *, difficult: Difficult
) -> LabelledImages:
    listing, annotations = folder / "ImageSets" / "Main" / f"{split}.txt", folder / "Annotations"
    parse = partial(_parse, listing, annotations)
    table = cache.table("voc", [listing, annotations], parse, values=range(DIFFICULT + 1))

    log.info(
        "%s %s: %s images, %d classes", folder.name, split, f"{len(table):,}", len(table.classes)
    )
    only_difficult = f"{table.labels.counts(DIFFICULT).sum():,}"
    log.info(
        "%s %s: %s labels of difficult objects only: %s",
        folder.name,
        split,
        only_difficult,
        difficult,
    )
    labels = table.labels.recode({DIFFICULT: MEANINGS[difficult]})
    return in_folder(Table(table.files, labels, table.classes), folder / "JPEGImages", _SEE)


def _parse(listing: Path, annotations: Path) -> Table:
    builder = TableBuilder(_SEE, classes=VOC)
    for number, image in _image_ids(listing):
        path = annotations / f"{image}.xml"
        labels: dict[str, int] = {}
        for name, difficult in _objects(path):
            if name not in VOC:
                raise unknown_class(name[:40], VOC, str(path), _SEE)
            # One object that is not difficult decides.
            labels[name] = labels.get(name, DIFFICULT) if difficult else 1
        builder.add(f"{image}.jpg", labels, f"{listing}, line {number}")
    if not len(builder):
        raise DataError(f"{listing} names no image; restore it, {_SEE}")
    return builder.build(listing)


def _image_ids(listing: Path) -> Iterator[tuple[int, str]]:
    """Yield the number of each line, and the image id in it, as text: those of 2012 are no numbers."""
    for number, line in enumerate(read_text(listing, _SEE).split("\n"), 1):
        if not line.strip():
            continue
        # The lists of a class hold a second word, at a distance of one or two blanks.
        image = line.split()[0]
        if "/" in image or "\\" in image or ".." in image or "\0" in image:
            raise DataError(f"{listing}, line {number}: {image!r} is not an image id; {_SEE}")
        yield number, image


def _objects(path: Path) -> list[tuple[str, bool]]:
    """Return the class of each object in an annotation file, and whether it is difficult.

    Direct children only: the parts of a person have names too.
    """
    root = _read_xml(path)
    if root.tag != "annotation":
        raise DataError(
            f"{path} is not a VOC annotation: its root is <{root.tag[:40]}>, not <annotation>; {_SEE}"
        )
    found = []
    for thing in root.findall("object"):
        name, difficult = (
            thing.findtext("name", "").strip(),
            thing.findtext("difficult", "0").strip(),
        )
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
            raise DataError(
                f"{path} has more than {LARGEST_XML:,} bytes: not a VOC annotation; {_SEE}"
            )
        text = data.decode("utf-8-sig")
        if "<!DOCTYPE" in text.upper() or "<!ENTITY" in text.upper():
            raise DataError(
                f"{path} declares a document type or entities, which is refused; {_SEE}"
            )
        return ElementTree.fromstring(text)
    except FileNotFoundError as error:
        what = (
            "is absent, though its image is listed (no labels of the test split of 2012 are public)"
        )
        raise DataError(f"{path} {what}; {_SEE}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); {_SEE}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8; restore it, {_SEE}") from error
    except ElementTree.ParseError as error:
        raise DataError(f"{path} is not valid XML ({error}); restore it, {_SEE}") from error
