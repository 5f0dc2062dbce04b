"""NUS-WIDE from the files of its makers: lists of images, 81 human labels and 1,000 Flickr tags as text.

This is the protocol of LESA and BiAM: learn from the 925 tags that are no concept, evaluate on all test images with the
81 human labels and the tags. Most images of 2009 are gone from Flickr; those that are absent here are counted.
"""

import logging
import os
from functools import partial
from pathlib import Path

import numpy as np

from mldec.data.base import LabelledImages
from mldec.data.cache import TableCache
from mldec.data.labels import from_dense
from mldec.data.names import as_name
from mldec.data.source import Source
from mldec.data.storage.image_files import check_folder, in_folder
from mldec.data.table import Table, encode_paths, path_inside
from mldec.data.zero_shot.task import ZeroShot, split_classes
from mldec.data.zero_shot.vectors import class_vectors
from mldec.errors import DataError
from mldec.files.text import open_binary, read_lines

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section NUS-WIDE"
_SPACE = b" \t\r\n"


def nuswide_official(
    *,
    root: str,
    images: str = "Flickr",
    vectors: str = "wordvec_array.pth",
    val_images: str = "all",
) -> Source:
    """Return NUS-WIDE zero-shot by its official lists: 925 seen tags, 81 unseen concepts, all in alphabetical order.

    Training images without a seen tag are left out. A concept's validation labels are the human ones, and a tag that is
    also a concept is not used (75 of the 1,000).

    Args:
        root: folder with ImageList, Groundtruth/TrainTestLabels, NUS_WID_Tags, ConceptsList and the images.
        images: folder of the images in `root`: as listed (actor/0001_2124494179.jpg), or under other names with the
            Flickr number in the second part (140016_215548610_422b79b4d7_m.jpg).
        vectors: file in `root` (or elsewhere, by an absolute path), or "clip:MODEL:WEIGHTS"; see `read_vectors`. The
            columns of an array without a list of names beside it are the sorted classes.
        val_images: "all", as LESA and BiAM; or "unseen": only images with an unseen class.

    Raises:
        DataError: Something under `root` is missing, broken or does not fit; of a split, when it is first used.
        ValueError: A value is out of range.
    """
    folder = check_folder(root, "NUS-WIDE", _SEE)
    concepts = folder / "ConceptsList" / "Concepts81.txt"
    where = f"{concepts} ({_SEE})"
    task = ZeroShot(
        roles=lambda names: split_classes(
            names, unseen=read_lines(concepts, _SEE), seen=None, where=where
        ),
        vectors=lambda names: class_vectors(folder, vectors, names, order=names),
        val_images=val_images,
        where=f"{folder} ({_SEE})",
    )
    return Source(
        load=partial(_load_split, folder, images),
        train="Train",
        val="Test",
        task=task,
        where=folder,
        see=_SEE,
    )


def _load_split(root: Path, images: str, split: str, cache: TableCache) -> LabelledImages:
    """Return the images that are there, with the labels of all classes."""
    concept_list = root / "ConceptsList" / "Concepts81.txt"
    concepts = [as_name(concept, concept_list, _SEE) for concept in read_lines(concept_list, _SEE)]
    sources = {
        "images": root / "ImageList" / f"{split}Imagelist.txt",
        "names": root / "NUS_WID_Tags" / "TagList1k.txt",
        "tags": root / "NUS_WID_Tags" / f"{split}_Tags1k.dat",
        **{concept: _concept_file(root, concept, split) for concept in concepts},
    }
    table = cache.table(
        f"nuswide-official-{split}", list(sources.values()), partial(_parse, sources, concepts)
    )

    # Most images are gone from Flickr, and copies of the others have other names.
    files = _find(root / images, table.files)
    is_present = files != b""
    total = f"{len(table):,}"
    if not is_present.any():
        raise DataError(f"{root / images}: none of the {total} images of {split} is there; {_SEE}")
    if not is_present.all():
        first = table.files[np.flatnonzero(~is_present)[0]].decode()
        text = (
            "nuswide_official %s: %s of %s listed images are absent and left out, the first is %s"
        )
        log.warning(text, split, f"{np.count_nonzero(~is_present):,}", total, first)

    present = table.select(is_present)
    return in_folder(Table(files[is_present], present.labels, present.classes), root / images, _SEE)


def _concept_file(root: Path, concept: str, split: str) -> Path:
    name = path_inside(concept, f"{root / 'ConceptsList' / 'Concepts81.txt'}", _SEE)
    return root / "Groundtruth" / "TrainTestLabels" / f"Labels_{name}_{split}.txt"


def _parse(sources: dict[str, Path], concepts: list[str]) -> Table:
    """Join the list of images, the tags that are no concept, and the concepts, as classes in alphabetical order."""
    source = sources["images"]
    lines = enumerate(read_lines(source, _SEE), 1)
    files = [path_inside(line, f"{source}, line {row:,}", _SEE) for row, line in lines]

    tags = [as_name(tag, sources["names"], _SEE) for tag in read_lines(sources["names"], _SEE)]
    used_tags = [number for number, tag in enumerate(tags) if tag not in set(concepts)]
    names = sorted([*concepts, *(tags[number] for number in used_tags)])
    if len(set(names)) < len(names):
        raise DataError(f"{sources['names']}: a tag or concept is named twice; {_SEE}")

    labels = np.zeros((len(files), len(names)), np.int8)
    columns = [names.index(tags[number]) for number in used_tags]
    labels[:, columns] = _tags(sources["tags"], len(files), len(tags))[:, used_tags]
    for concept in concepts:
        labels[:, names.index(concept)] = _zeros_and_ones_of(sources[concept], len(files))
    return Table(encode_paths(files), from_dense(labels), tuple(names))


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


def _zeros_and_ones_of(source: Path, images: int) -> np.ndarray:
    """Return int8 [images] from a file with a 0 or 1 in each line."""
    with open_binary(source) as file:
        return _zeros_and_ones(file.read(), images, str(source))


def _zeros_and_ones(text: bytes, count: int, where: str) -> np.ndarray:
    digits = np.frombuffer(text.translate(None, _SPACE), np.int8) - ord("0")
    if len(digits) != count or not np.isin(digits, (0, 1)).all():
        raise DataError(f"{where}: {len(digits):,} characters, not {count:,} of 0 and 1; {_SEE}")
    return digits


def _find(folder: Path, listed: np.ndarray) -> np.ndarray:
    """Return the path of each listed image in the folder; empty where it is absent.

    An image has the listed path, or another name with the same Flickr number, the second part of a name.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder} is not a folder; set data.images to the folder of the images, {_SEE}"
        )

    present = set()
    for directory, _, files in os.walk(folder):
        inner = os.path.relpath(directory, folder)
        present |= {file if inner == "." else f"{inner}/{file}" for file in files}

    by_number = {_flickr_number(path): path for path in sorted(present)} | {"": ""}
    names = [os.fsdecode(file) for file in listed.tolist()]
    return encode_paths(
        [name if name in present else by_number.get(_flickr_number(name), "") for name in names]
    )


def _flickr_number(path: str) -> str:
    parts = path.rpartition("/")[2].partition(".")[0].split("_")
    return parts[1] if len(parts) > 1 else ""
