"""NUS-WIDE as the authors of ML-Decoder share it: one CSV of images, labels and splits.

`nuswide_zsl` is their zero-shot form (925 seen and 81 unseen classes), `nuswide81` the multi-label
form with the 81 concepts. `mldec.data.readers.nuswide` reads the original files instead.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mldec.data.cache import TableCache
from mldec.data.settings import Source
from mldec.data.table import (
    Table,
    TableBuilder,
    as_name,
    encode_paths,
    from_dense,
    path_inside,
    split_names,
)
from mldec.data.tasks import MultiLabel, Roles, ZeroShot, split_classes
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.data.word_vectors import DEFAULT_VECTORS, VectorSettings
from mldec.errors import DataError
from mldec.files.text import csv_rows, open_binary, read_bytes, read_json, read_lines, reading

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section NUS-WIDE"
_SPLITS = ("train", "val")
_LIST_MARKS = str.maketrans("", "", "[]'\"")


def nuswide_zsl(
    *,
    root: str,
    csv_file: str = "data.csv",
    split_file: str = "benchmark_81_v0.json",
    val_images: str = "unseen",
    threshold: float = 0.5,
    words: VectorSettings = DEFAULT_VECTORS,
) -> Source:
    """Return NUS-WIDE zero-shot: training on the seen classes, validation on all.

    Classes are in alphabetical order.

    Source: official train_zsl_nus.py; its files have 1,006 classes, 925 of them seen.

    Args:
        root: folder with the three files and the images that the CSV names.
        csv_file: image path, labels and split of each image. The columns are known by their order,
            not by their names.
        split_file: JSON with the unseen classes, "test class", and optionally the seen ones, "train
            class".
        val_images: "unseen": only images with an unseen class, as in the official code; or "all".
        threshold: see `MultiLabel`.
        words: see `VectorSettings`. The columns of an array without a list of names beside it are
            the sorted classes of the CSV.

    Raises:
        DataError: see `Source.load`.
        ValueError: An argument is out of range.
    """
    folder = check_folder(root, "NUS-WIDE", _SEE)
    task = ZeroShot(
        roles=partial(_roles, folder / split_file),
        vectors=lambda names: words.of_classes(folder, names, order=names),
        val_images=val_images,
        where=f"{folder / csv_file} ({_SEE})",
        threshold=threshold,
    )
    load = partial(_load_split, folder, csv_file)
    return Source(load=load, train="train", val="val", task=task, where=folder, see=_SEE)


def nuswide81(*, root: str, csv_file: str = "nus_wid_data.csv", threshold: float = 0.5) -> Source:
    """Return NUS-WIDE with the 81 concepts, in alphabetical order.

    Source: the CSV of ASL, with 119,103 training and 50,720 validation images. Images without any
    concept are not in it.

    Args:
        root: folder with the CSV and the images that it names.
        csv_file: image path, labels and split of each image. The columns are known by their order,
            not by their names.
        threshold: see `MultiLabel`.

    Raises:
        DataError: A file under `root` is missing or broken; see `Source.load`.
        ValueError: An argument is out of range.
    """
    task = MultiLabel(threshold)
    folder = check_folder(root, "NUS-WIDE", _SEE)
    load = partial(_load_split, folder, csv_file)
    return Source(load=load, train="train", val="val", task=task, where=folder, see=_SEE)


class _Row(NamedTuple):
    """One image of the CSV; `number` is its line in the file."""

    number: int
    file: str
    labels: list[str]
    split: str


def _load_split(root: Path, csv_file: str, split: str, cache: TableCache) -> StoredImages:
    """Return the images of a split."""
    source = root / csv_file
    table = cache.table(f"nuswide-{split}", [source], partial(_parse, source, split))

    log.info(
        "nuswide %s: %s images, %s classes", split, f"{len(table):,}", f"{len(table.classes):,}"
    )
    return in_folder(table, root, _SEE)


def _parse(source: Path, split: str) -> Table:
    """Return the images of a split; the classes are the sorted labels of both splits."""
    rows = list(_rows(source))
    other_splits = Counter(row.split for row in rows if row.split not in _SPLITS)
    if other_splits:
        log.warning(
            "%s: rows of other splits than train and val are left out: %s",
            source,
            dict(other_splits),
        )

    label_names: set[str] = set()
    for row in rows:
        if row.split in _SPLITS:
            label_names.update(row.labels)
    if not label_names:
        raise DataError(f"{source}: no row of train or val has a label; {_SEE}")

    # Rows of other splits are added too, without labels: so the builder still refuses an image that
    # is in such a split and in train or val.
    builder = TableBuilder(_SEE, classes=sorted(label_names))
    for row in rows:
        labels = row.labels if row.split in _SPLITS else []
        builder.add(row.file, dict.fromkeys(labels, 1), f"{source}, row {row.number:,}")

    in_split = np.array([row.split == split for row in rows], bool)
    return builder.build(source).select(in_split)


def _rows(source: Path) -> Iterator[_Row]:
    """Yield the rows after the header: path, labels as "[sky, sun]" or "['sky', 'sun']", split."""
    _refuse_swapped(source)

    for number, (line, fields) in enumerate(csv_rows(source, _SEE), 1):
        where = f"{source}, row {line:,}"
        _check_row(fields, number, where)
        if number == 1:
            continue

        # An empty list gives one blank name. The official MultiLabelBinarizer makes a class of it,
        # which shifts all other columns; here it is no label.
        labels = split_names(fields[1].translate(_LIST_MARKS), ",", where, _SEE)
        yield _Row(line, fields[0], labels, fields[2].strip())


def _refuse_swapped(source: Path) -> None:
    """Raise a `DataError` if the CSV is in fact the file of word vectors."""
    with reading(source, _SEE), open_binary(source) as file:
        # A torch file is a zip archive, which starts with PK.
        is_archive = file.read(2) == b"PK"

    if is_archive:
        raise DataError(
            f"{source} is not text but a torch file: the official README swaps the links of "
            f"data.csv and wordvec_array.pth; swap the two files back, {_SEE}"
        )


def _check_row(row: list[str], number: int, where: str) -> None:
    """Raise a `DataError` for a row of another length, or for an image in place of the header."""
    if len(row) != 3:
        raise DataError(f'{where}: {len(row)} columns, not 3 (path, "[labels]", split); {_SEE}')

    # Without a header the first image would silently be lost.
    if number == 1 and row[2].strip() in _SPLITS:
        raise DataError(
            f"{where}: an image, where a header is wanted; add one such as path,label,split, {_SEE}"
        )


def _roles(source: Path, names: Sequence[str]) -> Roles:
    """Read which of the classes are seen and which are unseen.

    Args:
        source: JSON file with the list "test class" and optionally the list "train class".
        names: all class names, in the order of the columns.

    Raises:
        DataError: A list is missing or is not a list of names.
    """
    content = read_json(source, _SEE)
    if not isinstance(content, dict):
        content = {}
    unseen, seen = content.get("test class", ""), content.get("train class")

    # The list of seen classes is optional: null and absence mean all other classes.
    lists = {"test class": unseen, "train class": [] if seen is None else seen}
    for key, class_list in lists.items():
        if not isinstance(class_list, list) or not all(
            isinstance(name, str) for name in class_list
        ):
            raise DataError(f"{source} has no list of names '{key}'; {_SEE}")

    return split_classes(names, unseen=unseen, seen=seen, where=f"{source} ({_SEE})")


_SPACE = b" \t\r\n"


def nuswide_official(
    *,
    root: str,
    images: str = "Flickr",
    val_images: str = "all",
    threshold: float = 0.5,
    words: VectorSettings = DEFAULT_VECTORS,
) -> Source:
    """Return NUS-WIDE zero-shot by its official lists: 925 seen tags and 81 unseen concepts.

    All classes are in alphabetical order. Training images without a seen tag are left out. The
    labels of a concept are the human ones: the 75 of the 1,000 tags that are also concepts are not
    used.

    Args:
        root: folder with ImageList, Groundtruth/TrainTestLabels, NUS_WID_Tags, ConceptsList and the
            images.
        images: folder of the images in `root`, with the listed names (actor/0001_2124494179.jpg) or
            with other names whose second part is the Flickr number
            (140016_215548610_422b79b4d7_m.jpg).
        val_images: "all", as in LESA and BiAM; or "unseen": only images with an unseen class.
        threshold: see `MultiLabel`.
        words: see `VectorSettings`. The columns of an array without a list of names beside it are
            the sorted classes.

    Raises:
        DataError: see `Source.load`.
        ValueError: An argument is out of range.
    """
    folder = check_folder(root, "NUS-WIDE", _SEE)
    concepts = folder / "ConceptsList" / "Concepts81.txt"
    where = f"{concepts} ({_SEE})"
    task = ZeroShot(
        roles=lambda names: split_classes(
            names, unseen=read_lines(concepts, _SEE), seen=None, where=where
        ),
        vectors=lambda names: words.of_classes(folder, names, order=names),
        val_images=val_images,
        where=f"{folder} ({_SEE})",
        threshold=threshold,
    )

    return Source(
        load=partial(_load_official_split, folder, images),
        train="Train",
        val="Test",
        task=task,
        where=folder,
        see=_SEE,
    )


def _load_official_split(root: Path, images: str, split: str, cache: TableCache) -> StoredImages:
    """Return the images of a split that are on the disk, with the labels of all classes."""
    concepts = _read_names(root / "ConceptsList" / "Concepts81.txt")
    sources = {
        "images": root / "ImageList" / f"{split}Imagelist.txt",
        "names": root / "NUS_WID_Tags" / "TagList1k.txt",
        "tags": root / "NUS_WID_Tags" / f"{split}_Tags1k.dat",
        **{concept: _concept_file(root, concept, split) for concept in concepts},
    }
    table = cache.table(
        f"nuswide-official-{split}",
        list(sources.values()),
        partial(_parse_official, sources, concepts),
    )

    # Most images are no longer on Flickr, and copies of the others have other names.
    files = _find(root / images, table.files)
    is_present = files != b""
    total = f"{len(table):,}"
    if not is_present.any():
        raise DataError(f"{root / images}: none of the {total} images of {split} is there; {_SEE}")
    if not is_present.all():
        first = table.files[np.flatnonzero(~is_present)[0]].decode()
        log.warning(
            "nuswide_official %s: %s of %s listed images are absent and left out, the first is %s",
            split,
            f"{np.count_nonzero(~is_present):,}",
            total,
            first,
        )

    present = table.select(is_present)
    return in_folder(Table(files[is_present], present.labels, present.classes), root / images, _SEE)


def _read_names(file: Path) -> list[str]:
    """Read a list of concepts or tags, one per line."""
    return [as_name(name, file, _SEE) for name in read_lines(file, _SEE)]


def _concept_file(root: Path, concept: str, split: str) -> Path:
    """Return the file with the human labels of a concept."""
    # The name comes from a file: it must not lead out of the folder.
    name = path_inside(concept, f"{root / 'ConceptsList' / 'Concepts81.txt'}", _SEE)
    return root / "Groundtruth" / "TrainTestLabels" / f"Labels_{name}_{split}.txt"


def _parse_official(sources: dict[str, Path], concepts: list[str]) -> Table:
    """Join the images, their tags and their concepts; the classes are in alphabetical order.

    Args:
        sources: the files of the "images", the "names" of the tags, the "tags" of the images, and
            of each concept by its name.
        concepts: the names of the concepts; a tag of the same name is not used.
    """
    image_list = sources["images"]
    files = []
    for number, line in enumerate(read_lines(image_list, _SEE), 1):
        files.append(path_inside(line, f"{image_list}, line {number:,}", _SEE))

    tags = _read_names(sources["names"])
    used_tags = [number for number, tag in enumerate(tags) if tag not in set(concepts)]
    names = sorted([*concepts, *(tags[number] for number in used_tags)])
    if len(set(names)) < len(names):
        raise DataError(f"{sources['names']}: a tag or concept is named twice; {_SEE}")

    # The columns of the tags in the file become columns of the sorted classes.
    labels = np.zeros((len(files), len(names)), np.int8)
    columns = [names.index(tags[number]) for number in used_tags]
    labels[:, columns] = _tags(sources["tags"], len(files), len(tags))[:, used_tags]

    for concept in concepts:
        # A 0 or 1 per line.
        text = read_bytes(sources[concept], _SEE)
        column = _zeros_and_ones(text, len(files), str(sources[concept]))
        labels[:, names.index(concept)] = column
    return Table(encode_paths(files), from_dense(labels), tuple(names))


def _tags(source: Path, num_images: int, num_tags: int) -> np.ndarray:
    """Read one line per image, of 0 and 1 with any white space between them: one per tag.

    Returns:
        int8 [num_images, num_tags].

    Raises:
        DataError: The file has another number of lines, or a line is not of 0 and 1.
    """
    # Line by line: the file is a third of a gigabyte.
    matrix = np.zeros((num_images, num_tags), np.int8)
    with reading(source, _SEE), open_binary(source) as file:
        number = 0
        for number, line in enumerate(file, 1):
            row = _zeros_and_ones(line, num_tags, f"{source}, line {number:,}")
            if number <= num_images:
                matrix[number - 1] = row

    # Surplus lines are counted, for the message.
    if number != num_images:
        raise DataError(f"{source} has {number:,} lines for {num_images:,} listed images; {_SEE}")
    return matrix


def _zeros_and_ones(text: bytes, count: int, where: str) -> np.ndarray:
    """Return the digits of a text of 0, 1 and white space, int8 [count].

    Raises:
        DataError: The text has another number of digits or other characters.
    """
    digits = np.frombuffer(text.translate(None, _SPACE), np.int8) - ord("0")
    if len(digits) != count or not np.isin(digits, (0, 1)).all():
        raise DataError(f"{where}: {len(digits):,} characters, not {count:,} of 0 and 1; {_SEE}")
    return digits


def _find(folder: Path, listed: np.ndarray) -> np.ndarray:
    """Find each listed image in the folder.

    An image has the listed path, or another name with the same Flickr number.

    Args:
        folder: folder of the images.
        listed: paths of the official list, bytes [N].

    Returns:
        The path of each image inside the folder, bytes [N]; empty where it is absent.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder} is not a folder; set data.images to the folder of the images, {_SEE}"
        )

    present: set[str] = set()
    for directory, _, files in os.walk(folder):
        inner = os.path.relpath(directory, folder)
        present |= {file if inner == "." else f"{inner}/{file}" for file in files}

    # Files without a Flickr number have the number "", which must find no image.
    by_number = {_flickr_number(path): path for path in sorted(present)}
    by_number[""] = ""

    paths = []
    for name in map(os.fsdecode, listed.tolist()):
        if name in present:
            paths.append(name)
        else:
            paths.append(by_number.get(_flickr_number(name), ""))
    return encode_paths(paths)


def _flickr_number(path: str) -> str:
    """Return the second part of a file name, the number of the image at Flickr; "" without one."""
    parts = path.rpartition("/")[2].partition(".")[0].split("_")
    return parts[1] if len(parts) > 1 else ""
