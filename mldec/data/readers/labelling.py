"""Exports of labeling tools: Label Studio (JSON), CVAT for images 1.1 (XML), and FiftyOne (JSON)."""

import logging
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

from mldec.data.images import READ
from mldec.data.settings import Source
from mldec.data.splits import check_fraction, check_val, hold_out, hold_out_stratified, log_split
from mldec.data.table import Table, TableBuilder, path_inside
from mldec.data.tasks import multi_label, partial_labels
from mldec.data.types import StoredImages, check_folder, in_folder
from mldec.errors import DataError, naming_errors
from mldec.files.text import read_bytes, read_json
from mldec.names import abbreviate, as_name, format_list, given_names

log = logging.getLogger("mldec")

# The file name of an upload to Label Studio starts with eight characters of a random number.
_UPLOAD = re.compile(r"[0-9a-f]{8}-")


@dataclass(frozen=True)
class Annotated:
    """An image of an export."""

    path: str  # path or address in the export
    labels: dict[str, int] | None  # class -> 1, 0 or -1; None if nobody has labeled the image
    where: str  # file and task, for messages
    split: str = ""  # lowercase name


@dataclass
class Export:
    """The content of an export."""

    images: list[Annotated] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)  # declared classes in order, if any
    ignored: Counter[str] = field(default_factory=Counter)  # numbers of unsupported annotations


def label_studio(
    *,
    root: str,
    file: str = "export.json",
    images: str = "",
    image_key: str | None = None,
    control: str | None = None,
    taxonomy: Literal["leaf", "path", "all"] = "leaf",
    disagreement: Literal["majority", "unknown"] = "majority",
    classes: str | list[str] | None = None,
    train: str = "train",
    val: str = "val",
    val_fraction: float = 0.1,
    split: Literal["stratified", "hash"] = "stratified",
    seed: int = 0,
    threshold: float = 0.5,
    skip_empty: bool = True,
) -> Source:
    """Return the labeled images of a JSON export of Label Studio. See `_source` for the images.

    The labels are the choices and taxonomies of the submitted annotations. Skipped (cancelled)
    annotations, drafts, predictions and labels of regions are ignored. Tasks without a submitted
    annotation are left out. A submitted annotation without a choice is a negative of every class.

    Args:
        image_key: Key of the image in `data` of a task. None takes "image", or the only key.
        control: Name of the control (`from_name`) with the labels. None takes all controls.
        taxonomy: Labels of a path of a taxonomy: its last level, the path joined by "/", or each
            level.
        disagreement: Labels of several annotators. "majority": present if at least half of them
            chose it. "unknown": not annotated (-1) unless all agree. An annotation marked as
            ground truth replaces the others.
    """
    partial = disagreement == "unknown"

    def parse(path: Path) -> Export:
        export = Export()
        content = read_json(path)
        if not isinstance(content, list):
            raise DataError(f"{path}: the file is not a list of tasks; export it as JSON")
        for number, task in enumerate(content, 1):
            where = f"{path}, task {number}"
            with naming_errors(where, DataError, remedy="export it as JSON, not as JSON-MIN"):
                image = _image_of_task(task["data"], image_key, where)
                votes = []
                for annotation in _submitted(task["annotations"]):
                    results = annotation["result"]
                    votes.append(_choices(results, control, taxonomy, where, export.ignored))
                export.images.append(Annotated(image, _join(votes, partial), where))
        return export

    source = _source(
        "label_studio", parse, root, file, images, classes, train, val, val_fraction, split, seed
    )
    make_evaluator = partial_labels if partial else multi_label
    evaluator = (
        make_evaluator(threshold) if partial else multi_label(threshold, skip_empty=skip_empty)
    )
    return replace(source, evaluator=evaluator)
