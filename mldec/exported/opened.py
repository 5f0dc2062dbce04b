"""Open an exported file of either kind."""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from mldec.exported.metadata import ONNX, Metadata, check_suffix
from mldec.exported.onnx_file import OnnxFile
from mldec.exported.torch_file import TorchFile


class Exported(Protocol):
    """An exported file that is ready to answer."""

    metadata: Metadata

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities float32 [B, K] and decisions bool [B, K].

        Args:
            inputs: images uint8 [B, 3, H, W], and word vectors float32 [K, D] if the file asks for
                them.
        """
        ...


def open_exported(path: Path) -> Exported:
    """Load a file that `mldec.export` wrote.

    Raises:
        ConfigError: if its name does not end in .onnx or .pt2, or a package is missing.
        CheckpointError: if it cannot be loaded, or has no metadata.
    """
    check_suffix(path)
    return OnnxFile(path) if path.suffix == ONNX else TorchFile(path)
