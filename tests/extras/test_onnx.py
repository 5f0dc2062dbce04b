"""Exported ONNX files in ONNX Runtime."""

import logging
import os

import networks
import pytest
import torch
from networks import CALIBRATION, metadata, noise

from mldec.errors import CheckpointError
from mldec.tools.export import Program, quantize, serialize, to_onnx
from mldec.tools.exported import OnnxFile

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def whole():
    """The program of an ML-Decoder in groups that resizes, and its translation to ONNX."""
    loaded = networks.loaded("groups", calibration=CALIBRATION)
    program = Program(loaded, [0.5], any_size=True)
    return program, to_onnx(program, loaded, "x.pt")


def write(model, path, **settings):
    path.write_bytes(serialize(model, metadata(**settings), path.name))
    return OnnxFile(path)


def test_file_scores_any_number_of_images_like_the_program(whole, tmp_path):
    program, model = whole
    opened = write(model, tmp_path / "x.onnx")
    assert opened.metadata == metadata()
    assert [path.name for path in tmp_path.iterdir()] == ["x.onnx"]
    forms = {}
    for value in (*model.graph.input, *model.graph.output):
        axes = value.type.tensor_type.shape.dim
        forms[value.name] = [axis.dim_param or axis.dim_value for axis in axes]
    assert forms == {
        "images": ["batch", 3, "height", "width"],
        "probabilities": ["batch", networks.CLASSES],
        "decisions": ["batch", networks.CLASSES],
    }

    for images in (noise(1), noise(5, 40, 24)):
        with torch.no_grad():
            expected, decisions = program(images)
        answer = opened(images)
        torch.testing.assert_close(answer[0], expected, atol=1e-5, rtol=0)
        assert torch.equal(answer[1], decisions)
    with pytest.raises(CheckpointError, match=r"x\.onnx"):
        opened(noise(1).float())


def test_telemetry_of_onnx_runtime_is_disabled():
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"


def test_int8_changes_probabilities_slightly(whole, tmp_path, monkeypatch):
    program, model = whole
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    small = quantize(model, ({"images": noise(1, side).numpy()} for side in (32, 40, 48)))
    assert logging.getLogger().handlers == [], "messages would be printed twice"
    kinds = {node.op_type for node in small.graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= kinds
    with torch.no_grad():
        expected, _ = program(noise(4))
    probabilities, _ = write(small, tmp_path / "x.onnx", precision="int8")(noise(4))
    assert 1e-5 < (probabilities - expected).abs().max() < 0.1


def test_unusable_files_raise_an_error(tmp_path):
    (tmp_path / "damaged.onnx").write_bytes(b"\xff" * 100)
    for name in ("none.onnx", "damaged.onnx"):
        with pytest.raises(CheckpointError, match=name):
            OnnxFile(tmp_path / name)
