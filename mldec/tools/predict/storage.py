"""Files by path, or by address such as s3://bucket/key through fsspec.

Credentials and endpoints are configured for the fsspec backend, such as s3fs.
"""

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from fsspec.core import url_to_fs

from mldec.data.photos import SkippedFiles, files_below, is_junk
from mldec.errors import DataError, naming_errors
from mldec.files.atomic import replacing
from mldec.files.text import open_binary
from mldec.files.torch_files import sha256_of

ATTEMPTS = 3  # to read an object, each with the retries of the fsspec backend
PAUSE = 1.0  # seconds after the first attempt, twice as long after the second
REMEDY = "check the address, the credentials and the network"


def is_address(path: str | Path) -> bool:
    """Return True for an address such as s3://bucket/key."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(path)) is not None


@contextmanager
def _remote(address: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system of an address and the path in it. Errors become DataError."""
    with naming_errors(address, DataError, remedy=REMEDY):
        yield url_to_fs(address)


def read(address: str) -> bytes:
    """Return the content of an object, after several attempts if necessary."""
    with _remote(address) as (files, name):
        for attempt in range(1, ATTEMPTS):
            try:
                return bytes(files.cat_file(name))
            except (FileNotFoundError, PermissionError):
                raise
            except Exception:
                time.sleep(PAUSE * attempt)
        return bytes(files.cat_file(name))


def opened(path: str) -> IO[bytes]:
    """Open a file or an object to read it as a stream; raises OSError or DataError."""
    if not is_address(path):
        return open_binary(path)
    with _remote(path) as (files, name):
        stream: IO[bytes] = files.open(name, "rb")
        return stream


def files_in(folder: str, skipped: SkippedFiles) -> Iterator[str]:
    """Yield the paths of the user's files below a folder, sorted by the names in their paths."""
    if not is_address(folder):
        yield from files_below(folder, skipped)
        return

    with _remote(folder) as (files, root):
        names = files.find(root)
    for name in sorted(names, key=lambda name: name.split("/")):
        below = name.removeprefix(root.rstrip("/"))
        path = folder.rstrip("/") + below
        if is_junk(below):
            skipped.add_junk(path)
        else:
            yield path


def is_folder(path: str) -> bool:
    """Return True for an existing folder. Web servers have no folders."""
    if not is_address(path):
        return Path(path).is_dir()
    if path.startswith("http"):
        return False
    with _remote(path) as (files, name):
        return bool(files.isdir(name))


def exists(path: str) -> bool:
    """Return True if the file or folder exists."""
    if not is_address(path):
        return Path(path).exists()
    with _remote(path) as (files, name):
        return bool(files.exists(name))


def fingerprint(path: str) -> str:
    """Return the size of a file, and the SHA-256 hash of a local file."""
    if not is_address(path):
        return f"{Path(path).stat().st_size} bytes, sha256 {sha256_of(Path(path))}"
    with _remote(path) as (files, name):
        files.invalidate_cache()
        return f"{files.size(name)} bytes"


@contextmanager
def publishing(path: str, scratch: Path) -> Iterator[BinaryIO]:
    """Write a file atomically. An object is first written to the local folder `scratch`."""
    if not is_address(path):
        # Commands that write the same file must not share a temporary file.
        tag = hashlib.sha256(str(scratch.absolute()).encode()).hexdigest()[:12]
        # Replace the target of a link, not the link.
        with replacing(Path(os.path.realpath(path)), durable=True, tag=tag) as file:
            yield file
        return

    local = scratch / "upload"
    try:
        with replacing(local) as file:
            yield file
        with _remote(path) as (files, name):
            files.put_file(str(local), name)
    finally:
        local.unlink(missing_ok=True)
