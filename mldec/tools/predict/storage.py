"""Files by their paths or addresses: local ones, object storage and the web through fsspec.

Credentials and endpoints are the affair of the package of each scheme, such as s3fs.
"""

import hashlib
import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, TypeVar

from mldec.errors import ConfigError, DataError, brief, visible, writing
from mldec.files.atomic import replacing, write_file
from mldec.files.text import open_binary

T = TypeVar("T")

# The schemes, and the packages that fsspec needs for them.
SCHEMES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "http": "aiohttp"}
SCHEMES["https"] = SCHEMES["http"]

ATTEMPTS = 3  # at a file, beside those that a library makes itself
PATIENCE = 60.0  # seconds for an attempt at an image; after them there is no further attempt
PAUSE = 0.5  # seconds before the second attempt; twice as many before each further one
BLOCK = 2**23  # bytes that a stream reads at a time


def is_address(path: str | Path) -> bool:
    """Tell whether this is an address such as s3://bucket/key, and no local path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(path)) is not None


def _files_of(address: str) -> Any:
    """Return the file system of an address, made by fsspec in this process."""
    scheme = address.partition("://")[0]
    if scheme not in SCHEMES:
        raise ConfigError(
            f"{visible(address)}: the scheme {scheme}:// is unknown; "
            f"choose one of {', '.join(f'{known}://' for known in SCHEMES)}"
        )
    if importlib.util.find_spec(SCHEMES[scheme]) is None:
        raise ConfigError(
            f"{visible(address)}: {scheme}:// needs {SCHEMES[scheme]}, which is not installed; "
            f"run pip install -e '.[cloud]' or pip install {SCHEMES[scheme]}"
        )
    import fsspec

    return fsspec.filesystem(scheme)


def _patiently(address: str, job: Callable[[], T]) -> T:
    """Do a job that may fail for a moment, several times if need be."""
    end = time.monotonic() + PATIENCE
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return job()
        except FileNotFoundError as error:
            raise DataError(f"{visible(address)}: there is no such object; check it") from error
        except Exception as error:
            times = "once" if attempt == 1 else f"{attempt} times"
            fault = f"it cannot be used ({brief(error)}), tried {times}; try again later"
            is_refused = isinstance(error, PermissionError) or "Credentials" in type(error).__name__
            if is_refused:
                package = SCHEMES[address.partition("://")[0]]
                fault = f"no access ({brief(error)}); give the credentials that {package} looks for"
            if is_refused or attempt == ATTEMPTS or time.monotonic() > end:
                raise DataError(f"{visible(address)}: {fault}") from error
            time.sleep(PAUSE * 2 ** (attempt - 1))
    raise AssertionError


def read(address: str) -> bytes:
    """Return the content of an object, within `PATIENCE` per attempt."""
    files = _files_of(address)

    def content() -> bytes:
        if not files.async_impl:
            return bytes(files.cat_file(address))
        from fsspec.asyn import sync

        # Without a limit a connection that sends a byte now and then holds up everything.
        whole = sync(files.loop, files._cat_file, files._strip_protocol(address), timeout=PATIENCE)
        if not whole:
            raise ValueError("an empty answer, 0 bytes")
        return bytes(whole)

    return _patiently(address, content)


def opened(path: str) -> IO[bytes]:
    """Open a file to read it as a stream; raises an `OSError` or a `DataError`."""
    if not is_address(path):
        return open_binary(path)
    files = _files_of(path)
    return _patiently(path, lambda: files.open(path, "rb", block_size=BLOCK))


class Entry(NamedTuple):
    """What a folder holds."""

    name: str  # empty for a folder of a store that cannot be listed
    path: str
    is_folder: bool


def entries(folder: str) -> list[Entry]:
    """Return what a folder holds, sorted by name; raises an `OSError` or a `DataError`."""
    if not is_address(folder):
        # A link to a folder may lead back to a folder above.
        with os.scandir(folder) as scanned:
            return sorted(Entry(e.name, e.path, e.is_dir(follow_symlinks=False)) for e in scanned)

    files, scheme = _files_of(folder), folder.partition("://")[0]
    own = files._strip_protocol(folder).rstrip("/")
    found = []
    for one in _patiently(folder, lambda: files.ls(own, detail=True)):
        # Some stores list the folder itself as an empty object.
        path = one["name"].rstrip("/")
        if path != own:
            name = path.rpartition("/")[2]
            found.append(Entry(name, f"{scheme}://{path}", one["type"] == "directory"))
        elif one.get("StorageClass") == "DIRECTORY":
            # A prefix of other keys with an empty name between two slashes, see s3fs.
            found.append(Entry("", f"{scheme}://{own}//", False))
    return sorted(found)


def is_folder(path: str) -> bool:
    """Tell whether a path or an address is that of a folder; on the web there are none."""
    if not is_address(path):
        return Path(path).is_dir()
    files = _files_of(path)
    return not path.startswith("http") and bool(_patiently(path, lambda: files.isdir(path)))


def exists(path: str) -> bool:
    """Tell whether there is a file or a folder."""
    if not is_address(path):
        return Path(path).exists()
    files = _files_of(path)
    return bool(_patiently(path, lambda: files.exists(path)))


def fingerprint(path: str, *, hashed: bool = True) -> str | None:
    """Return the size of a file, and of a local one its hash; None if there is no file."""
    if is_address(path):
        files = _files_of(path)
        files.invalidate_cache()
        return f"{_patiently(path, lambda: files.size(path))} bytes" if exists(path) else None
    try:
        with open_binary(path) as file:
            size = f"{os.fstat(file.fileno()).st_size} bytes"
            digest = hashlib.file_digest(file, "sha256").hexdigest() if hashed else ""
    except FileNotFoundError:
        return None
    return f"{size}, sha256 {digest}" if hashed else size


def remove(path: str) -> None:
    """Remove a file, if it exists."""
    if not is_address(path):
        Path(path).unlink(missing_ok=True)
    elif exists(path):
        files = _files_of(path)
        _patiently(path, lambda: files.rm_file(path))


@contextmanager
def publishing(path: str, scratch: Path, ready: Callable[[Path], None]) -> Iterator[BinaryIO]:
    """Open a file that gets its name, or is uploaded from a folder `scratch`, once it is whole.

    `ready` gets the path of the whole file before that. After an error in it nothing is published.
    """
    if not is_address(path):
        # The target of a link is replaced, not the link.
        tag = hashlib.sha256(str(scratch.absolute()).encode()).hexdigest()[:12]
        with replacing(Path(os.path.realpath(path)), durable=True, tag=tag) as file:
            yield file
            file.flush()
            ready(Path(file.name))
        return

    local = scratch / "upload"
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        with writing(local), local.open("wb") as file:
            yield file
        ready(local)
        files = _files_of(path)
        _patiently(path, lambda: files.put_file(str(local), path))
    finally:
        local.unlink(missing_ok=True)


def write(path: str, content: bytes) -> None:
    """Write a small file, completely or not at all."""
    if not is_address(path):
        write_file(Path(path), content)
    else:
        files = _files_of(path)
        _patiently(path, lambda: files.pipe_file(path, content))
