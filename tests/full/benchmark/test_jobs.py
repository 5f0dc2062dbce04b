"""Operations of a training step, counted by `mldec benchmark profile`."""

import json
import math

import pytest
import torch

from mldec import build
from mldec.config.compose import compose
from mldec.data.types import Classes
from mldec.model import multiply_accumulates
from mldec.tools.benchmark import profile


@pytest.fixture
def profiled(cli, tmp_path, monkeypatch):
    """Profile a small step of digits, and return its figures."""
    monkeypatch.setitem(profile.SIDE, "cpu", 64)

    def run(*changed):
        file = tmp_path / "profile.json"
        words = ["--experiment", "digits", "--classes", "10", "--repeats", "1", "--json", file]
        sizes = ["data.image_size=32", "train.batch_size=16", "train.accumulate=2"]
        cli.out("benchmark", "profile", *words, *sizes, "device=cpu", "optim.name=adam", *changed)
        return json.loads(file.read_text())["figures"]

    return run


def test_operations_of_a_step(profiled):
    figures = profiled("head=gap")
    # Each product has two more in the backward pass, except for the gradient of the images. A
    # product and a sum are two operations.
    parts = build.check(compose(["+experiment=digits", "head=gap"]), build.MODEL_PARTS)
    model = build.model(parts, Classes(tuple("0123456789")), pretrained=False)
    first = model.backbone.network.conv1[0]
    outputs = first(torch.zeros(1, 3, 32, 32)).numel()
    first_macs = outputs * math.prod(first.weight.shape[1:])
    flops = 16 * 2 * (3 * multiply_accumulates(model, 32) - first_macs)
    assert figures["step_gflop"] == pytest.approx(flops / 1e9)
