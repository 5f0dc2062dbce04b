"""What scores images: a checkpoint in torch, or an exported file in ONNX Runtime."""

import argparse
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mldec.calibration.stored import stored_thresholds
from mldec.checkpoint import Loaded, check_queries, is_tower
from mldec.data.base import Classes
from mldec.data.images import check_decoder
from mldec.data.transforms import EvalTransform, Picture, to_tensor
from mldec.errors import CheckpointError, ConfigError
from mldec.exported.metadata import ONNX
from mldec.exported.onnx_file import OnnxFile
from mldec.inference.scoring import probabilities
from mldec.runtime.devices import Precision, autocast, memory_format
from mldec.runtime.facts import explain_out_of_memory


class Answers(NamedTuple):
    """What an engine says of B images, in main memory."""

    scores: Tensor  # float32 [B, K], in [0, 1]
    features: Tensor | None  # float32 [B, C]: the mean over the tokens of the backbone


class Engine(Protocol):
    """A network with its classes and its input transform, whatever file it is from.

    Attributes:
        path: of the file.
        classes: names of the K classes, and whether an image has one label.
        thresholds: the lowest score of a present class [K]; None if the file has none, or an image
            has one label.
        transform: an RGB image -> uint8 [3, H, W].
        decoder: of image files, see `mldec.data.images.load_image`.
        image_size: pixels per side of the network's input.
        shorter_side: pixels of the shorter side of an image that the network's input is made of; a
            smaller image would have to be enlarged.
        precision: number format of the forward pass, such as "bf16".
        zero_shot: it scores any classes that have word vectors; see `for_classes`.
    """

    path: Path
    classes: Classes
    thresholds: Sequence[float] | None
    transform: Callable[[Picture], Tensor]
    decoder: str
    image_size: int
    shorter_side: int
    precision: str
    zero_shot: bool

    def answer(self, images: Sequence[Tensor] | Tensor, *, features: bool = False) -> Answers:
        """Score images.

        Args:
            images: B from `transform`; stacked, if they have one size, or not.
            features: return the pooled features of the backbone too.

        Raises:
            OutOfMemoryError: if there are too many at a time.
            CheckpointError: if the network cannot take them, or has no features to return.
        """
        ...

    def for_classes(self, classes: Classes) -> "Engine":
        """Return an engine of the same zero-shot network that scores other classes.

        Args:
            classes: with word vectors.

        Raises:
            CheckpointError: if the word vectors have another width.
        """
        ...


class TorchEngine:
    """A checkpoint in torch; see `Engine`.

    Args:
        loaded: from `checkpoint.load_model`.
        precision: of the forward pass.
    """

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
    """An ONNX file of `mldec.export` on the CPU; see `Engine`.

    Args:
        path: of the file.
        classes: with word vectors, for a file that asks for them; else None.

    Raises:
        ConfigError: if a package is missing.
        CheckpointError: if the file cannot be used, or classes are missing, do not fit or have no
            effect.
    """

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
    is_name = str(path).startswith("hf:") or is_tower(path)
    return Path(path).suffix == ONNX and not is_name


def check_exported_options(args: argparse.Namespace, *others: str) -> None:
    """Check that no option is given that has no effect on an exported file.

    Args:
        args: the command line, with an exported file and the options of `add_model_options`.
        others: names of further options of the command without effect.

    Raises:
        ConfigError: if one is.
    """
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
