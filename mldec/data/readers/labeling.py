"""Exports of labeling tools: Label Studio (JSON), CVAT for images 1.1 (XML) and FiftyOne (JSON)."""

import logging
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

from mldec.data.images import READ
from mldec.data.settings import Source
from mldec.data.splits import HoldOut, check_val, log_split
from mldec.data.table import TableBuilder, path_inside
from mldec.data.tasks import multi_label, partial_labels
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, naming_errors
from mldec.files.text import read_bytes, read_json
from mldec.names import abbreviate, as_name, check_names, format_list, given_names

log = logging.getLogger("mldec")

# Eight hexadecimal digits that Label Studio puts before the names of uploaded files.
_UPLOAD = re.compile(r"[0-9a-f]{8}-(?=.)")

Levels = Literal["leaves", "paths", "all"]


@dataclass(frozen=True, kw_only=True)
class ExportSettings(HoldOut):
    """Settings of a `data` node with the export of a labeling tool."""

    file: str  # name of the export in `root`, or in each of root/train and root/val
    images: str = ""  # folder in `root` that contains the images
    # class names in order, or a text file with one name per line; null: the sorted labels
    classes: str | list[str] | None = None
    train: str = "train"  # name of the training split
    val: str = "val"  # name of the validation split
    threshold: float = 0.5  # see `multi_label`
    skip_empty: bool = True  # see `multi_label`


@dataclass
class Export:
    """The images of one or more exports, in order."""

    classes: list[str] = field(default_factory=list)  # declared classes
    # Path or address, labels (1 or -1), file and task for messages, and lowercase split.
    images: list[tuple[str, dict[str, int], str, str]] = field(default_factory=list)
    unlabeled: int = 0  # number of unlabeled images, which are left out
    ignored: Counter[str] = field(default_factory=Counter)  # unsupported annotations by type


def label_studio(
    *,
    root: str,
    export: ExportSettings = ExportSettings(file="export.json"),
    image_key: str = "image",
    control: str | None = None,
    levels: Levels = "leaves",
    disagreement: Literal["majority", "unknown"] = "majority",
) -> Source:
    """Return the labeled images of a JSON export of Label Studio.

    The labels are choices and taxonomies of whole images. Skipped (cancelled) annotations, drafts
    and predictions are ignored. A task without an annotation is left out. A submitted annotation
    without a choice is a negative of every class.

    Args:
        image_key: Key of the image in the data of a task.
        control: Name of the control with the labels; None for all controls.
        levels: Labels of a taxonomy such as Animal/Dog. "leaves": Dog. "paths": Animal/Dog. "all":
            Animal and Dog.
        disagreement: Labels of a task with several annotations. "majority": chosen in at least half
            of them. "unknown": not annotated (-1) unless all agree. Annotations that are marked as
            ground truth replace the others.
    """

    def parse(path: Path, found: Export, split: str) -> None:
        tasks = read_json(path)
        if not isinstance(tasks, list):
            raise DataError(f"{path}: it is not a list of tasks; export it as JSON")
        for number, task in enumerate(tasks, 1):
            where = f"{path}, task {number}"
            with naming_errors(where, DataError, remedy="export it as JSON, not as JSON-MIN"):
                address = task["data"].get(image_key)
                if not isinstance(address, str):
                    keys = abbreviate(", ".join(task["data"]))
                    fault = f"data.image_key={image_key} is not an image among the keys {keys}"
                    raise DataError(f"{where}: {fault}; set data.image_key")
                done = [item for item in task["annotations"] if not item.get("was_cancelled")]
                done = [item for item in done if item.get("ground_truth")] or done
                votes: Counter[str] = Counter()
                for annotation in done:
                    results = annotation["result"]
                    votes.update(_choices(results, control, levels, where, found.ignored))
                if not done:
                    found.unlabeled += 1
                    continue
                labels = {}
                for name, count in votes.items():
                    if disagreement == "unknown" and count < len(done):
                        labels[name] = -1
                    elif 2 * count >= len(done):
                        labels[name] = 1
                found.images.append((_path(address), labels, where, split))

    source = _source("label_studio", root, export, parse, [""])
    if disagreement == "unknown":
        source = replace(source, evaluator=partial_labels(export.threshold))
    return source


def _choices(
    results: Sequence[Any], control: str | None, levels: Levels, where: str, ignored: Counter[str]
) -> set[str]:
    names: list[object] = []
    for result in results:
        if control not in (None, result.get("from_name")):
            continue
        kind = result["type"]
        value = result.get("value", {})
        if kind not in ("choices", "taxonomy") or "x" in value or "points" in value:
            ignored[kind] += 1
        elif kind == "choices":
            names += value["choices"]
        else:
            for path in value["taxonomy"]:
                if levels == "paths":
                    names.append("/".join(path))
                else:
                    names += path if levels == "all" else path[-1:]
    return {as_name(name, where) for name in names}


def cvat(
    *,
    root: str,
    export: ExportSettings = ExportSettings(file="annotations.xml"),
    untagged: Literal["skip", "negative"] = "skip",
) -> Source:
    """Return the images of an export "CVAT for images 1.1". The labels are the tags of images.

    Shapes and attributes are ignored. The subsets of a project are splits.

    Args:
        untagged: "skip" leaves out images without a tag, because the file does not record if they
            were seen. "negative": they are negatives of every class.
    """

    def parse(path: Path, found: Export, split: str) -> None:
        content = read_bytes(path)
        with naming_errors(path, DataError, remedy="export it as CVAT for images 1.1"):
            document = ElementTree.fromstring(content)
            if document.tag != "annotations" or document.find("track") is not None:
                raise ValueError("it is not an export of images")
            for label in document.iterfind("meta//labels/label"):
                # Shapes have no image labels.
                if label.findtext("type", "tag") in ("tag", "any"):
                    found.classes.append(label.findtext("name", ""))
            for image in document.iterfind("image"):
                where = f"{path}, image {image.attrib['id']}"
                subset = split or image.get("subset", "").lower()
                tags = {as_name(tag.get("label"), where): 1 for tag in image.iterfind("tag")}
                found.ignored.update(item.tag for item in image if item.tag != "tag")
                _add(found, image.attrib["name"], tags, where, subset, untagged)

    return _source("cvat", root, export, parse, ["", "images/", "images/{split}/"])


def fiftyone(
    *,
    root: str,
    export: ExportSettings = ExportSettings(file="labels.json"),
    untagged: Literal["skip", "negative"] = "skip",
) -> Source:
    """Return the images of a FiftyOneImageClassificationDataset with one or more labels per image.

    Args:
        untagged: See `cvat`. FiftyOne also writes null for an empty list of labels.
    """

    def parse(path: Path, found: Export, split: str) -> None:
        content = read_json(path)
        with naming_errors(path, DataError, remedy="export a FiftyOneImageClassificationDataset"):
            classes = content.get("classes") or []
            found.classes += classes
            # The keys are paths without their extension.
            files = {}
            for image in sorted(path.parent.rglob("*")):
                if image.suffix.lower() in READ:
                    name = image.relative_to(path.parent)
                    files[name.with_suffix("").as_posix()] = name.as_posix()
            for key, value in content["labels"].items():
                where = f"{path}, label {key}"
                labels = {}
                for item in value if isinstance(value, list) else [value]:
                    label = item["label"] if isinstance(item, dict) else item
                    if label is not None:
                        is_index = isinstance(label, int) and classes
                        labels[as_name(classes[label] if is_index else label, where)] = 1
                file = files.get(f"data/{key}", files.get(key, key))
                _add(found, file, labels, where, split, untagged)

    return _source("fiftyone", root, export, parse, ["", "data/", "{split}/", "{split}/data/"])


def _add(
    found: Export, path: str, labels: dict[str, int], where: str, split: str, untagged: str
) -> None:
    if labels or untagged == "negative":
        found.images.append((path, labels, where, split))
    else:
        found.unlabeled += 1


def _path(address: str) -> str:
    """Return the path in an address of Label Studio: a URL, an upload or a local file."""
    parts = urlsplit(address)
    if not parts.scheme and not address.startswith("/"):
        return address
    if parts.path.endswith("/local-files/"):
        return parse_qs(parts.query).get("d", [""])[0]
    return unquote(parts.path)


def _find(path: str, folder: Path, prefixes: Iterable[str]) -> str:
    """Return the longest end of a path that is a file in the folder, or else the whole path."""
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".")]
    if ".." in parts or not parts:
        return path
    ends = ["/".join(parts[start:]) for start in range(len(parts))]
    if _UPLOAD.match(parts[-1]):
        ends.append(_UPLOAD.sub("", parts[-1]))
    for end in ends:
        for prefix in prefixes:
            if (folder / prefix / end).is_file():
                return prefix + end
    return ends[0]


def _source(
    name: str,
    root: str,
    export: ExportSettings,
    parse: Callable[[Path, Export, str], None],
    prefixes: list[str],
) -> Source:
    """Return the source of an export. `prefixes` are folders of images inside `data.images`."""
    folder = check_folder(root, "the export")
    image_folder = folder / path_inside(export.images or ".", "data.images")
    names = given_names(export.classes, folder)
    file = path_inside(export.file, "data.file", folder=folder)
    path = folder / file
    train = export.train.lower()
    val = export.val.lower()

    def load(part: str, _: str | None) -> StoredImages:
        found = Export()
        has_files = not path.is_file() and (folder / export.train / file).is_file()
        if has_files:
            for split in (export.train, export.val):
                parse(folder / split / file, found, split.lower())
        else:
            parse(path, found, "")

        classes = names
        if names is None and found.classes:
            classes = check_names(dict.fromkeys(found.classes), path)
        builder = TableBuilder(classes=classes, folder=image_folder)
        splits = []
        for image, labels, where, split in found.images:
            places = [prefix.format(split=split) for prefix in prefixes]
            builder.add(_find(image, image_folder, places), labels, where)
            splits.append(split)
        if not splits:
            raise DataError(f"{path}: none of {found.unlabeled:,} images is labeled; label some")
        table = builder.build(path)

        if has_files or (train in splits and len(set(splits)) > 1):
            if part == export.val:
                check_val(val, splits, path)
            wanted = train if part == export.train else val
            table = table.select(np.array(splits) == wanted)
        else:
            table = export.select(table, val=part == export.val)
        if part == export.val:
            log.info(f"{name}: {found.unlabeled:,} images without a label are left out")
            if found.ignored:
                kinds = [f"{count:,} {kind}" for kind, count in found.ignored.most_common()]
                log.warning(f"{name}: ignored annotations: {format_list(kinds)}")
        log_split(name, part, table)
        return in_folder(table, image_folder)

    evaluator = multi_label(export.threshold, skip_empty=export.skip_empty)
    source = Source(load=load, train=export.train, val=export.val, where=path, evaluator=evaluator)
    return replace(source, folder_setting="data.images")
