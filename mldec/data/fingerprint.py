"""What a run was trained on, in a few hashes: a resumed run must meet the same images in the same order."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mldec.data.base import Split, StoredImages
from mldec.data.labels import Labels
from mldec.errors import CheckpointError

ROWS = 65_536  # images at a time, so that nine million of them need no memory


@dataclass(frozen=True)
class Fingerprint:
    """The training table of a run; texts are sha256 in hexadecimal digits, empty for what is not known."""

    images: int
    files: str
    labels: str
    classes: str


def fingerprint(split: Split) -> Fingerprint:
    """Return the fingerprint of a split: its images, labels and class names, in order, but not its folder.

    Of a dataset that is not stored only the length counts, as of scenes that are drawn anew each time.
    """
    dataset = split.dataset
    files = labels = ""
    if isinstance(dataset, StoredImages):
        files = _digest(_key_bytes(dataset.storage.keys))
        labels = _digest(_label_bytes(dataset.labels))
    names = json.dumps(split.classes.names).encode()
    return Fingerprint(len(dataset), files, labels, _digest(iter([names])))


def check_same(
    saved: Fingerprint | None, now: Fingerprint, path: Path, *, allow: bool
) -> str | None:
    """Compare the fingerprint in a checkpoint with that of the data.

    Args:
        saved: that of the checkpoint; None in one of a version that had none.
        now: of the data.
        path: of the checkpoint.
        allow: other data is no fault.

    Returns:
        A warning, or None.

    Raises:
        CheckpointError: if the data is other data.
    """
    if saved is None:
        return f"{path} has no fingerprint of its training data, as in older versions: a change of it goes unnoticed"

    difference = _difference(saved, now)
    if difference is None:
        return None
    if not allow:
        raise CheckpointError(
            f"{path} was trained on other data ({difference}): put that data back, "
            f"or go on with this one with data.changed=allow"
        )
    return f"{path} was trained on other data ({difference}); going on with this one, as data.changed=allow says"


def _difference(before: Fingerprint, now: Fingerprint) -> str | None:
    if before.classes != now.classes:
        return "its training classes have other names or another order"
    if before.images != now.images:
        return f"{before.images:,} training images, now {now.images:,}"
    if before.files != now.files:
        return "other training images, or the same in another order"
    if before.labels != now.labels:
        return "other labels of the same training images"
    return None


def _digest(pieces: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _key_bytes(keys: np.ndarray) -> Iterator[bytes]:
    for first in range(0, len(keys), ROWS):
        rows = keys[first : first + ROWS]
        if (
            rows.dtype.kind == "S"
        ):  # whose width is that of the longest path, of another split perhaps
            yield b"\0".join([*rows.tolist(), b""])
        else:
            yield rows.tobytes()


def _label_bytes(labels: Labels) -> Iterator[bytes]:
    """Yield the labels as bytes that do not depend on how a reader wrote them down.

    The entries of an image may be in any order, and one that equals the default may be there or not.
    """
    yield f"{labels.num_classes} {labels.default} ".encode()
    for first in range(0, len(labels), ROWS):
        starts = labels.starts[first : first + ROWS + 1]
        statements = slice(starts[0], starts[-1])
        images = np.repeat(np.arange(first, first + len(starts) - 1), np.diff(starts))
        pairs = images * labels.num_classes + labels.classes[statements]
        values = labels.values[statements]

        stated = values != labels.default
        pairs, values = pairs[stated], values[stated]
        if (np.diff(pairs) < 0).any():
            order = np.argsort(pairs, kind="stable")
            pairs, values = pairs[order], values[order]
        yield pairs.astype("<i8").tobytes()
        yield values.astype("i1").tobytes()
