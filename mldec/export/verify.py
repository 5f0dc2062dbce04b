"""Compare an exported file with its checkpoint, image by image."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mldec import build
from mldec.checkpoint import Loaded
from mldec.data.base import DataModule, StoredImages, picture
from mldec.data.transforms import to_tensor
from mldec.errors import CheckpointError, DataError, brief, complain
from mldec.evaluators.average_precision import average_precision
from mldec.exported.metadata import Metadata
from mldec.inference.decoding import read_item
from mldec.inference.inputs import Inputs
from mldec.inference.scoring import decided, scores

BATCH = 8  # images at a time at most

# Largest allowed differences: of the probabilities of an fp32 file, of those of one that resizes
# the images, and of the mAP of an fp16 file, in percentage points.
PROBABILITY, RESIZED, MEAN_AP = 1e-4, 2e-2, 0.1

# An image, and its labels of the checkpoint's classes if they are known: 1, 0 or -1, [K].
Picture = tuple[Image.Image, Tensor | None]


class Exported(Protocol):
    """An exported file that is ready to answer."""

    metadata: Metadata

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities float32 [B, K] and decisions bool [B, K].

        Args:
            inputs: images uint8 [B, 3, H, W], and word vectors float32 [K, D] if the file asks for
                them.
        """
        ...


class TorchFile:
    """A `.pt2` file in torch, in the process that made it.

    Args:
        content: its bytes. torch.export.load unpickles them, and so runs what they hold: they never
            come from a file.
        metadata: in it.
    """

    def __init__(self, content: bytes, metadata: Metadata) -> None:
        self.metadata = metadata
        self._module = torch.export.load(io.BytesIO(content)).module()

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities and decisions; see `Exported`."""
        try:
            return self._module(*inputs)
        except Exception as error:
            raise CheckpointError(
                f"the .pt2 file fails in torch: {brief(error)}; write an .onnx file"
            ) from error


@dataclass(frozen=True)
class Comparison:
    """How an exported file answers beside its checkpoint.

    Attributes:
        images: that were compared.
        largest: difference of two probabilities.
        equal: share of the decisions that are equal.
        mean_ap: of the file and of the checkpoint, in percent, over the classes with an image;
            None without labels.
    """

    images: int
    largest: float
    equal: float
    mean_ap: tuple[float, float] | None

    def text(self) -> str:
        """Return the sentence for the console."""
        sentence = (
            f"largest difference of probabilities {self.largest:.1e}, "
            f"equal decisions {100 * self.equal:.2f} %"
        )
        if self.mean_ap is None:
            return sentence

        of_file, of_checkpoint = self.mean_ap
        return f"{sentence}, mAP {of_file:.3f}, of the checkpoint {of_checkpoint:.3f}"


def compare(
    exported: Exported, loaded: Loaded, pictures: Iterable[Picture], source: str
) -> Comparison:
    """Run images through an exported file and its checkpoint.

    The first image is a batch of its own, because a faulty export may fix the batch size.

    Args:
        exported: the file.
        loaded: the checkpoint, whose classes are scored.
        pictures: of any size.
        source: of the images, for messages.

    Raises:
        DataError: if there is no image.
        CheckpointError: if the file fails, or a score is not finite.
    """
    thresholds = exported.metadata.thresholds
    limits = None if thresholds is None else torch.tensor(thresholds)
    queries = [] if exported.metadata.word_dim is None else [loaded.classes.queries]

    images, equal, largest = 0, 0.0, 0.0
    own: list[Tensor] = []
    others: list[Tensor] = []
    targets: list[Tensor] = []
    for inputs, transformed, labels in _batches(pictures, exported, loaded):
        expected = scores(loaded, transformed)
        answers, decisions = exported(inputs, *queries)  # type: ignore[arg-type]
        if answers.shape != expected.shape or not torch.isfinite(answers).all():
            raise CheckpointError(
                f"{source}: the exported file answers {list(answers.shape)} probabilities, some of "
                f"them not finite, where the checkpoint answers {list(expected.shape)}"
            )

        images += len(inputs)
        largest = max(largest, (answers - expected).abs().max().item())
        equal += (decisions == decided(expected, limits)).float().sum().item()
        if labels is not None:
            own.append(answers)
            others.append(expected)
            targets.append(labels)

    if not images:
        raise DataError(f"{source}: no image can be read; choose another folder")
    classes = len(loaded.classes)
    mean_ap = (_mean_ap(own, targets), _mean_ap(others, targets)) if targets else None
    return Comparison(images, largest, equal / (images * classes), mean_ap)


def check(comparison: Comparison, exported: Exported, out: str) -> None:
    """Check that an exported file answers as its checkpoint does.

    Args:
        comparison: on some images.
        exported: the file.
        out: its name, for the message.

    Raises:
        CheckpointError: if it differs by more than its precision explains.
    """
    metadata = exported.metadata
    limit = RESIZED if metadata.resizes else PROBABILITY
    if metadata.precision == "fp32" and comparison.largest > limit:
        raise CheckpointError(
            f"{out} is not written: its probabilities differ from the checkpoint's by up to "
            f"{comparison.largest:.1e}, and the limit is {limit:g}; please report it"
        )

    if metadata.precision == "fp16" and comparison.mean_ap is not None:
        of_file, of_checkpoint = comparison.mean_ap
        if abs(of_file - of_checkpoint) > MEAN_AP:
            raise CheckpointError(
                f"{out} is not written: half precision changes the mAP from {of_checkpoint:.3f} to "
                f"{of_file:.3f}, and the limit is {MEAN_AP:g}; pass --precision fp32"
            )


def generated(size: int, *, any_size: bool) -> list[Picture]:
    """Return images that need no file: noise, and smooth colours.

    Args:
        size: pixels per side.
        any_size: of other sizes too.
    """
    generator = np.random.default_rng(0)
    sizes = [(size, size)] * 2
    if any_size:
        sizes += [(size // 2 + 1, size), (2 * size, size + size // 2)]

    pictures: list[Picture] = []
    for width, height in sizes:
        noise = Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
        coarse = Image.fromarray(generator.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        smooth = coarse.resize((width, height), Image.Resampling.BICUBIC)
        pictures += [(noise, None), (smooth, None)]
    return pictures


def stored(folder: str, loaded: Loaded) -> Iterator[Picture]:
    """Yield the images of a folder, with their labels if the folder holds them.

    Labels are those of a data.csv in the folder (of its validation images, as with data=csv), or
    the names of its folders, if all of them are classes of the checkpoint.

    Args:
        folder: of images.
        loaded: the checkpoint, whose classes the labels are of.

    Raises:
        DataError: if there is no image, or the labels cannot be read.
    """
    data = _labelled(Path(folder), loaded)
    if data is None:
        for item in Inputs([folder]):
            yield from _readable(partial(read_item, item), None)
        return

    dataset = data.val.dataset
    assert isinstance(dataset, StoredImages)
    for index in range(len(dataset)):
        yield from _readable(partial(picture, dataset, index), dataset.labels.row(index))


def _labelled(folder: Path, loaded: Loaded) -> DataModule | None:
    """Return the labelled images of a folder; None if it has no labels of these classes."""
    if not folder.is_dir():
        raise DataError(f"--verify {folder}: no such folder; check the path")

    names = list(loaded.classes.names)
    shared = {"classes": names, "image_size": loaded.transform.image_size}
    if (folder / "data.csv").is_file():
        target = "mldec.data.readers.csv_table.csv_table"
        place = {"root": str(folder), "exclusive": loaded.classes.exclusive}
    else:
        inner = [entry.name for entry in folder.iterdir() if entry.is_dir()]
        if not inner or not set(inner) <= set(names):
            return None
        target = "mldec.data.readers.folders.folders"
        split = folder.resolve().name
        place = {"root": str(folder.resolve().parent), "train": split, "val": split}

    node = {"_target_": target, **place, **shared}
    return build.data({"data": build.resolve("data", node)})


def _readable(read: Callable[[], Image.Image], labels: Tensor | None) -> list[Picture]:
    """Return an image and its labels, or nothing, and say so, if it cannot be read."""
    try:
        return [(read(), labels)]
    except DataError as error:
        complain(str(error))
        return []


def _batches(
    pictures: Iterable[Picture], exported: Exported, loaded: Loaded
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield the inputs of the file and of the checkpoint, and the labels, batch by batch."""
    inputs: list[Tensor] = []
    transformed: list[Tensor] = []
    labels: list[Tensor | None] = []
    most = 1
    for image, target in pictures:
        small = loaded.transform(image)
        pixels = to_tensor(image) if exported.metadata.resizes else small

        # Images of one size only make a batch.
        if inputs and (len(inputs) == most or inputs[0].shape != pixels.shape):
            yield _batch(inputs, transformed, labels)
            inputs, transformed, labels = [], [], []
            most = BATCH
        inputs.append(pixels)
        transformed.append(small)
        labels.append(target)

    if inputs:
        yield _batch(inputs, transformed, labels)


def _batch(
    inputs: Sequence[Tensor], transformed: Sequence[Tensor], labels: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Stack the tensors of some images."""
    known = [target for target in labels if target is not None]
    return (
        torch.stack([*inputs]),
        torch.stack([*transformed]),
        torch.stack(known) if known else None,
    )


def _mean_ap(blocks: list[Tensor], targets: list[Tensor]) -> float:
    """Return the mAP in percent over the classes with an image."""
    return 100 * average_precision(blocks, targets)["none"].nanmean().item()
