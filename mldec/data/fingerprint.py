"""Hashes of a split: a resumed run must see the same images and labels in the same order."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from mldec.data.labels import Labels
from mldec.data.types import Split, StoredImages
from mldec.errors import CheckpointError

ROWS = 65_536  # images hashed at a time, so that nine million of them need little memory


@dataclass(frozen=True)
class Fingerprint:
    """Hashes of the training or validation data of a run, in hexadecimal digits."""

    images: int  # their number
    files: str  # of the keys of the images; empty if they are not stored
    labels: str  # likewise of their labels
    classes: str  # of the class names


def fingerprint(split: Split) -> Fingerprint:
    """Return the fingerprint of a split: images, labels and class names in their order."""
    dataset = split.dataset
    files = labels = ""
    if isinstance(dataset, StoredImages):
        files = _digest(_key_bytes(dataset.storage.keys))
        labels = _digest(_label_bytes(dataset.labels))

    classes = _digest([json.dumps(split.classes.names).encode()])
    return Fingerprint(len(dataset), files, labels, classes)


def check_same(
    saved: Fingerprint | None,
    now: Fingerprint,
    path: Path,
    *,
    allow: bool,
    split: Literal["training", "validation"] = "training",
) -> str | None:
    """Compare the fingerprint in a checkpoint, if it has one, with that of the present data.

    Returns a warning or None. Raises `CheckpointError` for other data unless it is allowed.
    """
    if saved is None:
        return f"{path} has no fingerprint of its {split} data: a change of it goes unnoticed"

    changed = difference(saved, now, split)
    if changed is None:
        return None

    verb = "trained" if split == "training" else "evaluated"
    fault = f"{path} was {verb} on other data ({changed})"
    if allow:
        return f"{fault}; going on with this one, as data.changed=allow says"
    raise CheckpointError(
        f"{fault}: put that data back, or go on with this one with data.changed=allow"
    )


def difference(before: Fingerprint, now: Fingerprint, split: str = "training") -> str | None:
    """Return the first difference between the data of a checkpoint and the current data."""
    if before.classes != now.classes:
        return f"its {split} classes have other names or another order"
    if before.images != now.images:
        return f"{before.images:,} {split} images, now {now.images:,}"
    if before.files != now.files:
        return f"other {split} images, or the same in another order"
    if before.labels != now.labels:
        return f"other labels of the same {split} images"
    return None


def _digest(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _key_bytes(keys: np.ndarray) -> Iterator[bytes]:
    """Yield the keys of all images as bytes."""
    for first in range(0, len(keys), ROWS):
        chunk = keys[first : first + ROWS]

        # The width of a text array is that of its longest path, which may belong to another split:
        # the padding must not count.
        if chunk.dtype.kind == "S":
            yield b"\0".join([*chunk.tolist(), b""])
        else:
            yield chunk.tobytes()


def _label_bytes(labels: Labels) -> Iterator[bytes]:
    """Yield the labels as bytes, in whatever order the entries of an image are listed."""
    yield f"{labels.num_classes} {labels.default} ".encode()
    for first in range(0, len(labels), ROWS):
        starts = labels.starts[first : first + ROWS + 1]
        entries = slice(starts[0], starts[-1])
        images = np.arange(first, first + len(starts) - 1)
        images = np.repeat(images, np.diff(starts))
        pairs = images * labels.num_classes + labels.classes[entries]
        values = labels.values[entries]

        # Readers may or may not list what equals the default.
        listed = values != labels.default
        pairs, values = pairs[listed], values[listed]

        # Fixed types and byte order: the hash is the same on every machine.
        order = np.argsort(pairs, kind="stable")
        yield pairs[order].astype("<i8").tobytes()
        yield values[order].astype("i1").tobytes()
