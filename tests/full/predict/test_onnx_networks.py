"""ONNX files of each head, each kind of backbone, and the backbones of the recipes."""

from itertools import cycle

import networks
import pytest
import torch
from networks import CALIBRATION, HEADS, OF_WORDS, metadata, noise, words_of

from mldec.backbones import HFBackbone, TimmBackbone
from mldec.tools.export import Program, serialize, to_onnx
from mldec.tools.exported import OnnxFile

pytest.importorskip("onnxruntime")

SMALL = {
    "test_resnet": {},
    "test_convnext": {"feature_norm": "pretrained"},
    "test_efficientnet": {"feature_norm": "new"},
    "test_vit": {"image_size": 64},
}
LARGE = [
    ("tresnet_m", {}, "groups"),
    ("resnet50", {}, "query2label"),
    ("vit_base_patch16_224", {"image_size": 224}, "full"),
    ("swin_tiny_patch4_window7_224", {"image_size": 224}, "words"),
]


def agrees(backbone, head, size, path):
    """Compare the probabilities of an exported model."""
    backbone.eval()
    loaded = networks.loaded(head, backbone, size=size, calibration=CALIBRATION)
    program = Program(loaded, [0.5], takes_word_vectors=head in OF_WORDS)
    model = to_onnx(program, loaded, "x.pt")
    path.write_bytes(serialize(model, metadata(), path.name))
    opened = OnnxFile(path)
    for images, classes in ((1, 3), (3, 9)):
        inputs = [noise(images, size), *words_of(head, classes)]
        with torch.no_grad():
            expected, _ = program(*inputs)
        torch.testing.assert_close(opened(*inputs)[0], expected, atol=1e-4, rtol=0)


# Each head once, and each backbone at least once.
PAIRS = [(name, head) for name, head in zip(cycle(SMALL), HEADS, strict=False)]


@pytest.mark.parametrize(("name", "head"), PAIRS)
def test_each_head_is_exported(name, head, tmp_path):
    agrees(TimmBackbone(name, **SMALL[name]), head, 64, tmp_path / "x.onnx")


@pytest.mark.parametrize(("name", "arguments", "head"), LARGE)
def test_backbones_of_the_recipes_are_exported(name, arguments, head, tmp_path):
    agrees(TimmBackbone(name, **arguments), head, 224, tmp_path / "x.onnx")


def test_cvt_is_exported(tmp_path):
    config = {"model_type": "cvt", "embed_dim": [16, 32, 64], "num_heads": [1, 2, 4]}
    backbone = HFBackbone("x", config={**config, "depth": [1, 2, 3]})
    agrees(backbone, "groups", 64, tmp_path / "x.onnx")
