"""Export of heads that are fitted in closed form."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from photos import write_photos

import mldec
from mldec.checkpoint import load_model
from mldec.evaluation.run import scores


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_exported_head_equals_checkpoint(here, kernel):
    write_photos(Path("own"))
    words = ["backbone=tiny", "data.cache_dir=cache", "data.image_size=32"]
    words += ["train.workers=0", "device=cpu", f"head.kernel={kernel}"]
    run = mldec.fit("finetune_frozen", "own", overrides=words)
    run.export("model.onnx")

    loaded = load_model(run.folder)
    assert bool(len(loaded.model.head.support)) == (kernel == "rbf")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
    session = onnxruntime.InferenceSession("model.onnx")
    probabilities, _ = session.run(None, {"images": images})
    expected = scores(loaded, torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)
