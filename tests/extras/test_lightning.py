"""examples/lightning_module.py with the real lightning package."""

import importlib.util
from pathlib import Path

import pytest
import torch
from sklearn.metrics import average_precision_score

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_module.py"


def test_module_logs_map_of_its_model(tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("lightning_module", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    trainer = example.main(images=64, epochs=1)
    model = trainer.model.eval().cpu()
    images, targets = zip(*example.Dots(128, seed=1), strict=True)
    with torch.no_grad():
        logits = model.model(torch.stack(images))
    expected = 100 * average_precision_score(torch.stack(targets), logits)
    assert trainer.callback_metrics["val/mAP"].item() == pytest.approx(expected, abs=0.01)
