"""Export a checkpoint as a self-contained ONNX file and verify its outputs.

`mldec export best.pt model.onnx` writes the file. Its input is a batch of RGB images, uint8
[B, 3, S, S]. Its outputs are probabilities, float32 [B, K], and decisions, bool [B, K]. Zero-shot
models take word vectors, float32 [K, D], as a second input unless --classes is given. See
docs/export.md.
"""

import argparse
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode

from mldec import build, cli
from mldec.checkpoint import Loaded
from mldec.data.photos import user_entries
from mldec.data.transforms import EvalTransform, to_tensor
from mldec.data.types import StoredImages, picture
from mldec.errors import CheckpointError, ConfigError, DataError, naming_errors, print_error, say
from mldec.evaluation.inference import for_inference
from mldec.evaluation.open import DEFAULT_THRESHOLD, load_checkpoint
from mldec.evaluation.options import THRESHOLD, ModelOptions, flag, fraction, option
from mldec.evaluation.run import as_limits, decided, probabilities
from mldec.evaluators.average_precision import average_precision
from mldec.files.atomic import check_targets, replacing, to_json
from mldec.files.torch_files import sha256_of
from mldec.names import numbered_names
from mldec.runtime import environment
from mldec.tools.exported import INPUTS, KEY, OUTPUTS, Metadata, OnnxFile
from mldec.tools.predict.decode import read_item
from mldec.tools.predict.engine import TorchEngine
from mldec.tools.predict.inputs import Inputs

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
CALIBRATION_IMAGES = 128  # for int8
MAX_BATCH = 8

# Maximum differences between file and checkpoint.
MAX_DIFFERENCE = 1e-4  # of fp32 probabilities
MAX_RESIZE_DIFFERENCE = 2e-2  # of fp32 probabilities, with resize in the graph
MAX_MAP_CHANGE = 0.1  # of the fp16 mAP, in percentage points

# An image, and its labels int8 [K] (1, 0 or -1) if they are known.
Picture = tuple[Image.Image, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ModelOptions):
    """The options of the command."""

    out: str
    precision: str = option(
        "number format; int8 is calibrated on the images of --verify; default: fp32",
        default="fp32",
        choices=("fp32", "fp16", "int8"),
    )
    any_size: bool = flag("resize images in the graph")
    verify: str | None = option(
        "compare file and checkpoint on the images of a folder", metavar="FOLDER"
    )
    threshold: float | None = option(THRESHOLD, fraction)


class Program(nn.Module):
    """The exported network: resize, model, calibration and thresholds.

    The checkpoint is on the CPU. Thresholds are K, one for all classes, or None for single-label
    classes. Word vectors are an input or constants.
    """

    thresholds: Tensor | None
    word_vectors: Tensor | None

    def __init__(
        self,
        loaded: Loaded,
        thresholds: Sequence[float] | None,
        *,
        any_size: bool = False,
        half: bool = False,
        takes_word_vectors: bool = False,
    ) -> None:
        super().__init__()
        self.model = for_inference(loaded.model, loaded.transform.image_size, None, fold=True)
        if half:
            self.model = deepcopy(self.model).half()
        self.resize: nn.Module = nn.Identity()
        if any_size:
            self.resize = Resize(loaded.transform)
        self.takes_word_vectors = takes_word_vectors
        self.word_dim: int | None = None
        if takes_word_vectors:
            assert loaded.classes.word_vectors is not None
            self.word_dim = loaded.classes.word_vectors.shape[1]
        # A graph that was traced with several groups of classes does not support a single group.
        self.min_classes = getattr(loaded.model.head, "group_size", 0) + 1

        self._loaded = loaded
        limits = None if thresholds is None else as_limits(thresholds)
        self.register_buffer("thresholds", limits)
        constant = None if takes_word_vectors else loaded.classes.word_vectors
        self.register_buffer("word_vectors", constant)

    def forward(self, images: Tensor, word_vectors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map images uint8 [B, 3, H, W] to probabilities [B, K] and decisions bool [B, K]."""
        if not self.takes_word_vectors:
            word_vectors = self.word_vectors
        logits = self.model(self.resize(images), word_vectors)
        scores = probabilities(self._loaded, logits)
        return scores, decided(scores, self.thresholds)

    def dynamic_axes(self) -> list[dict[int, str]]:
        """Return the names of the dynamic axes of each input."""
        image_axes = {0: "batch"}
        if isinstance(self.resize, Resize):
            image_axes |= {2: "height", 3: "width"}
        if self.takes_word_vectors:
            return [image_axes, {0: "classes"}]
        return [image_axes]


class Resize(nn.Module):
    """`EvalTransform` in torch, for a batch of images of one size.

    Pixels may differ from Pillow's by 2 levels, because Pillow rounds the filter weights and the
    result of the first pass.
    """

    def __init__(self, transform: EvalTransform) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, images: Tensor) -> Tensor:
        """Map images uint8 [B, 3, H, W] of any size to uint8 [B, 3, S, S]."""
        size = self.transform.image_size
        height: Any = size
        width: Any = size
        if self.transform.crop is not None:
            # Multiply before dividing, like `EvalTransform`. A rounded scale may reduce the size.
            shortest = torch.sym_min(*images.shape[2:])
            height = self.transform.shorter_side * images.shape[2] // shortest
            width = self.transform.shorter_side * images.shape[3] // shortest

        mode = self.transform.interpolation
        pixels = F.interpolate(images.float(), size=(height, width), mode=mode, antialias=True)
        top = _half(height - size)
        left = _half(width - size)
        pixels = pixels[:, :, top : top + size, left : left + size]
        return torch.floor(pixels + 0.5).clamp(0, 255).to(torch.uint8)


def _half(number: int) -> int:
    """Return half of an integer, rounded half to even like Python's `round`."""
    return number // 2 + (number % 2) * (number // 2 % 2)


class _ContiguousAttention(TorchFunctionMode):
    """Makes attention outputs contiguous: Swin of transformers calls `view` on them in ONNX."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention:
            return result.contiguous()
        return result


def trace(program: Program, loaded: Loaded) -> ExportedProgram:
    """Trace a program of the checkpoint `loaded` with torch.export."""
    # torch.export specializes sizes of 0 and 1, and merges dimensions of equal size, so all dynamic
    # sizes differ.
    size = loaded.transform.image_size
    height = size
    width = size
    if isinstance(program.resize, Resize):
        height += 3
        width += 5
    examples = [torch.zeros(2, 3, height, width, dtype=torch.uint8)]
    if program.word_dim is not None:
        examples.append(torch.ones(program.min_classes + 5, program.word_dim))

    shapes = tuple(dict.fromkeys(axes, Dim.DYNAMIC) for axes in program.dynamic_axes())
    with torch.no_grad(), _ContiguousAttention():
        return torch.export.export(program.eval(), tuple(examples), dynamic_shapes=shapes)


# Classes of onnx have the type `Any`, because the package is optional.
def to_onnx(program: Program, loaded: Loaded, path: str) -> Any:
    """Convert a program to an `onnx.ModelProto`. Errors name the `path` of the checkpoint."""
    axes = program.dynamic_axes()
    inputs = INPUTS[: len(axes)]
    remedy = "torch.onnx does not support its network; MLDEC_TRACEBACK=1 shows the cause"
    with naming_errors(path, remedy=remedy), _quiet():
        exported = torch.onnx.export(
            trace(program, loaded),
            dynamo=True,
            verbose=False,
            input_names=inputs,
            output_names=OUTPUTS,
            dynamic_shapes=dict(zip(inputs, axes, strict=True)),
        )
    assert exported is not None
    return exported.model_proto


def quantize(model: Any, inputs: Iterator[dict[str, np.ndarray]]) -> Any:
    """Quantize convolutions and linear layers of an `onnx.ModelProto`, calibrated on inputs."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_static

    # Attention and the group pooling of ML-Decoder remain float: quantization changes them most.
    matrices = {weight.name for weight in model.graph.initializer if len(weight.dims) == 2}
    excluded = []
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] not in matrices:
            excluded.append(node.name)

    with tempfile.TemporaryDirectory() as folder, _quiet():
        target = Path(folder, "model.onnx")
        quantize_static(
            model,
            target,
            SimpleNamespace(get_next=lambda: next(inputs, None)),
            op_types_to_quantize=["Conv", "Gemm", "MatMul"],
            nodes_to_exclude=excluded,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return onnx.load(target)


def serialize(model: Any, metadata: Metadata, path: str) -> bytes:
    """Return the content of an ONNX file with metadata; `path` is for messages."""
    entry = model.metadata_props.add()
    entry.key = KEY
    entry.value = to_json(asdict(metadata))
    model.producer_name = "mldec"
    model.producer_version = metadata.versions["mldec"]
    # Protocol buffers have a limit of 2 GiB.
    with naming_errors(path, remedy="pass --precision fp16"):
        return model.SerializeToString()


@contextmanager
def _quiet() -> Iterator[None]:
    # The quantizer adds a handler to the root logger, which would print our messages twice.
    root_handlers = logging.getLogger().handlers.copy()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        logging.getLogger().handlers[:] = root_handlers


def generate_images(size: int, *, any_size: bool) -> list[Picture]:
    """Return noise and smooth images of `size` pixels per side; `any_size` adds other sizes."""
    # Test two batch sizes, because a wrong graph may have a fixed batch size.
    sizes = [(size, size)] * (MAX_BATCH + 1)
    if any_size:
        sizes += [(size // 2 + 1, size), (2 * size, size + size // 2)]

    pictures: list[Picture] = []
    generator = np.random.default_rng(0)
    for number, (width, height) in enumerate(sizes):
        shape = (4, 4, 3) if number % 2 else (height, width, 3)
        noise = Image.fromarray(generator.integers(0, 256, shape, dtype=np.uint8))
        image = noise.resize((width, height), Image.Resampling.BICUBIC)
        pictures.append((image, None))
    return pictures


def read_folder(folder: str, loaded: Loaded) -> Iterator[Picture]:
    """Yield the readable images of a folder, with labels if it has a data.csv or class folders."""
    dataset = _labeled_images(Path(folder), loaded)
    inputs = Inputs([folder]) if dataset is None else None
    images: Iterable[Any] = inputs or range(len(dataset or ()))
    for image in images:
        try:
            if dataset is None:
                yield read_item(image), None
            else:
                yield picture(dataset, image), dataset.labels.row(image)
        except DataError as error:
            print_error(str(error))
    if inputs is not None and inputs.skipped:
        print_error(str(inputs.skipped))


def _labeled_images(folder: Path, loaded: Loaded) -> StoredImages | None:
    """Return the validation images of data.csv, the images of class folders, or None."""
    names = list(loaded.classes.names)
    node: dict[str, Any] = {"classes": names, "image_size": loaded.transform.image_size}
    if (folder / "data.csv").is_file():
        node |= {"_target_": "mldec.data.readers.csv_table", "root": str(folder)}
        node["exclusive"] = loaded.classes.exclusive
    else:
        inner = {entry.name for entry in user_entries(folder) if entry.is_dir()}
        if not inner or not inner <= set(names):
            return None
        split = folder.resolve()
        node |= {"_target_": "mldec.data.readers.folders", "root": str(split.parent)}
        node |= {"train": split.name, "val": split.name}

    dataset = build.data({"data": build.resolve("data", node)}).val.dataset
    assert isinstance(dataset, StoredImages)
    return dataset


def compare(
    run: Callable[..., tuple[Tensor, Tensor]],
    metadata: Metadata,
    loaded: Loaded,
    pictures: Iterable[Picture],
    source: str,
) -> str:
    """Compare an exported file with its checkpoint on images. Returns a summary of one line.

    The checkpoint predicts on a CPU, as `mldec predict` does there. `source` describes the images,
    of which all or none have labels. A difference above a limit raises CheckpointError.
    """
    engine = TorchEngine(loaded)
    limits = None if metadata.thresholds is None else as_limits(metadata.thresholds)
    word_vectors = [] if metadata.word_dim is None else [loaded.classes.word_vectors]
    file_scores: list[Tensor] = []
    checkpoint_scores: list[Tensor] = []
    equal: list[Tensor] = []
    targets: list[Tensor] = []
    for batch in _batches(pictures, any_size=metadata.resizes):
        images, labels = zip(*batch, strict=True)
        transformed = torch.stack([loaded.transform(image) for image in images])
        inputs = transformed
        if metadata.resizes:
            inputs = torch.stack([to_tensor(image) for image in images])
        expected = engine.answer(transformed).scores
        with torch.no_grad():
            found, decisions = run(inputs, *word_vectors)

        file_scores.append(found)
        checkpoint_scores.append(expected)
        equal.append(decisions == decided(expected, limits))
        if labels[0] is not None:
            targets += labels
    if not equal:
        raise DataError(f"{source}: no readable image; choose another folder")

    found = torch.cat(file_scores)
    expected = torch.cat(checkpoint_scores)
    difference = check_difference(found, expected, metadata, source)
    share = 100 * torch.cat(equal).float().mean().item()
    summary = (
        f"{len(found)} {source}: largest difference of probabilities {difference:.1e}, "
        f"equal decisions {share:.2f} %"
    )
    if not targets:
        return summary
    known = torch.stack(targets)
    file_map = 100 * average_precision(found, known)["none"].nanmean().item()
    checkpoint_map = 100 * average_precision(expected, known)["none"].nanmean().item()
    if metadata.precision == "fp16" and abs(file_map - checkpoint_map) > MAX_MAP_CHANGE:
        raise CheckpointError(
            f"--precision fp16: the mAP changes from {checkpoint_map:.3f} to {file_map:.3f} (limit "
            f"{MAX_MAP_CHANGE:g}), so the file was not written; pass --precision fp32"
        )
    return f"{summary}, mAP {file_map:.3f} (checkpoint: {checkpoint_map:.3f})"


def check_difference(found: Tensor, expected: Tensor, metadata: Metadata, source: str) -> float:
    """Return the largest difference of probabilities. Raises CheckpointError above the limit."""
    difference = (found - expected).abs().max().item()
    limit = MAX_RESIZE_DIFFERENCE if metadata.resizes else MAX_DIFFERENCE
    if not math.isfinite(difference) or (metadata.precision == "fp32" and difference > limit):
        raise CheckpointError(
            f"{source}: probabilities of file and checkpoint differ by {difference:.1e} (limit "
            f"{limit:g}), so the file was not written; pass another --precision or report this"
        )
    return difference


def _batches(pictures: Iterable[Picture], *, any_size: bool) -> Iterator[list[Picture]]:
    """Yield batches of consecutive images. `any_size` starts a new batch if the size changes."""
    for _, group in groupby(pictures, lambda item: item[0].size if any_size else None):
        while batch := list(islice(group, MAX_BATCH)):
            yield batch


def verify(
    run: OnnxFile, program: Program, metadata: Metadata, loaded: Loaded, folder: str | None
) -> list[str]:
    """Compare a file with its checkpoint on generated images and the images of a folder."""
    # The checkpoint may have no classes if word vectors are an input.
    tested = loaded
    if metadata.word_dim is not None:
        names = numbered_names(program.min_classes + 2)
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(len(names), metadata.word_dim, generator=generator)
        classes = replace(loaded.classes, names=names, word_vectors=vectors)
        tested = replace(loaded, classes=classes)

    generated = generate_images(metadata.image_size, any_size=metadata.resizes)
    lines = [compare(run, metadata, tested, generated, "generated images")]
    if folder is not None:
        pictures = read_folder(folder, loaded)
        lines.append(compare(run, metadata, loaded, pictures, f"images of {folder}"))
    return lines


def export(options: ExportOptions) -> None:
    """Export a checkpoint. The file is only written if its outputs are verified."""
    out = Path(options.out)
    if out.suffix != ".onnx":
        raise ConfigError(f"{out}: the name must end in .onnx; choose another name")
    check_targets(options.out)
    cli.require(str(out), "export", *PACKAGES)
    if options.precision == "int8" and options.verify is None:
        raise ConfigError("--precision int8: calibration images are missing; pass --verify FOLDER")

    loaded = load_checkpoint(options)
    thresholds, origin = chosen_thresholds(loaded, options.threshold)
    if options.any_size and loaded.transform.resize != "pillow":
        raise ConfigError(
            f"--any-size: the graph resizes like Pillow, but {loaded.path} was trained with "
            f"data.resize={loaded.transform.resize}; omit --any-size"
        )

    program = Program(
        loaded,
        thresholds,
        any_size=options.any_size,
        half=options.precision == "fp16",
        takes_word_vectors=loaded.classes.word_vectors is not None and options.classes is None,
    )
    metadata = build_metadata(program, loaded, options)
    model = to_onnx(program, loaded, options.checkpoint)
    if options.verify is not None and options.precision == "int8":
        model = quantize(model, calibration_inputs(metadata, loaded, options.verify))
    content = serialize(model, metadata, options.out)

    # The temporary file is renamed if the differences are within the limits.
    with replacing(out) as file:
        file.write(content)
        file.flush()
        lines = verify(OnnxFile(Path(file.name)), program, metadata, loaded, options.verify)
    say(f"{out}: {len(content) / 1e6:.1f} MB, {options.precision}", f"decisions: {origin}", *lines)


def calibration_inputs(
    metadata: Metadata, loaded: Loaded, folder: str
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the first images of a folder as inputs of the ONNX file."""
    for image, _ in islice(read_folder(folder, loaded), CALIBRATION_IMAGES):
        pixels = to_tensor(image) if metadata.resizes else loaded.transform(image)
        inputs = {INPUTS[0]: pixels[None].numpy()}
        if metadata.word_dim is not None:
            assert loaded.classes.word_vectors is not None
            inputs[INPUTS[1]] = loaded.classes.word_vectors.numpy()
        yield inputs


def chosen_thresholds(loaded: Loaded, threshold: float | None) -> tuple[list[float] | None, str]:
    """Return the thresholds (K, one for all classes, or None for single-label) and their origin."""
    if loaded.classes.exclusive:
        if threshold is not None:
            raise ConfigError("--threshold: single-label classes have no threshold; omit it")
        return None, "most probable class of each image"

    calibration = loaded.calibration
    if threshold is not None:
        return [threshold], f"threshold {threshold:g} (--threshold)"
    if calibration is not None and calibration.thresholds:
        return list(calibration.thresholds), f"calibrated thresholds {calibration.reason}"

    of_run = loaded.config.data.get("threshold")
    if of_run is not None:
        return [float(of_run)], f"threshold {of_run:g} (data.threshold), not calibrated"
    return [DEFAULT_THRESHOLD], f"threshold {DEFAULT_THRESHOLD:g} (default), not calibrated"


def build_metadata(program: Program, loaded: Loaded, options: ExportOptions) -> Metadata:
    """Return the metadata of the exported file."""

    def normalization(name: str) -> list[float] | None:
        # Third-party backbones may have no normalization.
        value = getattr(loaded.model.backbone, name, None)
        return value.flatten().tolist() if isinstance(value, Tensor) else None

    return Metadata(
        classes=list(loaded.classes.names),
        word_dim=program.word_dim,
        exclusive=loaded.classes.exclusive,
        calibrated=loaded.calibration is not None and loaded.calibration.images > 0,
        thresholds=None if program.thresholds is None else program.thresholds.tolist(),
        image_size=loaded.transform.image_size,
        crop=loaded.transform.crop,
        interpolation=loaded.transform.interpolation,
        resize=loaded.transform.resize,
        draft=loaded.transform.draft,
        resizes=options.any_size,
        mean=normalization("mean"),
        std=normalization("std"),
        precision=options.precision,
        versions=environment.installed() | {name: version(name) for name in PACKAGES},
        checkpoint={
            "file": loaded.path.name,
            "sha256": sha256_of(loaded.path),
            "weights": loaded.weights,
        },
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec export`."""
    arguments = cli.command("export", str(__doc__))
    cli.add_model_options(arguments)
    arguments.add_argument("out", metavar="OUT.onnx", help="the file to write")
    names = ("precision", "any_size", "verify", "threshold", "classes", "vectors")
    cli.add_options(arguments, ExportOptions, *names)
    return arguments


def main() -> None:
    """Run the command."""
    cli.run_command(parser().parse_args, export, ExportOptions)
