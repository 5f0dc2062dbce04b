"""ONNX files: written from a graph of torch.export, quantised, and run by ONNX Runtime."""

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from mldec.errors import CheckpointError, brief
from mldec.exported.metadata import INPUTS, KEY, OUTPUTS, Metadata, parse, require_onnx

# ONNX Runtime reads this while it is imported, which is done in this module only. Otherwise it asks
# a host of Microsoft's, and writes an identifier of the machine to the user's cache.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

LARGEST = 2**31  # bytes in one ONNX file, a limit of protocol buffers
SILENT, WARNINGS = 4, 2  # levels of ONNX Runtime's own log; what is fatal is raised as an error too
LOUD = ("onnxscript", "onnx_ir", "torch.onnx", "root")  # loggers that tell of each constant


# Any: the classes of onnx and onnxruntime are imported only where they are used.
def translated(graph: ExportedProgram, axes: tuple[dict[int, str], ...], path: str) -> Any:
    """Translate a graph to an ONNX model.

    Args:
        graph: of a `Program`.
        axes: the names of the open axes of each input.
        path: of the checkpoint, for messages.

    Returns:
        An `onnx.ModelProto`.

    Raises:
        CheckpointError: if ONNX lacks an operation of the network.
    """
    inputs = INPUTS[: len(axes)]
    try:
        with _quiet():
            program = torch.onnx.export(
                graph,
                dynamo=True,
                verbose=False,
                input_names=inputs,
                output_names=OUTPUTS,
                dynamic_shapes=dict(zip(inputs, axes, strict=True)),
            )
    except Exception as error:
        # The exporter lists its attempts: the last cause says what is missing.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise CheckpointError(
            f"{path} cannot be exported to ONNX ({brief(Exception(str(cause)))}); "
            f"export a .pt2 file"
        ) from error

    assert program is not None
    return program.model_proto


def quantised(model: Any, inputs: Sequence[tuple[Tensor, ...]]) -> Any:
    """Quantise weights and activations of convolutions and linear layers to 8 bits.

    The ranges of the activations are the smallest and largest values on the given inputs. Weights
    have a scale per output channel. Products of two activations, as in attention, and the group
    pooling of ML-Decoder, which gives the logits, stay as they are.

    Args:
        model: an `onnx.ModelProto`.
        inputs: images, and word vectors if the model asks for them, batch by batch.

    Returns:
        An `onnx.ModelProto`.

    Raises:
        CheckpointError: if ONNX Runtime cannot quantise it.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Batches(CalibrationDataReader):
        """The inputs one after the other, in the form that the calibration asks for."""

        def __init__(self) -> None:
            self.remaining: Iterator[tuple[Tensor, ...]] = iter(inputs)

        def get_next(self) -> dict[str, Any] | None:
            """Return the next batch by the names of the inputs, and None at the end."""
            batch = next(self.remaining, None)
            return None if batch is None else _named(batch)

    with tempfile.TemporaryDirectory() as folder, _quiet():
        target = Path(folder, "model.onnx")
        try:
            quantize_static(
                model,
                target,
                Batches(),
                op_types_to_quantize=["Conv", "Gemm", "MatMul"],
                nodes_to_exclude=_products(model),
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
        except Exception as error:
            raise CheckpointError(
                f"--precision int8: ONNX Runtime cannot quantise this network ({brief(error)}); "
                f"choose fp32 or fp16"
            ) from error
        return onnx.load(target)


def _products(model: Any) -> list[str]:
    """Return the names of the matrix products that are no linear layers."""
    matrices = {weight.name for weight in model.graph.initializer if len(weight.dims) == 2}
    return [
        node.name
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] not in matrices
    ]


def content(model: Any, metadata: Metadata, path: str) -> bytes:
    """Return the bytes of a self-contained ONNX file.

    Args:
        model: an `onnx.ModelProto`.
        metadata: stored in it.
        path: of the file, for messages.

    Raises:
        CheckpointError: if it is too large for one file.
    """
    size = model.ByteSize()
    if size >= LARGEST:
        raise CheckpointError(
            f"{path}: the model has {size / 2**30:.1f} GiB, and an ONNX file holds at most 2; "
            f"pass --precision fp16, or write a .pt2 file"
        )

    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, metadata.to_json()
    model.producer_name, model.producer_version = "mldec", metadata.versions["mldec"]
    return model.SerializeToString()


class OnnxFile:
    """An exported ONNX file in ONNX Runtime, on the CPU.

    Args:
        path: of the file.

    Raises:
        ConfigError: if ONNX Runtime is not installed.
        CheckpointError: if it is no such file, or has no metadata.
    """

    metadata: Metadata

    def __init__(self, path: Path) -> None:
        require_onnx(path, ["onnxruntime"])
        import onnxruntime

        self._path = path
        # As many threads as torch, so that OMP_NUM_THREADS counts for both.
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = SILENT
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise CheckpointError(f"ONNX Runtime does not load {path}: {brief(error)}") from error
        self.metadata = parse(self._session.get_modelmeta().custom_metadata_map.get(KEY), path)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities float32 [B, K] and decisions bool [B, K].

        Args:
            inputs: images uint8 [B, 3, H, W], and word vectors float32 [K, D] if the file asks for
                them.

        Raises:
            CheckpointError: if the file does not take such inputs.
        """
        try:
            scores, decisions = self._session.run(OUTPUTS, _named(inputs))
        except Exception as error:
            raise CheckpointError(f"{self._path} fails in ONNX Runtime: {brief(error)}") from error
        return torch.from_numpy(scores), torch.from_numpy(decisions)


def _named(inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """Return inputs as arrays, by their names."""
    return {name: tensor.numpy() for name, tensor in zip(INPUTS, inputs, strict=False)}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter and the quantiser: they tell of every step."""
    import onnxruntime

    loggers = [logging.getLogger(name) for name in LOUD]
    levels = [logger.level for logger in loggers]
    # The quantiser gives the root logger a handler, which would print our messages again.
    root_handlers = [*logging.getLogger().handlers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    onnxruntime.set_default_logger_severity(SILENT)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        onnxruntime.set_default_logger_severity(WARNINGS)
        logging.getLogger().handlers[:] = root_handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
