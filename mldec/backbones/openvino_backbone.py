"""Conversion of frozen backbones to OpenVINO, which is faster than torch on a CPU."""

import contextlib
import importlib.util
import os
import shutil
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mldec.errors import ConfigError, DataError, brief, log
from mldec.files.cache import cache_folder, describe_entry, network_hash
from mldec.runtime.devices import EngineName

# Maximum norm of the difference to torch, relative to the norm of the output. Rounding errors are
# near 1e-6 in float32, and near 1e-2 in bfloat16, which has 8 bits of precision.
MAX_ERROR = {None: 1e-3, torch.bfloat16: 5e-2}
PRECISIONS = {None: "f32", torch.bfloat16: "bf16"}

NETWORK = "network.xml"  # file in a folder of the cache, which also has the weights


def is_installed() -> bool:
    """Return True if the package openvino is installed."""
    return importlib.util.find_spec("openvino") is not None


def uses_openvino(engine: EngineName, device: torch.device) -> bool:
    """Return True if OpenVINO computes a backbone on a device: only on a CPU, and if installed.

    Raises:
        ConfigError: If the setting requires OpenVINO and it is not installed.
    """
    if engine is EngineName.openvino and not is_installed():
        raise ConfigError("engine=openvino: it is not installed; run pip install -e '.[cpu]'")
    return engine is not EngineName.torch and device.type == "cpu" and is_installed()


def recorded(engine: EngineName) -> EngineName:
    """Return the engine of a checkpoint, or torch if its engine is not installed here.

    A head that was fitted to features of one program is evaluated with the same program, because
    the rounding errors of both differ.
    """
    if engine is EngineName.openvino and not is_installed():
        log.warning(
            "the head was fitted to features of OpenVINO, which is not installed: torch computes "
            "them with other rounding errors; run pip install -e '.[cpu]'"
        )
        return EngineName.torch
    return engine


class OpenVinoBackbone(nn.Module):
    """A backbone that was compiled by OpenVINO.

    It has no parameters. Later changes of the weights in torch have no effect on it.

    Args:
        compiled: Compiled model of OpenVINO.
    """

    def __init__(self, compiled: Any) -> None:
        super().__init__()
        self._compiled = compiled

    def forward(self, images: Tensor) -> Tensor:
        """Return the output of the backbone, float32, for images uint8 [B, 3, S, S] on the CPU."""
        [output] = self._compiled([images.contiguous().numpy()]).values()
        return torch.from_numpy(output)


@torch.no_grad()
def convert(backbone: nn.Module, image_size: int, half: torch.dtype | None = None) -> nn.Module:
    """Convert a backbone to OpenVINO.

    The conversion fails if OpenVINO does not support an operation, or if the outputs for random
    images differ from torch by more than rounding errors. A warning is logged then, and the
    backbone itself is returned. The converted network is stored in the cache folder, because the
    conversion takes seconds.

    Args:
        backbone: Network on the CPU in evaluation mode that maps images uint8 [B, 3, S, S] to a
            tensor.
        image_size: Side S of the images in pixels.
        half: None for float32, or torch.bfloat16.
    """
    # The trace has two images. Verify the conversion with three, because a network may contain the
    # number of images as a constant.
    shape = (3, 3, image_size, image_size)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    expected = backbone(images).float()
    versions = [version(package) for package in ("openvino", "torch", "timm")]
    key = network_hash(backbone, versions, image_size, backbone)
    folder = cache_folder(None) / f"openvino-{key}"
    try:
        # The converter of OpenVINO reports its use to Intel by default. An entry of None makes the
        # import of its telemetry package fail, and it then uses a stub that sends nothing.
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
        import openvino

        network: Any = folder / NETWORK
        if not folder.exists():
            network = _converted(openvino, backbone, image_size)
            name = getattr(backbone, "name", type(backbone).__name__)
            content = f"{name} converted to OpenVINO, {image_size} pixels"
            try:
                _store(network, folder, openvino, content)
            except (OSError, DataError) as problem:
                log.warning(f"{folder}: the conversion is not stored ({brief(problem)})")

        core = openvino.Core()
        settings = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[half],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),  # from OMP_NUM_THREADS
        }
        compiled = core.compile_model(network, "CPU", settings)
        converted = OpenVinoBackbone(compiled)
        error = (converted(images) - expected).norm() / expected.norm()
        if not error <= MAX_ERROR[half]:
            raise ValueError(f"its output differs by {error:.1g} of its norm")
    except Exception as problem:
        # OpenVINO raises RuntimeError and its own types of errors for unsupported operations.
        log.warning(f"OpenVINO does not compute this backbone ({brief(problem)}); torch is used")
        return backbone
    return converted.eval()


def _converted(openvino: Any, backbone: nn.Module, image_size: int) -> Any:
    """Return the network of OpenVINO for any number of images and a fixed image size."""
    images = torch.zeros(2, 3, image_size, image_size, dtype=torch.uint8)
    with warnings.catch_warnings():
        # The tracer of torch warns of its deprecation and of constants in the shapes of layers.
        warnings.simplefilter("ignore")
        network = openvino.convert_model(backbone, example_input=images)
    network.reshape([-1, *images.shape[1:]])
    return network


def _store(network: Any, folder: Path, openvino: Any, content: str) -> None:
    """Write a network to a folder atomically. For `content` see `describe_entry`."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    # A killed process with the same number, as in a container, may have left the folder.
    temporary.mkdir(parents=True, exist_ok=True)
    try:
        openvino.save_model(network, temporary / NETWORK, compress_to_fp16=False)
        describe_entry(temporary, content, "", [path.name for path in temporary.iterdir()])
        # Another process may have stored the same network meanwhile.
        with contextlib.suppress(OSError):
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
