"""The input images of `mldec predict`: files, folders, tar files and lists."""

import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import IO, Any

from mldec.cli import require
from mldec.data.columns import PATHS
from mldec.data.photos import PhotoFinder, SkippedFiles, files_below, is_junk
from mldec.errors import ConfigError, DataError, brief, naming_errors
from mldec.files.atomic import STANDARD_OUTPUT
from mldec.files.tables import (
    SUFFIXES,
    TYPED,
    as_cell,
    decoded,
    read_table,
    simple_name,
    text_chunks,
)
from mldec.files.text import open_binary
from mldec.tools.predict.decode import Item

STANDARD_INPUT = STANDARD_OUTPUT  # both are "-"
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")  # tar files that are read as a stream
# Simple names of the default columns of a table. The first match is used.
COLUMNS = ("image", "path", "bytes", *PATHS)
ROWS = 256  # rows per chunk of a Parquet list, which may contain whole images


class Inputs:
    """Input images in order: the given files, folders and tar files, then the rows of a list.

    Folders are sorted by path. A list is a text file or a table with one image per row, or "-" for
    standard input; `column` is None for the first of `COLUMNS`. `shard` (I, N) selects every N-th
    image, beginning with number I, from 0.
    """

    def __init__(
        self,
        paths: Sequence[str],
        listing: str | None = None,
        *,
        column: str | None = None,
        root: str | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self._paths = list(paths)
        self._listing = listing or ""
        self._kind = Path(self._listing).suffix.lower()
        self._known = [simple_name(column)] if column else COLUMNS
        self._root = root
        self._finder = PhotoFinder(Path())
        self._shard = shard
        # Skipped files in folders and tar files, known after a complete iteration.
        self.skipped = SkippedFiles()

        if not paths and listing is None:
            raise ConfigError("no images are given: pass files, folders, tar files or --list FILE")
        if self._kind == ".parquet":
            require(f"--list {listing}", "parquet", "pyarrow")
        for path in paths:
            if not Path(path).exists():
                raise DataError(f"{path}: the file or folder does not exist; check the path")
            skipped = SkippedFiles()
            if Path(path).is_dir() and next(_in_folder(path, skipped), None) is None:
                raise DataError(f"{path}: no readable image; {skipped or 'check it'}")
        if listing not in (None, STANDARD_INPUT) and next(self._listed(), None) is None:
            raise DataError(f"--list {listing}: the list is empty; check the file")

    def __iter__(self) -> Iterator[Item]:
        number, total = self._shard
        return islice(self._all(), number, None, total)

    def _all(self) -> Iterator[Item]:
        skipped = SkippedFiles()
        for path in self._paths:
            files: Iterator[str] = iter([path])
            if Path(path).is_dir():
                # `Path` removes ./ and double slashes.
                files = _in_folder(str(Path(path)), skipped)
            for file in files:
                if is_tar(file):
                    yield from _in_tar(file, skipped)
                else:
                    yield Item(file, file)
        self.skipped = skipped

        if self._listing:
            yield from self._listed()

    def _path(self, name: str) -> str:
        if self._root is None or Path(name).is_absolute():
            return name
        return f"{self._root.rstrip('/')}/{name}"

    def _rooted(self, name: str) -> Item:
        path = self._path(name)
        if not Path(path).exists():
            # The path may have backslashes or no suffix, as in tables for training. Text files may
            # also have quotes and blanks around it.
            listed = name.strip(" \t\"'").replace("\\", "/")
            try:
                found = self._finder.find(self._path(listed), f"--list {self._listing}")
            except DataError as error:
                return Item(name, path, fault=str(error))
            if found is not None:
                return Item(found.removeprefix(self._path("")), found)
        return Item(name, path)

    def _column_of(self, names: Sequence[str]) -> str:
        for wanted in self._known:
            for name in names:
                if simple_name(name) == wanted:
                    return name
        raise DataError(
            f"--list {self._listing}: the column of the images is missing; "
            f"pass --column with a name of {', '.join(names)[:200]}"
        )

    def _listed(self) -> Iterator[Item]:
        with (
            ExitStack() as stack,
            naming_errors(f"--list {self._listing}", DataError, remedy="correct it"),
        ):
            file: IO[bytes] = sys.stdin.buffer
            if self._listing != STANDARD_INPUT:
                file = stack.enter_context(open_binary(self._listing))
            if self._kind == ".parquet":
                yield from self._from_parquet(file)
                return

            # Bytes that are not UTF-8 are decoded as in file names.
            if self._kind in (*SUFFIXES, *TYPED):
                paths = self._from_table(file)
            else:
                text = decoded(file, errors="surrogateescape")
                lines = (line.rstrip("\r\n").removeprefix("\ufeff") for line in text)
                paths = (line for line in lines if line.strip())
            for row, path in enumerate(paths):
                yield self._cell(path, None, row)

    def _from_table(self, file: IO[bytes]) -> Iterator[Any]:
        """Yield the paths in a table; delimited text is read in chunks."""
        if self._kind in TYPED:
            chunks = iter([read_table(Path(self._listing), self._known)])
        else:
            source = f"--list {self._listing}"
            chunks = text_chunks(source, file, self._known, errors="surrogateescape")
        for chunk in chunks:
            column = list(chunk.columns).index(self._column_of(chunk.columns))
            is_filled = (chunk != "").to_numpy().any(axis=1)
            yield from map(as_cell, chunk.iloc[:, column][is_filled])

    def _from_parquet(self, file: IO[bytes]) -> Iterator[Item]:
        """Yield the images of a Parquet file."""
        from pyarrow.parquet import ParquetFile

        table = ParquetFile(file)
        names = table.schema_arrow.names
        columns = [self._column_of(names)]
        # A second column with the names of images that are given by their bytes.
        for name in COLUMNS[:2]:
            if len(columns) == 1 and name in names and name != columns[0]:
                columns.append(name)

        row = 0
        for batch in table.iter_batches(ROWS, columns=columns):
            cells = [batch.column(name).to_pylist() for name in columns]
            for value, name in zip(cells[0], cells[-1], strict=True):
                yield self._cell(value, name, row)
                row += 1

    def _cell(self, value: Any, name: Any, row: int) -> Item:
        """Return the image of a cell: a path, bytes, or both as in tables of Hugging Face."""
        if isinstance(value, dict):
            name = value.get("path")
            value = value.get("bytes") or name
        if isinstance(value, str) and value.strip():
            return self._rooted(value)
        if not isinstance(name, str):
            name = f"{self._listing}/{row}"
        if isinstance(value, bytes):
            return Item(name, name, content=value)
        return Item(name, name, fault=f"{name}: no path and no bytes; correct the list")


def is_tar(path: str) -> bool:
    """Return True for the path of a tar file."""
    return path.lower().endswith((".tar", *COMPRESSED))


def _in_folder(folder: str, skipped: SkippedFiles) -> Iterator[str]:
    """Yield the user's images and tar files below a folder, and count the other files."""
    for path in files_below(folder, skipped):
        if is_tar(path) or skipped.accepts(path):
            yield path


def _in_tar(path: str, skipped: SkippedFiles) -> Iterator[Item]:
    """Yield the images in a tar file, and one fault for the rest of a damaged file."""
    # Workers read the members of an uncompressed file. A stream is read here.
    is_stream = path.lower().endswith(COMPRESSED)
    try:
        with (
            open_binary(path) as file,
            tarfile.open(fileobj=file, mode="r|*" if is_stream else "r:") as tar,
        ):
            for member in tar:
                # Limit the memory, because tarfile keeps all members in a list.
                tar.members.clear()  # type: ignore[attr-defined]

                name = f"{path}/{member.name}"
                if not member.isreg() or member.issparse() or is_junk(member.name):
                    skipped.add_junk(name)
                    continue
                if not skipped.accepts(name):
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
