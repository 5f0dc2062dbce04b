"""Files of weights on a disk: written whole or not at all, checked when read, and never run."""

import hashlib
import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from mldec.errors import CheckpointError


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that a crash at any moment leaves a whole one under its name.

    The new file is written beside the old one, flushed to the disk and renamed. While the two exist, the checksum
    file holds the hashes of both.

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
        new = sha256_of(temporary)
        old = [line for line in known_hashes(path) if line != new]
        write_hashes(path, [new, *old])
        temporary.replace(path)
        _sync_folder(path.parent)
        write_hashes(path, [new])
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        temporary.unlink(missing_ok=True)
        kept = f"; {path} is still the last good one" if path.exists() else ""
        raise CheckpointError(
            f"cannot save {path}: {_first_line(error)}{kept}; free space and pass resume=auto"
        ) from error


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
    temporary = hash_record(path).with_name(path.name + ".sha256.tmp")
    with temporary.open("w") as file:
        file.writelines(f"{line}  {path.name}\n" for line in hashes)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(hash_record(path))


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def _named(error: BaseException) -> str:
    """Return the part of torch's refusal that names what the pickle asked for."""
    for line in str(error).splitlines():
        if "Unsupported" in line or "GLOBAL" in line:
            return line.strip().removeprefix("WeightsUnpickler error: ").split(" was not an allowed")[0]
    return _first_line(error)
