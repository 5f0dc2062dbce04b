"""Name what images show: the work of the command `mldec.predict`."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mldec import distributed
from mldec.checkpoint import Loaded
from mldec.data.base import Classes
from mldec.data.transforms import FORMATS, read_image
from mldec.data.vectors import read_vectors
from mldec.errors import CheckpointError, ConfigError, DataError
from mldec.evaluation import autocast, check_queries
from mldec.options import fast_precision, open_model
from mldec.settings import Precision


@torch.no_grad()
def scores(loaded: Loaded, images: Tensor) -> Tensor:
    """Return the probability of each class: softmax where an image has one label, else sigmoid.

    Args:
        loaded: from `checkpoint.load_model`.
        images: [B, 3, S, S], uint8 or float in [0, 1], on the model's device.

    Returns:
        float32 [B, K].
    """
    queries = loaded.classes.queries
    logits = loaded.model(images, None if queries is None else queries.to(images.device)).float()
    return logits.softmax(-1) if loaded.classes.exclusive else logits.sigmoid()


def find_images(paths: list[str]) -> list[Path]:
    """Return the named files, and every image file below the named folders, sorted.

    Raises:
        DataError: for a path that is not there, or a folder without images.
    """
    known = {suffix for suffix, name in Image.registered_extensions().items() if name in FORMATS}
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")
        inside = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in known] if path.is_dir() else [path]
        if not inside:
            raise DataError(f"{path}: the folder holds no image")
        found += inside
    return found


def predict(
    loaded: Loaded, paths: list[Path], *, batch_size: int, device: torch.device, precision: Precision = Precision.fp32
) -> Iterator[tuple[Path, Any]]:
    """Yield each path with its scores [K], or with the `DataError` that kept it from being read."""
    for start in range(0, len(paths), batch_size):
        part = paths[start : start + batch_size]
        read = [_read(loaded, path) for path in part]
        images = [image for image in read if isinstance(image, Tensor)]
        with autocast(device, precision):
            rows = iter(scores(loaded, torch.stack(images).to(device)).cpu() if images else torch.empty(0))
        for path, image in zip(part, read, strict=True):
            yield path, next(rows) if isinstance(image, Tensor) else image


def best(names: tuple[str, ...], row: Tensor, *, top: int, threshold: float) -> list[dict[str, Any]]:
    """Return the `top` classes whose score is at least `threshold`, highest first."""
    values, order = row.sort(descending=True, stable=True)
    pairs = zip(order[:top].tolist(), values[:top].tolist(), strict=True)
    return [{"name": names[index], "score": score} for index, score in pairs if score >= threshold]


def with_classes(loaded: Loaded, names: str, vectors: str) -> Loaded:
    """Return a zero-shot model that answers for other classes.

    Args:
        loaded: from `checkpoint.load_model`.
        names: of the classes, with commas between them.
        vectors: a file of their word vectors, of the kind that it was trained with; see `read_vectors`.

    Raises:
        ConfigError: if no class is named.
        CheckpointError: if the checkpoint has classes of its own only, or asks by vectors of another width.
        DataError: if a name is twice or has no vector, or the file cannot be read.
    """
    if loaded.classes.queries is None:
        raise CheckpointError(
            "--classes: the checkpoint knows its own classes only, it was not trained by word vectors"
        )
    wanted = tuple(name.strip() for name in names.split(",") if name.strip())
    if not wanted:
        raise ConfigError(f"--classes {names!r} names no class: pass names with commas between them")
    classes = Classes(wanted, queries=read_vectors(vectors, wanted))
    check_queries(loaded.classes, classes, "the checkpoint")
    return replace(loaded, classes=classes)


def run(words: argparse.Namespace) -> int:
    """Load, predict, print; return the exit status: 1 if an image could not be read."""
    if (words.classes is None) != (words.vectors is None):
        raise ConfigError("--classes and --vectors need each other: names, and a file with their word vectors")
    paths = find_images(words.images)
    device = distributed.pick_device(words.device)
    loaded = open_model(words, device)
    if words.classes is not None:
        loaded = with_classes(loaded, words.classes, words.vectors)
    status, answers = 0, []
    precision = fast_precision(device) if words.fast else Precision.fp32
    for path, row in predict(loaded, paths, batch_size=words.batch_size, device=device, precision=precision):
        if isinstance(row, DataError):
            print(f"mldec: {row}", file=sys.stderr)
            status = 1
            continue
        found = best(loaded.classes.names, row, top=words.top, threshold=words.threshold)
        answers.append({"image": str(path), "predictions": found})
        if words.json != "-":
            print(f"{path}: " + (", ".join(f"{item['name']} {item['score']:.3f}" for item in found) or "nothing"))
    if words.json:
        text = json.dumps(answers, indent=1) + "\n"
        sys.stdout.write(text) if words.json == "-" else Path(words.json).write_text(text)
    return status


def _read(loaded: Loaded, path: Path) -> Tensor | DataError:
    try:
        return loaded.transform(read_image(path))
    except DataError as error:
        return error
