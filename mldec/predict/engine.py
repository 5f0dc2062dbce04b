"""What scores images: a checkpoint in torch, or an exported file in ONNX Runtime."""

import argparse
import importlib.util
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.export import ExportedProgram

from mldec.checkpoint import Loaded, check_queries, is_open_clip
from mldec.data.images import check_decoder
from mldec.data.transforms import EvalTransform, Picture, to_tensor
from mldec.data.types import Classes
from mldec.errors import CheckpointError, ConfigError, brief
from mldec.evaluation import stored_thresholds
from mldec.runtime.devices import Precision, autocast, memory_format
from mldec.runtime.facts import explain_out_of_memory

# The names of inputs, of which a file has the first or both, and of outputs.
INPUTS = ("images", "queries")
OUTPUTS = ("probabilities", "decisions")

KEY = "mldec"  # of the entry in an ONNX file
ONNX = ".onnx"
NEEDED = ("onnx", "onnxscript", "onnxruntime")  # the packages of the extra


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What a program needs to know of an exported file."""

    # Names of the outputs; of the classes of its training if `word_dim` is given.
    classes: list[str]
    word_dim: int | None  # width D of the word vectors that are its second input; None without one
    # An image has one label: probabilities are a softmax, and the most probable class is the
    # decision. Otherwise they are sigmoids.
    exclusive: bool
    calibrated: bool  # the probabilities are calibrated
    # Lowest probability of a present class: K, one for all, or None with one label per image.
    thresholds: list[float] | None
    image_size: int  # pixels per side S of the network's images
    crop: float | None  # see `EvalTransform`
    interpolation: str  # likewise
    # The resize is inside, and images of any size are the input. Otherwise images are resized
    # outside, see `resize`.
    resizes: bool
    mean: list[float] | None  # of the channels of images in [0, 1]; the normalisation is inside
    std: list[float] | None  # likewise
    precision: str  # "fp32", "fp16" or "int8"
    versions: dict[str, str]  # of the packages that wrote the file
    # Its file name, the SHA-256 hash of this file, and its weights, "ema" or "raw".
    checkpoint: dict[str, str]
    date: str  # of the export, in ISO 8601
    resize: str = "pillow"  # likewise; "pillow" in older files

    def to_json(self) -> str:
        """Return the text that the file holds."""
        return json.dumps(asdict(self), allow_nan=False)


def parse(text: str | None, path: Path) -> Metadata:
    """Read the text that an exported file holds; None if it has none."""
    try:
        content: dict[str, Any] = json.loads(text or "")
        return Metadata(**content)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} does not say what its classes are: it lacks the metadata of this version; "
            f"write it with python -m mldec.export"
        ) from error


def require_onnx(path: str | Path, needed: Sequence[str] = NEEDED) -> None:
    """Check that the packages for ONNX files are installed."""
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{path}: ONNX files need {name}, which is not installed; "
                f"run pip install -e '.[export]'"
            )


def read_metadata(path: Path) -> Metadata:
    """Return what an ONNX file says of itself, without loading its network."""
    if not path.is_file():
        raise CheckpointError(f"no file at {path}: check the path")
    require_onnx(path, ["onnx"])
    import onnx

    try:
        # Weights in other files are not looked for.
        model = onnx.load(path, load_external_data=False)
    except Exception as error:
        # The parser raises classes of its own for a damaged file.
        raise CheckpointError(f"{path} is damaged, or no {ONNX} file") from error
    text = next((entry.value for entry in model.metadata_props if entry.key == KEY), None)
    return parse(text, path)


# ONNX Runtime reads this while it is imported, which is done in this module only. Otherwise it asks
# a host of Microsoft's, and writes an identifier of the machine to the user's cache.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

LARGEST = 2**31  # bytes in one ONNX file, a limit of protocol buffers
SILENT, WARNINGS = 4, 2  # levels of ONNX Runtime's own log; what is fatal is raised as an error too
LOUD = ("onnxscript", "onnx_ir", "torch.onnx", "root")  # loggers that tell of each constant


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
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Batches(CalibrationDataReader):
        """The inputs one after the other, in the form that the calibration asks for."""

        def __init__(self) -> None:
            self.remaining: Iterator[tuple[Tensor, ...]] = iter(inputs)

        def get_next(self) -> dict[str, Any] | None:
            """Return the next batch by the names of the inputs, and None at the end."""
            batch = next(self.remaining, None)
            return None if batch is None else _named(batch)

    with tempfile.TemporaryDirectory() as folder, _quiet():
        target = Path(folder, "model.onnx")
        try:
            quantize_static(
                model,
                target,
                Batches(),
                op_types_to_quantize=["Conv", "Gemm", "MatMul"],
                nodes_to_exclude=_products(model),
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
        except Exception as error:
            raise CheckpointError(
                f"--precision int8: ONNX Runtime cannot quantise this network ({brief(error)}); "
                f"choose fp32 or fp16"
            ) from error
        return onnx.load(target)


def _products(model: Any) -> list[str]:
    """Return the names of the matrix products that are no linear layers."""
    matrices = {weight.name for weight in model.graph.initializer if len(weight.dims) == 2}
    return [
        node.name
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] not in matrices
    ]


def content(model: Any, metadata: Metadata, path: str) -> bytes:
    """Return the bytes of a self-contained ONNX file."""
    size = model.ByteSize()
    if size >= LARGEST:
        raise CheckpointError(
            f"{path}: the model has {size / 2**30:.1f} GiB, and an ONNX file holds at most 2; "
            f"pass --precision fp16, or write a .pt2 file"
        )

    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, metadata.to_json()
    model.producer_name, model.producer_version = "mldec", metadata.versions["mldec"]
    return model.SerializeToString()


class OnnxFile:
    """An exported ONNX file in ONNX Runtime, on the CPU."""

    metadata: Metadata

    def __init__(self, path: Path) -> None:
        require_onnx(path, ["onnxruntime"])
        import onnxruntime

        self._path = path
        # As many threads as torch, so that OMP_NUM_THREADS counts for both.
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = SILENT
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise CheckpointError(f"ONNX Runtime does not load {path}: {brief(error)}") from error
        self.metadata = parse(self._session.get_modelmeta().custom_metadata_map.get(KEY), path)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities float32 [B, K] and decisions bool [B, K].

        The inputs are images uint8 [B, 3, H, W], and word vectors [K, D] if it asks for them.
        """
        try:
            scores, decisions = self._session.run(OUTPUTS, _named(inputs))
        except Exception as error:
            raise CheckpointError(f"{self._path} fails in ONNX Runtime: {brief(error)}") from error
        return torch.from_numpy(scores), torch.from_numpy(decisions)


def _named(inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """Return inputs as arrays, by their names."""
    return {name: tensor.numpy() for name, tensor in zip(INPUTS, inputs, strict=False)}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter and the quantiser: they tell of every step."""
    import onnxruntime

    loggers = [logging.getLogger(name) for name in LOUD]
    levels = [logger.level for logger in loggers]
    # The quantiser gives the root logger a handler, which would print our messages again.
    root_handlers = [*logging.getLogger().handlers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    onnxruntime.set_default_logger_severity(SILENT)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        onnxruntime.set_default_logger_severity(WARNINGS)
        logging.getLogger().handlers[:] = root_handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


DEFAULT_THRESHOLD = 0.5  # of a model without thresholds, as in mldec.evaluate


@torch.no_grad()
def scores(loaded: Loaded, images: Tensor) -> Tensor:
    """Return the scores of all classes in [0, 1]: softmax if an image has one label, else sigmoid.

    They are calibrated if the checkpoint is. Otherwise, after training with the asymmetric loss,
    they are not probabilities: those of absent classes are often above 0.5.

    Args:
        loaded: from `checkpoint.load_model`.
        images: [B, 3, S, S], uint8 or float in [0, 1], on the model's device.

    Returns:
        float32 [B, K].
    """
    queries = loaded.classes.queries
    if queries is not None:
        queries = queries.to(images.device)

    return probabilities(loaded, loaded.model(images, queries))


def probabilities(loaded: Loaded, logits: Tensor) -> Tensor:
    """Return the scores [B, K], float32, of the logits [B, K] of a model; see `scores`."""
    logits = logits.float()
    if loaded.calibration is not None:
        logits = loaded.calibration.scaled(logits)
    return logits.softmax(-1) if loaded.classes.exclusive else logits.sigmoid()


def decided(scores: Tensor, thresholds: Tensor | None) -> Tensor:
    """Return which classes are present, bool [B, K], by the thresholds [K] or [1] of their scores.

    Without thresholds an image has one label: the most probable class, the first one of several.
    """
    if thresholds is not None:
        return scores >= thresholds

    classes = torch.arange(scores.shape[1], device=scores.device)
    return classes == scores.argmax(1, keepdim=True)


class Answers(NamedTuple):
    """What an engine says of B images, in main memory."""

    scores: Tensor  # float32 [B, K], in [0, 1]
    features: Tensor | None  # float32 [B, C]: the mean over the tokens of the backbone


class Engine(Protocol):
    """A network with its classes and its input transform, whatever file it is from."""

    path: Path
    classes: Classes  # names of the K classes, and whether an image has one label
    # Lowest score of a present class [K]; None without any, or if an image has one label.
    thresholds: Sequence[float] | None
    transform: Callable[[Picture], Tensor]  # an RGB image -> uint8 [3, H, W]
    decoder: str  # of image files, see `mldec.data.images.load_image`
    image_size: int  # pixels per side of the network's input
    # Pixels of the shorter side of an image that the network's input is made of; a smaller image
    # would have to be enlarged.
    shorter_side: int
    precision: str  # number format of the forward pass, such as "bf16"
    zero_shot: bool  # it scores any classes that have word vectors; see `for_classes`

    def answer(self, images: Sequence[Tensor] | Tensor, *, features: bool = False) -> Answers:
        """Score B images from `transform`; stacked, if they have one size, or not.

        The features are the mean over the tokens of the backbone.
        """
        ...

    def for_classes(self, classes: Classes) -> "Engine":
        """Return an engine of the same zero-shot network that scores other classes."""
        ...


class TorchEngine:
    """A checkpoint in torch; see `Engine`."""

    def __init__(self, loaded: Loaded, precision: Precision = Precision.auto) -> None:
        self.loaded = loaded
        self.path = loaded.path
        self.classes = loaded.classes
        self.thresholds: Sequence[float] | None = stored_thresholds(loaded)
        self.transform: Callable[[Picture], Tensor] = loaded.transform
        self.decoder = loaded.transform.decoder
        check_decoder(self.decoder)
        self.image_size = loaded.transform.image_size
        self.shorter_side = loaded.transform.shorter_side
        self.device = next(loaded.model.parameters()).device
        self._precision = precision.on(self.device)
        self.precision = self._precision.value
        # What tensor cores want; a CPU is not always faster with it.
        self._order = memory_format(channels_last=self.device.type == "cuda")
        loaded.model.to(memory_format=self._order)
        queries = loaded.classes.queries
        self.zero_shot = queries is not None
        self._queries = None if queries is None else queries.to(self.device)

    @torch.no_grad()
    def answer(self, images: Sequence[Tensor] | Tensor, *, features: bool = False) -> Answers:
        """Score images; see `Engine`."""
        with explain_out_of_memory(lambda: _advice(self.device, len(images), self.image_size)):
            model = self.loaded.model
            batch = _stacked(images).to(self.device, non_blocking=True, memory_format=self._order)
            with autocast(self.device, self._precision):
                tokens = model.backbone(batch)
                logits = model.classify(tokens, self._queries)
            scores = probabilities(self.loaded, logits).cpu()
            pooled = tokens.float().mean(1).cpu() if features else None
        return Answers(scores, pooled)

    def for_classes(self, classes: Classes) -> "TorchEngine":
        """Return an engine that scores other classes; see `Engine`."""
        check_queries(self.loaded.classes, classes, "the checkpoint")
        return TorchEngine(replace(self.loaded, classes=classes), self._precision)


class ExportedEngine:
    """An ONNX file of `mldec.export` on the CPU; see `Engine`."""

    def __init__(self, path: Path, classes: Classes | None = None) -> None:
        self.path = path
        self._exported = OnnxFile(path)
        metadata = self._exported.metadata
        self.zero_shot = metadata.word_dim is not None
        self._set_classes(classes)

        self.image_size = metadata.image_size
        self.precision = metadata.precision
        eval_transform = EvalTransform(
            image_size=metadata.image_size,
            crop=metadata.crop,
            interpolation=metadata.interpolation,
            resize=metadata.resize,
        )
        self.decoder = eval_transform.decoder
        self.shorter_side = eval_transform.shorter_side
        self._resizes = metadata.resizes
        self.transform: Callable[[Picture], Tensor] = eval_transform
        if self._resizes:
            self.transform = to_tensor

    def answer(self, images: Sequence[Tensor] | Tensor, *, features: bool = False) -> Answers:
        """Score images; see `Engine`."""
        if features:
            raise CheckpointError(
                "--features: an exported file holds no features; pass the checkpoint"
            )

        # A file that resizes takes images of any size, and a batch has one.
        batches = [image[None] for image in images]
        if not self._resizes:
            batches = [_stacked(images)]
        with explain_out_of_memory(lambda: _advice("cpu", len(images), self.image_size)):
            scores = [self._exported(batch, *self._queries)[0] for batch in batches]
        return Answers(torch.cat(scores), None)

    def for_classes(self, classes: Classes) -> "ExportedEngine":
        """Return an engine that scores other classes; see `Engine`."""
        engine = copy(self)
        engine._set_classes(classes)
        return engine

    def _set_classes(self, classes: Classes | None) -> None:
        """Take the classes of the file, or those given, with a threshold for each."""
        self.classes, self._queries = _classes_of(self._exported, classes, self.path)
        self.thresholds: Sequence[float] | None = self._exported.metadata.thresholds
        if self.thresholds is not None and len(self.thresholds) == 1:
            self.thresholds = [*self.thresholds] * len(self.classes)


def is_exported(path: str | Path) -> bool:
    """Tell whether a path names an ONNX file, by its ending."""
    # A repository of the hub may have any name, and so may weights of open_clip.
    is_name = str(path).startswith("hf:") or is_open_clip(path)
    return Path(path).suffix == ONNX and not is_name


def check_exported_options(args: argparse.Namespace, *others: str) -> None:
    """Refuse options without effect on an exported file, of `add_model_options` and others."""
    for name in ("weights", "image_size", "class_names", "plugin", "precision", *others):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} has no effect on an exported file such as {args.checkpoint}: pass the "
                f"checkpoint, or leave {option} out"
            )
    if args.device not in ("auto", "cpu"):
        raise ConfigError(
            f"--device {args.device}: an exported file runs on the CPU here; leave --device out"
        )


def _classes_of(
    exported: OnnxFile, classes: Classes | None, path: Path
) -> tuple[Classes, list[Tensor]]:
    """Return the classes of an exported file, and its word vectors as a list of none or one."""
    metadata = exported.metadata
    if metadata.word_dim is None:
        if classes is not None:
            raise CheckpointError(
                f"--classes: {path} knows its own classes only; export the checkpoint with them"
            )
        return Classes(tuple(metadata.classes), exclusive=metadata.exclusive), []

    if classes is None or classes.queries is None:
        raise CheckpointError(f"{path} asks for word vectors: pass --classes and --vectors")
    width = classes.queries.shape[1]
    if width != metadata.word_dim:
        raise CheckpointError(
            f"{path} takes word vectors of {metadata.word_dim} numbers, and those of --vectors "
            f"have {width}; pass the kind that the model was trained with"
        )
    return replace(classes, exclusive=metadata.exclusive), [classes.queries]


def _stacked(images: Sequence[Tensor] | Tensor) -> Tensor:
    """Return images of one size as a batch [B, 3, H, W]."""
    return images if isinstance(images, Tensor) else torch.stack([*images])


def _advice(device: object, images: int, size: int) -> str:
    """Say what helps against too little memory."""
    return (
        f"out of memory on {device}: batches of {images}, images of {size} pixels; "
        f"pass a smaller --batch-size"
    )
