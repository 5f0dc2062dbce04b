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
from typing import Any, NamedTuple

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

    @property
    def transform(self) -> EvalTransform:
        """What makes images of the network's size."""
        return EvalTransform(
            image_size=self.image_size,
            crop=self.crop,
            interpolation=self.interpolation,
            resize=self.resize,
        )


def parse(text: str | None, path: Path) -> Metadata:
    """Read the text that an exported file holds; None if it has none."""
    try:
        metadata = Metadata(**json.loads(text or ""))
        names, thresholds = metadata.classes, metadata.thresholds
        _ = Classes(tuple(names)), metadata.transform  # both check what they are given
        limits = torch.tensor([0.5] if thresholds is None else thresholds)
        counts = (1, len(names)) if metadata.word_dim is None else (1,)
        fits = limits.ndim == 1 and len(limits) in counts and limits.isfinite().all()
        if not isinstance(names, list) or not fits:
            raise ValueError(f"{len(names)} classes, thresholds {thresholds}")
    except Exception as error:
        raise CheckpointError(
            f"{path} lacks the metadata of this version ({brief(error)}); write it with "
            f"python -m mldec.export"
        ) from error
    return metadata


def require_onnx(path: str | Path, needed: Sequence[str] = NEEDED) -> None:
    """Check that the packages for ONNX files are installed."""
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"{path}: ONNX files need {name}, which is not installed; "
                f"run pip install -e '.[export]'"
            )


# ONNX Runtime reads this while it is imported, which is done in this module only. Otherwise it asks
# a host of Microsoft's, and writes an identifier of the machine to the user's cache.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

LARGEST = 2**31  # bytes in one ONNX file, a limit of protocol buffers
SILENT, WARNINGS = 4, 2  # levels of ONNX Runtime's own log; what is fatal is raised as an error too


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

    remaining = map(_named, inputs)

    class Batches(CalibrationDataReader):
        """The inputs one after the other, in the form that the calibration asks for."""

        def get_next(self) -> dict[str, Any] | None:
            """Return the next batch by the names of the inputs, and None at the end."""
            return next(remaining, None)

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
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    return [node.name for node in products if node.input[1] not in matrices]


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
        if not path.is_file():
            raise CheckpointError(f"no file at {path}: check the path")
        require_onnx(path, ["onnxruntime"])
        import onnxruntime

        self.path = path
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
        count = len(inputs[1]) if len(inputs) > 1 else len(self.metadata.classes)
        expected = f"torch.float32 {[len(inputs[0]), count]}"
        try:
            scores, decisions = map(torch.from_numpy, self._session.run(OUTPUTS, _named(inputs)))
            if f"{scores.dtype} {[*scores.shape]}" != expected:
                raise ValueError(f"{scores.dtype} {[*scores.shape]}, not {expected}")
        except Exception as error:
            raise CheckpointError(f"{self.path} fails in ONNX Runtime: {brief(error)}") from error
        return scores, decisions


def _named(inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """Return inputs as arrays, by their names."""
    return {name: tensor.numpy() for name, tensor in zip(INPUTS, inputs, strict=False)}


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
    queries = None if queries is None else queries.to(images.device)
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
    """What an engine says of B images, on its device."""

    scores: Tensor  # float32 [B, K], in [0, 1]
    features: Tensor | None  # float32 [B, C]: the mean over the tokens of the backbone


class TorchEngine:
    """A checkpoint in torch."""

    def __init__(self, loaded: Loaded, precision: Precision = Precision.auto) -> None:
        self.loaded, self.path, self.classes = loaded, loaded.path, loaded.classes
        # Lowest score of a present class [K]; None without any, or if an image has one label.
        self.thresholds: Sequence[float] | None = stored_thresholds(loaded)
        self.transform: Callable[[Picture], Tensor] = loaded.transform  # to uint8 [3, H, W]
        self.decoder = loaded.transform.decoder  # of image files, see `load_image`
        check_decoder(self.decoder)
        self.image_size = loaded.transform.image_size  # pixels per side of the network's input
        # Pixels of the shorter side of an image that the network's input is made of; a smaller
        # image would have to be enlarged.
        self.shorter_side = loaded.transform.shorter_side
        self.device = next(loaded.model.parameters()).device
        self._precision = precision.on(self.device)
        self.precision = self._precision.value  # number format of the forward pass
        # What tensor cores want; a CPU is not always faster with it.
        self._order = memory_format(channels_last=self.device.type == "cuda")
        loaded.model.to(memory_format=self._order)
        queries = loaded.classes.queries
        self.zero_shot = queries is not None  # it scores any classes that have word vectors
        self._queries = None if queries is None else queries.to(self.device)

    @torch.no_grad()
    def answer(self, images: Sequence[Tensor] | Tensor, *, features: bool = False) -> Answers:
        """Score B images from `transform`; stacked, if they have one size, or not.

        On a GPU this returns before the scores are known; reading them waits.
        """
        with explain_out_of_memory(lambda: _advice(self.device, len(images), self.image_size)):
            model = self.loaded.model
            batch = _stacked(images).to(self.device, non_blocking=True, memory_format=self._order)
            with autocast(self.device, self._precision):
                # Features are of the tokens, which a forward pass would compute again.
                tokens = model.backbone(batch) if features else None
                if tokens is None:
                    logits = model(batch, self._queries)
                else:
                    logits = model.classify(tokens, self._queries)
            scores = probabilities(self.loaded, logits)
            pooled = None if tokens is None else tokens.float().mean(1)
        return Answers(scores, pooled)

    def for_classes(self, classes: Classes) -> "TorchEngine":
        """Return an engine of the same zero-shot network that scores other classes."""
        check_queries(self.loaded.classes, classes, "the checkpoint")
        return TorchEngine(replace(self.loaded, classes=classes), self._precision)


class ExportedEngine:
    """An ONNX file of `mldec.export` on the CPU; see `TorchEngine`."""

    def __init__(self, exported: OnnxFile, classes: Classes | None = None) -> None:
        self.path, self._exported, metadata = exported.path, exported, exported.metadata
        self.zero_shot = metadata.word_dim is not None
        self._set_classes(classes)

        self.image_size, self.precision = metadata.image_size, metadata.precision
        transform, self._resizes = metadata.transform, metadata.resizes
        self.decoder, self.shorter_side = transform.decoder, transform.shorter_side
        self.transform: Callable[[Picture], Tensor] = to_tensor if self._resizes else transform

    def answer(self, images: Sequence[Tensor] | Tensor, *, features: bool = False) -> Answers:
        """Score B images; see `TorchEngine`."""
        if features:
            raise CheckpointError(
                "--features: an exported file holds no features; pass the checkpoint"
            )

        # A file that resizes takes images of any size, and a batch has one.
        batches = [image[None] for image in images] if self._resizes else [_stacked(images)]
        with explain_out_of_memory(lambda: _advice("cpu", len(images), self.image_size)):
            scores = [self._exported(batch, *self._queries)[0] for batch in batches]
        return Answers(torch.cat(scores), None)

    def for_classes(self, classes: Classes) -> "ExportedEngine":
        """Return an engine that scores other classes; see `TorchEngine`."""
        engine = copy(self)
        engine._set_classes(classes)
        return engine

    def _set_classes(self, classes: Classes | None) -> None:
        """Take the classes of the file, or those given, with a threshold for each."""
        metadata, fault = self._exported.metadata, None
        queries = None if classes is None else classes.queries
        if metadata.word_dim is None and classes is not None:
            fault = f"--classes: {self.path} knows its own classes only; export it with them"
        elif metadata.word_dim is not None and queries is None:
            fault = f"{self.path} asks for word vectors: pass --classes and --vectors"
        elif queries is not None and queries.shape[1] != metadata.word_dim:
            fault = (
                f"{self.path} takes word vectors of {metadata.word_dim} numbers, and those of "
                f"--vectors have {queries.shape[1]}; pass the kind that the model was trained with"
            )
        if fault is not None:
            raise CheckpointError(fault)

        self._queries = [] if queries is None else [queries]
        classes = classes or Classes(tuple(metadata.classes))
        self.classes = replace(classes, exclusive=metadata.exclusive)
        self.thresholds: Sequence[float] | None = metadata.thresholds
        if self.thresholds is not None and len(self.thresholds) == 1:
            self.thresholds = [*self.thresholds] * len(self.classes)


# A network with its classes and its input transform, whatever file it is from.
Engine = TorchEngine | ExportedEngine


def is_exported(path: str | Path) -> bool:
    """Tell whether a path names an ONNX file, by its ending."""
    # A repository of the hub may have any name, and so may weights of open_clip.
    is_name = str(path).startswith("hf:") or is_open_clip(path)
    return Path(path).suffix == ONNX and not is_name


def check_exported_options(args: argparse.Namespace, *others: str) -> None:
    """Refuse options without effect on an exported file, of `add_model_options` and others."""
    options = ("weights", "image_size", "class_names", "thresholds", "plugin", "precision")
    for name in (*options, *others):
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


def _stacked(images: Sequence[Tensor] | Tensor) -> Tensor:
    """Return images of one size as a batch [B, 3, H, W]."""
    return images if isinstance(images, Tensor) else torch.stack([*images])


def _advice(device: object, images: int, size: int) -> str:
    """Say what helps against too little memory."""
    return (
        f"out of memory on {device}: batches of {images}, images of {size} pixels; "
        f"pass a smaller --batch-size"
    )
