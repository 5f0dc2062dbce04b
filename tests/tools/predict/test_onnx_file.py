"""ONNX files in ONNX Runtime."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from networks import CALIBRATION, HEADS, OF_WORDS, metadata, noise, words_of
from torch import nn

from mldec.backbones import HFBackbone, TimmBackbone
from mldec.checkpoint import Loaded
from mldec.errors import CheckpointError
from mldec.export import Program, open_axes, traced
from mldec.predict import engine as onnx_file
from mldec.predict.engine import OnnxFile, content, quantised, read_metadata, translated

onnx = pytest.importorskip("onnx")


def model_of(loaded: Loaded, **settings: Any) -> tuple[Program, Any]:
    """Return a program and its translation."""
    program = Program(loaded, [0.5], **settings)
    return program, translated(traced(program, loaded, "x.pt"), open_axes(program), "x.pt")


@pytest.fixture(scope="module")
def whole() -> tuple[Program, Any]:
    """ML-Decoder in groups, with the resize inside."""
    return model_of(networks.loaded("groups", calibration=CALIBRATION), any_size=True)


def write(model: Any, path: Path, **settings: Any) -> OnnxFile:
    path.write_bytes(content(model, metadata(**settings), path.name))
    return OnnxFile(path)


def test_it_answers_as_the_program_for_any_number_of_images(
    whole: tuple[Program, Any], tmp_path: Path
) -> None:
    program, model = whole
    opened = write(model, tmp_path / "x.onnx")
    assert opened.metadata == read_metadata(tmp_path / "x.onnx") == metadata()
    assert [path.name for path in tmp_path.iterdir()] == ["x.onnx"]

    for images in (noise(1), noise(5, 40, 24)):
        with torch.no_grad():
            expected, decided = program(images)
        probabilities, decisions = opened(images)
        torch.testing.assert_close(probabilities, expected, atol=1e-5, rtol=0)
        assert torch.equal(decisions, decided)


def test_inputs_and_outputs_have_names(whole: tuple[Program, Any]) -> None:
    graph = whole[1].graph
    forms = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert forms == {
        "images": ["batch", 3, "height", "width"],
        "probabilities": ["batch", networks.CLASSES],
        "decisions": ["batch", networks.CLASSES],
    }


def test_inputs_of_another_form_are_one_line(whole: tuple[Program, Any], tmp_path: Path) -> None:
    opened = write(whole[1], tmp_path / "x.onnx")
    with pytest.raises(CheckpointError, match=r"x\.onnx fails in ONNX Runtime: "):
        opened(noise(1).float())


def test_eight_bits_change_a_little(
    whole: tuple[Program, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, model = whole
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    small = quantised(model, [(noise(1, side),) for side in (32, 40, 48)])
    assert logging.getLogger().handlers == [], "our messages would be printed twice"
    kinds = {node.op_type for node in small.graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= kinds
    with torch.no_grad():
        expected, _ = program(noise(4))
    probabilities, _ = write(small, tmp_path / "x.onnx", precision="int8")(noise(4))
    assert 1e-5 < (probabilities - expected).abs().max() < 0.1


def test_a_model_beyond_two_gigabytes_is_one_line(
    whole: tuple[Program, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file, "LARGEST", 1000)
    with pytest.raises(CheckpointError, match=r"x\.onnx: the model has 0\.0 GiB.* \.pt2 file"):
        content(whole[1], metadata(), "x.onnx")


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"ONNX Runtime does not load .*x\.onnx"):
        OnnxFile(path)


def test_telemetry_is_off_before_onnx_runtime_is_imported(tmp_path: Path) -> None:
    stand_in = tmp_path / "onnxruntime.py"
    stand_in.write_text("import os; raise SystemExit(os.environ['ORT_DISABLE_TELEMETRY'])")
    code = f"""if True:
        import os, sys
        os.environ.pop("ORT_DISABLE_TELEMETRY", None)
        sys.path.insert(0, {str(tmp_path)!r})
        from mldec.predict.engine import OnnxFile
        OnnxFile("x.onnx")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "1\n"


# The matrix: each head with each kind of network, and the networks of the recipes in full size.
WIDTHS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
}
SMALL: dict[str, dict[str, Any]] = {
    "test_resnet": {},
    "test_convnext": {"feature_norm": "pretrained"},
    "test_efficientnet": {"feature_norm": "new"},
    "test_vit": {"image_size": 64},
}
LARGE: list[tuple[str, dict[str, Any], str]] = [
    ("tresnet_m", {}, "groups"),
    ("resnet50", {}, "query2label"),
    ("vit_base_patch16_224", {"image_size": 224}, "full"),
    ("swin_tiny_patch4_window7_224", {"image_size": 224}, "words"),
]


# Of transformers: type, settings, side of the image in pixels.
OF_TRANSFORMERS: list[tuple[str, dict[str, Any], int]] = [
    ("vit", {**WIDTHS, "intermediate_size": 48}, 64),
    ("dinov2", {**WIDTHS, "patch_size": 14, "image_size": 56}, 56),
    (
        "swin",
        {
            "depths": [1, 1, 1, 1],
            "embed_dim": 16,
            "num_heads": [1, 2, 4, 8],
            "image_size": 96,
            "window_size": 3,
        },
        96,
    ),
    ("cvt", {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, 64),
]


def agrees(backbone: nn.Module, head: str, size: int, path: Path) -> None:
    """Export a model and compare its answers."""
    backbone.eval()
    loaded = networks.loaded(head, backbone, size=size, calibration=CALIBRATION)
    program, model = model_of(loaded, asks=head in OF_WORDS)
    opened = write(model, path)
    for images, classes in ((1, 3), (3, 9)):
        inputs = [noise(images, size), *words_of(head, classes)]
        with torch.no_grad():
            expected, _ = program(*inputs)
        torch.testing.assert_close(opened(*inputs)[0], expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("head", HEADS)
def test_each_head_on_each_kind_of_network(name: str, head: str, tmp_path: Path) -> None:
    agrees(TimmBackbone(name, **SMALL[name]), head, 64, tmp_path / "x.onnx")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments", "head"), LARGE)
def test_the_networks_of_the_recipes(
    name: str, arguments: dict[str, Any], head: str, tmp_path: Path
) -> None:
    agrees(TimmBackbone(name, **arguments), head, 224, tmp_path / "x.onnx")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings", "size"), OF_TRANSFORMERS)
def test_networks_of_transformers(
    kind: str, settings: dict[str, Any], size: int, tmp_path: Path
) -> None:
    config = {"model_type": kind, **settings}
    backbone = HFBackbone(name="x", config=config, mean=[0.5] * 3, std=[0.5] * 3, pretrained=False)
    agrees(backbone, "groups", size, tmp_path / "x.onnx")
