"""Name what images show: the work of the command `mldec.predict`."""

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mldec.checkpoint import Loaded
from mldec.cli import open_model
from mldec.data.base import Classes
from mldec.data.transforms import FORMATS, load_image
from mldec.data.zero_shot.vectors import read_vectors
from mldec.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Stopped,
    complain,
    printable,
    say,
    visible,
)
from mldec.evaluation import check_queries
from mldec.files.results import STANDARD_OUTPUT, JsonLines, JsonList, check_targets
from mldec.runtime import distributed, out_of_memory
from mldec.runtime.signals import StopRequest, listening


@torch.no_grad()
def scores(loaded: Loaded, images: Tensor) -> Tensor:
    """Return the score of each class in [0, 1]: softmax where an image has one label, else sigmoid.

    After the asymmetric loss scores are no probabilities: those of absent classes are often above 0.5.

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
        inside = (
            [file for file in sorted(path.rglob("*")) if file.suffix.lower() in known]
            if path.is_dir()
            else [path]
        )
        if not inside:
            raise DataError(f"{path}: the folder holds no image")
        found += inside
    return found


def predict(
    loaded: Loaded,
    paths: list[Path],
    *,
    batch_size: int,
    device: torch.device,
    stop: StopRequest | None = None,
) -> Iterator[tuple[Path, Tensor | DataError]]:
    """Yield each path with its scores [K], or with the `DataError` that says why it has none.

    Args:
        loaded: from `checkpoint.load_model`.
        paths: of image files.
        batch_size: images at a time.
        device: of the model.
        stop: ends the loop before the next batch.

    Raises:
        OutOfMemoryError: if a batch is too large.
    """
    size = loaded.transform.image_size
    advice = f"out of memory on {device}: {batch_size} images of {size} pixels at a time; pass a smaller --batch-size"

    for start in range(0, len(paths), batch_size):
        if stop:
            return

        part = paths[start : start + batch_size]
        with out_of_memory.explained_by(lambda: advice):
            read = [_read(loaded, path) for path in part]
            images = [image for image in read if isinstance(image, Tensor)]
            rows = iter(
                scores(loaded, torch.stack(images).to(device)).cpu() if images else torch.empty(0)
            )

        for path, image in zip(part, read, strict=True):
            yield path, _finite(path, next(rows)) if isinstance(image, Tensor) else image


def best(
    names: tuple[str, ...], row: Tensor, *, top: int, threshold: float
) -> list[dict[str, Any]]:
    """Return the `top` classes whose score is at least `threshold`, highest first."""
    values, order = row.sort(descending=True, stable=True)
    top = min(top, len(names))
    pairs = zip(order[:top].tolist(), values[:top].tolist(), strict=True)
    return [{"name": names[index], "score": score} for index, score in pairs if score >= threshold]


def named(path: Path) -> dict[str, str]:
    """Return how a row of `--json` and `--jsonl` names an image: as UTF-8, with its bytes where those are not."""
    name = os.fsencode(path)
    try:
        return {"image": name.decode("utf-8")}
    except UnicodeDecodeError:
        return {"image": name.decode("utf-8", "backslashreplace"), "image_bytes": name.hex()}


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
        raise ConfigError(
            f"--classes {names!r} names no class: pass names with commas between them"
        )
    classes = Classes(wanted, queries=read_vectors(vectors, wanted))
    check_queries(loaded.classes, classes, "the checkpoint")
    return replace(loaded, classes=classes)


def run(args: argparse.Namespace) -> int:
    """Load, predict, print, write; return the exit status: 1 if an image could not be answered.

    Raises:
        Stopped: after a signal, with the rows so far written.
    """
    if (args.classes is None) != (args.vectors is None):
        raise ConfigError(
            "--classes and --vectors need each other: names, and a file with their word vectors"
        )
    check_targets(args.json, args.jsonl)
    paths = find_images(args.images)
    device = distributed.pick_device(args.device)
    loaded = open_model(args, device)
    if args.classes is not None:
        loaded = with_classes(loaded, args.classes, args.vectors)

    status = answered = 0
    with ExitStack() as stack:
        stop = stack.enter_context(listening())
        files: list[JsonList | JsonLines] = []
        if args.jsonl is not None:
            files.append(stack.enter_context(JsonLines(args.jsonl)))
        if args.json is not None:
            files.append(stack.enter_context(JsonList(args.json)))

        scored = predict(loaded, paths, batch_size=args.batch_size, device=device, stop=stop)
        for path, row in scored:
            answered += 1
            if isinstance(row, DataError):
                status = 1
                complain(str(row))
                answer: dict[str, Any] = {**named(path), "error": printable(str(row))}
            else:
                predictions = best(
                    loaded.classes.names, row, top=args.top, threshold=args.threshold
                )
                answer = {**named(path), "predictions": predictions}
                if STANDARD_OUTPUT not in (args.json, args.jsonl):
                    say(_line(path, predictions))
            for file in files:
                file.add(answer)

    if answered < len(paths):
        raise Stopped(
            f"stopped by {stop.name} after {answered:,} of {len(paths):,} images", stop.status
        )
    return status


def _line(path: Path, predictions: list[dict[str, Any]]) -> str:
    """Return what the console shows of an image."""
    classes = ", ".join(f"{item['name']} {item['score']:.3f}" for item in predictions)
    return f"{path}: {classes or 'nothing'}"


def _finite(path: Path, row: Tensor) -> Tensor | DataError:
    """Return the scores [K], unless the network is broken."""
    if torch.isfinite(row).all():
        return row
    return DataError(
        f"{visible(str(path))}: its scores are not finite; look at the weights of the checkpoint"
    )


def _read(loaded: Loaded, path: Path) -> Tensor | DataError:
    try:
        return load_image(path, loaded.transform)
    except DataError as error:
        return error
