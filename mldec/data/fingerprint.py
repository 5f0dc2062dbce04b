"""Hashes of a split, to check that a resumed run uses the same images and labels."""

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

ROWS = 65_536  # images per chunk, to limit memory for millions of images


@dataclass(frozen=True)
class Fingerprint:
    """Hexadecimal hashes of the training or validation data of a run."""

    images: int  # number of images
    files: str  # hash of the image keys; empty if the images are generated
    labels: str  # hash of the labels; empty if the images are generated
    classes: str  # hash of the class names


def fingerprint(split: Split) -> Fingerprint:
    """Return the fingerprint of the images, labels and class names of a split, in order."""
    dataset = split.dataset
    files = ""
    labels = ""
    if isinstance(dataset, StoredImages):
        # Keys do not contain the folder, so that a data set may be moved.
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
    """Compare the fingerprint of the checkpoint at `path` with the current data.

    Returns a warning, or None. Raises CheckpointError if the data differs and `allow` is False.
    """
    if saved is None:
        return f"{path} has no fingerprint of the {split} data, so changes are not detected"

    changed = difference(saved, now, split)
    if changed is None:
        return None

    verb = "trained" if split == "training" else "evaluated"
    fault = f"{path} was {verb} on other data ({changed})"
    if allow:
        return f"{fault}; continuing because of data.changed=allow"
    raise CheckpointError(f"{fault}; restore the data, or pass data.changed=allow")


def difference(before: Fingerprint, now: Fingerprint, split: str = "training") -> str | None:
    """Return the first difference between the data of a checkpoint and the current data."""
    if before.classes != now.classes:
        return f"the names or the order of the {split} classes changed"
    if before.images != now.images:
        return f"{before.images:,} {split} images, now {now.images:,}"
    if before.files != now.files:
        return f"the {split} images or their order changed"
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

        # Do not hash the padding of text. The width may depend on paths of another split.
        if chunk.dtype.kind == "S":
            paths = chunk.tolist()
            paths.append(b"")
            yield b"\0".join(paths)
        else:
            yield chunk.tobytes()


def _label_bytes(labels: Labels) -> Iterator[bytes]:
    """Yield the labels as bytes, independent of the order of the entries of an image."""
    yield f"{labels.num_classes} {labels.default} ".encode()
    for first in range(0, len(labels), ROWS):
        starts = labels.starts[first : first + ROWS + 1]
        entries = slice(starts[0], starts[-1])
        images = np.arange(first, first + len(starts) - 1)
        images = np.repeat(images, np.diff(starts))
        pairs = images * labels.num_classes + labels.classes[entries]
        values = labels.values[entries]

        # Ignore entries that equal the default. Readers may or may not list them.
        differs = values != labels.default
        pairs = pairs[differs]
        values = values[differs]

        # Fix types and byte order, so that the hash is the same on all machines.
        order = np.argsort(pairs, kind="stable")
        yield pairs[order].astype("<i8").tobytes()
        yield values[order].astype("i1").tobytes()
