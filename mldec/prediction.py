"""Score images and print their classes: the work of the command `mldec.predict`."""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mldec.calibration.stored import stored_thresholds
from mldec.checkpoint import Loaded, load_model
from mldec.cli import chosen_model
from mldec.data.images import FORMATS, load_image, read_image
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
from mldec.explain import Explainer
from mldec.explain.pictures import Finding, Typeface, draw, file_name, save
from mldec.files.results import (
    STANDARD_OUTPUT,
    JsonLines,
    JsonList,
    check_folder,
    check_targets,
)
from mldec.inference.classes import check_class_options, with_classes
from mldec.inference.scoring import scores
from mldec.runtime import distributed, out_of_memory
from mldec.runtime.signals import StopRequest, listening


def find_images(paths: list[str]) -> list[Path]:
    """Return the given files, and all image files below the given folders.

    Args:
        paths: files, which are taken whatever their names, and folders.

    Returns:
        The files in the order of the paths; those of a folder are sorted.

    Raises:
        DataError: for a path that does not exist, or a folder without images.
    """
    suffixes = {suffix for suffix, name in Image.registered_extensions().items() if name in FORMATS}
    images: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"{path}: no such file or folder")

        if path.is_dir():
            files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in suffixes]
        else:
            files = [path]

        if not files:
            raise DataError(f"{path}: the folder holds no image")
        images += files
    return images


def predict(
    loaded: Loaded,
    paths: list[Path],
    *,
    batch_size: int,
    device: torch.device,
    stop: StopRequest | None = None,
) -> Iterator[tuple[Path, Tensor | DataError]]:
    """Yield each path with its scores [K], or with the `DataError` that explains why it has none.

    Args:
        loaded: from `checkpoint.load_model`.
        paths: of image files.
        batch_size: images per forward pass.
        device: of the model.
        stop: if true, the loop ends before the next batch.

    Raises:
        OutOfMemoryError: if a batch is too large.
    """
    size = loaded.transform.image_size
    advice = (
        f"out of memory on {device}: {batch_size} images of {size} pixels at a time; "
        f"pass a smaller --batch-size"
    )

    for start in range(0, len(paths), batch_size):
        if stop:
            return

        # A file that cannot be read becomes a DataError here, and leaves no gap in the batch.
        batch_paths = paths[start : start + batch_size]
        with out_of_memory.explained(lambda: advice):
            loaded_images = [_read(loaded, path) for path in batch_paths]
            images = [image for image in loaded_images if isinstance(image, Tensor)]
            batch_scores = torch.empty(0)
            if images:
                batch_scores = scores(loaded, torch.stack(images).to(device)).cpu()

        # The scores belong to the readable images, in their order.
        remaining = iter(batch_scores)
        for path, image in zip(batch_paths, loaded_images, strict=True):
            if isinstance(image, DataError):
                yield path, image
            else:
                yield path, _finite(path, next(remaining))


def best(
    names: tuple[str, ...],
    row: Tensor,
    *,
    top: int,
    threshold: float = 0.0,
    stored: Sequence[float] | None = None,
) -> list[dict[str, Any]]:
    """Return the classes with the highest scores.

    Args:
        names: of the K classes.
        row: the scores [K] of an image.
        top: number of classes at most.
        threshold: lowest score of a class in the answer.
        stored: a threshold per class [K] instead.

    Returns:
        `{"name": ..., "score": ...}` per class, highest score first; of equal scores the lower
        class comes first. With stored thresholds each has its `threshold` too.
    """
    thresholds = [threshold] * len(names) if stored is None else stored
    values, order = row.sort(descending=True, stable=True)

    answers: list[dict[str, Any]] = []
    for index, score in zip(order.tolist(), values.tolist(), strict=True):
        if len(answers) == top:
            break
        if score >= thresholds[index]:
            answers.append({"name": names[index], "score": score})
            if stored is not None:
                answers[-1]["threshold"] = stored[index]
    return answers


def named(path: Path) -> dict[str, str]:
    """Return the entries of `--json` and `--jsonl` that name an image.

    JSON is UTF-8, which a path need not be: such a path is given in hexadecimal too.
    """
    name = os.fsencode(path)
    try:
        return {"image": name.decode("utf-8")}
    except UnicodeDecodeError:
        return {"image": name.decode("utf-8", "backslashreplace"), "image_bytes": name.hex()}


def _with_names(args: argparse.Namespace, device: torch.device) -> Loaded:
    """Load the checkpoint, with the classes of the command line if there are any.

    Args:
        args: the command line.
        device: that computes.

    Raises:
        UserError: for a checkpoint that cannot be used, or that names no classes.
    """
    loaded = load_model(**chosen_model(args), device=device)
    if args.classes is not None:
        return with_classes(loaded, args.classes, args.vectors)

    if not loaded.classes.names:
        raise CheckpointError(
            f"{args.checkpoint} names no classes and holds no word vectors: "
            f"pass --classes and --vectors"
        )
    return loaded


def run(args: argparse.Namespace) -> int:
    """Do the work of `mldec.predict`: load, predict, print, and write the files.

    Args:
        args: the command line; see `mldec.predict.parser`.

    Returns:
        The exit status: 1 if an image has no scores, else 0.

    Raises:
        Stopped: after a signal; the entries so far are written.
        UserError: for a wrong option, or a checkpoint or file that cannot be used.
    """
    # Everything that can be refused at once comes before the first image.
    check_class_options(args)
    if args.font is not None and args.pictures is None:
        raise ConfigError("--font has no effect without --pictures: leave it out")
    check_targets(args.json, args.jsonl)
    typeface = None
    if args.pictures is not None:
        check_folder("--pictures", args.pictures)
        typeface = Typeface(args.font)
    paths = find_images(args.images)
    device = distributed.pick_device(args.device)
    loaded = _with_names(args, device)

    stored = stored_thresholds(loaded) if args.threshold is None else None
    pictures = None
    if typeface is not None:
        pictures = Pictures(loaded, Path(args.pictures), typeface, device)

    status = answered = 0
    with ExitStack() as stack:
        stop = stack.enter_context(listening())

        # Leaving the block completes the list of `--json`, also after an error or a signal.
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
                    loaded.classes.names,
                    row,
                    top=args.top,
                    threshold=args.threshold or 0.0,
                    stored=stored,
                )
                answer = {**named(path), "predictions": predictions}
                if pictures is not None:
                    answer["picture"] = str(pictures.add(path, predictions))
                # Standard output is for a person or for JSON, not for both.
                if STANDARD_OUTPUT not in (args.json, args.jsonl):
                    say(_line(path, predictions))

            for file in files:
                file.add(answer)

    if answered < len(paths):
        raise Stopped(
            f"stopped by {stop.name} after {answered:,} of {len(paths):,} images", stop.status
        )

    if args.threshold is None and stored is None and not loaded.classes.exclusive:
        complain(
            f"{args.checkpoint} has no thresholds: classes are listed by score alone; pass "
            f"--threshold, or calibrate it with python -m mldec.calibrate"
        )
    return status


class Pictures:
    """Draw images and where the model looked, a file per image.

    Args:
        loaded: from `checkpoint.load_model`.
        folder: of the files; it is made with the first one.
        typeface: of the texts.
        device: of the model.

    Raises:
        ConfigError: if no heat maps can be made of this model.
    """

    def __init__(
        self, loaded: Loaded, folder: Path, typeface: Typeface, device: torch.device
    ) -> None:
        self._loaded = loaded
        self._folder = folder
        self._typeface = typeface
        self._device = device
        size = loaded.transform.image_size
        self._advice = (
            f"out of memory on {device}: a heat map of one image of {size} pixels; "
            f"leave --pictures out"
        )
        with out_of_memory.explained(lambda: self._advice):
            self._explainer = Explainer(loaded.model, size, loaded.classes.queries)

    def add(self, path: Path, predictions: Sequence[dict[str, Any]]) -> Path:
        """Write the picture of an image.

        Args:
            path: of the image.
            predictions: its classes, see `best`.

        Returns:
            The path of the picture.

        Raises:
            DataError: if the image can no longer be read, or the picture not be written.
            OutOfMemoryError: if the heat maps need too much memory.
        """
        image = read_image(path)
        transform, names = self._loaded.transform, self._loaded.classes.names
        classes = [names.index(item["name"]) for item in predictions]
        with out_of_memory.explained(lambda: self._advice):
            model_input = transform(image)[None].to(self._device)
            [heat] = self._explainer.maps(model_input, [classes])

        # The maps cover what the model saw. Where it squeezed the image into a square, drawing
        # them over the image in its own proportions undoes that.
        seen = image.crop(transform.visible_part(image.size))
        findings = [
            Finding(item["name"], item["score"], class_heat.numpy())
            for item, class_heat in zip(predictions, heat, strict=True)
        ]
        sheet = draw(seen, path.name, findings, self._explainer.method, self._typeface)

        target = self._folder / file_name(path)
        save(sheet, target)
        return target


def _line(path: Path, predictions: list[dict[str, Any]]) -> str:
    """Return the line of the console for an image."""
    classes = ", ".join(f"{item['name']} {item['score']:.3f}" for item in predictions)
    return f"{path}: {classes or 'nothing'}"


def _finite(path: Path, row: Tensor) -> Tensor | DataError:
    """Return the scores [K], or a `DataError` if one of them is not finite."""
    if torch.isfinite(row).all():
        return row

    return DataError(
        f"{visible(str(path))}: its scores are not finite; look at the weights of the checkpoint"
    )


def _read(loaded: Loaded, path: Path) -> Tensor | DataError:
    """Return the image [3, S, S], or the `DataError` that explains why it cannot be read."""
    try:
        return load_image(path, loaded.transform)
    except DataError as error:
        return error
