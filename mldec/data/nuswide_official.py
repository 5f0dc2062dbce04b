"""NUS-WIDE from the files of its makers: lists of images, 81 human labels and 1,000 Flickr tags as text.

This is the protocol of LESA and BiAM: learn from the 925 tags that are no concept, evaluate on all test images with the
81 human labels and the tags. Most images of 2009 are gone from Flickr; those that are absent here are counted.
"""

import logging
import os
from functools import partial
from pathlib import Path

import numpy as np

from mldec.data.base import DataModule
from mldec.data.files import check_folder
from mldec.data.labels import from_dense
from mldec.data.names import as_name
from mldec.data.tables import Table, cached, inside, paths
from mldec.data.transforms import EvalTransform, TrainTransform
from mldec.data.vectors import class_vectors
from mldec.data.zero_shot import split_classes, zero_shot_data
from mldec.errors import DataError
from mldec.inputs import open_binary, read_text

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section NUS-WIDE"
_SPACE = b" \t\r\n"


def nuswide_official(
    *,
    root: str,
    image_size: int = 224,
    images: str = "Flickr",
    vectors: str = "wordvec_array.pth",
    val_images: str = "all",
    augment: str = "official",
    cutout: float = 0.5,
    flip: bool = False,
    crop: float = 1.0,
    bad_images: str = "stop",
    cache_dir: str | None = None,
) -> DataModule:
    """Return NUS-WIDE zero-shot by its official lists: 925 seen tags, 81 unseen concepts, all in alphabetical order.

    Training images without a seen tag are left out. A concept's validation labels are the human ones, and a tag that is
    also a concept is not used (75 of the 1,000).

    Args:
        root: folder with ImageList, Groundtruth/TrainTestLabels, NUS_WID_Tags, ConceptsList and the images.
        image_size: side of the square input in pixels.
        images: folder of the images in `root`: as listed (actor/0001_2124494179.jpg), or under other names with the
            Flickr number in the second place (140016_215548610_422b79b4d7_m.jpg).
        vectors: file in `root` (or elsewhere, by an absolute path), or "clip:MODEL:WEIGHTS"; see `read_vectors`. The
            columns of an array without a list of names beside it are the sorted classes.
        val_images: "all", as LESA and BiAM; or "unseen": only images with an unseen class.
        augment: "official", "randaugment" or "none"; this and the next three are described at `TrainTransform`.
        cutout: side of the covered square as a fraction of the image side; 0 turns it off.
        flip: mirror half of the training images.
        crop: smallest area of a random crop as a fraction of the image; 1 turns it off.
        bad_images: "stop" at an image that cannot be read, or "skip" and count it.
        cache_dir: folder for the parsed labels; None is $XDG_CACHE_HOME/mldec or ~/.cache/mldec.

    Raises:
        DataError: Something under `root` is missing, broken or does not fit; of a split, when it is first used.
        ConfigError: A value is out of range.
    """
    learn = TrainTransform(image_size=image_size, augment=augment, cutout=cutout, flip=flip, crop=crop)
    folder = check_folder(root, "NUS-WIDE", _SEE)
    concepts = folder / "ConceptsList" / "Concepts81.txt"
    return zero_shot_data(
        partial(_read_split, folder, images, cache_dir=cache_dir),
        train="Train",
        val="Test",
        roles=lambda names: split_classes(names, unseen=_lines(concepts), seen=None, where=f"{concepts} ({_SEE})"),
        vectors=lambda names: class_vectors(folder, vectors, names, order=names),
        val_images=val_images,
        learn=learn,
        check=EvalTransform(image_size=image_size),
        where=folder,
        see=_SEE,
        bad_images=bad_images,
    )


def _read_split(root: Path, images: str, split: str, *, cache_dir: str | None) -> tuple[Path, Table]:
    """Return the images that are there, with the labels of all classes."""
    listed = root / "ConceptsList" / "Concepts81.txt"
    concepts = [as_name(concept, listed, _SEE) for concept in _lines(listed)]
    sources = {
        "images": root / "ImageList" / f"{split}Imagelist.txt",
        "names": root / "NUS_WID_Tags" / "TagList1k.txt",
        "tags": root / "NUS_WID_Tags" / f"{split}_Tags1k.dat",
        **{concept: _concept_file(root, concept, split) for concept in concepts},
    }
    parse = partial(_parse, sources, concepts)
    table = cached(f"nuswide-official-{split}", list(sources.values()), parse, cache_dir=cache_dir, see=_SEE)
    here = _find(root / images, table.files)
    present = np.flatnonzero(here != b"")
    total = f"{len(table):,}"
    if not len(present):
        raise DataError(f"{root / images}: none of the {total} images of {split} is there; {_SEE}")
    if len(present) < len(table):
        gone = table.files[np.flatnonzero(here == b"")[0]].decode()
        text = "nuswide_official %s: %s of %s listed images are absent and left out, the first is %s"
        log.warning(text, split, f"{len(table) - len(present):,}", total, gone)
    found = table.select(present)
    return root / images, Table(here[present], found.labels, found.classes)


def _concept_file(root: Path, concept: str, split: str) -> Path:
    name = inside(concept, f"{root / 'ConceptsList' / 'Concepts81.txt'}", _SEE)
    return root / "Groundtruth" / "TrainTestLabels" / f"Labels_{name}_{split}.txt"


def _parse(sources: dict[str, Path], concepts: list[str]) -> Table:
    """Join the list of images, the tags that are no concept, and the concepts, as classes in alphabetical order."""
    source = sources["images"]
    files = [inside(line, f"{source}, line {row:,}", _SEE) for row, line in enumerate(_lines(source), 1)]
    tags = [as_name(tag, sources["names"], _SEE) for tag in _lines(sources["names"])]
    kept = [place for place, tag in enumerate(tags) if tag not in set(concepts)]
    names = sorted([*concepts, *(tags[place] for place in kept)])
    if len(set(names)) < len(names):
        raise DataError(f"{sources['names']}: a tag or concept is named twice; {_SEE}")
    labels = np.zeros((len(files), len(names)), np.int8)
    labels[:, [names.index(tags[place]) for place in kept]] = _tags(sources["tags"], len(files), len(tags))[:, kept]
    for concept in concepts:
        labels[:, names.index(concept)] = _digits(sources[concept], len(files))
    return Table(paths(files), from_dense(labels), tuple(names))


def _lines(source: Path) -> list[str]:
    return [line.strip() for line in read_text(source, _SEE).split("\n") if line.strip()]


def _tags(source: Path, images: int, tags: int) -> np.ndarray:
    """Return int8 [images, tags] from lines of 0 and 1 with any blanks; the file is a third of a gigabyte."""
    matrix = np.zeros((images, tags), np.int8)
    with open_binary(source) as file:
        number = 0
        for number, line in enumerate(file, 1):
            row = _zeros_and_ones(line, tags, f"{source}, line {number:,}")
            if number <= images:
                matrix[number - 1] = row
    if number != images:
        raise DataError(f"{source} has {number:,} lines for {images:,} listed images; {_SEE}")
    return matrix


def _digits(source: Path, images: int) -> np.ndarray:
    """Return int8 [images] from a file with a 0 or 1 in each line."""
    with open_binary(source) as file:
        return _zeros_and_ones(file.read(), images, str(source))


def _zeros_and_ones(text: bytes, count: int, where: str) -> np.ndarray:
    digits = np.frombuffer(text.translate(None, _SPACE), np.int8) - ord("0")
    if len(digits) != count or not np.isin(digits, (0, 1)).all():
        raise DataError(f"{where}: {len(digits):,} signs, not {count:,} of 0 and 1; {_SEE}")
    return digits


def _find(folder: Path, listed: np.ndarray) -> np.ndarray:
    """Return where each listed image lies in the folder, as paths; empty where it is absent.

    It has the listed path, or another name with the same Flickr number, the second part of a name.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; set data.images to the folder of the images, {_SEE}")
    there = set()
    for place, _, leaves in os.walk(folder):
        inner = os.path.relpath(place, folder)
        there |= {leaf if inner == "." else f"{inner}/{leaf}" for leaf in leaves}
    by_number = {_flickr_number(path): path for path in sorted(there)} | {"": ""}
    names = [os.fsdecode(file) for file in listed.tolist()]
    return paths([name if name in there else by_number.get(_flickr_number(name), "") for name in names])


def _flickr_number(path: str) -> str:
    parts = path.rpartition("/")[2].partition(".")[0].split("_")
    return parts[1] if len(parts) > 1 else ""
