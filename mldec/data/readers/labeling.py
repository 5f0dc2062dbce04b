"""Exports of labeling tools: Label Studio (JSON), CVAT for images 1.1 (XML) and FiftyOne (JSON).

Predictions are written in the first two formats, to be imported by the tools.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote, unquote_plus, urlsplit
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from mldec.data.photos import PhotoFinder
from mldec.data.source import Source
from mldec.data.splits import HoldOut, check_val, log_split
from mldec.data.table import TableBuilder, path_inside
from mldec.data.tasks import multi_label, partial_labels
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, log, naming_errors, print_error
from mldec.files.text import expect, member, read_bytes, read_json
from mldec.names import abbreviate, as_name, check_names, format_list, given_names

# Eight hexadecimal digits that Label Studio puts before the names of uploaded files.
_UPLOAD = re.compile(r"\A[0-9a-f]{8}-(?=.)")

_NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, 2.2

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


@dataclass(frozen=True)
class Entry:
    """An image of an export."""

    paths: list[str]  # possible paths, the most probable one first
    labels: dict[str, int]  # 1, or -1 for not annotated
    where: str  # file and entry, for messages
    split: str = ""
    folders: tuple[str, ...] = ()  # where the image is searched first, such as its subset


@dataclass
class Export:
    """The images of one or more exports, in order."""

    classes: list[object] = field(default_factory=list)  # declared classes
    images: list[Entry] = field(default_factory=list)
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
        with naming_errors(path, DataError, remedy="export a list of tasks as JSON"):
            tasks = expect(read_json(path), list, "it")
        for number, task in enumerate(tasks, 1):
            where = f"{path}, task {number}"
            with naming_errors(where, DataError, remedy="export it as JSON, not as JSON-MIN"):
                data = member(task, "data", dict)
                address = data.get(image_key)
                if not isinstance(address, str):
                    keys = abbreviate(", ".join(data))
                    fault = f"data.image_key={image_key} is not an image among the keys {keys}"
                    raise DataError(f"{where}: {fault}; set data.image_key")
                if address.startswith("data:"):
                    fault = f"the image is embedded ({address[:30]}...)"
                    raise DataError(f"{where}: {fault}; save it as a file, and name the file")
                done = member(task, "annotations", list)
                done = [item for item in done if not item.get("was_cancelled")]
                # A reviewer marks the annotation that is to replace the others.
                done = [item for item in done if item.get("ground_truth")] or done
                votes: Counter[str] = Counter()
                for annotation in done:
                    results = member(annotation, "result", list)
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
                found.images.append(Entry(studio_paths(address), labels, where, split))

    source = _source("label_studio", root, export, parse)
    if disagreement == "unknown":
        source = replace(source, evaluator=partial_labels(export.threshold))
    return source


def _choices(
    results: list[Any], control: str | None, levels: Levels, where: str, ignored: Counter[str]
) -> set[str]:
    names: list[object] = []
    for result in results:
        kind = member(result, "type", str)
        value = result.get("value", {})
        if control not in (None, result.get("from_name")):
            continue
        if kind not in ("choices", "taxonomy") or "x" in value or "points" in value:
            ignored[kind] += 1
        elif kind == "choices":
            names += member(value, "choices", list)
        else:
            for path in member(value, "taxonomy", list):
                expect(path, list, "an item of the taxonomy")
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
        # The export of a project lists its tasks, and each image has the id of its task.
        tasks = {task.findtext("id", ""): task.findtext("name") for task in document.iter("task")}
        for number, image in enumerate(document.iterfind("image")):
            task = tasks.get(image.get("task_id", "?"))
            where = f"{path}, image {image.get('id', number)}"
            if task is not None:
                where += f" of task {task}"
            with naming_errors(where, DataError, remedy="export it as CVAT for images 1.1"):
                tags = {as_name(tag.get("label"), where): 1 for tag in image.iterfind("tag")}
                found.ignored.update(item.tag for item in image if item.tag != "tag")
                # Images of several tasks may have the same name. Each subset has its folder.
                subset = image.get("subset") or "default"
                folders = tuple(
                    f"images/{name}/" for name in (task or subset, subset.lower(), subset)
                )
                entry = Entry([image.attrib["name"]], tags, where, split or subset.lower(), folders)
                _add(found, entry, untagged)

    return _source("cvat", root, export, parse)


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
        remedy = "export a FiftyOneImageClassificationDataset"
        with naming_errors(path, DataError, remedy=remedy):
            classes = check_names(expect(content.get("classes") or [], list, "classes"), path)
            found.classes += classes
            entries = member(content, "labels", dict)
        for key, value in entries.items():
            where = f"{path}, label {key}"
            with naming_errors(where, DataError, remedy=remedy):
                labels = {}
                for item in value if isinstance(value, list) else [value]:
                    label = member(item, "label", object) if isinstance(item, dict) else item
                    if type(label) is int and classes:
                        if label not in range(len(classes)):
                            raise ValueError(f"{label} is not an index below {len(classes)}")
                        label = classes[label]
                    if label is not None:
                        labels[as_name(label, where)] = 1
                # The keys are paths without their extension.
                _add(found, Entry([f"data/{key}", key], labels, where, split), untagged)

    return _source("fiftyone", root, export, parse)


def _add(found: Export, entry: Entry, untagged: str) -> None:
    if entry.labels or untagged == "negative":
        found.images.append(entry)
    else:
        found.unlabeled += 1


def studio_address(prefix: str, path: str) -> str:
    """Return the address of a path for Label Studio; `studio_paths` is the inverse function.

    Browsers and the query of local files decode an address, so its path is quoted. Label Studio
    reads the keys of object storage, such as s3://, as they are.
    """
    is_url = prefix.startswith(("/", "http://", "https://"))
    return prefix + (quote(path) if is_url else path)


def studio_tasks(rows: Iterable[Mapping[str, Any]], prefix: str) -> Iterator[dict[str, Any]]:
    """Yield Label Studio tasks with predictions, for images without an error.

    The names are those of the template for image classification: choices called `choice` of an
    image called `image`. The score of a prediction is the lowest score of its classes. A row has
    `image`, and `error` or the lists `classes` and `scores`. `prefix` precedes the paths.
    """
    names = {"from_name": "choice", "to_name": "image", "type": "choices"}
    for row in rows:
        if "error" in row:
            continue
        prediction: dict[str, Any] = {"model_version": "mldec", "result": []}
        data = {"image": studio_address(prefix, row["image"].removeprefix("./"))}
        if row["classes"]:
            prediction["result"].append({**names, "value": {"choices": row["classes"]}})
        if row.get("scores"):
            prediction["score"] = min(row["scores"])
            pairs = zip(row["classes"], row["scores"], strict=True)
            data["scores"] = ", ".join(f"{name} {score:.3f}" for name, score in pairs)
        yield {"data": data, "predictions": [prediction]}


def cvat_tags(rows: Iterable[Mapping[str, Any]], names: Iterable[str]) -> Iterator[str]:
    """Yield the text of "CVAT for images 1.1", with a tag per class of an image without an error.

    Tags have no scores. Names of classes have no control characters, see `name_fault`. Images with
    characters in their names that XML cannot represent are left out with a message. A row has
    `image`, and `error` or the list `classes`. `names` are those of all classes.
    """
    yield '<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n<version>1.1</version>\n'
    yield "<meta><task><labels>\n"
    for name in names:
        yield f"<label><name>{escape(name)}</name><type>tag</type><attributes/></label>\n"
    yield "</labels></task></meta>\n"
    for number, row in enumerate(rows):
        if "error" in row:
            continue
        if _NOT_IN_XML.search(row["image"]):
            print_error(f"--cvat: left out {row['image']}: its name is invalid in XML; rename it")
            continue
        yield f'<image id="{number}" name={quoteattr(row["image"].removeprefix("./"))}>\n'
        for name in row["classes"]:
            yield f'<tag label={quoteattr(name)} source="auto"/>\n'
        yield "</image>\n"
    yield "</annotations>\n"


def studio_paths(address: str) -> list[str]:
    """Return the possible paths in an address of Label Studio: a URL, an upload or a local file."""
    parts = urlsplit(address, allow_fragments=False)
    if not parts.scheme and not address.startswith("/"):
        return [address]
    if parts.path.endswith("/local-files/"):
        written = parts.query.removeprefix("d=")
        return [unquote_plus(written), written]
    paths = [unquote(parts.path), parts.path]
    folder, _, name = paths[0].rpartition("/")
    if "upload" in folder.split("/"):
        paths.append(_UPLOAD.sub("", name))
    return paths


def _find(entry: Entry, finder: PhotoFinder, folders: tuple[str, ...]) -> str:
    """Return the longest suffix of a path that is a photo in one of the folders, or the path."""
    for path in entry.paths:
        parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".")]
        if ".." in parts or len(path) > 4096:
            break  # `path_inside` raises an error
        for start in range(len(parts)):
            for folder in folders:
                found = finder.find(folder + "/".join(parts[start:]), entry.where)
                if found is not None:
                    return found
    return entry.paths[0].replace("\\", "/").lstrip("/")


def _source(
    name: str, root: str, export: ExportSettings, parse: Callable[[Path, Export, str], None]
) -> Source:
    """Return the source of an export. `parse` adds the content of a file with its split."""
    folder = check_folder(root, "the export")
    image_folder = folder / path_inside(export.images or ".", "data.images")
    names = given_names(export.classes, folder)
    file = path_inside(export.file, "data.file", folder=folder)
    path = folder / file
    train = export.train.lower()
    val = export.val.lower()

    def load(part: str, _: str | None) -> StoredImages:
        # Each split may have its own export, in the folder of this name.
        found = Export()
        split_folders = {}
        if not path.is_file() and (folder / export.train / file).is_file():
            split_folders = {train: export.train, val: export.val}
            present = [other.parent.name for other in folder.glob(f"*/{file}")]
            check_val(export.val, present, folder)
            for split, name_of_folder in split_folders.items():
                parse(folder / name_of_folder / file, found, split)
        else:
            parse(path, found, "")
        splits = [entry.split for entry in found.images]
        if not splits:
            raise DataError(f"{path}: none of {found.unlabeled:,} images is labeled; label some")
        images = _images(found, names, path, image_folder, split_folders)

        # A single export may have the splits of its images. Otherwise, some images are held out.
        if split_folders or (train in splits and len(set(splits)) > 1):
            if part == export.val:
                check_val(val, splits, path)
            wanted = train if part == export.train else val
            images = images.select(np.array(splits) == wanted)
        else:
            images = export.select(images, val=part == export.val)

        if part == export.val:
            log.info(f"{name}: {found.unlabeled:,} images without a label are left out")
            if found.ignored:
                kinds = [f"{count:,} {kind}" for kind, count in found.ignored.most_common()]
                log.warning(f"{name}: ignored annotations: {format_list(kinds)}")
        return log_split(name, part, images)

    evaluator = multi_label(export.threshold, skip_empty=export.skip_empty)
    source = Source(load=load, train=export.train, val=export.val, where=path, evaluator=evaluator)
    return replace(source, folder_setting="data.images")


def _images(
    found: Export,
    names: tuple[str, ...] | None,
    where: Path,
    image_folder: Path,
    split_folders: Mapping[str, str],
) -> StoredImages:
    """Return the images of an export. `split_folders` are the folders of splits with an export."""
    if names is None and found.classes:
        names = check_names(dict.fromkeys(found.classes), where)
    builder = TableBuilder(classes=names, folder=image_folder)
    finder = PhotoFinder(image_folder)
    for entry in found.images:
        # Images of several splits or subsets may have the same name.
        folders = entry.folders + ("", "images/", "data/")
        if split_folders:
            parent = split_folders[entry.split]
            folders = tuple(f"{parent}/{name}" for name in folders) + folders
        builder.add(_find(entry, finder, folders), entry.labels, entry.where)
    return in_folder(builder.build(where), image_folder)
