"""Engines that score images: a checkpoint in torch, or an exported file."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mldec.backbones.openvino_backbone import recorded, uses_openvino
from mldec.checkpoint import Loaded
from mldec.checkpoint.classes import can_encode, check_queries
from mldec.checkpoint.sources import is_exported
from mldec.data.images import check_decoder
from mldec.data.transforms import Picture
from mldec.data.types import Classes
from mldec.errors import CheckpointError, OptionError, log
from mldec.evaluation.class_list import read_classes
from mldec.evaluation.inference import for_inference
from mldec.evaluation.open import load_checkpoint, stored_thresholds
from mldec.evaluation.options import ModelOptions
from mldec.evaluation.run import probabilities
from mldec.model import Classifier
from mldec.runtime import distributed
from mldec.runtime.devices import EngineName, Precision, autocast, pad_batch, to_device
from mldec.runtime.environment import explain_out_of_memory
from mldec.tools.exported import Answers, ExportedEngine, OnnxFile, memory_hint, to_batch
from mldec.tools.heat_maps import Explainer, Wanted
from mldec.words.vectors import load_word_vectors


class TorchEngine:
    """A checkpoint in torch. `compiled` compiles its network.

    Its backbone is computed by OpenVINO on a CPU, see `uses_openvino` for `engine`.
    """

    def __init__(
        self,
        loaded: Loaded,
        precision: Precision | None = None,
        *,
        compiled: bool = False,
        engine: EngineName = EngineName.auto,
    ) -> None:
        self.loaded = loaded
        self.compiled = compiled
        self._engine = engine
        if engine is EngineName.auto and loaded.model.is_fitted:
            engine = recorded(loaded.config.train.engine)
        is_converted = uses_openvino(engine, next(loaded.model.parameters()).device)
        self.program = "OpenVINO" if is_converted and not compiled else "torch"
        self.path = loaded.path
        self.classes = loaded.classes
        self.zero_shot = loaded.classes.word_vectors is not None
        # K minimum scores; None without thresholds, or with one label per image.
        self.thresholds: Sequence[float] | None = stored_thresholds(loaded)

        self.transform: Callable[[Picture], Tensor] = loaded.transform  # to uint8 [3, H, W]
        self.decoder = loaded.transform.decoder  # see `load_image`
        self.image_size = loaded.transform.image_size  # pixels per side of the network's input
        self.shorter_side = loaded.transform.shorter_side  # of the resized image before the crop
        self.min_side = loaded.transform.min_side  # of decoded JPEG files
        check_decoder(self.decoder)

        self.device = next(loaded.model.parameters()).device
        self._batches: Counter[torch.Size] = Counter()  # number of scored batches per shape
        train = loaded.config.train
        self._flags = {"tf32": train.tf32, "deterministic": train.deterministic}
        if precision is None:
            # Like evaluation: the half precision of the training on a GPU, fp32 on a CPU.
            precision = loaded.config.train.precision.after_training(self.device)
            if precision is Precision.fp32:
                precision = Precision.auto
        self._precision = precision.for_device(self.device)
        self.precision = self._precision.value
        self._word_vectors = loaded.classes.word_vectors
        if self._word_vectors is not None:
            self._word_vectors = self._word_vectors.to(self.device)

    @cached_property
    def _network(self) -> Classifier:
        """Model for inference: channels_last, with folded batch norms."""
        half = self._precision.half
        options: dict[str, Any] = {"fold": True, "compiled": self.compiled}
        options["openvino"] = self.program == "OpenVINO"
        model = for_inference(self.loaded.model, self.image_size, half, **options)
        return model.to(memory_format=torch.channels_last)

    @torch.no_grad()
    def answer(
        self, images: Sequence[Tensor] | Tensor, *, features: bool = False, size: int = 0
    ) -> Answers:
        """Score B transformed images, uint8 [3, S, S]. The results are asynchronous on a GPU.

        `size` is the number of images in a full batch, or 0 for single batches. Smaller batches are
        padded on CUDA and for a compiled network, because a new shape costs seconds or minutes.
        """
        with explain_out_of_memory(lambda: memory_hint(self, len(images))):
            model = self._network
            batch = to_batch(images)
            count = len(batch)
            batch = to_device(batch, self.device, memory_format=torch.channels_last)
            if self.compiled or self.device.type == "cuda":
                batch = pad_batch(batch, size)
            self._batches[batch.shape] += size > 0
            # All engines of the process share these options.
            batches = self._batches[batch.shape]
            distributed.prepare_device(self.device, **self._flags, batches=batches)
            tokens = None
            with autocast(self.device, self._precision):
                if features:
                    tokens = model.backbone(batch)
                    logits = model.classify(tokens, self._word_vectors)
                else:
                    logits = model(batch, self._word_vectors)
            scores = probabilities(self.loaded, logits[:count])
            pooled = None if tokens is None else model.mean_token(tokens[:count])
        return Answers(scores, pooled)

    @torch.no_grad()
    def tokens(self, images: Tensor) -> Tensor:
        """Return the output of the backbone for transformed images, uint8 [B, 3, S, S]."""
        with autocast(self.device, self._precision):
            return self._network.backbone(images.to(self.device))

    def for_classes(self, classes: Classes) -> "TorchEngine":
        """Return an engine of the same zero-shot model for other classes."""
        check_queries(self.loaded.classes, classes, "the checkpoint")
        loaded = replace(self.loaded, classes=classes)
        options: dict[str, Any] = {"compiled": self.compiled, "engine": self._engine}
        engine = TorchEngine(loaded, self._precision, **options)
        engine._network = self._network
        return engine

    @cached_property
    def explainer(self) -> Explainer:
        """The heat maps of the model."""
        return Explainer(self.loaded.model, self.image_size, self._word_vectors)

    def heat_maps(self, images: Tensor, classes: Wanted) -> list[Tensor]:
        """Return heat maps for some classes of each image, see `Explainer.maps`."""
        with explain_out_of_memory(lambda: f"out of memory on {self.device}; disable heat maps"):
            return self.explainer.maps(images.to(self.device), classes)


Engine = TorchEngine | ExportedEngine


# Options that exported files support.
EXPORTED = ("checkpoint", "classes", "vectors")


def open_engine(options: ModelOptions, *, typed_classes: bool = False) -> Engine:
    """Load a checkpoint or an exported file.

    `typed_classes`: the user enters classes later, see `for_classes`. The model then needs no
    classes, and `options.vectors` is for the later classes.
    """
    engine: Engine
    if is_exported(options.checkpoint):
        engine = _open_exported(options, typed_classes)
    else:
        engine = _open_checkpoint(options, typed_classes)
    if typed_classes and options.vectors is not None and not engine.zero_shot:
        raise OptionError("vectors", f"{options.checkpoint} is not a zero-shot model; omit it")
    where = f"{engine.device} with {engine.program}"
    log.info(f"{options.checkpoint}: scoring in {engine.precision} on {where}")
    return engine


def _open_checkpoint(options: ModelOptions, typed_classes: bool) -> TorchEngine:
    loaded = load_checkpoint(options, options.device)
    needs_vectors = options.vectors is None and not can_encode(loaded.classes)
    if not loaded.classes.names and (needs_vectors or not typed_classes):
        remedy = "pass --vectors FILE" if typed_classes else "pass --classes, and --vectors"
        raise CheckpointError(f"{options.checkpoint}: class names are missing; {remedy}")
    precision = None if options.precision is None else Precision(options.precision)
    engine = EngineName(options.engine)
    return TorchEngine(loaded, precision, compiled=options.compile, engine=engine)


def _open_exported(options: ModelOptions, typed_classes: bool) -> ExportedEngine:
    # The command can also write features and pictures.
    names = [each.name for each in fields(ModelOptions)] + ["features", "pictures"]
    for name in names:
        value = getattr(options, name, None)
        if value and name not in EXPORTED and value not in ("auto", "cpu"):
            fault = f"not supported for exported files, which run on the CPU ({options.checkpoint})"
            raise OptionError(name, f"{fault}; pass the checkpoint, or omit this option")

    exported = OnnxFile(Path(options.checkpoint))
    metadata = exported.metadata
    classes = None
    if options.classes is not None:
        classes = read_classes(options.classes, options.vectors, None)
    elif typed_classes and options.vectors is not None and metadata.word_dim is not None:
        # Files converted from a released zero-shot checkpoint have no classes.
        word_vectors = torch.zeros(0, metadata.word_dim)
        if metadata.classes:
            word_vectors = load_word_vectors(options.vectors, tuple(metadata.classes)).word_vectors
        classes = Classes(tuple(metadata.classes), word_vectors=word_vectors)
    return ExportedEngine(exported, classes)
