"""NUS-WIDE: zero-shot (925 seen tags, 81 unseen concepts) or multi-label (81 concepts).

Both are read from the CSV files of the authors of ML-Decoder and ASL, or from the official text
files. The 81 concepts are also read from the NumPy files of the papers on single positive labels.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Literal

import numpy as np

from mldec.data.cache import cached_table
from mldec.data.columns import PATHS
from mldec.data.labels import from_dense
from mldec.data.photos import SkippedFiles, files_below
from mldec.data.source import Source
from mldec.data.table import Table, TableBuilder, encode_paths, path_inside
from mldec.data.tasks import (
    DEFAULT_VECTORS,
    Roles,
    VectorSettings,
    ZeroShot,
    multi_label,
    split_classes,
)
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, log, naming_errors
from mldec.files.tables import read_table
from mldec.files.text import member, read_bytes, read_json, read_lines
from mldec.names import check_names, split_names

_SPLITS = ("train", "val")
_CONCEPTS = Path("ConceptsList", "Concepts81.txt")
_CONCEPT_NAMES = (
    "airport,animal,beach,bear,birds,boats,book,bridge,buildings,cars,castle,cat,cityscape,clouds,"
    "computer,coral,cow,dancing,dog,earthquake,elk,fire,fish,flags,flowers,food,fox,frost,garden,"
    "glacier,grass,harbor,horses,house,lake,leaf,map,military,moon,mountain,nighttime,ocean,person,"
    "plane,plants,police,protest,railroad,rainbow,reflection,road,rocks,running,sand,sign,sky,snow,"
    "soccer,sports,statue,street,sun,sunset,surf,swimmers,tattoo,temple,tiger,tower,town,toy,train,"
    "tree,valley,vehicle,water,waterfall,wedding,whales,window,zebra"
)
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
    """Return zero-shot NUS-WIDE: training on seen classes, validation on all, sorted by name.

    Source: official train_zsl_nus.py, with 1,006 classes, 925 of them seen.

    Args:
        root: Folder with the three files and the images.
        csv_file: CSV file with path, labels and split, identified by their order.
        split_file: JSON file with the unseen classes ("test class") and optionally the seen classes
            ("train class").
        val_images: "unseen": only images with an unseen class, as in the official code, or "all".
    """
    folder = check_folder(root, "NUS-WIDE")
    task = ZeroShot(
        roles=partial(_roles, folder / split_file),
        vectors=lambda names: words.of_classes(folder, names, order=names),
        val_images=val_images,
        where=str(folder / csv_file),
        threshold=threshold,
    )
    load = partial(_load_split, folder, csv_file)
    return Source(load=load, where=folder, evaluator=task.evaluator, zero_shot=task)


def nuswide81(
    *,
    root: str,
    csv_file: str = "nus_wid_data.csv",
    images: str = "Flickr",
    annotated_only: bool = False,
    numpy_lists: bool = False,
    threshold: float = 0.5,
) -> Source:
    """Return NUS-WIDE with the 81 concepts in alphabetical order.

    The CSV file of ASL has 119,103 training and 50,720 validation images, all with a concept. The
    official lists are used if it is absent. They have 161,789 and 107,859 images, with and without
    a concept. Images that are not on the disk are omitted.

    Args:
        root: Folder with the CSV file and its images, or with ImageList,
            Groundtruth/TrainTestLabels, ConceptsList and the images.
        csv_file: See `nuswide_zsl`.
        images: Image folder of the official and the NumPy lists, see `nuswide_official`.
        annotated_only: Omit images without concepts, as in ASL.
        numpy_lists: Read formatted_{train,val}_{images,labels}.npy in `root`, the lists of the
            papers on single positive labels (elijahcole/single-positive-multi-label).
    """
    evaluator = multi_label(threshold)
    folder = check_folder(root, "NUS-WIDE")
    load_all = partial(_load_split, folder, csv_file)
    train = "train"
    val = "val"
    if numpy_lists:
        load_all = partial(_load_numpy_split, folder, images)
    elif not (folder / csv_file).exists() and (folder / "ImageList").is_dir():
        load_all = partial(_load_official_split, folder, images, with_tags=False)
        train = "Train"
        val = "Test"

    def load(split: str, cache_dir: str | None) -> StoredImages:
        loaded = load_all(split, cache_dir)
        if annotated_only:
            loaded = loaded.select(loaded.labels.counts_per_image() > 0)
        return loaded

    return Source(load=load, train=train, val=val, where=folder, evaluator=evaluator)


def _load_split(root: Path, csv_file: str, split: str, cache_dir: str | None) -> StoredImages:
    source = root / csv_file
    table = cached_table(f"nuswide-{split}", [source], partial(_parse, source, split), cache_dir)
    log.info(f"nuswide {split}: {len(table):,} images, {len(table.classes):,} classes")
    return in_folder(table, root)


def _parse(source: Path, split: str) -> Table:
    """Return the images of a split. Labels are written "[sky, sun]" or "['sky', 'sun']"."""
    frame = read_table(source, PATHS)
    if len(frame.columns) != 3:
        fault = f"{len(frame.columns)} columns instead of path, label and split"
        raise DataError(f"{source}: {fault}; quote lists of labels")

    builder = TableBuilder()
    split_of_rows: list[str] = []
    for row, path, texts, split_of_row in frame.itertuples(name=None):
        where = f"{source}, row {row:,}"
        split_of_rows.append(split_of_row.strip())
        # Rows of other splits have no labels, and are added so that repeated images are detected.
        labels: list[str] = []
        if split_of_rows[-1] in _SPLITS:
            # An empty list gives one blank name, which is skipped. In the official code it becomes
            # a class of MultiLabelBinarizer and shifts all other columns.
            labels = split_names(texts.translate(_LIST_MARKS), ",", where)
        builder.add(path, dict.fromkeys(labels, 1), where)
    return builder.build(source).select(np.array(split_of_rows, str) == split)


def _roles(source: Path, names: Sequence[str]) -> Roles:
    """Read the unseen classes and the seen classes, by default all others."""
    if source.name == _CONCEPTS.name:
        content = {"test class": read_lines(source)}
    else:
        content = read_json(source)
    with naming_errors(source, DataError, remedy="restore it"):
        unseen = member(content, "test class", list)
        seen = member(content, "train class", list) if "train class" in content else None
        return split_classes(names, unseen=unseen, seen=seen, where=str(source))


def nuswide_official(
    *,
    root: str,
    images: str = "Flickr",
    val_images: Literal["unseen", "all"] = "all",
    threshold: float = 0.5,
    words: VectorSettings = DEFAULT_VECTORS,
) -> Source:
    """Return zero-shot NUS-WIDE from the official lists: 925 seen tags, 81 unseen concepts.

    All classes are in alphabetical order. Training images without a seen tag are omitted. The
    labels of concepts are human annotations. The 75 of 1,000 tags that are also concepts are not
    used.

    Args:
        root: Folder with ImageList, Groundtruth/TrainTestLabels, NUS_WID_Tags, ConceptsList and the
            images.
        images: Image folder in `root`. File names are the listed names, such as
            actor/0001_2124494179.jpg, or have the Flickr number as their second part, such as
            140016_215548610_422b79b4d7_m.jpg.
        val_images: "all", as in LESA and BiAM, or "unseen": only images with an unseen class.
    """
    folder = check_folder(root, "NUS-WIDE")
    task = ZeroShot(
        roles=partial(_roles, folder / _CONCEPTS),
        vectors=lambda names: words.of_classes(folder, names, order=names),
        val_images=val_images,
        where=str(folder),
        threshold=threshold,
    )
    load = partial(_load_official_split, folder, images, with_tags=True)
    source = Source(load=load, where=folder, evaluator=task.evaluator, zero_shot=task)
    return replace(source, train="Train", val="Test")


def _load_official_split(
    root: Path, images: str, split: str, cache_dir: str | None, *, with_tags: bool
) -> StoredImages:
    concepts = read_lines(root / _CONCEPTS)
    sources = [root / "ImageList" / f"{split}Imagelist.txt", root / _CONCEPTS]
    labels = root / "Groundtruth" / "TrainTestLabels"
    sources += [labels / f"Labels_{concept}_{split}.txt" for concept in concepts]
    if with_tags:
        tags = root / "NUS_WID_Tags"
        sources += [tags / "TagList1k.txt", tags / f"{split}_Tags1k.dat"]
    parse = partial(_parse_official, sources, concepts)
    table = cached_table(f"nuswide-official-{split}", sources, parse, cache_dir)
    return _present_images(table, root / images, split)


def _load_numpy_split(root: Path, images: str, split: str, cache_dir: str | None) -> StoredImages:
    """Return the existing images of a split of the NumPy lists."""
    sources = [root / f"formatted_{split}_{content}.npy" for content in ("images", "labels")]
    parse = partial(_parse_numpy, *sources)
    table = cached_table(f"nuswide-numpy-{split}", sources, parse, cache_dir)
    return _present_images(table, root / images, split)


def _parse_numpy(image_list: Path, label_file: Path) -> Table:
    """Return the images with concepts. The columns are assumed to be in alphabetical order."""
    with naming_errors(image_list, DataError, remedy="restore it"):
        files = []
        for number, path in enumerate(np.load(image_list, allow_pickle=False).tolist(), 1):
            files.append(path_inside(path, f"{image_list}, image {number:,}"))

    classes = tuple(_CONCEPT_NAMES.split(","))
    with naming_errors(label_file, DataError, remedy="restore it"):
        matrix = np.load(label_file, allow_pickle=False)
        shape = (len(files), len(classes))
        if matrix.shape != shape:
            raise ValueError(f"its shape is {matrix.shape}, and the list has {shape}")
        labels = from_dense((matrix == 1).astype(np.int8))
    return Table(encode_paths(files), labels, classes)


def _present_images(table: Table, folder: Path, split: str) -> StoredImages:
    """Return the images of a table that are in a folder."""
    if not folder.is_dir():
        raise DataError(f"data.images: {folder} is not a folder; set it to the image folder")
    skipped = SkippedFiles()
    present = {Path(path).relative_to(folder).as_posix() for path in files_below(folder, skipped)}
    skipped.log("nuswide")

    # Most images are no longer on Flickr, and copies of the dataset have other file names with the
    # same Flickr number. Files without a number have the number "", which must not match.
    by_number = {_flickr_number(path): path for path in sorted(present)}
    by_number[""] = ""
    paths = []
    for name in map(os.fsdecode, table.files.tolist()):
        paths.append(name if name in present else by_number.get(_flickr_number(name), ""))
    files = encode_paths(paths)
    is_present = files != b""
    if not is_present.all():
        count = f"{np.count_nonzero(~is_present):,} of {len(table):,} listed images are absent"
        log.warning(f"nuswide {split}: {count} and left out")

    table = replace(table, files=files).select(is_present)
    log.info(f"nuswide {split}: {len(table):,} images, {len(table.classes):,} classes")
    return in_folder(table, folder)


def _parse_official(sources: list[Path], concepts: list[str]) -> Table:
    image_list, names_file, *label_files = sources
    files = []
    for number, line in enumerate(read_lines(image_list), 1):
        files.append(path_inside(line, f"{image_list}, line {number:,}"))

    columns = []
    for concept, source in zip(concepts, label_files, strict=False):
        columns.append((concept, _zeros_and_ones(source, (len(files),))))
    tag_files = label_files[len(concepts) :]
    if tag_files:
        names_file, tags_of_images = tag_files
        tags = read_lines(names_file)
        matrix = _zeros_and_ones(tags_of_images, (len(files), len(tags)))
        for tag, labels_of_tag in zip(tags, matrix.T, strict=True):
            if tag not in concepts:
                columns.append((tag, labels_of_tag))

    columns.sort(key=itemgetter(0))
    names, labels_of_classes = zip(*columns, strict=True)
    labels = from_dense(np.stack(labels_of_classes, axis=1))
    return Table(encode_paths(files), labels, check_names(names, names_file))


def _zeros_and_ones(source: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read a whitespace-separated file of 0 and 1 as int8 with the given shape."""
    text = read_bytes(source)
    with naming_errors(source, DataError, remedy="restore it"):
        digits = np.frombuffer(text.translate(None, b" \t\r\n"), np.int8)
        return digits.reshape(shape) - ord("0")


def _flickr_number(path: str) -> str:
    """Return the Flickr number of a file, the second part of its name, or ""."""
    parts = path.rpartition("/")[2].partition(".")[0].split("_")
    return parts[1] if len(parts) > 1 else ""
