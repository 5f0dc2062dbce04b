"""YOLO datasets, as exported by Roboflow and CVAT. The labels are the classes of the boxes.

Paths follow the documentation of Ultralytics, https://docs.ultralytics.com/datasets/detect. The
forms of darknet (obj.names, train.txt and valid.txt), LabelImg and Label Studio (classes.txt) are
read as well.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from mldec.data.photos import (
    PhotoFinder,
    SkippedFiles,
    files_below,
    find_list,
    fold_case,
    user_entries,
)
from mldec.data.source import Source
from mldec.data.splits import HELD_OUT, HoldOut, check_val, log_split
from mldec.data.table import TableBuilder, path_inside
from mldec.data.tasks import multi_label
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, log, naming_errors, visible
from mldec.files.text import expect, read_lines, read_text, read_yaml
from mldec.names import abbreviate, check_names, format_list

NULL = ("", "null", "~")  # YAML without a value, read as text
# Class names, one per line, in the form of darknet, and of LabelImg and Label Studio.
LISTS = ("obj.names", "classes.txt")
SPLITS = ("train", "val", "valid", "test")


def yolo(
    *,
    root: str,
    file: str = "data.yaml",
    train: str = "train",
    val: str = "val",
    division: HoldOut = HELD_OUT,
    threshold: float = 0.5,
    skip_empty: bool = True,
) -> Source:
    """Return the images of a YOLO dataset, sorted by path, or in the order of a text file.

    Args:
        file: YAML file in `root`. If there is no data.yaml, the only YAML file is read. It has
            `names` (a list or a mapping of index to name), and for each split an image folder, a
            list of folders, or a text file with a path per line. The optional `path` is the parent
            of these folders.
        train: Key of the training split.
        val: Key of the validation split, such as "test".
        division: Held-out images if the dataset has a single split.
    """
    evaluator = multi_label(threshold, skip_empty=skip_empty)
    folder = check_folder(root, "the YAML file")
    source = folder / path_inside(file, "data.file")
    if file == "data.yaml" and not source.is_file():
        # Many data sets call the file dataset.yaml, or by their own name.
        entries = map(Path, user_entries(folder))
        files = [path for path in entries if path.suffix.lower() in (".yaml", ".yml")]
        lists = [folder / name for name in LISTS if (folder / name).is_file()]
        if lists and (not files or lists[0].name == LISTS[0]):
            files = lists[:1]
        if len(files) != 1:
            names = format_list([path.name for path in files]) or "no YAML file or classes.txt"
            raise DataError(f"{folder}: there is {names}; add data.file=NAME")
        source = files[0]

    def load(split: str, _: str | None) -> StoredImages:
        content = _read(source)
        present = [key for key in SPLITS if content.get(key)]
        # A single split is divided, except to evaluate all of it.
        if len(present) == 1 and val not in present:
            images = _load_split(folder, source, content, present[0])
            images = division.select(images, val=split == val)
            log.info(f"yolo: {source} has only {present[0]}: {len(images):,} images for {split}")
        else:
            if split == val:
                check_val(val, [key for key, value in content.items() if value], source)
            images = _load_split(folder, source, content, split)
        return log_split("yolo", split, images)

    return Source(load=load, train=train, val=val, where=source, evaluator=evaluator)


def _read(source: Path) -> dict[str, Any]:
    """Return the content of data.yaml, or the same content from a list of names and the folders."""
    if source.suffix not in (".names", ".txt"):
        with naming_errors(source, DataError, remedy="write keys such as train: FOLDER"):
            entries = expect(read_yaml(source, as_text=True), dict, "it")
            return {key: value for key, value in entries.items() if value not in NULL}
    # An empty line within the list is an error, because the next names have other indices.
    content: dict[str, Any] = {"names": read_text(source).rstrip().split("\n")}
    for name in SPLITS:
        if (source.parent / f"{name}.txt").is_file():
            content["val" if name == "valid" else name] = f"{name}.txt"
    # LabelImg and Label Studio have no splits.
    if len(content) == 1:
        content["train"] = "images" if (source.parent / "images").is_dir() else "."
    return content


def _load_split(folder: Path, source: Path, content: Mapping[str, Any], split: str) -> StoredImages:
    # There is no cache, because edited labels do not change the time of the folder.
    names = _class_names(content.get("names"), source)
    images: list[Path] = []
    skipped = SkippedFiles()
    for path in _paths(content, split, source):
        images += _images(path, skipped, source.parent)
    if skipped and not images:
        raise DataError(f"{source}, {split}: no supported image; {skipped}")

    # Two images may differ in their suffix only, and would share their labels without a word.
    folders = {parent: _label_folder(parent) for parent in {image.parent for image in images}}
    label_files: dict[Path, Path] = {}  # maps a label file to its image
    for image in images:
        file = folders[image.parent] / f"{image.stem}.txt"
        other = label_files.setdefault(file, image)
        if other != image:
            fault = f"{other} and {image} have the same label file {file}"
            raise DataError(f"{source}, {split}: {fault}; rename one of them")

    existing = _existing(label_files, f"yolo {split}")
    absent = label_files.keys() - existing
    for file in absent:
        # A common mistake would turn all photos into negatives.
        wrong = file.with_name(f"{label_files[file].name}.txt")
        if wrong.is_file():
            raise DataError(f"{wrong}: no image has this label file; rename it to {file.name}")
    if images and len(absent) == len(images):
        fault = f"none of {len(images):,} images has a label file"
        remedy = f"add files such as {next(iter(label_files))}"
        if not any(map(Path.exists, images)):
            fault = f"none of {len(images):,} listed images exists"
            remedy = f"correct paths such as {images[0]}"
        raise DataError(f"{source}, {split}: {fault}; {remedy}")

    # The common folder is `root`, or one of its parents if images are outside `root`.
    image_folder = Path(os.path.commonpath([folder, *folders]))
    builder = TableBuilder(classes=names)
    for image in images:
        file = folders[image.parent] / f"{image.stem}.txt"
        labels = {} if file in absent else _labels(existing[file], len(names))
        builder.add(str(image.relative_to(image_folder)), labels, f"{source}, {split}")

    skipped.log(f"yolo {split}")
    if absent:
        log.info(f"yolo {split}: {len(absent):,} images have no label file")
    return in_folder(builder.build(source), image_folder)


def _class_names(names: object, source: Path) -> tuple[str, ...]:
    if isinstance(names, dict) and set(names) == set(map(str, range(len(names)))):
        names = [names[index] for index in sorted(names, key=int)]
    if not isinstance(names, list) or not names:
        fault = f"names is {abbreviate(names)}"
        raise DataError(f"{source}: {fault}; list the names, or map 0, 1, ... to names")
    return check_names(names, source)


def _paths(content: Mapping[str, Any], split: str, source: Path) -> list[Path]:
    value: Any = content.get(split)
    entries: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, str) for entry in entries):
        fault = f"{split} is {abbreviate(value)}"
        raise DataError(f"{source}: {fault}; set an image folder, a list or a text file of paths")

    # `path` is often a folder on another machine. Roboflow writes ../train/images for a folder next
    # to data.yaml.
    paths = []
    base = source.parent / str(content.get("path") or "")
    for entry in entries:
        relative = entry.replace("\\", "/")
        candidates = [base / relative, base / relative.removeprefix("../")]
        candidates += [source.parent / relative, source.parent / relative.removeprefix("../")]
        # Folders of another computer lose leading folders, but never the name of the split: it must
        # not happen that train/images and valid/images both become images.
        inner = path_inside(relative, str(source), without_root=True)
        while PureWindowsPath(relative).root and any(name in inner for name in SPLITS):
            candidates.append(source.parent / inner)
            inner = inner.partition("/")[2]
        path = next(filter(Path.exists, candidates), None)
        if path is None:
            missing = os.path.normpath(candidates[0])
            raise DataError(f"{source}: {split}: {missing} does not exist; correct the path")
        paths.append(Path(os.path.normpath(path)))
    return paths


def _images(path: Path, skipped: SkippedFiles, folder: Path) -> list[Path]:
    """Return the images below a folder, or the images in a list. `folder` has data.yaml."""
    if path.is_dir():
        return list(map(Path, filter(skipped.accepts, files_below(path, skipped))))

    finder = PhotoFinder(path.parent)
    lines = [line.replace("\\", "/") for line in read_lines(path)]
    found = [finder.find(line, f"{path}, line {row}") for row, line in enumerate(lines, 1)]
    place = path.parent
    if any(found):
        names = [photo or line for photo, line in zip(found, lines, strict=True)]
    else:
        # Exports of CVAT name a folder "data" that the archive does not have.
        inner = [path_inside(line, str(path), without_root=True) for line in lines]
        place, names = find_list(inner, [place, folder])
    return [Path(os.path.normpath(place / name)) for name in names]


def _label_folder(folder: Path) -> Path:
    """Return the folder of the label files of an image folder.

    The last parent called "images", or JPEGImages as in VOC, is replaced by its sibling "labels".
    Label files are next to the images if there is no such folder.
    """
    for parent in (folder, *folder.parents):
        if parent.name.lower() in ("images", "jpegimages"):
            for name in ("labels", "Labels", "LABELS"):
                if parent.with_name(name).is_dir():
                    return parent.with_name(name) / folder.relative_to(parent)
    return folder


def _existing(label_files: Mapping[Path, Path], what: str) -> dict[Path, Path]:
    """Return the existing label files. Their names may differ in case or in their Unicode form.

    The keys are the expected files. Files without an image are counted in a warning.
    """
    folders = {file.parent: image.parent for file, image in label_files.items()}
    finders = {folder: PhotoFinder(folder) for folder in folders}
    existing = {}
    for file in label_files:
        name = finders[file.parent].find(file.name, file)
        # The label files of a.jpg and A.jpg may differ in case only.
        if name == file.name or (name and file.with_name(name) not in label_files):
            existing[file] = file.with_name(name)

    # Images of other splits may have their label files in the same folders.
    texts: set[Path] = set()
    of_images: set[str] = set()
    for folder in filter(Path.is_dir, {*folders, *folders.values()}):
        place = _label_folder(folder)
        for path in map(Path, user_entries(folder)):
            if path.suffix.lower() != ".txt":
                of_images.add(fold_case(str(place / path.stem)))
            elif folder in folders and path.stem not in ("classes", *SPLITS):
                texts.add(path)
    unused = sorted(path for path in texts if fold_case(str(path)[:-4]) not in of_images)
    if unused:
        example = visible(str(unused[0]))
        log.warning(f"{what}: {len(unused):,} label files have no image, such as {example}")
    return existing


def _labels(path: Path, num_classes: int) -> dict[int, int]:
    """Return the classes of a label file. The first number of each line is a class index."""
    labels = {}
    for number, line in enumerate(read_text(path).split("\n"), 1):
        fields = line.split()
        if not fields:
            continue

        # Some programs write the index as a decimal, such as 2.000000.
        index = re.fullmatch(r"(\d+)(\.0*)?", fields[0])
        if index is None or int(index[1]) >= num_classes:
            fault = f"the class {abbreviate(fields[0])} is not an index below {num_classes}"
            raise DataError(f"{path}, line {number}: {fault}; correct it")
        labels[int(index[1])] = 1
    return labels
