"""Files of tensors on a disk: written whole or not at all, checked when read, and never run."""

import hashlib
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mldec.errors import CheckpointError
from mldec.files.archive import refuse_bomb
from mldec.files.plain import plain

RECORD_BYTES = 2**16  # read of a file of hashes; one of ours has two lines


def save(path: Path, state: dict[str, Any], *, keep: int = 1) -> None:
    """Write a checkpoint so that a crash at any moment leaves a whole one under its name or an older one's.

    The new file is written beside the old one, flushed to the disk and renamed. While a name passes from one file to
    the next, its checksum file holds the hashes of both.

    Args:
        path: of the checkpoint.
        state: plain containers and tensors.
        keep: how many to keep, this one included; older ones are called as `versions` says.

    Raises:
        CheckpointError: if it cannot be written; what was there before stays.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        names = versions(path, keep)
        for older, newer in reversed(list(zip(names[1:], names, strict=False))):
            if newer.exists():
                _rename(newer, older, known_hashes(newer))
        _rename(temporary, path, [sha256_of(temporary)])
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        temporary.unlink(missing_ok=True)
        kept = next(
            (f"; {name} is the last good one" for name in versions(path, keep) if name.exists()), ""
        )
        raise CheckpointError(
            f"cannot save {path}: {_write_fault(error)}{kept}; free space and pass resume=auto"
        ) from error


def versions(path: Path, keep: int) -> list[Path]:
    """Return the names of a checkpoint and those before it, newest first: last.pt, last.1.pt, last.2.pt, ..."""
    return [path, *(path.with_name(f"{path.stem}.{age}{path.suffix}") for age in range(1, keep))]


def duplicate(source: Path, target: Path) -> None:
    """Give a checkpoint a second name; no bytes are copied where the disk knows hard links.

    Raises:
        CheckpointError: if that cannot be written; what was there before stays.
    """
    temporary = target.with_name(target.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        _rename(temporary, target, known_hashes(source))
    except OSError as error:
        raise CheckpointError(
            f"cannot save {target}: {error.strerror}; free space and pass resume=auto"
        ) from error


class Writer:
    """Write in the background, one thing at a time and in order, while training goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Start a job once the one before it is done; an error of that one is raised here."""
        self.wait()
        self._pending = self._thread.submit(job)

    def wait(self) -> None:
        """Wait for the pending job, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def snapshot(value: Any) -> Any:
    """Return a copy in main memory of plain containers and tensors, so that the originals may go on changing."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: snapshot(item) for key, item in value.items()}
    return [snapshot(item) for item in value] if isinstance(value, list | tuple) else value


def read_torch(path: Path) -> Any:
    """Read a file of torch's: the one way in for checkpoints, released weights, word vectors and class names.

    Its checksum is compared if there is one beside it, nothing in it is run, and it is not unpacked if it is a bomb.

    Returns:
        What it holds, rebuilt from exact dict, list, tuple, text, numbers and dense tensors, see `plain`.

    Raises:
        CheckpointError: if the file is missing, damaged, truncated, or refused.
    """
    try:
        if not path.is_file():  # nor a pipe, which would keep us waiting
            raise CheckpointError(f"no file at {path}: check the path")
        _check_hash(path)
        _check_start(path)
        refuse_bomb(path)
        return plain(_unpickle(path), path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({_first_line(error)})") from error
    except MemoryError as error:
        raise CheckpointError(
            f"{path} asks for more memory than there is; use another copy"
        ) from error


def _check_hash(path: Path) -> None:
    record = hash_record(path)
    if not record.is_file() or not record.stat().st_size:
        return
    if sha256_of(path) not in known_hashes(path):
        raise CheckpointError(
            f"{path} is damaged: its sha256 is not the one in {record.name}; use another copy"
        )


def _check_start(path: Path) -> None:
    """Name what servers send instead of a file."""
    with path.open("rb") as file:
        start = file.read(1)
    if start == b"":
        raise CheckpointError(f"{path} is no file of tensors, but an empty file: download it again")
    if start == b"<":
        raise CheckpointError(f"{path} is no file of tensors, but a web page: download it again")


def _unpickle(path: Path) -> Any:
    """Read plain containers and tensors by torch's restricted unpickler."""
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # torch's remarks on a stranger's pickle help nobody
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        what = _named(error) if zipfile.is_zipfile(path) else "or is not one at all"
        raise CheckpointError(
            f"{path} is refused: it holds more than tensors and plain values ({what})"
        ) from error
    except (MemoryError, OSError):
        raise
    except Exception as error:  # bytes that are no such file end in almost anything
        raise CheckpointError(
            f"{path} is no file of tensors, or a damaged one: {_first_line(error)}"
        ) from error


def hash_record(path: Path) -> Path:
    """Return the path of the file with the hashes of a file."""
    return path.with_name(path.name + ".sha256")


def known_hashes(path: Path) -> list[str]:
    """Return the hashes in the file beside a file of tensors; none if there is no such file.

    Both forms of `sha256sum` are read ("HASH  NAME", "SHA256 (NAME) = HASH"), and what PowerShell writes: capitals,
    with a byte order mark.
    """
    record = hash_record(path)
    if not record.is_file():
        return []
    with record.open("rb") as file:
        content = file.read(RECORD_BYTES)
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    text = content.decode(encoding, errors="replace")
    return [match.lower() for match in re.findall(r"\b[0-9a-fA-F]{64}\b", text)]


def write_hashes(path: Path, hashes: list[str]) -> None:
    """Write lines as `sha256sum` does, in one atomic step."""
    write_text(hash_record(path), "".join(f"{line}  {path.name}\n" for line in hashes))


def write_text(path: Path, text: str) -> None:
    """Write a small file beside the old one and rename it: a crash leaves the one or the other.

    Raises:
        OSError: if it cannot be written; what was there before stays.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _rename(source: Path, target: Path, hashes: list[str]) -> None:
    """Give a whole file its name; its checksum file holds the hashes of it and of the file before it meanwhile."""
    if hashes:
        write_hashes(
            target, [*hashes, *(line for line in known_hashes(target) if line not in hashes)]
        )
    else:
        hash_record(target).unlink(missing_ok=True)  # nobody knows the hash of this one
    source.replace(target)
    _sync_folder(target.parent)
    if hashes:
        write_hashes(target, hashes)


def _sync_folder(folder: Path) -> None:
    """Flush a rename to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def _write_fault(error: OSError | RuntimeError) -> str:
    """Say why torch.save failed: it reports a short write as an unexpected position in the file."""
    text = _first_line(error)
    return "the disk is full, or did not take all of it" if "unexpected pos" in text else text


def _named(error: BaseException) -> str:
    """Return the part of torch's refusal that names what the pickle asked for."""
    for line in str(error).splitlines():
        if "Unsupported" in line or "GLOBAL" in line:
            return (
                line.strip()
                .removeprefix("WeightsUnpickler error: ")
                .split(" was not an allowed")[0]
            )
    return _first_line(error)
