"""Files of torch.export: `.pt2`, run by torch without this program's code."""

import io
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from mldec.errors import CheckpointError, brief
from mldec.exported.metadata import EXTRA, Metadata, read_metadata


def content(graph: ExportedProgram, metadata: Metadata) -> bytes:
    """Return the bytes of a `.pt2` file."""
    buffer = io.BytesIO()
    torch.export.save(graph, buffer, extra_files={EXTRA: metadata.to_json()})
    return buffer.getvalue()


class TorchFile:
    """An exported `.pt2` file, on the CPU.

    Load only files that you trust: torch does not promise that loading one runs no code of it.

    Args:
        path: of the file.

    Raises:
        CheckpointError: if it is no such file, or has no metadata.
    """

    metadata: Metadata

    def __init__(self, path: Path) -> None:
        self._path = path
        self.metadata = read_metadata(path)
        try:
            with path.open("rb") as file:
                self._module = torch.export.load(file).module()
        except Exception as error:
            raise CheckpointError(f"torch does not load {path}: {brief(error)}") from error

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities float32 [B, K] and decisions bool [B, K]; see `OnnxFile`."""
        try:
            return self._module(*inputs)
        except Exception as error:
            raise CheckpointError(f"{self._path} fails in torch: {brief(error)}") from error
