"""An exported file in OpenVINO."""

import hostile
import numpy as np
import pytest
import torch

from mldec.checkpoint import load_model
from mldec.evaluation.run import scores

# The default tests compute backbones in torch, so that openvino is no package of development.
openvino = pytest.importorskip("openvino")


@pytest.mark.parametrize("words", [(), ("--any-size",)])
def test_openvino_equals_checkpoint(words, cli, here):
    torch.save(hostile.good(), "best.pt")
    cli.out("export", "best.pt", "model.onnx", *words)
    loaded = load_model("best.pt")
    side = loaded.transform.image_size
    images = torch.randint(256, (2, 3, side, side), dtype=torch.uint8)

    # The default is bf16 on a CPU with instructions for it.
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    network = openvino.Core().compile_model("model.onnx", "CPU", options)
    # OpenVINO supports only one image at a time with dynamic sizes.
    blocks = images.split(1) if words else [images]
    answers = [network({"images": block.numpy()})["probabilities"] for block in blocks]
    np.testing.assert_allclose(np.concatenate(answers), scores(loaded, images), atol=1e-4)
