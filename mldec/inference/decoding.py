"""Images decoded in worker processes while the model works, in the order of the input."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mldec.data.images import load_image, read_image
from mldec.data.transforms import Picture
from mldec.data.workers import start_worker, unwrap
from mldec.errors import DataError, visible
from mldec.files.text import open_binary
from mldec.inference.inputs import Item

# Worker processes are worth their start from this many images on.
FEW = 64

# Batches that each worker prepares ahead.
AHEAD = 4


@dataclass(frozen=True)
class Decoder(Dataset[Tensor | str]):
    """Read an image and transform it; picklable, for worker processes.

    Attributes:
        transform: an RGB image -> uint8 [3, H, W].
        draft: see `read_image`.
        decoder: see `load_image`.
    """

    transform: Callable[[Picture], Tensor]
    draft: int | None = None
    decoder: str = "pillow"

    def __getitem__(self, item: Item) -> Tensor | str:
        """Return the image, or the sentence that says why it cannot be read."""
        try:
            path, content = located(item)
            return load_image(path, self.transform, content, draft=self.draft, decoder=self.decoder)
        except DataError as error:
            return str(error)


class Decoded(NamedTuple):
    """A batch of B items that were read, or not.

    Attributes:
        items: in the order of the input.
        images: uint8 [3, H, W] of those that could be read; stacked if they have one size.
        faults: why the others could not, by their index in the batch.
    """

    items: list[Item]
    images: Sequence[Tensor] | Tensor
    faults: dict[int, str]


def decoded(
    items: Iterable[Item],
    decoder: Decoder,
    *,
    batch_size: int,
    workers: int,
    pin: bool = False,
) -> Iterator[Decoded]:
    """Read images in worker processes, in batches and in their order.

    Args:
        items: to be read; they are taken only a few batches ahead.
        decoder: of one item.
        batch_size: images per batch.
        workers: number of processes; a short input, or 0, is read in this process.
        pin: put the batches into page-locked memory, for a faster way to a GPU.

    Raises:
        DataError: if a worker process dies, or the input itself cannot be read any further.
    """
    stream = iter(items)
    first = list(islice(stream, FEW + 1))
    if len(first) <= FEW:
        workers = 0

    # The loader hands back tensors only; what they are of waits here, in the same order.
    waiting: deque[list[Item]] = deque()

    def batches() -> Iterator[list[Item]]:
        rest = chain(first, stream)
        while batch := list(islice(rest, batch_size)):
            waiting.append(batch)
            yield batch

    loader: DataLoader[Any] = DataLoader(
        decoder,
        batch_sampler=_Once(batches()),
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=pin,
        prefetch_factor=AHEAD if workers else None,
        worker_init_fn=start_worker,
    )
    for images, faults in unwrap(loader):
        yield Decoded(waiting.popleft(), images, faults)


@dataclass(frozen=True)
class _Once:
    """Batches for a loader that goes through them once."""

    batches: Iterator[list[Item]]

    def __iter__(self) -> Iterator[list[Item]]:
        return self.batches


def read_item(item: Item) -> Image.Image:
    """Return the image of an item, see `read_image`.

    Raises:
        DataError: if it cannot be read.
    """
    return read_image(*located(item))


def located(item: Item) -> tuple[str, bytes | None]:
    """Return an item as the first arguments of `read_image`: a path, and bytes from inside a file.

    Raises:
        DataError: if it is known to be unreadable, or bytes inside a file cannot be read.
    """
    if item.fault is not None:
        raise DataError(item.fault)
    if item.size is None:
        return item.path, None

    try:
        with open_binary(item.path) as file:
            content = os.pread(file.fileno(), item.size, item.offset)
    except OSError as error:
        raise DataError(
            f"{visible(item.name)}: {error.strerror or error}; restore {item.path}"
        ) from error

    if len(content) != item.size:
        raise DataError(f"{visible(item.name)}: {item.path} is cut short; restore it")
    return item.name, content


def _collate(answers: list[Tensor | str]) -> tuple[Sequence[Tensor] | Tensor, dict[int, str]]:
    """Separate the images of a batch from the sentences about those that cannot be read."""
    images = [answer for answer in answers if isinstance(answer, Tensor)]
    faults = {index: answer for index, answer in enumerate(answers) if isinstance(answer, str)}

    # One tensor travels between processes faster than many.
    if len({image.shape for image in images}) == 1:
        return torch.stack(images), faults
    return images, faults
