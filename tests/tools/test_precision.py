"""Number format of the report and of predictions, on a CPU with fast bf16.

tests/unit/evaluation/test_open_for_evaluation.py has that of evaluate and calibrate.
"""

import pytest
import torch
from pictures import picture

import mldec
from mldec.checkpoint import load_model
from mldec.evaluation.run import scores
from mldec.runtime.devices import Precision
from mldec.tools import report
from mldec.tools.report.content import open_checkpoint

OPTIONS = {"plugin": ["patches"], "device": "cpu"}


@pytest.fixture
def trained_in_bf16(best, here, monkeypatch):
    """A checkpoint that was trained in bf16, on a CPU with instructions for it."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    state = torch.load(best, weights_only=True)
    state["config"]["train"]["precision"] = "bf16"
    torch.save(state, "bf16.pt")
    return "bf16.pt"


def test_report_scores_in_fp32(trained_in_bf16):
    words = [trained_in_bf16, "--plugin=patches", "--out=r.html"]
    options = report.ReportOptions.of(vars(report.parser().parse_args(words)))
    setup = open_checkpoint(options)
    assert setup.config.train.precision is Precision.fp32


def test_scores_of_predict_are_those_of_the_model_in_fp32(trained_in_bf16):
    loaded = load_model(trained_in_bf16, plugins=["patches"])
    expected = scores(loaded, loaded.transform(picture(64, 64))[None])[0]
    model = mldec.load(trained_in_bf16, **OPTIONS)
    assert "fp32" in repr(model)
    torch.testing.assert_close(model(picture(64, 64)).scores, expected, atol=1e-6, rtol=0)
    lower = mldec.load(trained_in_bf16, precision="bf16", **OPTIONS)(picture(64, 64)).scores
    assert not torch.allclose(lower, expected, atol=1e-4, rtol=0)
