"""What scores images: a checkpoint in torch, or an exported file in ONNX Runtime."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import torch
from torch import Tensor

from mldec.checkpoint import Loaded, load_model
from mldec.checkpoint.classes import can_make, check_queries
from mldec.checkpoint.sources import is_exported
from mldec.cli import require
from mldec.config.schema import describe, matches
from mldec.data.images import check_decoder
from mldec.data.transforms import EvalTransform, Picture, to_tensor
from mldec.data.types import Classes
from mldec.errors import CheckpointError, ConfigError, naming_errors
from mldec.evaluation.class_list import check_class_options, read_classes, with_classes
from mldec.evaluation.open import stored_thresholds
from mldec.evaluation.run import probabilities
from mldec.runtime import distributed
from mldec.runtime.devices import Precision, autocast, memory_format, to_device
from mldec.runtime.environment import explain_out_of_memory
from mldec.tools.predict.heat_maps import Explainer, Wanted
from mldec.words.vectors import load_word_vectors

# The names of inputs, of which a file has the first or both, and of outputs.
INPUTS = ("images", "queries")
OUTPUTS = ("probabilities", "decisions")

KEY = "mldec"  # of the entry in an ONNX file
SILENT = 4  # level of ONNX Runtime's own log; what is fatal is raised as an error too

# ONNX Runtime reads this while it is imported. Otherwise it asks a host of Microsoft's, and writes
# an identifier of the machine to the user's cache.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What a program needs to know of an exported file."""

    # Names of the outputs; of the classes of its training if `word_dim` is given.
    classes: list[str]
    word_dim: int | None  # width D of the word vectors that are its second input; None without one
    exclusive: bool  # an image has one label: the most probable class, by a softmax
    calibrated: bool  # the probabilities are calibrated
    thresholds: list[float] | None  # K, one for all, or None with one label per image
    image_size: int  # pixels per side S of the network's images
    crop: float | None  # see `EvalTransform`
    interpolation: str  # likewise
    resizes: bool  # the resize is inside, and images of any size are the input
    mean: list[float] | None  # of the channels of images in [0, 1]; the normalisation is inside
    std: list[float] | None  # likewise
    precision: str  # "fp32", "fp16" or "int8"
    versions: dict[str, str]  # of the packages that wrote the file
    # Its file name, the SHA-256 hash of this file, and its weights, "ema" or "raw".
    checkpoint: dict[str, str]
    date: str  # of the export, in ISO 8601
    resize: str = "pillow"  # as in `EvalTransform`; not in older files

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
    with naming_errors(path, remedy="write it with mldec export of this version"):
        metadata = Metadata(**json.loads(text or "null"))
        check(metadata)
        _ = Classes(tuple(metadata.classes)), metadata.transform  # both check what they are given
    return metadata


def check(metadata: Metadata) -> None:
    """Raise a `ValueError` for a value of another type, or thresholds that are not usable."""
    for name, hint in get_type_hints(Metadata).items():
        value = getattr(metadata, name)
        if not matches(value, hint):
            raise ValueError(f"{name} is {str(value)[:40]!r}, not {describe(hint)}")
    if not metadata.classes and metadata.word_dim is None:
        raise ValueError("classes is empty")

    thresholds = metadata.thresholds
    if thresholds is None:
        return
    if len(thresholds) not in (1, len(metadata.classes)):
        raise ValueError(f"{len(thresholds)} thresholds for {len(metadata.classes)} classes")
    # A class that must never be present has the float32 after 1.
    highest = np.nextafter(np.float32(1), np.float32(2))
    if not all(0 <= value <= highest for value in thresholds):
        raise ValueError("a threshold is not from 0 to 1")


class OnnxFile:
    """An exported ONNX file in ONNX Runtime, on the CPU."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise CheckpointError(f"no file at {path}: check the path")
        require(str(path), "export", "onnxruntime")
        import onnxruntime

        self.path = path
        # As many threads as torch, so that OMP_NUM_THREADS counts for both.
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = SILENT
        providers = ["CPUExecutionProvider"]
        with naming_errors(path, remedy="ONNX Runtime does not load it"):
            self._session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        self.metadata = parse(self._session.get_modelmeta().custom_metadata_map.get(KEY), path)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities float32 [B, K] and decisions bool [B, K].

        The inputs are images uint8 [B, 3, H, W], and word vectors [K, D] if it asks for them.
        """
        with naming_errors(self.path, remedy="ONNX Runtime fails at these images"):
            outputs = self._session.run(OUTPUTS, arrays(inputs))

        classes = self.metadata.classes if len(inputs) == 1 else inputs[1]
        shape = (len(inputs[0]), len(classes))
        for name, output, dtype in zip(OUTPUTS, outputs, (np.float32, np.bool_), strict=True):
            array = np.asarray(output)
            if array.dtype != dtype or array.shape != shape:
                raise CheckpointError(
                    f"{self.path} cannot be used: {name} are {array.dtype} {[*array.shape]}, not "
                    f"{np.dtype(dtype)} {[*shape]}; write it with mldec export"
                )
        scores, decisions = outputs
        return torch.from_numpy(scores), torch.from_numpy(decisions)


def arrays(inputs: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """Return the inputs of an ONNX file as arrays, by their names."""
    return {name: tensor.numpy() for name, tensor in zip(INPUTS, inputs, strict=False)}


class Answers(NamedTuple):
    """What an engine says of B images, on its device."""

    scores: Tensor  # float32 [B, K], in [0, 1]
    features: Tensor | None  # float32 [B, C]: the mean over the tokens of the backbone


class TorchEngine:
    """A checkpoint in torch."""

    def __init__(self, loaded: Loaded, precision: Precision | None = None) -> None:
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
        self.device, train = next(loaded.model.parameters()).device, loaded.config.train
        distributed.prepare_device(self.device, tf32=train.tf32, deterministic=train.deterministic)
        if precision is None:
            # A half precision of the training is that of evaluation and calibration on CUDA.
            recorded = train.precision if self.device.type == "cuda" else Precision.auto
            precision = recorded if recorded.half else Precision.auto
        self._precision = precision.for_device(self.device)
        self.precision = self._precision.value  # number format of the forward pass
        # What tensor cores want; a CPU is not always faster with it.
        self._order = memory_format(channels_last=self.device.type == "cuda")
        loaded.model.to(memory_format=self._order)
        word_vectors = loaded.classes.word_vectors
        self.zero_shot = word_vectors is not None  # it scores any classes that have word vectors
        self._queries = None if word_vectors is None else word_vectors.to(self.device)

    @torch.no_grad()
    def answer(self, images: Sequence[Tensor] | Tensor, *, features: bool = False) -> Answers:
        """Score B images from `transform`; stacked, if they have one size, or not.

        On a GPU this returns before the scores are known; reading them waits.
        """
        with explain_out_of_memory(lambda: _advice(self.device, len(images), self.image_size)):
            model = self.loaded.model
            batch = to_device(_stacked(images), self.device, memory_format=self._order)
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

    @cached_property
    def explainer(self) -> Explainer:
        """What makes heat maps of the network."""
        return Explainer(self.loaded.model, self.image_size, self._queries)

    def heat_maps(self, images: Tensor, classes: Wanted) -> list[Tensor]:
        """Return where the network looked for some classes of each image, see `Explainer.maps`."""
        fault = f"out of memory on {self.device}: a heat map of {self.image_size} pixels"
        with explain_out_of_memory(lambda: f"{fault}; do without"):
            return self.explainer.maps(images.to(self.device), classes)


class ExportedEngine:
    """An ONNX file of `mldec export` on the CPU; see `TorchEngine`."""

    def __init__(self, exported: OnnxFile, classes: Classes | None = None) -> None:
        self.path, self._exported, metadata = exported.path, exported, exported.metadata
        self.device = torch.device("cpu")
        self.zero_shot = metadata.word_dim is not None
        word_vectors = None if classes is None else classes.word_vectors
        fault, width = None, metadata.word_dim
        if width is None and classes is not None:
            fault = "knows its own classes only: export it with --classes"
        elif width is not None and word_vectors is None:
            fault = "asks for word vectors: pass --vectors, and to predict --classes too"
        elif word_vectors is not None and word_vectors.shape[1] != width:
            fault = (
                f"takes word vectors of {width} numbers, not {word_vectors.shape[1]}: pass others"
            )
        if fault is not None:
            raise CheckpointError(f"{self.path} {fault}")

        self._queries = [] if word_vectors is None else [word_vectors]
        if classes is None:
            classes = Classes(tuple(metadata.classes))
        self.classes = replace(classes, exclusive=metadata.exclusive)
        self.thresholds: Sequence[float] | None = metadata.thresholds
        if self.thresholds is not None and len(self.thresholds) == 1:
            self.thresholds = [*self.thresholds] * len(self.classes)

        self.image_size, self.precision = metadata.image_size, metadata.precision
        transform, self._resizes = metadata.transform, metadata.resizes
        self.decoder, self.shorter_side = transform.decoder, transform.shorter_side
        self.transform: Callable[[Picture], Tensor] = to_tensor if self._resizes else transform

    def answer(self, images: Sequence[Tensor] | Tensor, *, features: bool = False) -> Answers:
        """Score B images; see `TorchEngine`."""
        # A file that resizes takes images of any size, and a batch has one.
        batches = [image[None] for image in images] if self._resizes else [_stacked(images)]
        with explain_out_of_memory(lambda: _advice(self.device, len(images), self.image_size)):
            scores = [self._exported(batch, *self._queries)[0] for batch in batches]
        return Answers(torch.cat(scores), None)

    def for_classes(self, classes: Classes) -> "ExportedEngine":
        """Return an engine that scores other classes; see `TorchEngine`."""
        return ExportedEngine(self._exported, classes)


# A network with its classes and its input transform, whatever file it is from.
Engine = TorchEngine | ExportedEngine


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The network of predict and demo; the fields are options of the commands."""

    checkpoint: str  # or an exported file, as the user names it
    weights: str | None = None  # as in `load_model`, like the next five
    image_size: int | None = None
    class_names: str | None = None
    thresholds: str | None = None
    plugin: Sequence[str] = ()
    views: str | None = None
    device: str = "auto"
    precision: str | None = None  # a value of `Precision`; None: see `TorchEngine`

    classes: str | None = None  # other classes of a zero-shot model, separated by commas
    vectors: str | None = None  # file of word vectors, or a text encoder

    # Results that exported files do not provide.
    features: str | None = None
    pictures: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "EngineOptions":
        """Return the options among the values of a command line."""
        names = [option.name for option in fields(cls)]
        return cls(**{name: values[name] for name in names if name in values})


def open_engine(options: EngineOptions, *, typed_classes: bool = False) -> Engine:
    """Load a checkpoint or an exported file.

    Args:
        options: the options of the command.
        typed_classes: the user types the classes of a zero-shot model later, see `for_classes`.
            The model then needs no classes of its own, and `options.vectors` are for the typed
            classes.

    Raises:
        UserError: if an option is invalid or has no effect, or the file cannot be used.
    """
    check_class_options(options.classes, options.class_names)
    engine: Engine
    if is_exported(options.checkpoint):
        check_exported_options(options)
        exported = OnnxFile(Path(options.checkpoint))
        classes = None
        if options.classes is not None:
            classes = read_classes(options.classes, options.vectors, None)
        elif typed_classes and options.vectors is not None:
            classes = _exported_classes(exported.metadata, options.vectors)
        engine = ExportedEngine(exported, classes)
    else:
        loaded = _load(options)
        if not loaded.classes.names:
            _check_classes(loaded.classes, options, typed_classes=typed_classes)
        precision = None if options.precision is None else Precision(options.precision)
        engine = TorchEngine(loaded, precision)

    if typed_classes and options.vectors is not None and not engine.zero_shot:
        raise ConfigError(
            f"--vectors has no effect: {options.checkpoint} knows its own classes only; "
            f"leave it out"
        )
    return engine


def _load(options: EngineOptions) -> Loaded:
    """Load a checkpoint, with other classes if they are given."""
    loaded = load_model(
        options.checkpoint,
        options.weights,
        image_size=options.image_size,
        class_names=options.class_names,
        thresholds=options.thresholds,
        device=options.device,
        plugins=options.plugin,
        views=options.views,
    )
    if options.classes is None:
        return loaded
    return with_classes(loaded, options.classes, options.vectors)


def _check_classes(classes: Classes, options: EngineOptions, *, typed_classes: bool) -> None:
    """Raise a `CheckpointError` unless a model without classes gets them later."""
    if not typed_classes:
        fault = "names no classes and holds no word vectors: pass --classes and --vectors"
        if can_make(classes):
            fault = "has no classes of its own: pass --classes"
        raise CheckpointError(f"{options.checkpoint} {fault}")

    if options.vectors is None and not can_make(classes):
        raise CheckpointError(f"{options.checkpoint} names no classes: pass --vectors FILE")


def _exported_classes(metadata: Metadata, vectors: str) -> Classes | None:
    """Return the classes of an exported zero-shot file, with word vectors; None for other files."""
    if metadata.word_dim is None:
        return None

    # A file converted from a released zero-shot checkpoint has no classes.
    names = tuple(metadata.classes)
    word_vectors = torch.zeros(0, metadata.word_dim)
    if names:
        word_vectors = load_word_vectors(vectors, names).word_vectors
    return Classes(names, word_vectors=word_vectors)


def check_exported_options(options: EngineOptions) -> None:
    """Raise a `ConfigError` for options that have no effect on an exported file."""
    used = ("checkpoint", "device", "classes", "vectors")
    names = [option.name for option in fields(options) if option.name not in used]
    idle = [name for name in names if getattr(options, name)]
    if options.device not in ("auto", "cpu"):
        idle.append("device")
    if idle:
        name = idle[0].replace("_", "-")
        raise ConfigError(
            f"--{name} has no effect on an exported file such as {options.checkpoint}, which runs "
            f"on the CPU: pass the checkpoint, or leave --{name} out"
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
