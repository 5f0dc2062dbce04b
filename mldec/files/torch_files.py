"""Write tensor files atomically, and read them safely: with checksums and without code."""

import errno
import hashlib
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as packed
from torch import Tensor

from mldec.errors import CheckpointError, naming_errors, writing
from mldec.files.atomic import replacing, write_file

SUFFIX = ".safetensors"
MAPPED = 2**30  # minimum size in bytes of files that are memory-mapped


def save(path: Path, state: dict[str, Any], *, keep: int = 1, of_run: bool = True) -> None:
    """Write a checkpoint atomically. A crash leaves either the old or the new one.

    Other processes can read it at any time, because `path` always exists. The checksum file holds
    the hashes of both files during the rename. `keep` is the number of versions to keep, including
    this one; see `versions`. For `of_run` see `replacing`.
    """
    with replacing(path, durable=True, of_run=of_run) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch reports an incomplete write as an unexpected file position.
            raise OSError(errno.ENOSPC, "the disk is full, or the write was incomplete") from error
        file.flush()
        os.fsync(file.fileno())

        # Replace the oldest version first, so that none is lost.
        new_hash = sha256_of(Path(file.name))
        for newer, older in reversed(list(pairwise(versions(path, keep)))):
            if newer.exists():
                duplicate(newer, older)
        write_hashes(path, [new_hash] + known_hashes(path))
    _sync_folder(path.parent)
    write_hashes(path, [new_hash])


def versions(path: Path, keep: int) -> list[Path]:
    """Return the paths of `keep` versions, newest first: last.pt, last.1.pt and so on."""
    paths = [path]
    paths += [path.with_name(f"{path.stem}.{age}{path.suffix}") for age in range(1, keep)]
    return paths


def duplicate(source: Path, target: Path) -> None:
    """Replace the checkpoint `target` by a hard link to, or a copy of, `source`."""
    temporary = target.with_name(target.name + ".tmp")
    with writing(target, of_run=True):
        # Remove the file of an interrupted run, because `os.link` does not replace files.
        temporary.unlink(missing_ok=True)

        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)

        # The checksum file must match both files until the rename is on the disk.
        hashes = known_hashes(source)
        if hashes:
            old_hashes = [known for known in known_hashes(target) if known not in hashes]
            write_hashes(target, hashes + old_hashes)
        else:
            hash_record(target).unlink(missing_ok=True)

        temporary.replace(target)
        _sync_folder(target.parent)
        if hashes:
            write_hashes(target, hashes)
        # A rename has no effect if both names are links to the same file.
        temporary.unlink(missing_ok=True)


def snapshot(value: Any) -> Any:
    """Copy plain containers and tensors to main memory, before training changes them."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(item) for item in value]
    return value


def read_torch(path: Path) -> Any:
    """Return the content of a file of torch.save, on the CPU, without running code from it.

    Raises CheckpointError if the file is missing, differs from its checksum file, or contains more
    than tensors and plain values.
    """
    # `is_file` is also False for a pipe, which would block.
    if not path.is_file():
        raise CheckpointError(f"{path}: file not found; check the path")

    # A training run may replace both files while the checkpoint is read.
    with naming_errors(path):
        hashes = known_hashes(path)

    # Ignore torch's warnings about the pickle format, which the user cannot change.
    with naming_errors(path), path.open("rb") as file, warnings.catch_warnings(action="ignore"):
        # Ignore an empty checksum file, whose writer was killed.
        record = hash_record(path)
        has_record = record.is_file() and record.stat().st_size
        if has_record:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            hashes += known_hashes(path)
            if digest not in hashes:
                raise CheckpointError(
                    f"{path} is damaged: its sha256 is not in {record.name}; use another copy"
                )

        # Unused parts of a memory-mapped file, such as optimizer states, take no memory. The
        # legacy format cannot be mapped.
        is_mapped = path.stat().st_size >= MAPPED and zipfile.is_zipfile(file)
        file.seek(0)
        source: Any = str(path) if is_mapped else file
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
        except pickle.UnpicklingError as error:
            # torch's message advises to trust the file. Keep the name of the unsupported object.
            match = re.search(r"(GLOBAL|class|global) \S+", str(error))
            found = match[0] if match else "other data"
            raise CheckpointError(
                f"{path}: expected tensors and plain values, found {found}; use another copy"
            ) from error


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a .safetensors file atomically. Tensors with shared memory are copied."""
    # safetensors does not store tensors that share memory.
    separate = {}
    for name, tensor in tensors.items():
        separate[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    write_file(path, packed(separate, {"format": "pt"}))


def hash_record(path: Path) -> Path:
    """Return the path of the checksum file of a file."""
    return path.with_name(path.name + ".sha256")


def known_hashes(path: Path) -> list[str]:
    """Return the hashes in the checksum file of a file, which may not exist, in lower case."""
    record = hash_record(path)
    if not record.is_file():
        return []
    text = record.read_text(encoding="utf-8", errors="replace").lower()
    return re.findall(r"\b[0-9a-f]{64}\b", text)


def write_hashes(path: Path, hashes: list[str]) -> None:
    """Write the checksum file of a file atomically, in the format of `sha256sum`."""
    write_text(hash_record(path), "".join(f"{line}  {path.name}\n" for line in hashes))


def write_text(path: Path, text: str) -> None:
    """Write a small file of a run atomically, and flush it to the disk."""
    with replacing(path, durable=True, of_run=True) as file:
        file.write(text.encode())


def sha256_of(path: Path) -> str:
    """Return the SHA-256 hash of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def recorded_hash(path: Path) -> str:
    """Return the SHA-256 hash of a file, from its checksum file if that holds a single hash."""
    hashes = known_hashes(path)
    if len(hashes) == 1:
        return hashes[0]
    return sha256_of(path)


def _sync_folder(folder: Path) -> None:
    """Flush the renames in a folder to the disk. Windows does not support this."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
