"""Read and write tensors in the safetensors format: a JSON header and bytes, and no code."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from mldec.errors import CheckpointError, DataError
from mldec.files.plain import plain
from mldec.files.results import write_file
from mldec.files.text import open_binary, parse_json

SUFFIX = ".safetensors"
MAX_HEADER = 2**24  # bytes; that of a large network has half a megabyte


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, completely or not at all.

    Args:
        path: of the file.
        tensors: by name; tensors that share memory are written separately.

    Raises:
        DataError: if it cannot be written; an existing file stays as it is.
    """
    separate = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    write_file(path, save(separate, {"format": "pt"}))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read an untrusted file of tensors.

    The library checks that the tensors fill the file without gaps and overlaps. Its reader of the
    header would take the last of two tensors of one name, and a long header.

    Raises:
        CheckpointError: if the file is missing, damaged, or another kind of file, or its tensors
            are of a type that `plain` refuses.
    """
    try:
        _check_header(path)
        tensors = load_file(path)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from error
    except Exception as error:
        # The library raises classes of its own, and torch any for a shape that it cannot have.
        raise CheckpointError(f"{path} is no safetensors file, or damaged: {error}") from error

    return dict(plain(tensors, path))


def _check_header(path: Path) -> None:
    """Refuse a header that is too long or names a tensor twice, and other kinds of files."""
    size = path.stat().st_size
    with open_binary(path) as file:
        start = file.read(8)
        # A zip archive of torch.save, and a pickle.
        if start[:2] == b"PK" or start[:1] == b"\x80":
            raise CheckpointError(
                f"{path} is refused: it holds a pickle, which can run code when it is read, under "
                f"the name of a safetensors file"
            )

        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, MAX_HEADER):
            raise CheckpointError(
                f"{path} is no safetensors file, or damaged: its first 8 bytes are not the "
                f"length of a header"
            )
        header = file.read(length)

    try:
        parse_json(header)
    except DataError as error:
        raise CheckpointError(
            f"{path} is no safetensors file, or damaged: its header {error}"
        ) from error
