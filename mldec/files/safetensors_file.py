"""Read and write tensors in the safetensors format: a JSON header and bytes, and no code."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from mldec.errors import refusing
from mldec.files.results import write_file

SUFFIX = ".safetensors"


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
    """Read a file of tensors; the library checks that they fill it without gaps and overlaps.

    Raises:
        CheckpointError: if the file is missing, damaged, or another kind of file.
    """
    with refusing(path):
        return load_file(path)
