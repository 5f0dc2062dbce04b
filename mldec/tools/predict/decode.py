"""Decoding of images in worker processes, in the order of the input."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from mldec.data.images import FIX, load_image, read_image
from mldec.data.loader import Loader, share
from mldec.data.transforms import Picture
from mldec.errors import DataError, naming_errors
from mldec.files.text import open_binary, read_bytes

FEW = 64  # maximum number of images that are decoded without worker processes
AHEAD = 4  # batches that each worker prefetches


@dataclass(frozen=True, slots=True)
class Item:
    """An image before decoding."""

    name: str  # in the results: its path, or FILE.tar/MEMBER
    path: str  # of the file that contains it
    offset: int = 0  # in the file, in bytes
    size: int | None = None  # in bytes; None for a whole file
    fault: str | None = None  # error message of an image that cannot be read
    content: bytes | Image.Image | None = None  # in memory: an image file, or the image

    @property
    def is_file(self) -> bool:
        """True for an image file, which is not part of another file."""
        return self.content is None and self.size is None


@dataclass(frozen=True, slots=True)
class Fault:
    """The error of an image without a prediction."""

    message: str
    retry: bool = False  # whether another attempt may succeed, as for a missing file


@dataclass(frozen=True)
class Decoder(Dataset[Tensor | Fault]):
    """A dataset that reads and transforms items. Workers receive a pickled copy."""

    transform: Callable[[Picture], Tensor]  # maps an RGB image to uint8 [3, H, W]
    draft: int | None = None  # see `read_image`
    decoder: str = "pillow"  # see `load_image`

    def __getitem__(self, item: Item) -> Tensor | Fault:
        """Return the image, or a fault if it cannot be read or decoded."""
        if isinstance(item.content, Image.Image):
            try:
                return self.transform(item.content)
            except DataError as error:
                return Fault(f"{item.name}: {error}; {FIX}")
        try:
            path, content = read_content(item)
        except DataError as error:
            return Fault(str(error), retry=item.fault is None)
        try:
            return load_image(path, self.transform, content, draft=self.draft, decoder=self.decoder)
        except DataError as error:
            return Fault(str(error))


class Decoded(NamedTuple):
    """A batch of B items, of which some may have faults."""

    items: list[Item]
    images: Sequence[Tensor] | Tensor  # uint8 [3, H, W] each; stacked if all sizes are equal
    faults: dict[int, Fault]  # of the other items, by their index in the batch


def decoded(
    items: Iterable[Item],
    decoder: Decoder,
    *,
    batch_size: int,
    workers: int,
    pin: bool = False,
) -> Iterator[Decoded]:
    """Decode items in batches and in their order. Only a few batches are prefetched.

    Up to `FEW` items are decoded without worker processes. `pin` copies batches to pinned memory.
    """
    stream = iter(items)
    first = list(islice(stream, FEW + 1))
    if len(first) <= FEW:
        workers = 0

    # Items of the batches that the loader has not returned yet. It returns batches in order.
    pending: deque[list[Item]] = deque()

    def batches() -> Iterator[list[Item]]:
        rest = chain(first, stream)
        while batch := list(islice(rest, batch_size)):
            pending.append(batch)
            yield batch

    loader: Loader[Any] = Loader(
        decoder,
        batch_sampler=batches(),
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=pin,
        prefetch_factor=AHEAD if workers else None,
    )
    for images, faults in loader:
        yield Decoded(pending.popleft(), images, faults)


def read_item(item: Item) -> Image.Image:
    """Return the image of an item, see `read_image`."""
    return read_image(*read_content(item))


def read_content(item: Item) -> tuple[str, bytes]:
    """Return the first two arguments of `read_image`."""
    if item.fault is not None:
        raise DataError(item.fault)
    if isinstance(item.content, bytes):
        return item.name, item.content
    if item.size is None:
        return item.path, read_bytes(Path(item.path))

    with naming_errors(item.name, DataError, remedy="restore it"), open_binary(item.path) as file:
        # The header of a damaged tar file may contain any size.
        size = min(item.size, os.fstat(file.fileno()).st_size)
        file.seek(item.offset)
        content = file.read(size)
        if len(content) != item.size:
            raise ValueError(f"{item.path} is truncated")
    return item.name, content


def _collate(
    answers: list[Tensor | Fault],
) -> tuple[Sequence[Tensor] | Tensor, dict[int, Fault]] | str:
    """Separate images from faults. Returns an error if the shared memory is full."""
    images = []
    faults = {}
    for index, answer in enumerate(answers):
        if isinstance(answer, Fault):
            faults[index] = answer
        else:
            images.append(answer)

    # One tensor is transferred faster than several.
    batch: Sequence[Tensor] | Tensor = images
    if len({image.shape for image in images}) == 1:
        batch = torch.stack(images)
    return share(batch) or (batch, faults)
