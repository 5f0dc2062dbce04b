"""NUS-WIDE, zero-shot (925 seen tags, 81 unseen concepts) or with the 81 concepts alone.

Either form is read from a CSV of images, labels and splits, as the authors of ML-Decoder and ASL
share it, or from the text files of the makers.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Literal

import numpy as np

from mldec.data.cache import cached_table
from mldec.data.labels import from_dense
from mldec.data.settings import DEFAULT_VECTORS, LoadSplit, Source, VectorSettings
from mldec.data.table import Table, TableBuilder, encode_paths, path_inside
from mldec.data.tasks import MultiLabel, Roles, ZeroShot, split_classes
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, refusing
from mldec.files.text import csv_rows, open_binary, read_bytes, read_json, read_lines, reading
from mldec.names import check_names, split_names

log = logging.getLogger("mldec")

_SEE = "see DATASETS.md, section NUS-WIDE"
_SPLITS = ("train", "val")
_CONCEPTS = Path("ConceptsList", "Concepts81.txt")
_LIST_MARKS = str.maketrans("", "", "[]'\"")


def nuswide_zsl(
    *,
    root: str,
    csv_file: str = "data.csv",
    split_file: str = "benchmark_81_v0.json",
    val_images: Literal["unseen", "all"] = "unseen",
    threshold: float = 0.5,
    words: VectorSettings = DEFAULT_VECTORS,
) -> Source:
    """Return NUS-WIDE zero-shot: training on the seen classes, validation on all, sorted by name.

    Source: official train_zsl_nus.py; its files have 1,006 classes, 925 of them seen.

    Args:
        root: folder with the three files and the images that the CSV names.
        csv_file: image path, labels and split of each image. The columns are known by their order,
            not by their names.
        split_file: JSON with the unseen classes, "test class", and optionally the seen ones, "train
            class".
        val_images: "unseen": only images with an unseen class, as in the official code; or "all".
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


def nuswide81(
    *,
    root: str,
    csv_file: str = "nus_wid_data.csv",
    images: str = "Flickr",
    annotated_only: bool = False,
    threshold: float = 0.5,
) -> Source:
    """Return NUS-WIDE with the 81 concepts, in alphabetical order, in one of two forms.

    ASL's CSV has 119,103 training and 50,720 validation images, each with a concept. If it is
    absent, the makers' lists are read: 161,789 and 107,859 images, with and without a concept, of
    which those that are not on the disk are left out.

    Args:
        root: folder with the CSV and the images that it names; or with ImageList,
            Groundtruth/TrainTestLabels, ConceptsList and the images.
        csv_file: as of `nuswide_zsl`.
        images: of the makers' form, as of `nuswide_official`.
        annotated_only: leave out images without any concept, as ASL does.
    """
    task = MultiLabel(threshold)
    folder = check_folder(root, "NUS-WIDE", _SEE)
    load_all: LoadSplit = partial(_load_split, folder, csv_file)
    train, val = "train", "val"
    if not (folder / csv_file).exists() and (folder / "ImageList").is_dir():
        load_all = partial(_load_official_split, folder, images, with_tags=False)
        train, val = "Train", "Test"

    def load(split: str, cache_dir: str | None) -> StoredImages:
        listed = load_all(split, cache_dir)
        if not annotated_only:
            return listed
        return listed.select(listed.labels.counts_per_image() > 0)

    return Source(load=load, train=train, val=val, task=task, where=folder, see=_SEE)


def _load_split(root: Path, csv_file: str, split: str, cache_dir: str | None) -> StoredImages:
    """Return the images of a split of a CSV file."""
    source = root / csv_file
    table = cached_table(
        f"nuswide-{split}", [source], partial(_parse, source, split), cache_dir, _SEE
    )
    log.info(f"nuswide {split}: {len(table):,} images, {len(table.classes):,} classes")
    return in_folder(table, root, _SEE)


def _parse(source: Path, split: str) -> Table:
    """Return the images of a split; the labels in a row are "[sky, sun]" or "['sky', 'sun']"."""
    # A torch file is a zip archive, which starts with PK.
    with reading(source, _SEE), open_binary(source) as file:
        if file.read(2) == b"PK":
            raise DataError(
                f"{source} is not text but a torch file: the official README swaps the links of "
                f"data.csv and wordvec_array.pth; swap the two files back, {_SEE}"
            )

    builder = TableBuilder(_SEE)
    split_of_rows: list[str] = []
    for number, (line, fields) in enumerate(csv_rows(source, _SEE)):
        where = f"{source}, row {line:,}"
        if len(fields) != 3:
            fault = "it is not path,label,split, with quotes around several labels"
            raise DataError(f"{where}: {fault}; {_SEE}")
        if number == 0:  # the header
            continue

        # An empty list gives one blank name. The official MultiLabelBinarizer makes a class of it,
        # which shifts all other columns; here it is no label.
        labels = split_names(fields[1].translate(_LIST_MARKS), ",", where, _SEE)
        split_of_rows.append(fields[2].strip())

        # Rows of other splits have no labels; the builder refuses an image that is in two splits.
        used = labels if split_of_rows[-1] in _SPLITS else []
        builder.add(fields[0], dict.fromkeys(used, 1), where)
    return builder.build(source).select(np.array([name == split for name in split_of_rows], bool))


def _roles(source: Path, names: Sequence[str]) -> Roles:
    """Read which classes are unseen, and maybe which are seen: else these are all others."""
    if source.name == _CONCEPTS.name:
        content = {"test class": read_lines(source, _SEE)}
    else:
        content = read_json(source, _SEE)
    with refusing(source, DataError, remedy=f"it is no list of classes, {_SEE}"):
        unseen, seen = content["test class"], content.get("train class")
        return split_classes(names, unseen=unseen, seen=seen, where=f"{source} ({_SEE})")


def nuswide_official(
    *,
    root: str,
    images: str = "Flickr",
    val_images: Literal["unseen", "all"] = "all",
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
    """
    folder = check_folder(root, "NUS-WIDE", _SEE)
    task = ZeroShot(
        roles=partial(_roles, folder / _CONCEPTS),
        vectors=lambda names: words.of_classes(folder, names, order=names),
        val_images=val_images,
        where=f"{folder} ({_SEE})",
        threshold=threshold,
    )
    load = partial(_load_official_split, folder, images, with_tags=True)
    return Source(load=load, train="Train", val="Test", task=task, where=folder, see=_SEE)


def _load_official_split(
    root: Path, images: str, split: str, cache_dir: str | None, *, with_tags: bool
) -> StoredImages:
    """Return the images of a split that are on the disk, with the concepts and maybe the tags."""
    concepts = read_lines(root / _CONCEPTS, _SEE)
    sources = [root / "ImageList" / f"{split}Imagelist.txt", root / _CONCEPTS]
    labels = root / "Groundtruth" / "TrainTestLabels"
    sources += [labels / f"Labels_{concept}_{split}.txt" for concept in concepts]
    if with_tags:
        tags = root / "NUS_WID_Tags"
        sources += [tags / "TagList1k.txt", tags / f"{split}_Tags1k.dat"]
    parse = partial(_parse_official, sources, concepts)
    table = cached_table(f"nuswide-official-{split}", sources, parse, cache_dir, _SEE)

    # Most images are no longer on Flickr, and copies of the others have other names.
    files = _find(root / images, table.files)
    is_present = files != b""
    if not is_present.all():
        count = f"{np.count_nonzero(~is_present):,} of {len(table):,} listed images are absent"
        first = table.files[np.flatnonzero(~is_present)[0]].decode()
        log.warning(f"nuswide {split}: {count} and left out, the first is {first}")

    present = table.select(is_present)
    log.info(f"nuswide {split}: {len(present):,} images, {len(table.classes):,} classes")
    return in_folder(replace(present, files=files[is_present]), root / images, _SEE)


def _parse_official(sources: list[Path], concepts: list[str]) -> Table:
    """Join the images, their concepts and their tags; the classes are in alphabetical order.

    The sources are the images, the names of the concepts, the labels of each concept, and
    optionally the names and the labels of the tags. A tag with the name of a concept is not used.
    """
    image_list, name_list, *label_files = sources
    files = []
    for number, line in enumerate(read_lines(image_list, _SEE), 1):
        files.append(path_inside(line, f"{image_list}, line {number:,}", _SEE))

    pairs = zip(concepts, label_files, strict=False)
    columns = [(concept, _zeros_and_ones(source, (len(files),))) for concept, source in pairs]
    if tag_files := label_files[len(concepts) :]:
        name_list, tags_of_images = tag_files
        tags = read_lines(name_list, _SEE)
        matrix = _zeros_and_ones(tags_of_images, (len(files), len(tags)))
        for tag, labels_of_tag in zip(tags, matrix.T, strict=True):
            if tag not in concepts:
                columns.append((tag, labels_of_tag))

    columns.sort(key=itemgetter(0))
    names = check_names((name for name, _ in columns), name_list, _SEE)
    labels = np.stack([column for _, column in columns], axis=1)
    return Table(encode_paths(files), from_dense(labels), names)


def _zeros_and_ones(source: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read a file of 0 and 1 with any white space between them, int8 of this shape."""
    text = read_bytes(source, _SEE)
    with refusing(source, DataError, remedy=f"it is not of 0 and 1, {_SEE}"):
        digits = np.frombuffer(text.translate(None, b" \t\r\n"), np.int8)
        return digits.reshape(shape) - ord("0")


def _find(folder: Path, listed: np.ndarray) -> np.ndarray:
    """Find the path of each image, bytes [N]: as listed, of the same Flickr number, or empty."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; set data.images to that of the images, {_SEE}")

    present: set[str] = set()
    for directory, _, files in os.walk(folder):
        inner = os.path.relpath(directory, folder)
        prefix = "" if inner == "." else f"{inner}/"
        present.update(prefix + file for file in files)

    # Files without a Flickr number have the number "", which must find no image.
    by_number = {_flickr_number(path): path for path in sorted(present)} | {"": ""}
    names = map(os.fsdecode, listed.tolist())
    return encode_paths(
        [name if name in present else by_number.get(_flickr_number(name), "") for name in names]
    )


def _flickr_number(path: str) -> str:
    """Return the second part of a file name, the number of the image at Flickr; "" without one."""
    parts = path.rpartition("/")[2].partition(".")[0].split("_")
    return parts[1] if len(parts) > 1 else ""
