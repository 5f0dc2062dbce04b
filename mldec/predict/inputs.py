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
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mldec.data.images import FORMATS, load_image, read_image
from mldec.data.loader import START, share, start_worker, unwrap
from mldec.data.transforms import Picture
from mldec.errors import ConfigError, DataError, brief, refusing, visible
from mldec.runtime import storage
from mldec.runtime.cli import require
from mldec.runtime.results import STANDARD_OUTPUT
from mldec.runtime.text import open_binary

STANDARD_INPUT = STANDARD_OUTPUT  # the same sign
TAR = ".tar"
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")  # tar files that are read as a stream
COLUMNS = ("image", "path", "url", "bytes")  # of a table, if --column does not say
ROWS = 256  # of a Parquet list in memory at a time: they may hold images


@dataclass(frozen=True, slots=True)
class Item:
    """An image to be answered, not decoded yet."""

    name: str  # of the image in the answers: its path, or that of a tar file and of its member
    path: str  # path or address of the file that holds its bytes
    offset: int = 0
    size: int | None = None  # in bytes; None for a whole file
    fault: str | None = None  # why it cannot be read, if that is known already
    content: bytes | Image.Image | None = None  # what is in memory: its bytes, or the image


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
        self._paths, self._listing = list(paths), listing or ""
        self._column, self._root = column, root
        self._kind = Path(self._listing).suffix.lower()
        if self._kind == ".parquet":
            require(f"--list {listing}", "parquet", "pyarrow")
        self._check()

    def __iter__(self) -> Iterator[Item]:
        return self.of(0, 1)

    def divided(self, shards: int, only: int | None = None) -> Iterator[tuple[int, Item]]:
        """Yield the images with the number of the shard, of so many, that answers them.

        Tar files are dealt whole where there are as many as shards; other images belong to a shard
        by a hash of their paths below what the command line names, and rows of a list by their
        numbers. With `only` a shard the tar files and row groups of others are not opened.
        """
        tars = (item for _, item in self._files() if _is_tar(item))
        are_whole = shards > 1 and len(list(islice(tars, shards))) == shards
        number = 0
        for key, item in self._files():
            if not _is_tar(item):
                yield _shard_of(key, shards), item
                continue

            owner, number = number % shards, number + 1
            if are_whole and only not in (None, owner):
                continue
            for member in _in_tar(item.path):
                if not are_whole:
                    owner = _shard_of(key + member.name.removeprefix(item.path), shards)
                yield owner, member

        if self._listing:
            yield from self._listed(shards, only)

    def of(self, number: int, shards: int) -> Iterator[Item]:
        """Yield the images of one shard."""
        return (item for owner, item in self.divided(shards, number) if owner == number)

    def _files(self) -> Iterator[tuple[str, Item]]:
        """Yield the files of the command line that are no lists, with their paths below it."""
        for path in self._paths:
            if storage.is_folder(path):
                # As `Path` writes it: without ./ and double slashes.
                folder = path.rstrip("/") if storage.is_address(path) else str(Path(path))
                for item in _in_folder(folder):
                    yield item.name.removeprefix(folder), item
            else:
                yield path, Item(path, path)

    def _check(self) -> None:
        """Raise an error for what can be refused before the first image is read."""
        for path in self._paths:
            if not storage.exists(path):
                raise DataError(f"{path}: no such file or folder")
            if storage.is_folder(path) and next(_in_folder(path), None) is None:
                raise DataError(f"{path}: the folder holds no image")

        root = self._root
        if root is not None and not storage.is_address(root) and not Path(root).is_dir():
            raise DataError(f"--root {root}: no such folder; check the path")
        is_file = self._listing not in ("", STANDARD_INPUT)
        if is_file and next(self.of(0, 1), None) is None:
            raise DataError(f"--list {self._listing}: it names no image")

    def _rooted(self, name: str) -> Item:
        """Return the image of a path or an address in a list."""
        if self._root is None or storage.is_address(name):
            return Item(name, name)
        if storage.is_address(self._root):
            return Item(name, f"{self._root.rstrip('/')}/{name}")
        return Item(name, str(Path(self._root, name)))

    def _column_of(self, names: Sequence[str]) -> str:
        """Return the column of images among those of a table."""
        wanted = COLUMNS if self._column is None else (self._column,)
        for name in wanted:
            if name in names:
                return name
        raise DataError(
            f"--list {self._listing}: it has no column {' or '.join(wanted)}; "
            f"pass --column with one of {visible(', '.join(names))[:200]!r}"
        )

    def _listed(self, shards: int, only: int | None) -> Iterator[tuple[int, Item]]:
        """Yield the images of the list with their shards, see `divided`."""
        with (
            ExitStack() as stack,
            refusing(f"--list {self._listing}", DataError, remedy="correct it"),
        ):
            file: IO[bytes] = sys.stdin.buffer
            if self._listing != STANDARD_INPUT:
                file = stack.enter_context(storage.opened(self._listing))
            if self._kind == ".parquet":
                yield from self._of_parquet(file, shards, only)
                return
            paths = self._of_csv(file) if self._kind == ".csv" else _of_lines(file)
            for row, path in enumerate(paths):
                yield row % shards, self._rooted(path)

    def _of_csv(self, file: IO[bytes]) -> Iterator[str]:
        """Return the paths in a column of a CSV file."""
        # Bytes of a path that are not UTF-8 come through as in the names of files.
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.DictReader(text, restval="", strict=True)
        column = self._column_of(reader.fieldnames or [])
        return (row[column] for row in reader)

    def _of_parquet(
        self, file: IO[bytes], shards: int, only: int | None
    ) -> Iterator[tuple[int, Item]]:
        """Yield the images of a Parquet file, of which each shard has a range of rows."""
        from pyarrow.parquet import ParquetFile

        table = ParquetFile(file)
        total, names = table.metadata.num_rows, table.schema_arrow.names
        columns = [self._column_of(names)]
        # What names an image beside its bytes.
        columns += [name for name in COLUMNS[:2] if name in names and name not in columns][:1]

        def owner(row: int) -> int:
            return ((row + 1) * shards - 1) // total

        end = 0
        for group in range(table.metadata.num_row_groups):
            row, end = end, end + table.metadata.row_group(group).num_rows
            if only is not None and not owner(row) <= only <= owner(end - 1):
                continue
            for batch in table.iter_batches(ROWS, row_groups=[group], columns=columns):
                cells = [batch.column(name).to_pylist() for name in columns]
                for value, beside in zip(cells[0], cells[-1], strict=True):
                    yield owner(row), self._cell(value, beside, row)
                    row += 1

    def _cell(self, value: Any, beside: Any, row: int) -> Item:
        """Return the image of a cell: a path, bytes, or both as in tables of Hugging Face."""
        if isinstance(value, dict):
            value, beside = value.get("bytes") or value.get("path"), value.get("path")
        name = beside if isinstance(beside, str) else f"{self._listing}/{row}"
        if isinstance(value, bytes):
            return Item(name, name, content=value)
        if isinstance(value, str):
            return self._rooted(value)
        return Item(name, name, fault=f"{visible(name)}: no path and no bytes; correct the list")


def _shard_of(key: str, shards: int) -> int:
    """Return the shard of a path, the same on every machine and in every version of Python."""
    digest = blake2b(os.fsencode(key), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards


def _of_lines(file: IO[bytes]) -> Iterator[str]:
    """Yield the lines that are not empty, without their ends and a byte order mark, as paths."""
    mark = codecs.BOM_UTF8
    for line in file:
        if path := line.removeprefix(mark).rstrip(b"\r\n"):
            yield os.fsdecode(path)
        mark = b""


def _is_image(name: str) -> bool:
    return Image.registered_extensions().get(Path(name).suffix.lower()) in FORMATS


def _is_tar(item: Item) -> bool:
    """Tell whether an item is a tar file, whose members are the images."""
    return item.fault is None and item.path.endswith((TAR, *COMPRESSED))


def _in_folder(folder: str) -> Iterator[Item]:
    """Yield the images and tar files of a folder and of its folders, sorted by their paths."""
    try:
        entries = storage.entries(folder)
    except (OSError, DataError) as error:
        fault = f"{visible(folder)}: the folder cannot be listed ({brief(error)})"
        yield Item(folder, folder, fault=f"{fault}; check its permissions")
        return

    for entry in entries:
        item = Item(entry.path, entry.path)
        if entry.is_folder:
            yield from _in_folder(entry.path)
        elif _is_image(entry.name) or _is_tar(item):
            yield item


def _in_tar(path: str) -> Iterator[Item]:
    """Yield the images in a tar file; the rest of a damaged one is one fault.

    A plain file on this machine is only looked through, and workers read the members. All others
    are a stream, which is read once, with the members.
    """
    is_stream = storage.is_address(path) or path.endswith(COMPRESSED)
    try:
        with (
            storage.opened(path) as file,
            tarfile.open(fileobj=file, mode="r|*" if is_stream else "r:") as tar,
        ):
            for member in tar:
                # The list of all members would grow with their number.
                tar.members.clear()  # type: ignore[attr-defined]

                if not _is_image(member.name) or not member.isreg() or member.issparse():
                    continue
                name = f"{path}/{member.name}"
                if is_stream:
                    content = tar.extractfile(member)
                    assert content is not None
                    yield Item(name, path, content=content.read())
                else:
                    yield Item(name, path, member.offset_data, member.size)
    except Exception as error:
        # A header that lies makes tarfile raise almost anything, and ask for any amount of memory.
        kind = "a" if is_stream else "an uncompressed"
        fault = f"{visible(path)}: it cannot be read as {kind} tar file ({brief(error)})"
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
        if isinstance(item.content, Image.Image):
            return self.transform(item.content)
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
    if isinstance(item.content, bytes):
        return item.name, item.content
    if storage.is_address(item.path):
        return item.name, storage.read(item.path)
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
