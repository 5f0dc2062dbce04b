"""Files of weights on a disk: written whole or not at all, checked when read, and never run."""

import hashlib
import os
import pickle
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
from mldec.untrusted import refuse_bomb


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
        kept = next((f"; {name} is the last good one" for name in versions(path, keep) if name.exists()), "")
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
        raise CheckpointError(f"cannot save {target}: {error.strerror}; free space and pass resume=auto") from error


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


def read(path: Path) -> dict[str, Any]:
    """Read a file of plain containers and tensors, ours or another's: checksum first, and nothing in it is run.

    Raises:
        CheckpointError: if the file is missing, damaged, truncated, refused, or holds no weights.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}: check the path")
    hashes = known_hashes(path)
    if hashes and sha256_of(path) not in hashes:
        raise CheckpointError(
            f"{path} is damaged: its sha256 is not the one in {hash_record(path).name}; use another copy"
        )
    with path.open("rb") as file:
        if file.read(1) in (b"<", b""):
            raise CheckpointError(f"{path} is no checkpoint, but {_instead(path)}: download it again")
    refuse_bomb(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's remarks on a stranger's pickle help nobody
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        what = _named(error) if zipfile.is_zipfile(path) else "or is not one at all"
        raise CheckpointError(f"{path} is refused: it holds more than tensors and plain values ({what})") from error
    except MemoryError:
        raise
    except Exception as error:  # bytes that are no checkpoint end in almost anything
        raise CheckpointError(f"{path} is no checkpoint, or a damaged one: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is no checkpoint: it holds a {type(state).__name__}")
    return state


def hash_record(path: Path) -> Path:
    """Return the path of the file with the hashes of a file."""
    return path.with_name(path.name + ".sha256")


def known_hashes(path: Path) -> list[str]:
    """Return the hashes in the file beside a file of weights; none if there is no such file."""
    record = hash_record(path)
    lines = record.read_text(errors="replace").splitlines() if record.is_file() else []
    return [line.split()[0] for line in lines if line.strip()]


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
        write_hashes(target, [*hashes, *(line for line in known_hashes(target) if line not in hashes)])
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


def _instead(path: Path) -> str:
    return "an empty file" if path.stat().st_size == 0 else "a web page"


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
            return line.strip().removeprefix("WeightsUnpickler error: ").split(" was not an allowed")[0]
    return _first_line(error)
