"""Optimizer steps on CUDA and on the CPU: faults, GradScaler and compilation.

The cases on CUDA need `pytest -m gpu`.
"""

import pytest
import torch
from patches import Patches
from support import CUDA_MARKS, assert_equal, no_host_sync
from torch import nn

from mldec.config.compose import compose
from mldec.data.loader import Batch
from mldec.heads.ml_decoder import MLDecoder
from mldec.losses.asymmetric import AsymmetricLoss
from mldec.model import Classifier
from mldec.training.step import Learner

DEVICES = [
    torch.device("cpu"),
    pytest.param(torch.device("cuda:0"), marks=CUDA_MARKS, id="cuda"),
]


class Network(nn.Module):
    """Patches with a batch norm."""

    def __init__(self):
        super().__init__()
        self.patches = Patches()
        self.norm = nn.BatchNorm1d(48)
        self.num_features = 48

    def forward(self, images):
        return self.norm(self.patches(images).transpose(1, 2)).transpose(1, 2)


class InfiniteLoss(nn.Module):
    """A loss with an infinite value."""

    reduction = "sum"

    def forward(self, logits, targets):
        return logits.sum() * torch.inf


class InfiniteGradients(nn.Module):
    """A loss of 0 whose gradients are not finite."""

    reduction = "sum"

    def forward(self, logits, targets):
        return (logits - logits.detach()).sqrt().sum()


class Steep(nn.Module):
    """A loss whose gradients overflow in fp16 at the initial scale."""

    reduction = "sum"

    def forward(self, logits, targets):
        return 1e35 * logits.sum()


def learner(device, loss, *settings):
    torch.manual_seed(0)
    config = compose(["+experiment=digits", f"device={device}"] + list(settings))
    head = MLDecoder(48, 4, embed_dim=16, num_heads=2, mlp_dim=16, dropout=0.0)
    model = Classifier(Network(), head).to(device)
    ours = Learner(config, model, loss, device=device, steps=12)
    ours.train()
    return ours


def batch():
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (6, 3, 16, 16), dtype=torch.uint8, generator=generator)
    targets = torch.randint(2, (6, 4), dtype=torch.int8, generator=generator)
    return Batch(images, targets, torch.arange(6))


def weights(learner):
    return {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", [InfiniteLoss, InfiniteGradients])
def test_nonfinite_step_has_no_effect(device, precision, loss):
    settings = ["train.nonfinite=skip", f"train.precision={precision}"]
    ours = learner(device, loss(), *settings)
    before = weights(ours)
    ours.learn([batch()], 6)
    assert_equal(weights(ours), before)

    # The next step is not affected either.
    ours.loss = AsymmetricLoss()
    ours.learn([batch()], 6)
    after = weights(ours)
    assert all(value.isfinite().all() for value in after.values())
    assert not torch.equal(after["head.pool_weight"], before["head.pool_weight"])


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_step_needs_no_host_sync(device, precision):
    # Optimizers without a fused kernel, such as lamb, need one host sync per step.
    settings = [f"train.precision={precision}", "optim.name=adamw", "train.clip_grad=1"]
    ours = learner(device, AsymmetricLoss(), *settings)
    images, targets, indices = batch()[:3]
    pinned = Batch(images.pin_memory(), targets.pin_memory(), indices.pin_memory())
    # The first step builds the state of the optimizer.
    ours.learn([pinned], 6)

    with no_host_sync():
        for _ in range(3):
            ours.learn([pinned], 6)
    assert len(ours.read()) == 4


@pytest.mark.usefixtures("fp16_on_a_cpu")
@pytest.mark.parametrize("device", DEVICES)
def test_scaler_skips_step_that_overflows(device):
    ours = learner(device, Steep(), "train.precision=fp16")
    before = [value.detach().clone() for value in ours.model.parameters()]
    scale = ours.scaler.get_scale()
    ours.learn([batch()], 6)
    assert_equal(list(ours.model.parameters()), before)
    assert ours.scaler.get_scale() == scale / 2


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_cuda_graphs_give_same_weights(device, accumulate):
    results = []
    for mode in ("false", "reduce-overhead"):
        words = [f"train.compile={mode}", "optim.name=sgd", "train.precision=fp32"]
        ours = learner(device, AsymmetricLoss(), *words)
        for _ in range(4):
            ours.learn([batch()] * accumulate, 6 * accumulate)
        results.append(weights(ours))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-3)


def logits_and_gradients(model, images):
    model.zero_grad()
    logits = model(images)
    logits.square().sum().backward()
    gradients = [value.grad.clone() for value in model.parameters() if value.grad is not None]
    return [logits.detach()] + gradients


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_compiled_model_is_one_graph_with_same_gradients(device, memory_format):
    ours = learner(device, AsymmetricLoss())
    ours.model.to(memory_format=memory_format)
    images = batch().images.to(device).contiguous(memory_format=memory_format)

    # Compilation takes a minute on a CPU, so only the graph is tested there.
    backend = "inductor" if device.type == "cuda" else "eager"
    expected = logits_and_gradients(ours.model, images)
    compiled = torch.compile(ours.model, fullgraph=True, dynamic=False, backend=backend)
    found = logits_and_gradients(compiled, images)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
