"""The input images of `mldec predict`: files, folders, tar files and lists."""

import os
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from mldec.cli import require
from mldec.data.columns import PATHS
from mldec.data.images import READ
from mldec.data.photos import SkippedFiles, is_junk
from mldec.errors import ConfigError, DataError, brief, naming_errors
from mldec.files.atomic import STANDARD_OUTPUT
from mldec.files.tables import SUFFIXES, TYPED, decoded, read_table, simple_name, text_chunks
from mldec.files.text import CSV_ROWS
from mldec.runtime.distributed import rank_and_world_size
from mldec.tools.predict import storage
from mldec.tools.predict.decode import Item

STANDARD_INPUT = STANDARD_OUTPUT  # both are "-"
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")  # tar files that are read as a stream
# Simple names of the default columns of a table. The first match is used.
COLUMNS = ("image", "path", "url", "bytes", *PATHS)
NUMBERS = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")  # variables of --shard auto/N
ROWS = 256  # rows per chunk of a Parquet list, which may contain whole images


class Inputs:
    """The images of a command line, in order: files, folders and tar files, and those of a list.

    Folders are sorted by path. A list is a text file or a table with one image per row, or "-" for
    standard input; `column` is None for the first of `COLUMNS`.
    """

    def __init__(
        self,
        paths: Sequence[str],
        listing: str | None = None,
        *,
        column: str | None = None,
        root: str | None = None,
    ) -> None:
        self._paths = list(paths)
        self._listing = listing or ""
        self._kind = Path(self._listing).suffix.lower()
        self._known = [simple_name(column)] if column else COLUMNS
        self._root = root
        # Skipped files in folders and tar files, known after a complete iteration.
        self.skipped = SkippedFiles()

        if not paths and listing is None:
            raise ConfigError("no images are given: pass files, folders, tar files or --list FILE")
        if self._kind == ".parquet":
            require(f"--list {listing}", "parquet", "pyarrow")
        for path in paths:
            if not storage.exists(path):
                raise DataError(f"{path}: the file or folder does not exist; check the path")
            skipped = SkippedFiles()
            if storage.is_folder(path) and next(_in_folder(path, skipped), None) is None:
                raise DataError(f"{path}: no readable image; {skipped or 'check it'}")
        if listing not in (None, STANDARD_INPUT) and next(self._listed(1, None), None) is None:
            raise DataError(f"--list {listing}: the list is empty; check the file")

    def __iter__(self) -> Iterator[Item]:
        return self.of(0, 1)

    def of(self, number: int, shards: int) -> Iterator[Item]:
        """Yield the images of one shard."""
        for owner, item in self.divided(shards, number):
            if owner == number:
                yield item

    def divided(self, shards: int, only: int | None = None) -> Iterator[tuple[int, Item]]:
        """Yield all images with their shards. `only` permits to skip the images of other shards.

        If there are at least as many tar files as shards, whole tar files are assigned in turn.
        Other images are assigned by a hash of their path, relative to the argument of the command
        line. Rows of a list are assigned by their number.
        """
        tars = (path for _, path in self._files(SkippedFiles()) if is_tar(path))
        are_whole = shards > 1 and len(list(islice(tars, shards))) == shards

        skipped = SkippedFiles()
        tar_number = 0
        for key, path in self._files(skipped):
            if not is_tar(path):
                yield _shard_of(key, shards), Item(path, path)
                continue

            owner = tar_number % shards
            tar_number += 1
            if are_whole and only not in (None, owner):
                continue
            for member in _in_tar(path, skipped):
                if not are_whole:
                    owner = _shard_of(key + member.name.removeprefix(path), shards)
                yield owner, member
        self.skipped = skipped

        if self._listing:
            yield from self._listed(shards, only)

    def _files(self, skipped: SkippedFiles) -> Iterator[tuple[str, str]]:
        # Yield the path of each file below its argument, and its whole path.
        for path in self._paths:
            if not storage.is_folder(path):
                yield path, path
                continue
            # Remove ./ and double slashes.
            folder = path.rstrip("/") if storage.is_address(path) else str(Path(path))
            for file in _in_folder(folder, skipped):
                yield file.removeprefix(folder), file

    def _rooted(self, name: str) -> Item:
        if self._root is None or storage.is_address(name) or Path(name).is_absolute():
            return Item(name, name)
        return Item(name, f"{self._root.rstrip('/')}/{name}")

    def _column_of(self, names: Sequence[str]) -> str:
        for wanted in self._known:
            for name in names:
                if simple_name(name) == wanted:
                    return name
        raise DataError(
            f"--list {self._listing}: the column of the images is missing; "
            f"pass --column with a name of {', '.join(names)[:200]}"
        )

    def _listed(self, shards: int, only: int | None) -> Iterator[tuple[int, Item]]:
        with (
            ExitStack() as stack,
            naming_errors(f"--list {self._listing}", DataError, remedy="correct it"),
        ):
            file: IO[bytes] = sys.stdin.buffer
            if self._listing != STANDARD_INPUT:
                file = stack.enter_context(storage.opened(self._listing))
            if self._kind == ".parquet":
                yield from self._from_parquet(file, shards, only)
                return

            # Bytes that are not UTF-8 are decoded as in file names.
            if self._kind in SUFFIXES:
                paths = self._from_table(file)
            else:
                text = decoded(file, errors="surrogateescape")
                lines = (line.rstrip("\r\n").removeprefix("\ufeff") for line in text)
                paths = (line for line in lines if line)
            for row, path in enumerate(paths):
                yield row % shards, self._rooted(path)

    def _from_table(self, file: IO[bytes]) -> Iterator[str]:
        """Yield the paths in a table; delimited text is read in chunks."""
        if self._kind in TYPED:
            chunks = iter([read_table(Path(self._listing), self._known).astype(str)])
        else:
            chunks = text_chunks(
                f"--list {self._listing}",
                file,
                self._known,
                errors="surrogateescape",
                rows=CSV_ROWS,
            )
        for chunk in chunks:
            column = list(chunk.columns).index(self._column_of(chunk.columns))
            is_filled = (chunk != "").to_numpy().any(axis=1)
            yield from chunk.iloc[:, column][is_filled]

    def _from_parquet(
        self, file: IO[bytes], shards: int, only: int | None
    ) -> Iterator[tuple[int, Item]]:
        """Yield the images of a Parquet file. Each shard has a range of rows."""
        from pyarrow.parquet import ParquetFile

        table = ParquetFile(file)
        total = table.metadata.num_rows
        names = table.schema_arrow.names
        columns = [self._column_of(names)]
        # A second column with the names of images that are given by their bytes.
        for name in COLUMNS[:2]:
            if len(columns) == 1 and name in names and name != columns[0]:
                columns.append(name)

        def owner(row: int) -> int:
            return ((row + 1) * shards - 1) // total

        end = 0
        for group in range(table.metadata.num_row_groups):
            row = end
            end += table.metadata.row_group(group).num_rows
            if only is not None and not owner(row) <= only <= owner(end - 1):
                continue
            for batch in table.iter_batches(ROWS, row_groups=[group], columns=columns):
                cells = [batch.column(name).to_pylist() for name in columns]
                for value, name in zip(cells[0], cells[-1], strict=True):
                    yield owner(row), self._cell(value, name, row)
                    row += 1

    def _cell(self, value: Any, name: Any, row: int) -> Item:
        """Return the image of a cell: a path, bytes, or both as in tables of Hugging Face."""
        if isinstance(value, dict):
            name = value.get("path")
            value = value.get("bytes") or name
        if isinstance(value, str):
            return self._rooted(value)
        if not isinstance(name, str):
            name = f"{self._listing}/{row}"
        if isinstance(value, bytes):
            return Item(name, name, content=value)
        return Item(name, name, fault=f"{name}: no path and no bytes; correct the list")


def _shard_of(key: str, shards: int) -> int:
    """Return the shard of a path, the same on every machine and in every version of Python."""
    digest = blake2b(os.fsencode(key), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards


def is_tar(path: str) -> bool:
    """Return True for the path of a tar file."""
    return path.endswith((".tar", *COMPRESSED))


def _in_folder(folder: str, skipped: SkippedFiles) -> Iterator[str]:
    """Yield the user's images and tar files below a folder, and count the other files."""
    for path in storage.files_in(folder, skipped):
        if is_tar(path) or Path(path).suffix.lower() in READ:
            yield path
        else:
            skipped.add(path)


def _in_tar(path: str, skipped: SkippedFiles) -> Iterator[Item]:
    """Yield the images in a tar file, and one fault for the rest of a damaged file."""
    # Workers read the members of an uncompressed local file. A stream is read here.
    is_stream = storage.is_address(path) or path.endswith(COMPRESSED)
    try:
        with (
            storage.opened(path) as file,
            tarfile.open(fileobj=file, mode="r|*" if is_stream else "r:") as tar,
        ):
            for member in tar:
                # Limit the memory, because tarfile keeps all members in a list.
                tar.members.clear()  # type: ignore[attr-defined]

                name = f"{path}/{member.name}"
                if not member.isreg() or member.issparse() or is_junk(member.name):
                    skipped.add_junk(name)
                    continue
                if Path(member.name).suffix.lower() not in READ:
                    skipped.add(name)
                    continue
                if is_stream:
                    content = tar.extractfile(member)
                    assert content is not None
                    yield Item(name, path, content=content.read())
                else:
                    yield Item(name, path, member.offset_data, member.size)
    except Exception as error:
        # A damaged header makes tarfile raise many types of errors.
        fault = f"{path}: it cannot be read as a tar file ({brief(error)}); restore it"
        yield Item(path, path, fault=fault)


class Shard(NamedTuple):
    """The share of the images of one process."""

    number: int  # from 0
    total: int


def chosen_shard(option: str | None) -> Shard:
    """Return the shard of --shard, or of torchrun for "auto" and without this option."""
    shard = Shard(*rank_and_world_size())
    if option is None or (option == "auto" and "RANK" in os.environ):
        return shard
    if shard.total > 1:
        raise ConfigError(f"--shard {option} cannot be combined with torchrun; pass auto")

    number, _, total = option.partition("/")
    for name in NUMBERS:
        if number == "auto":
            number = os.environ.get(name, "auto")
    if not (number.isdecimal() and total.isdecimal() and int(number) < int(total)):
        raise ConfigError(
            f"--shard {option}: shard {number}/{total} is invalid; pass I/N with 0 <= I < N, "
            f"auto/N with {' or '.join(NUMBERS)}, or auto with torchrun"
        )
    return Shard(int(number), int(total))
