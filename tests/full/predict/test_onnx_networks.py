"""ONNX files of each head and of each kind of backbone."""

from itertools import cycle

import networks
import pytest
import torch
from networks import CALIBRATION, HEADS, OF_WORDS, metadata, noise, words_of

from mldec.backbones import HFBackbone, TimmBackbone
from mldec.tools.export import Program, serialize, to_onnx
from mldec.tools.exported import OnnxFile

pytest.importorskip("onnxruntime")

# Networks with one or two blocks per stage, which have the operations of the whole networks, and
# their image sizes. Swin shifts the windows of every second block, if a stage has several windows.
BACKBONES = {
    "test_resnet": ({}, 64),
    "test_convnext": ({"feature_norm": "pretrained"}, 64),
    "test_efficientnet": ({"feature_norm": "new"}, 64),
    "test_vit": ({"image_size": 64}, 64),
    "tresnet_m": ({"model_args": {"layers": [1, 1, 1, 1]}}, 64),
    "resnet50": ({"model_args": {"layers": [1, 1, 1, 1], "channels": [8, 16, 24, 32]}}, 64),
    "vit_base_patch16_224": (
        {"image_size": 224, "model_args": {"embed_dim": 32, "depth": 2, "num_heads": 2}},
        224,
    ),
    "swin_tiny_patch4_window7_224": (
        {
            "image_size": 224,
            "model_args": {"embed_dim": 16, "depths": [2, 1, 1, 1], "num_heads": [1, 1, 1, 1]},
        },
        224,
    ),
    "cvt": ({"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, 64),
}

# Each head and each backbone at least once.
PAIRS = list(zip(cycle(BACKBONES), HEADS, strict=False))


@pytest.mark.parametrize(("name", "head"), PAIRS)
def test_network_is_exported(name, head, tmp_path):
    arguments, size = BACKBONES[name]
    if name == "cvt":
        backbone = HFBackbone("x", config={"model_type": "cvt", **arguments})
    else:
        backbone = TimmBackbone(name, **arguments)
    loaded = networks.loaded(head, backbone.eval(), size=size, calibration=CALIBRATION)
    program = Program(loaded, [0.5], takes_word_vectors=head in OF_WORDS)
    path = tmp_path / "x.onnx"
    path.write_bytes(serialize(to_onnx(program, loaded, "x.pt"), metadata(), path.name))

    # Compare the probabilities.
    opened = OnnxFile(path)
    for images, classes in ((1, 3), (3, 9)):
        inputs = [noise(images, size), *words_of(head, classes)]
        with torch.no_grad():
            expected, _ = program(*inputs)
        torch.testing.assert_close(opened(*inputs)[0], expected, atol=1e-4, rtol=0)
