"""The images of `mldec predict`, and where they are: in folders, tar files and lists."""

import csv
import io
import os
import sys
import tarfile
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from mldec.cli import require
from mldec.data.images import READ, UnsupportedFiles
from mldec.errors import ConfigError, DataError, brief, naming_errors, visible
from mldec.files.atomic import STANDARD_OUTPUT
from mldec.runtime.devices import env_number
from mldec.runtime.distributed import rank_and_world_size
from mldec.tools.predict import storage
from mldec.tools.predict.decode import Item

STANDARD_INPUT = STANDARD_OUTPUT  # the same sign
TAR = ".tar"
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")  # tar files that are read as a stream
COLUMNS = ("image", "path", "url", "bytes")  # of a table, if --column does not say
# Byte order marks of UTF-16, as they are read from a list.
UTF_16 = tuple(mark.decode("utf-8", "surrogateescape") for mark in (BOM_UTF16_LE, BOM_UTF16_BE))
ROWS = 256  # of a Parquet list in memory at a time: they may hold images


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
        # Image files in folders and tar files that cannot be read, after a complete iteration.
        self.unsupported = UnsupportedFiles()
        self._kind = Path(self._listing).suffix.lower()
        if self._kind == ".parquet":
            require(f"--list {listing}", "parquet", "pyarrow")

        # What can be refused before the first image is read.
        for path in paths:
            if not storage.exists(path):
                raise DataError(f"{path}: no such file or folder")
            unsupported = UnsupportedFiles()
            if storage.is_folder(path) and next(_in_folder(path, unsupported), None) is None:
                reason = f" that can be read: {unsupported}" if unsupported else ""
                raise DataError(f"{path}: the folder holds no image{reason}")
        if root is not None and not storage.is_address(root) and not Path(root).is_dir():
            raise DataError(f"--root {root}: no such folder; check the path")
        if listing not in (None, STANDARD_INPUT) and next(self._listed(1, None), None) is None:
            raise DataError(f"--list {listing}: it names no image")

    def __iter__(self) -> Iterator[Item]:
        return self.of(0, 1)

    def divided(self, shards: int, only: int | None = None) -> Iterator[tuple[int, Item]]:
        """Yield the images with the number of the shard, of so many, that answers them.

        Tar files are dealt whole where there are as many as shards; other images belong to a shard
        by a hash of their paths below what the command line names, and rows of a list by their
        numbers. With `only` a shard the tar files and row groups of others are not opened.
        """
        unsupported = UnsupportedFiles()
        tars = (item for _, item in self._files(UnsupportedFiles()) if _is_tar(item))
        are_whole = shards > 1 and len(list(islice(tars, shards))) == shards
        number = 0
        for key, item in self._files(unsupported):
            if not _is_tar(item):
                yield _shard_of(key, shards), item
                continue

            owner, number = number % shards, number + 1
            if are_whole and only not in (None, owner):
                continue
            for member in _in_tar(item.path, unsupported):
                if not are_whole:
                    owner = _shard_of(key + member.name.removeprefix(item.path), shards)
                yield owner, member
        self.unsupported = unsupported

        if self._listing:
            yield from self._listed(shards, only)

    def of(self, number: int, shards: int) -> Iterator[Item]:
        """Yield the images of one shard."""
        return (item for owner, item in self.divided(shards, number) if owner == number)

    def _files(self, unsupported: UnsupportedFiles) -> Iterator[tuple[str, Item]]:
        """Yield the files of the command line that are no lists, with their paths below it."""
        for path in self._paths:
            if storage.is_folder(path):
                # As `Path` writes it: without ./ and double slashes.
                folder = path.rstrip("/") if storage.is_address(path) else str(Path(path))
                for item in _in_folder(folder, unsupported):
                    yield item.name.removeprefix(folder), item
            else:
                yield path, Item(path, path)

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
            naming_errors(f"--list {self._listing}", DataError, remedy="correct it"),
        ):
            file: IO[bytes] = sys.stdin.buffer
            if self._listing != STANDARD_INPUT:
                file = stack.enter_context(storage.opened(self._listing))
            if self._kind == ".parquet":
                yield from self._of_parquet(file, shards, only)
                return

            # Bytes of a path that are not UTF-8 come through as in the names of files.
            text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
            paths: Iterator[str] = filter(None, (line.rstrip("\r\n") for line in text))
            if self._kind == ".csv":
                reader = csv.DictReader(text, restval="", strict=True)
                column = self._column_of(reader.fieldnames or [])
                paths = (fields[column] for fields in reader)
            for row, path in enumerate(paths):
                if row == 0 and path.startswith(UTF_16):
                    raise ValueError("it is UTF-16 text: save it as UTF-8")
                yield row % shards, self._rooted(path)

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


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in READ


def _is_tar(item: Item) -> bool:
    """Tell whether an item is a tar file, whose members are the images."""
    return item.fault is None and item.path.endswith((TAR, *COMPRESSED))


def _in_folder(folder: str, unsupported: UnsupportedFiles) -> Iterator[Item]:
    """Yield the images and tar files of a folder and of its folders, sorted by their paths.

    Image files that cannot be read are added to `unsupported`.
    """
    for entry in storage.entries(folder):
        item = Item(entry.path, entry.path)
        if not entry.name:
            fault = f"{visible(entry.path)}: keys with // cannot be listed; rename the objects"
            yield Item(entry.path, entry.path, fault=fault)
        elif entry.is_folder:
            yield from _in_folder(entry.path, unsupported)
        elif _is_image(entry.name) or _is_tar(item):
            yield item
        else:
            unsupported.add(entry.path)


def _in_tar(path: str, unsupported: UnsupportedFiles) -> Iterator[Item]:
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

                if not member.isreg() or member.issparse():
                    continue
                name = f"{path}/{member.name}"
                if not _is_image(member.name):
                    unsupported.add(name)
                    continue
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


NUMBERS = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")  # variables with the number of a shard


class Shard(NamedTuple):
    """A share of the images: that of one process."""

    number: int  # from 0
    of: int


def chosen_shard(option: str | None) -> Shard:
    """Return the share of this process, by --shard, or by the variables of torchrun without it.

    I/N says it; auto/N takes I from a SLURM array or an indexed Job of Kubernetes, and auto takes
    both from torchrun.
    """
    if option is None:
        return Shard(*rank_and_world_size())

    number, of = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    first, _, last = option.partition("/")
    is_set = [name for name in (*NUMBERS, "RANK") if os.environ.get(name)]
    if first == "auto":
        sources = NUMBERS if last else ("RANK",)
        if len(is_set) != 1 or is_set[0] not in sources:
            raise ConfigError(
                f"--shard {option} takes its number from {' or '.join(sources)} alone, and "
                f"{' and '.join(is_set) or 'nothing'} is set; pass --shard I/N instead"
            )
        number, of = os.environ[is_set[0]], last or of
    elif env_number("WORLD_SIZE", 1, smallest=1) > 1:
        raise ConfigError(f"--shard {option} is that of all processes of torchrun: pass auto")
    else:
        number, of = first, last

    if not (number.isdecimal() and of.isdecimal() and int(number) < int(of)):
        raise ConfigError(
            f"--shard {option}: there is no shard {number or '?'} of {of or '?'}; "
            f"shards count from 0 to N - 1, with N from 1 on"
        )
    return Shard(int(number), int(of))
