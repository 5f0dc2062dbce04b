"""Export a checkpoint: the work of the command `mldec.export`."""

import argparse
import io
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from mldec import build
from mldec.checkpoint import Loaded, load_model
from mldec.cli import chosen_model
from mldec.data.base import fixed_sample
from mldec.data.transforms import to_tensor
from mldec.errors import ConfigError, DataError, UserError, say, writing
from mldec.export.program import Program, of_other_classes, open_axes, traced
from mldec.export.verify import Exported, TorchFile, check, compare, generated, stored
from mldec.exported import onnx_file
from mldec.exported.metadata import NEEDED, ONNX, Metadata, require_onnx
from mldec.files.results import check_targets
from mldec.files.torch_files import sha256_of
from mldec.inference.classes import check_class_options, with_classes
from mldec.inference.scoring import DEFAULT_THRESHOLD
from mldec.runtime import facts

PT2 = ".pt2"
EXTRA = "mldec.json"  # of the file of metadata in a .pt2 file
CALIBRATION_IMAGES = 128  # of an int8 file
MADE_UP = 2  # classes of a zero-shot model, beyond the fewest, that are compared too


def run(args: argparse.Namespace) -> None:
    """Do the work of `mldec.export`: load, trace, compare, and write the file.

    Args:
        args: the command line; see `mldec.export.parser`.

    Raises:
        UserError: for a wrong option, a checkpoint that cannot be used or exported, or a file that
            differs from it.
    """
    # Everything that can be refused at once comes before the model.
    out = Path(args.out)
    if out.suffix not in (ONNX, PT2):
        raise ConfigError(
            f"{out}: the name of an exported file ends in .onnx (ONNX) or .pt2 (torch.export); "
            f"choose one of them"
        )
    check_targets(args.out)
    check_class_options(args)
    if out.suffix == ONNX:
        require_onnx(out)
    elif args.precision == "int8":
        raise ConfigError(f"--precision int8: {out} cannot have it; write an .onnx file")

    loaded = load_model(**chosen_model(args))
    if args.classes is not None:
        loaded = with_classes(loaded, args.classes, args.vectors)
    thresholds, rule = chosen_thresholds(loaded, args)
    if args.any_size and loaded.transform.resize != "pillow":
        raise ConfigError(
            f"--any-size resizes as Pillow does, and {loaded.path} was trained with "
            f"data.resize={loaded.transform.resize}; leave --any-size out"
        )

    program = Program(
        loaded,
        thresholds,
        any_size=args.any_size,
        half=args.precision == "fp16",
        asks=loaded.classes.queries is not None and args.classes is None,
    )
    metadata = describe(program, loaded, args)
    content = to_bytes(program, loaded, metadata, args)

    # The file gets its name only after it has proved to answer as the checkpoint does.
    temporary = out.with_name(f".{out.stem[:40]}.{os.getpid()}.tmp{out.suffix}")
    try:
        with writing(out):
            temporary.write_bytes(content)
        exported: Exported
        if out.suffix == ONNX:
            exported = onnx_file.OnnxFile(temporary)
        else:
            exported = TorchFile(content, metadata)
        sentences = list(proofs(exported, program, loaded, args))
        with writing(out):
            temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)

    count = "as many classes as word vectors" if program.asks else f"{len(loaded.classes)} classes"
    say(
        f"{out}: {len(content) / 1e6:.1f} MB, {args.precision}, {count}; "
        f"images uint8 {shape(program, loaded)}",
        f"decisions: {rule}",
        *sentences,
    )


def chosen_thresholds(loaded: Loaded, args: argparse.Namespace) -> tuple[list[float] | None, str]:
    """Return the thresholds of the decisions, and say where they are from.

    Args:
        loaded: the checkpoint.
        args: the command line.

    Returns:
        One threshold per class, one for all classes, or None if an image has one label.

    Raises:
        ConfigError: for --threshold where an image has one label.
    """
    if loaded.classes.exclusive:
        if args.threshold is not None:
            raise ConfigError(
                "--threshold has no effect: an image has one label here; leave it out"
            )
        return None, "the most probable class of each image"

    if args.threshold is not None:
        return [args.threshold], f"at {args.threshold:g}, of --threshold"
    if loaded.calibration is not None and loaded.calibration.thresholds:
        return [*loaded.calibration.thresholds], (
            f"at the thresholds of the checkpoint for {loaded.calibration.objective}"
        )

    # As mldec.evaluate does, whose default this is.
    chosen = loaded.config.data.get("threshold")
    threshold = DEFAULT_THRESHOLD if chosen is None else float(chosen)
    origin = "the default" if chosen is None else "data.threshold of the run"
    return [threshold], (
        f"at {threshold:g}, {origin}: the checkpoint has no thresholds; pass --threshold, or "
        f"calibrate it with python -m mldec.calibrate"
    )


def describe(program: Program, loaded: Loaded, args: argparse.Namespace) -> Metadata:
    """Return what the file says of itself.

    Args:
        program: that is exported.
        loaded: its checkpoint.
        args: the command line.
    """
    width = None
    if program.asks and loaded.classes.queries is not None:
        width = loaded.classes.queries.shape[1]
    thresholds = None if program.thresholds is None else program.thresholds.tolist()

    # A backbone of the user's own need not normalise.
    backbone = loaded.model.backbone
    mean, std = getattr(backbone, "mean", None), getattr(backbone, "std", None)

    versions = facts.installed()
    if Path(args.out).suffix == ONNX:
        versions |= {name: version(name) for name in NEEDED}
    return Metadata(
        classes=[*loaded.classes.names],
        word_dim=width,
        exclusive=loaded.classes.exclusive,
        calibrated=loaded.calibration is not None,
        thresholds=thresholds,
        image_size=loaded.transform.image_size,
        crop=loaded.transform.crop,
        interpolation=loaded.transform.interpolation,
        resize=loaded.transform.resize,
        resizes=args.any_size,
        mean=mean.flatten().tolist() if isinstance(mean, Tensor) else None,
        std=std.flatten().tolist() if isinstance(std, Tensor) else None,
        precision=args.precision,
        versions=versions,
        checkpoint={
            "file": loaded.path.name,
            "sha256": sha256_of(loaded.path),
            "weights": loaded.weights,
        },
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def to_bytes(
    program: Program, loaded: Loaded, metadata: Metadata, args: argparse.Namespace
) -> bytes:
    """Return the content of the file; the arguments are those of `describe`.

    Raises:
        UserError: if the network cannot be exported, or there are no images to calibrate int8 on.
    """
    graph = traced(program, loaded, args.checkpoint)
    if Path(args.out).suffix != ONNX:
        buffer = io.BytesIO()
        torch.export.save(graph, buffer, extra_files={EXTRA: metadata.to_json()})
        return buffer.getvalue()

    model = onnx_file.translated(graph, open_axes(program), args.checkpoint)
    if metadata.precision == "int8":
        inputs = list(calibration_inputs(loaded, metadata, args))
        if not inputs:
            raise DataError("--precision int8: no image to calibrate on; pass --verify FOLDER")
        model = onnx_file.quantised(model, inputs)
    return onnx_file.content(model, metadata, args.out)


def calibration_inputs(
    loaded: Loaded, metadata: Metadata, args: argparse.Namespace
) -> Iterator[tuple[Tensor, ...]]:
    """Yield inputs on which an int8 file is calibrated: images of --verify, or of the training.

    Args:
        loaded: the checkpoint.
        metadata: of the file.
        args: the command line.

    Raises:
        UserError: if there are none.
    """
    pictures = training_images(loaded)
    if args.verify is not None:
        pictures = (image for image, _ in stored(args.verify, loaded))

    queries = loaded.classes.queries
    for image in islice(pictures, CALIBRATION_IMAGES):
        pixels = to_tensor(image) if metadata.resizes else loaded.transform(image)
        if metadata.word_dim is not None and queries is not None:
            yield pixels[None], queries
        else:
            yield (pixels[None],)


def training_images(loaded: Loaded) -> Iterator[Image.Image]:
    """Yield images of the data that a checkpoint was trained on, at equal distances.

    Raises:
        ConfigError: if the data is not there.
    """
    try:
        dataset = build.data(build.check(loaded.config, ["data"])).train.dataset
        count = len(dataset)
        for index in range(0, count, max(1, count // CALIBRATION_IMAGES)):
            pixels, _ = fixed_sample(dataset, index)
            yield Image.fromarray(pixels.permute(1, 2, 0).numpy())
    except UserError as error:
        raise ConfigError(
            f"--precision int8 is calibrated on images, and those of the training cannot be read "
            f"({error}); pass --verify FOLDER"
        ) from error


def proofs(
    exported: Exported, program: Program, loaded: Loaded, args: argparse.Namespace
) -> Iterator[str]:
    """Compare a file with its checkpoint, and yield a sentence per comparison.

    Args:
        exported: the file.
        program: in it.
        loaded: the checkpoint.
        args: the command line.

    Raises:
        CheckpointError: if it differs by more than its precision explains.
        DataError: if there are no images.
    """
    metadata = exported.metadata
    made = generated(metadata.image_size, any_size=metadata.resizes)
    name = f"{len(made)} generated images"

    # A file that asks for word vectors must take any number of them.
    if program.asks:
        count = program.fewest_classes + MADE_UP
        comparison = compare(exported, of_other_classes(loaded, count), made, name)
        check(comparison, exported, args.out)
        yield f"{name}, {count} made-up classes: {comparison.text()}"

    # A released zero-shot file has no classes of its own.
    if len(loaded.classes):
        comparison = compare(exported, loaded, made, name)
        check(comparison, exported, args.out)
        yield f"{name}: {comparison.text()}"

    if args.verify is not None:
        comparison = compare(exported, loaded, stored(args.verify, loaded), args.verify)
        check(comparison, exported, args.out)
        yield f"{comparison.images} images of {args.verify}: {comparison.text()}"


def shape(program: Program, loaded: Loaded) -> str:
    """Return the shape of the images that a program takes, for the console."""
    size = loaded.transform.image_size
    axes = open_axes(program)[0]
    sides = ", ".join(axes.get(axis, str(size)) for axis in (2, 3))
    return f"[batch, 3, {sides}]"
