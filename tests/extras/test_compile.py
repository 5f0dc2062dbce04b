"""`train.compile` compiles one static graph of the whole model per batch size."""

from functools import partial

import networks
import pytest
import torch
from squares import fit, settings, trainer
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from mldec.config.compose import compose
from mldec.errors import ConfigError
from mldec.tools.predict.engine import TorchEngine
from mldec.training.log import RunLog


def test_run_compiles_each_batch_size_once(tmp_path, monkeypatch):
    compiled = []  # direction, epoch and images of each graph

    def record(direction, graph, inputs):
        [size] = {value.shape[0] for value in inputs if value.shape[1:] == (3, 16, 16)}
        compiled.append((direction, job.epoch + 1, size))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=partial(record, "forward"), bw_compiler=partial(record, "backward")
    )
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))

    config = settings("train.compile=true", "train.epochs=2")
    job = trainer(config, tmp_path, images=31, network="test_resnet")
    fit(job, tmp_path)

    # Graphs with a symbolic batch size would be slow.
    assert all(type(size) is int for _, _, size in compiled)
    expected = [(way, 1, size) for size in (8, 7) for way in ("forward", "backward")]
    assert compiled == expected


def test_cuda_graphs_are_marked_once_per_step(tmp_path, monkeypatch):
    calls = []

    def compiled(model, *, mode, dynamic):
        model.register_forward_hook(lambda *_: calls.append(mode))
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(
        torch.compiler, "cudagraph_mark_step_begin", lambda: calls.append("new step")
    )
    words = ["train.compile=reduce-overhead", "train.accumulate=2", "train.epochs=1"]
    job = trainer(settings(*words), tmp_path, images=16)
    job.train_epoch(RunLog(tmp_path, step=0, lines=0))
    assert calls == ["new step", "reduce-overhead", "reduce-overhead"] * 2


@pytest.mark.parametrize("word", ["fast", "1", "null", "[true]"])
def test_invalid_mode_is_named(word):
    default = compose(["+experiment=digits", "train.compile=default"]).train
    assert (default.compile, default.compile_mode) == (True, None)
    with pytest.raises(ConfigError, match=r"^train\.compile"):
        compose(["+experiment=digits", f"train.compile={word}"])


def test_compiled_predictions_are_equal():
    loaded = networks.loaded("groups")
    images = networks.noise(3)
    expected = TorchEngine(loaded).answer(images, features=True)
    found = TorchEngine(loaded, compiled=True).answer(images, features=True, size=4)
    for values, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-5)
