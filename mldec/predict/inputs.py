"""The images of `mldec.predict`: where they are, and how workers decode them."""

import codecs
import csv
import io
import os
import sys
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mldec.data.images import FORMATS, load_image, read_image
from mldec.data.loader import START, share, start_worker, unwrap
from mldec.data.transforms import Picture
from mldec.errors import ConfigError, DataError, brief, visible
from mldec.runtime.results import STANDARD_OUTPUT
from mldec.runtime.text import open_binary

STANDARD_INPUT = STANDARD_OUTPUT  # the same sign
TAR = ".tar"
COLUMNS = ("image", "path")  # of a CSV file, if --column does not say


@dataclass(frozen=True, slots=True)
class Item:
    """An image to be answered, not read yet."""

    name: str  # of the image in the answers: its path, or that of a tar file and of its member
    path: str  # of the file that holds its bytes
    offset: int = 0
    size: int | None = None  # in bytes; None for a whole file
    fault: str | None = None  # why it cannot be read, if that is known already


class Inputs:
    """The images that a command line names, in their order; can be iterated over several times.

    Images of a folder are sorted by their paths, and those of a tar file have its order. What turns
    out to be unreadable on the way becomes an item with a fault. Standard input can be read once.
    """

    def __init__(
        self,
        paths: Sequence[str],
        listing: str | None = None,
        *,
        column: str | None = None,
        root: str | None = None,
    ) -> None:
        if not paths and listing is None:
            raise ConfigError("no image is named: pass files, folders, tar files or --list FILE")
        for option, value in (("--column", column), ("--root", root)):
            if value is not None and listing is None:
                raise ConfigError(f"{option} has no effect without --list: leave it out")
        if column is not None and not _is_csv(listing):
            raise ConfigError(f"--column has no effect: --list {listing} is no .csv file")

        self._paths = list(paths)
        self._listing = listing
        self._column = column
        self._root = root
        self._check()

    @property
    def repeatable(self) -> bool:
        """Whether the images can be gone through again: standard input cannot."""
        return self._listing != STANDARD_INPUT

    def __iter__(self) -> Iterator[Item]:
        for path in self._paths:
            if Path(path).is_dir():
                yield from _in_folder(path)
            elif path.endswith(TAR):
                yield from _in_tar(path)
            else:
                yield Item(path, path)

        if self._listing is not None:
            for name in self._listed(self._listing):
                path = name if self._root is None else str(Path(self._root, name))
                yield Item(name, path)

    def _check(self) -> None:
        """Raise an error for what can be refused before the first image is read."""
        for path in self._paths:
            if not Path(path).exists():
                raise DataError(f"{path}: no such file or folder")
            if Path(path).is_dir() and next(_in_folder(path), None) is None:
                raise DataError(f"{path}: the folder holds no image")

        if self._root is not None and not Path(self._root).is_dir():
            raise DataError(f"--root {self._root}: no such folder; check the path")
        listing = self._listing if self.repeatable else None
        if listing is not None and next(self._listed(listing), None) is None:
            raise DataError(f"--list {listing}: it names no image")

    def _listed(self, listing: str) -> Iterator[str]:
        """Yield the paths of a list."""
        with ExitStack() as stack:
            if listing == STANDARD_INPUT:
                file: BinaryIO = sys.stdin.buffer
            else:
                try:
                    file = stack.enter_context(open_binary(listing))
                except OSError as error:
                    raise DataError(
                        f"--list {listing} cannot be read ({error.strerror or error}); "
                        f"check the path"
                    ) from error

            if _is_csv(listing):
                yield from self._of_csv(file, listing)
            else:
                yield from _of_lines(file)

    def _of_csv(self, file: BinaryIO, listing: str) -> Iterator[str]:
        """Yield the paths in a column of a CSV file."""
        # Bytes of a path that are not UTF-8 come through as in the names of files.
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.reader(text, strict=True)
        try:
            header = next(reader, [])
            wanted = COLUMNS if self._column is None else (self._column,)
            column = next((header.index(name) for name in wanted if name in header), None)
            if column is None:
                raise DataError(
                    f"--list {listing}: its first row has no column {' or '.join(wanted)}; "
                    f"pass --column with one of {visible(', '.join(header))[:200]!r}"
                )

            for fields in reader:
                if not fields:
                    continue
                if len(fields) != len(header):
                    raise DataError(
                        f"--list {listing}: line {reader.line_num} has {len(fields)} columns, "
                        f"not {len(header)}; correct the file"
                    )
                yield fields[column]
        except csv.Error as error:
            raise DataError(
                f"--list {listing}: line {reader.line_num} is not CSV ({error}); check its quotes"
            ) from error


def _is_csv(listing: str | None) -> bool:
    """Tell whether a list is a CSV file, by its name."""
    return listing is not None and listing.lower().endswith(".csv")


def _of_lines(file: BinaryIO) -> Iterator[str]:
    """Yield the lines that are not empty, without their ends and a byte order mark, as paths."""
    mark = codecs.BOM_UTF8
    for line in file:
        if path := line.removeprefix(mark).rstrip(b"\r\n"):
            yield os.fsdecode(path)
        mark = b""


def _suffixes() -> set[str]:
    """Return the endings of files of images, in lower case."""
    return {suffix for suffix, name in Image.registered_extensions().items() if name in FORMATS}


def _in_folder(path: str) -> Iterator[Item]:
    """Yield the images of a folder and of its folders, sorted by their paths."""
    suffixes = _suffixes()

    def walk(folder: str) -> Iterator[Item]:
        try:
            with os.scandir(folder) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        except OSError as error:
            fault = f"{visible(folder)}: the folder cannot be listed ({error.strerror})"
            yield Item(folder, folder, fault=f"{fault}; check its permissions")
            return

        for entry in entries:
            # A link to a folder may lead back to a folder above.
            if entry.is_dir(follow_symlinks=False):
                yield from walk(entry.path)
            elif Path(entry.name).suffix.lower() in suffixes:
                yield Item(entry.path, entry.path)
            elif entry.name.endswith(TAR):
                yield from _in_tar(entry.path)

    # As `Path` writes it: without ./ and double slashes.
    return walk(str(Path(path)))


def _in_tar(path: str) -> Iterator[Item]:
    """Yield the images in an uncompressed tar file; the rest of a damaged one is one fault."""
    suffixes = _suffixes()
    try:
        with open_binary(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                # The list of all members would grow with their number.
                tar.members.clear()  # type: ignore[attr-defined]

                is_image = Path(member.name).suffix.lower() in suffixes
                if is_image and member.isreg() and not member.issparse():
                    name = f"{path}/{member.name}"
                    yield Item(name, path, member.offset_data, member.size)
    except Exception as error:
        # A header that lies makes tarfile raise almost anything, and ask for any amount of memory.
        fault = f"{visible(path)}: it cannot be read as an uncompressed tar file ({brief(error)})"
        yield Item(path, path, fault=f"{fault}; restore it")


# Worker processes are worth their start from this many images on.
FEW = 64

# Batches that each worker prepares ahead.
AHEAD = 4


@dataclass(frozen=True)
class Decoder(Dataset[Tensor | str]):
    """Read an image and transform it; picklable, for worker processes."""

    transform: Callable[[Picture], Tensor]  # an RGB image -> uint8 [3, H, W]
    draft: int | None = None  # see `read_image`
    decoder: str = "pillow"  # see `load_image`

    def __getitem__(self, item: Item) -> Tensor | str:
        """Return the image, or the sentence that says why it cannot be read."""
        try:
            path, content = located(item)
            return load_image(path, self.transform, content, draft=self.draft, decoder=self.decoder)
        except DataError as error:
            return str(error)


class Decoded(NamedTuple):
    """A batch of B items that were read, or not."""

    items: list[Item]  # in the order of the input
    # Those that could be read, uint8 [3, H, W]; stacked if they have one size.
    images: Sequence[Tensor] | Tensor
    faults: dict[int, str]  # why the others could not, by their index in the batch


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

    loader: DataLoader[Any] = DataLoader(
        decoder,
        batch_sampler=batches(),
        num_workers=workers,
        collate_fn=_collate,
        pin_memory=pin,
        prefetch_factor=AHEAD if workers else None,
        worker_init_fn=start_worker,
        multiprocessing_context=START if workers else None,
    )
    for images, faults in unwrap(loader):
        yield Decoded(waiting.popleft(), images, faults)


def read_item(item: Item) -> Image.Image:
    """Return the image of an item, see `read_image`."""
    return read_image(*located(item))


def located(item: Item) -> tuple[str, bytes | None]:
    """Return the first arguments of `read_image`: a path, and bytes from inside a file."""
    if item.fault is not None:
        raise DataError(item.fault)
    if item.size is None:
        return item.path, None

    try:
        with open_binary(item.path) as file:
            # A damaged tar file may say any size.
            size = min(item.size, os.fstat(file.fileno()).st_size)
            content = os.pread(file.fileno(), size, item.offset)
    except OSError as error:
        raise DataError(
            f"{visible(item.name)}: {error.strerror or error}; restore {item.path}"
        ) from error

    if len(content) != item.size:
        raise DataError(f"{visible(item.name)}: {item.path} is cut short; restore it")
    return item.name, content


def _collate(
    answers: list[Tensor | str],
) -> tuple[Sequence[Tensor] | Tensor, dict[int, str]] | DataError:
    """Separate the images of a batch from the sentences about those that cannot be read."""
    images = [answer for answer in answers if isinstance(answer, Tensor)]
    faults = {index: answer for index, answer in enumerate(answers) if isinstance(answer, str)}

    # One tensor travels between processes faster than many.
    batch: Sequence[Tensor] | Tensor = images
    if len({image.shape for image in images}) == 1:
        batch = torch.stack(images)
    return share(batch) or (batch, faults)
