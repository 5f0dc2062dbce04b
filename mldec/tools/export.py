"""Export a checkpoint as one file that answers by itself, and prove that it answers alike.

`mldec export best.pt model.onnx` writes an ONNX file, `model.pt2` a program of
torch.export. Input: images uint8 [B, 3, S, S], RGB. Outputs, in this order: probabilities float32
[B, K] and decisions bool [B, K]. A zero-shot checkpoint takes word vectors [K, D] as a second
input, or scores --classes. The file is compared with the checkpoint before it is written; see
docs/export.md.
"""

import argparse
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode

from mldec import build, cli
from mldec.checkpoint import Loaded, load_model
from mldec.data.transforms import EvalTransform, to_tensor
from mldec.data.types import DataModule, StoredImages, fixed_sample, picture
from mldec.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    UserError,
    brief,
    naming_errors,
    print_error,
    say,
)
from mldec.evaluation.class_list import check_class_options, with_classes
from mldec.evaluation.open import DEFAULT_THRESHOLD
from mldec.evaluation.run import decided, probabilities, scores
from mldec.evaluators.average_precision import average_precision
from mldec.files.atomic import check_targets, replacing, to_json
from mldec.files.torch_files import sha256_of
from mldec.runtime import environment as facts
from mldec.tools.predict.decode import read_item
from mldec.tools.predict.engine import INPUTS, KEY, OUTPUTS, SILENT, Metadata, OnnxFile, arrays
from mldec.tools.predict.inputs import Inputs

ONNX, PT2 = ".onnx", ".pt2"
WARNINGS = 2  # level of ONNX Runtime's own log, as it is without us
NEEDED = ("onnx", "onnxscript", "onnxruntime")  # the packages of the extra
EXTRA = "mldec.json"  # of the file of metadata in a .pt2 file
CLASSES = "classes"  # name of the axis of the word vectors
EXAMPLE = 2  # images that a program is traced with; 0 and 1 would be taken for fixed numbers
CALIBRATION_IMAGES = 128  # of an int8 file
MADE_UP = 2  # classes of a zero-shot model, beyond the fewest, that are compared too
BATCH = 8  # images at a time at most

# Largest allowed differences: of the probabilities of an fp32 file, of those of one that resizes
# the images, and of the mAP of an fp16 file, in percentage points.
PROBABILITY, RESIZED, MEAN_AP = 1e-4, 2e-2, 0.1

# An image, and its labels of the checkpoint's classes if they are known: 1, 0 or -1, [K].
Picture = tuple[Image.Image, Tensor | None]
# An exported file: images uint8 [B, 3, H, W], and word vectors float32 [K, D] if it asks for them
# -> probabilities float32 [B, K] and decisions bool [B, K].
Answer = Callable[..., tuple[Tensor, Tensor]]


# -------------------------------------------------------------------------------------- the network


class Program(nn.Module):
    """A checkpoint that answers by itself, with `half` in half precision up to the logits.

    With `any_size` it resizes the images, with `asks` word vectors are a second input.
    """

    thresholds: Tensor | None

    def __init__(
        self,
        loaded: Loaded,
        thresholds: Sequence[float] | None,
        *,
        any_size: bool = False,
        half: bool = False,
        asks: bool = False,
    ) -> None:
        super().__init__()
        self.model: nn.Module = deepcopy(loaded.model).half() if half else loaded.model
        self.resize = Resize(loaded.transform) if any_size else nn.Identity()
        self.asks = asks

        # A graph for several groups of classes does not fit one group.
        self.fewest_classes = getattr(loaded.model.head, "group_size", 0) + 1

        # The model is registered above, once.
        self._loaded = loaded
        self.register_buffer(
            "thresholds", None if thresholds is None else torch.tensor(thresholds).float()
        )
        self.register_buffer("queries", None if asks else loaded.classes.word_vectors)

    def forward(self, images: Tensor, word_vectors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map images uint8 [B, 3, H, W] to probabilities float32 [B, K] and decisions bool [B, K].

        The word vectors of the classes, if the program asks for them, are float32 [K, D].
        """
        logits = self.model(self.resize(images), word_vectors if self.asks else self.word_vectors)
        scores = probabilities(self._loaded, logits)
        return scores, decided(scores, self.thresholds)


def open_axes(program: Program) -> tuple[dict[int, str], ...]:
    """Return the names of the axes of each input whose length is open."""
    image_axes = {0: "batch"}
    if isinstance(program.resize, Resize):
        image_axes |= {2: "height", 3: "width"}
    return (image_axes, {0: CLASSES}) if program.asks else (image_axes,)


class _ContiguousAttention(TorchFunctionMode):
    """Make the result of attention contiguous in memory.

    A fused kernel orders it in another way than the operations that ONNX has instead, and a network
    that takes another view of it would then fail: transformers' Swin does.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention:
            return result.contiguous()
        return result


def traced(program: Program, loaded: Loaded, path: str) -> ExportedProgram:
    """Turn a program into a graph for any number of images, and of classes if it asks for them."""
    # Height and width differ from each other and from S, so that none is taken for another.
    size = loaded.transform.image_size
    height = width = size
    if isinstance(program.resize, Resize):
        height, width = size + 3, size + 5
    examples = [torch.zeros(EXAMPLE, 3, height, width, dtype=torch.uint8)]
    if program.asks:
        assert loaded.classes.word_vectors is not None
        word_dim = loaded.classes.word_vectors.shape[1]
        examples.append(torch.ones(program.fewest_classes + 5, word_dim))

    # Torch refuses a `Dim` where it cannot prove that each length will do. It cannot prove it for
    # classes in groups, where the number of groups is rounded.
    shapes = tuple(
        {axis: Dim.DYNAMIC if name == CLASSES else Dim(name) for axis, name in axes.items()}
        for axes in open_axes(program)
    )
    # A network of any library may do what torch.export does not follow.
    unfit = naming_errors(f"{path}: its network", remedy="torch.export does not follow it")
    with unfit, torch.no_grad(), _ContiguousAttention():
        return torch.export.export(program.eval(), tuple(examples), dynamic_shapes=shapes)


class Resize(nn.Module):
    """Apply an `EvalTransform` to a batch of images of one size.

    Values differ from Pillow's by a level of 256 here and there: Pillow rounds the filter, and
    between the two directions.
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
            # The product first, as in `EvalTransform`: with a rounded scale it may fall short.
            shorter, shortest = self.transform.shorter_side, torch.sym_min(*images.shape[2:])
            height, width = (shorter * side // shortest for side in images.shape[2:])

        mode, resized = self.transform.interpolation, (height, width)
        pixels = F.interpolate(images.float(), size=resized, mode=mode, antialias=True)
        top, left = _half(height - size), _half(width - size)
        pixels = pixels[:, :, top : top + size, left : left + size]
        return torch.floor(pixels + 0.5).clamp(0, 255).to(torch.uint8)


def _half(number: int) -> int:
    """Return half of a number, rounded to the nearest even one, as Python's `round` does."""
    return number // 2 + (number % 2) * (number // 2 % 2)


# --------------------------------------------------------------------------------------- the images


def generated(size: int, *, any_size: bool) -> list[Picture]:
    """Return noise and smooth colours of `size` pixels per side, or of other sizes too."""
    generator = np.random.default_rng(0)
    sizes = [(size, size)] * 2
    if any_size:
        narrow, large = (size // 2 + 1, size), (2 * size, size + size // 2)
        sizes += [narrow, large]

    pictures: list[Picture] = []
    for width, height in sizes:
        noise = Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
        coarse = Image.fromarray(generator.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        smooth = coarse.resize((width, height), Image.Resampling.BICUBIC)
        pictures += [(noise, None), (smooth, None)]
    return pictures


def stored(folder: str, loaded: Loaded) -> Iterator[Picture]:
    """Yield the images of a folder that can be read, with their labels if the folder holds them.

    Labels are those of a data.csv in the folder (of its validation images, as with data=csv), or
    the names of its folders, if all of them are classes of the checkpoint.
    """
    data = _labelled(Path(folder), loaded)
    sources: Iterable[tuple[Callable[[], Image.Image], Tensor | None]]
    if data is None:
        sources = ((partial(read_item, item), None) for item in Inputs([folder]))
    else:
        dataset = data.val.dataset
        assert isinstance(dataset, StoredImages)
        sources = (
            (partial(picture, dataset, index), dataset.labels.row(index))
            for index in range(len(dataset))
        )

    for read, labels in sources:
        try:
            image = read()
        except DataError as error:
            print_error(str(error))
        else:
            yield image, labels


def _labelled(folder: Path, loaded: Loaded) -> DataModule | None:
    """Return the labelled images of a folder; None if it has no labels of these classes."""
    if not folder.is_dir():
        raise DataError(f"--verify {folder}: no such folder; check the path")

    names = list(loaded.classes.names)
    shared = {"classes": names, "image_size": loaded.transform.image_size}
    if (folder / "data.csv").is_file():
        target = "mldec.data.readers.csv_table"
        place = {"root": str(folder), "exclusive": loaded.classes.exclusive}
    else:
        inner = [entry.name for entry in folder.iterdir() if entry.is_dir()]
        if not inner or not set(inner) <= set(names):
            return None
        target = "mldec.data.readers.folders"
        split = folder.resolve().name
        place = {"root": str(folder.resolve().parent), "train": split, "val": split}

    node = {"_target_": target, **place, **shared}
    return build.data({"data": build.resolve("data", node)})


def calibration_inputs(
    loaded: Loaded, metadata: Metadata, folder: str | None
) -> Iterator[tuple[Tensor, ...]]:
    """Yield inputs that calibrate an int8 file: images of a folder, or of the training."""
    pictures = _training_images(loaded)
    if folder is not None:
        pictures = (image for image, _ in stored(folder, loaded))

    word_vectors = loaded.classes.word_vectors if metadata.word_dim is not None else None
    for image in islice(pictures, CALIBRATION_IMAGES):
        pixels = to_tensor(image) if metadata.resizes else loaded.transform(image)
        yield (pixels[None],) if word_vectors is None else (pixels[None], word_vectors)


def _training_images(loaded: Loaded) -> Iterator[Image.Image]:
    """Yield images of the data that a checkpoint was trained on, at equal distances."""
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


# ---------------------------------------------------------------------------------------- the file


# Any: the classes of onnx and onnxruntime are imported only where they are used.
def translated(graph: ExportedProgram, axes: tuple[dict[int, str], ...], path: str) -> Any:
    """Translate a graph to an `onnx.ModelProto`; `axes` names the open axes of each input."""
    inputs = INPUTS[: len(axes)]
    try:
        with _quiet():
            program = torch.onnx.export(
                graph,
                dynamo=True,
                verbose=False,
                input_names=inputs,
                output_names=OUTPUTS,
                dynamic_shapes=dict(zip(inputs, axes, strict=True)),
            )
    except Exception as error:
        # The exporter lists its attempts: the last cause says what is missing.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise CheckpointError(
            f"{path} cannot be exported to ONNX ({brief(Exception(str(cause)))}); "
            f"export a .pt2 file"
        ) from error

    assert program is not None
    return program.model_proto


def quantised(model: Any, inputs: Sequence[tuple[Tensor, ...]]) -> Any:
    """Quantise weights and activations of convolutions and linear layers to 8 bits.

    The ranges of the activations are the smallest and largest values on the given inputs. Weights
    have a scale per output channel. Products of two activations, as in attention, and the group
    pooling of ML-Decoder, which gives the logits, stay as they are.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_static

    remaining = map(arrays, inputs)
    matrices = {weight.name for weight in model.graph.initializer if len(weight.dims) == 2}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    no_layers = [node.name for node in products if node.input[1] not in matrices]

    unfit = naming_errors("--precision int8: this network", remedy="choose fp32 or fp16")
    with tempfile.TemporaryDirectory() as folder, _quiet(), unfit:
        target = Path(folder, "model.onnx")
        quantize_static(
            model,
            target,
            SimpleNamespace(get_next=lambda: next(remaining, None)),
            op_types_to_quantize=["Conv", "Gemm", "MatMul"],
            nodes_to_exclude=no_layers,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return onnx.load(target)


def onnx_content(model: Any, metadata: Metadata, path: str) -> bytes:
    """Return the bytes of a self-contained ONNX file."""
    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, to_json(asdict(metadata))
    model.producer_name, model.producer_version = "mldec", metadata.versions["mldec"]
    # Protocol buffers have a limit of 2 GiB.
    with naming_errors(path, remedy="pass --precision fp16, or write a .pt2 file"):
        return model.SerializeToString()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter and the quantiser: they tell of every step."""
    import onnxruntime

    # The quantiser gives the root logger a handler, which would print our messages again.
    root_handlers = [*logging.getLogger().handlers]
    logging.disable(logging.WARNING)
    onnxruntime.set_default_logger_severity(SILENT)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        onnxruntime.set_default_logger_severity(WARNINGS)
        logging.disable(logging.NOTSET)
        logging.getLogger().handlers[:] = root_handlers


# ---------------------------------------------------------------------------------------- the proof


class Comparison(NamedTuple):
    """How an exported file answers beside its checkpoint."""

    images: int
    largest: float  # difference of two probabilities
    equal: float  # share of the decisions
    mean_ap: tuple[float, float] | None  # of file and checkpoint, in percent; None without labels


def compare(
    answer: Answer, metadata: Metadata, loaded: Loaded, pictures: Iterable[Picture], source: str
) -> Comparison:
    """Run images, which messages call `source`, through an exported file and its checkpoint."""
    limits = None if metadata.thresholds is None else torch.tensor(metadata.thresholds)
    word_vectors = [] if metadata.word_dim is None else [loaded.classes.word_vectors]

    images, equal, largest = 0, 0.0, 0.0
    labelled: list[tuple[Tensor, Tensor, Tensor]] = []
    for batch in _batches(pictures, metadata, loaded):
        inputs, transformed, labels = zip(*batch, strict=True)
        expected = scores(loaded, torch.stack(transformed))
        with naming_errors("the exported file", remedy="choose another format"), torch.no_grad():
            answers, decisions = answer(torch.stack(inputs), *word_vectors)
        if answers.shape != expected.shape or not torch.isfinite(answers).all():
            raise CheckpointError(
                f"{source}: the exported file answers {list(answers.shape)} probabilities, some of "
                f"them not finite, where the checkpoint answers {list(expected.shape)}"
            )

        images += len(inputs)
        largest = max(largest, (answers - expected).abs().max().item())
        equal += (decisions == decided(expected, limits)).float().sum().item()
        if labels[0] is not None:
            labelled.append((answers, expected, torch.stack(labels)))

    if not images:
        raise DataError(f"{source}: no image can be read; choose another folder")
    mean_ap = None
    if labelled:
        own, others, targets = map(list, zip(*labelled, strict=True))
        of_file, of_checkpoint = (average_precision(one, targets)["none"] for one in (own, others))
        mean_ap = 100 * of_file.nanmean().item(), 100 * of_checkpoint.nanmean().item()
    return Comparison(images, largest, equal / (images * len(loaded.classes)), mean_ap)


def _batches(
    pictures: Iterable[Picture], metadata: Metadata, loaded: Loaded
) -> Iterator[list[tuple[Tensor, Tensor, Tensor | None]]]:
    """Yield inputs of the file, those of the checkpoint, and labels, in batches of one size.

    The first image is a batch of its own, because a faulty export may fix the batch size.
    """
    batch: list[tuple[Tensor, Tensor, Tensor | None]] = []
    most = 1
    for image, labels in pictures:
        transformed = loaded.transform(image)
        pixels = to_tensor(image) if metadata.resizes else transformed
        if batch and (len(batch) == most or batch[0][0].shape != pixels.shape):
            yield batch
            batch, most = [], BATCH
        batch.append((pixels, transformed, labels))
    if batch:
        yield batch


def check(comparison: Comparison, metadata: Metadata, out: str) -> str:
    """Return the sentence for the console; refuse what the precision does not explain."""
    sentence = (
        f"largest difference of probabilities {comparison.largest:.1e}, "
        f"equal decisions {100 * comparison.equal:.2f} %"
    )
    limit = RESIZED if metadata.resizes else PROBABILITY
    if metadata.precision == "fp32" and comparison.largest > limit:
        raise CheckpointError(
            f"{out} is not written: its probabilities differ from the checkpoint's by up to "
            f"{comparison.largest:.1e}, and the limit is {limit:g}; please report it"
        )
    if comparison.mean_ap is None:
        return sentence

    of_file, of_checkpoint = comparison.mean_ap
    if metadata.precision == "fp16" and abs(of_file - of_checkpoint) > MEAN_AP:
        raise CheckpointError(
            f"{out} is not written: half precision changes the mAP from {of_checkpoint:.3f} to "
            f"{of_file:.3f}, and the limit is {MEAN_AP:g}; pass --precision fp32"
        )
    return f"{sentence}, mAP {of_file:.3f}, of the checkpoint {of_checkpoint:.3f}"


def proofs(
    answer: Answer, program: Program, metadata: Metadata, loaded: Loaded, args: argparse.Namespace
) -> Iterator[str]:
    """Compare a file with its checkpoint, and yield a sentence per comparison."""
    made = generated(metadata.image_size, any_size=metadata.resizes)
    name = f"{len(made)} generated images"

    # A file that asks for word vectors must take any number of them.
    if program.asks:
        count = program.fewest_classes + MADE_UP
        assert loaded.classes.word_vectors is not None
        width, generator = loaded.classes.word_vectors.shape[1], torch.Generator().manual_seed(0)
        names = tuple(f"class {number}" for number in range(count))
        vectors = torch.randn(count, width, generator=generator)
        others = replace(loaded, classes=replace(loaded.classes, names=names, word_vectors=vectors))
        comparison = compare(answer, metadata, others, made, name)
        yield f"{name}, {count} made-up classes: {check(comparison, metadata, args.out)}"

    # A released zero-shot file has no classes of its own.
    if len(loaded.classes):
        comparison = compare(answer, metadata, loaded, made, name)
        yield f"{name}: {check(comparison, metadata, args.out)}"

    if args.verify is not None:
        pictures = stored(args.verify, loaded)
        comparison = compare(answer, metadata, loaded, pictures, args.verify)
        sentence = check(comparison, metadata, args.out)
        yield f"{comparison.images} images of {args.verify}: {sentence}"


# -------------------------------------------------------------------------------------- the command


def export(args: argparse.Namespace) -> None:
    """Load a checkpoint, trace it, compare the two, and write the file."""
    # Everything that can be refused at once comes before the model.
    out = Path(args.out)
    if out.suffix not in (ONNX, PT2):
        raise ConfigError(
            f"{out}: the name of an exported file ends in .onnx (ONNX) or .pt2 (torch.export); "
            f"choose one of them"
        )
    check_targets(args.out)
    check_class_options(args.classes, args.class_names)
    if out.suffix == ONNX:
        cli.require(str(out), "export", *NEEDED)
    elif args.precision == "int8":
        raise ConfigError(f"--precision int8: {out} cannot have it; write an .onnx file")

    loaded = load_model(**cli.chosen_model(args))
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
        asks=loaded.classes.word_vectors is not None and args.classes is None,
    )
    metadata = describe(program, loaded, args)
    content = to_bytes(program, loaded, metadata, args)

    # The file gets its name only after it has proved to answer as the checkpoint does.
    with replacing(out) as file:
        file.write(content)
        file.flush()
        answer: Answer
        if out.suffix == ONNX:
            answer = OnnxFile(Path(file.name))
        else:
            # It unpickles, and so runs what a file holds: these bytes never come from a file.
            answer = torch.export.load(io.BytesIO(content)).module()
        sentences = list(proofs(answer, program, metadata, loaded, args))

    count = "as many classes as word vectors" if program.asks else f"{len(loaded.classes)} classes"
    axes, size = open_axes(program)[0], str(metadata.image_size)
    sides = ", ".join(axes.get(axis, size) for axis in (2, 3))
    say(
        f"{out}: {len(content) / 1e6:.1f} MB, {args.precision}, {count}; "
        f"images uint8 [batch, 3, {sides}]",
        f"decisions: {rule}",
        *sentences,
    )


def chosen_thresholds(loaded: Loaded, args: argparse.Namespace) -> tuple[list[float] | None, str]:
    """Return one threshold per class or for all, or None with one label per image; and its origin.

    As in `mldec evaluate`, the default is that of the run.
    """
    if loaded.classes.exclusive:
        if args.threshold is not None:
            raise ConfigError(
                "--threshold has no effect: an image has one label here; leave it out"
            )
        return None, "the most probable class of each image"

    if args.threshold is not None:
        return [args.threshold], f"at {args.threshold:g}, of --threshold"
    if (fitted := loaded.calibration) is not None and fitted.thresholds:
        return [*fitted.thresholds], f"at the thresholds of the checkpoint {fitted.reason}"

    chosen = loaded.config.data.get("threshold")
    threshold = DEFAULT_THRESHOLD if chosen is None else float(chosen)
    origin = "the default" if chosen is None else "data.threshold of the run"
    return [threshold], (
        f"at {threshold:g}, {origin}: the checkpoint has no thresholds; pass --threshold, or "
        f"calibrate it with mldec calibrate"
    )


def describe(program: Program, loaded: Loaded, args: argparse.Namespace) -> Metadata:
    """Return what the file says of itself."""
    width = None
    if program.asks and loaded.classes.word_vectors is not None:
        width = loaded.classes.word_vectors.shape[1]

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
        calibrated=loaded.calibration is not None and loaded.calibration.images > 0,
        thresholds=None if program.thresholds is None else program.thresholds.tolist(),
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
    """Return the content of the file."""
    graph = traced(program, loaded, args.checkpoint)
    if Path(args.out).suffix != ONNX:
        buffer = io.BytesIO()
        torch.export.save(graph, buffer, extra_files={EXTRA: to_json(asdict(metadata))})
        return buffer.getvalue()

    model = translated(graph, open_axes(program), args.checkpoint)
    if metadata.precision == "int8":
        inputs = list(calibration_inputs(loaded, metadata, args.verify))
        model = quantised(model, inputs)
    return onnx_content(model, metadata, args.out)


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec export`."""
    arguments = cli.command("export", str(__doc__))
    cli.add_model_options(arguments)

    arguments.add_argument("out", metavar="OUT.onnx|OUT.pt2", help="the file to write")
    arguments.add_argument(
        "--precision",
        choices=("fp32", "fp16", "int8"),
        default="fp32",
        help="of the weights; int8 (.onnx only) is calibrated on images; default: fp32",
    )
    arguments.add_argument(
        "--any-size", action="store_true", help="put the resize of the images into the file"
    )
    arguments.add_argument(
        "--verify", metavar="FOLDER", help="real images to compare file and checkpoint on"
    )
    cli.add_threshold_option(arguments)
    cli.add_class_options(arguments)
    return arguments


def main() -> None:
    """Run the command."""
    cli.run_command(parser().parse_args, export)


if __name__ == "__main__":
    main()
