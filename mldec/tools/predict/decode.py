"""Images that wait to be decoded, and how worker processes decode them, in their order."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from mldec.data.images import FIX, load_image, read_image
from mldec.data.loader import Loader, share
from mldec.data.transforms import Picture
from mldec.errors import DataError, naming_errors, visible
from mldec.files.text import open_binary, read_bytes
from mldec.tools.predict import storage

# Worker processes are worth their start from this many images on.
FEW = 64

# Batches that each worker prepares ahead.
AHEAD = 4


@dataclass(frozen=True, slots=True)
class Item:
    """An image to be answered, not decoded yet."""

    name: str  # of the image in the answers: its path, or that of a tar file and of its member
    path: str  # path or address of the file that holds its bytes
    offset: int = 0
    size: int | None = None  # in bytes; None for a whole file
    fault: str | None = None  # why it cannot be read, if that is known already
    content: bytes | Image.Image | None = None  # what is in memory: its bytes, or the image

    @property
    def is_file(self) -> bool:
        """Whether the image is a local file of its own."""
        is_part = self.content is not None or self.size is not None
        return not is_part and not storage.is_address(self.path)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why an image cannot be read."""

    text: str
    may_pass: bool  # True for missing files, permissions and network errors


@dataclass(frozen=True)
class Decoder(Dataset[Tensor | Fault]):
    """Read an image and transform it; picklable, for worker processes."""

    transform: Callable[[Picture], Tensor]  # an RGB image -> uint8 [3, H, W]
    draft: int | None = None  # see `read_image`
    decoder: str = "pillow"  # see `load_image`

    def __getitem__(self, item: Item) -> Tensor | Fault:
        """Return the image, or why it cannot be read."""
        if isinstance(item.content, Image.Image):
            try:
                return self.transform(item.content)
            except DataError as error:
                return Fault(f"{visible(item.name)}: {error}; {FIX}", may_pass=False)
        try:
            path, content = located(item)
        except DataError as error:
            return Fault(str(error), may_pass=item.fault is None)
        try:
            return load_image(path, self.transform, content, draft=self.draft, decoder=self.decoder)
        except DataError as error:
            # A store may have sent a part of the image.
            is_cut = not isinstance(error.__cause__, UnidentifiedImageError)
            is_remote = item.content is None and storage.is_address(item.path)
            return Fault(str(error), may_pass=is_remote and is_cut)


class Decoded(NamedTuple):
    """A batch of B items that were read, or not."""

    items: list[Item]  # in the order of the input
    # Those that could be read, uint8 [3, H, W]; stacked if they have one size.
    images: Sequence[Tensor] | Tensor
    faults: dict[int, Fault]  # why the others could not, by their index in the batch


def decoded(
    items: Iterable[Item],
    decoder: Decoder,
    *,
    batch_size: int,
    workers: int,
    pin: bool = False,
) -> Iterator[Decoded]:
    """Read images in worker processes, in batches and in their order, only a few batches ahead.

    A short input, or 0 workers, is read in this process. `pin` puts the batches into page-locked
    memory, for a faster way to a GPU.
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

    loader: Loader[Any] = Loader(
        decoder,
        batch_sampler=batches(),
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=pin,
        prefetch_factor=AHEAD if workers else None,
    )
    for images, faults in loader:
        yield Decoded(waiting.popleft(), images, faults)


def read_item(item: Item) -> Image.Image:
    """Return the image of an item, see `read_image`."""
    return read_image(*located(item))


def located(item: Item) -> tuple[str, bytes]:
    """Return the first arguments of `read_image`: a path, and the bytes of the image."""
    if item.fault is not None:
        raise DataError(item.fault)
    if isinstance(item.content, bytes):
        return item.name, item.content
    if storage.is_address(item.path):
        return item.name, storage.read(item.path)
    if item.size is None:
        return item.path, read_bytes(Path(item.path))

    unread = naming_errors(visible(item.name), DataError, remedy="restore it")
    with unread, open_binary(item.path) as file:
        # A damaged tar file may say any size.
        size = min(item.size, os.fstat(file.fileno()).st_size)
        file.seek(item.offset)
        content = file.read(size)
        if len(content) != item.size:
            raise ValueError(f"{item.path} is cut short")
    return item.name, content


def _collate(
    answers: list[Tensor | Fault],
) -> tuple[Sequence[Tensor] | Tensor, dict[int, Fault]] | str:
    """Separate the images of a batch from the faults of those that cannot be read.

    If the batch cannot be handed over, the message is returned, see `Loader`.
    """
    images = [answer for answer in answers if isinstance(answer, Tensor)]
    faults = {index: answer for index, answer in enumerate(answers) if isinstance(answer, Fault)}

    # One tensor travels between processes faster than many.
    batch: Sequence[Tensor] | Tensor = images
    if len({image.shape for image in images}) == 1:
        batch = torch.stack(images)
    return share(batch) or (batch, faults)
