"""Properties of a step on CUDA that a CPU can test: devices, shapes, and host syncs."""

from collections import Counter
from functools import cache, partial
from pathlib import Path

import networks
import pytest
import torch
from patches import Patches
from support import loss_of_option
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mldec.backbones import TimmBackbone
from mldec.config.compose import compose, override
from mldec.config.schema import Config
from mldec.data.loader import Batch
from mldec.losses import common, cross_entropy
from mldec.model import Classifier
from mldec.training.step import Learner

CLASSES, SIZE = networks.CLASSES, 32
LOSSES = sorted((Path(__file__).parents[3] / "configs" / "loss").glob("*.yaml"))
BACKBONES = {
    "resnet": {"name": "resnet10t", "model_args": {"channels": [8, 8, 8, 8], "stem_width": 8}},
    "tresnet": {"name": "tresnet_m", "model_args": {"layers": [1, 1, 1, 1]}},
    "vit": {"name": "vit_tiny_patch16_224", "image_size": SIZE, "model_args": {"depth": 1}},
    "swin": {
        "name": "swin_tiny_patch4_window7_224",
        "image_size": 64,
        "model_args": {"depths": [1, 1, 1, 1]},
    },
}

# Operations on CUDA that cause a host sync.
HANDED = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero")
HANDED += ("aten::masked_select", "aten::equal", "aten::unique2", "aten::_unique2")


class Waits(TorchDispatchMode):
    """Count operations that copy a value to the host, or need one for a shape."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name in HANDED:
            self.seen[name] += 1
        if name.startswith("aten::index") and len(args) > 1 and isinstance(args[1], list | tuple):
            masks = [index for index in args[1] if index is not None and index.dtype == torch.bool]
            self.seen[f"{name} by a mask"] += bool(masks)
        return func(*args, **(kwargs or {}))


class Lists(TorchFunctionMode):
    """Count calls of `tolist`, which is no operation on a CPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is Tensor.tolist
        return func(*args, **(kwargs or {}))


def seen(job):
    """Return the number of host syncs of a job by the name of the operation."""
    with Waits() as waits, Lists() as lists:
        job()
    return dict(+(waits.seen + Counter(tolist=lists.count)))


@pytest.fixture
def on_cuda():
    """Create fake tensors on a GPU, with autocast to bfloat16."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda:0"):
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        try:
            yield torch.device("cuda:0")
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", torch.float16)


def queries(head):
    return torch.randn(CLASSES, networks.WIDTH) if head in networks.OF_WORDS else None


@pytest.mark.parametrize("head", networks.HEADS)
def test_heads_stay_on_gpu(on_cuda, head):
    for training in (True, False):
        model = networks.HEADS[head](32).train(training)
        logits = model(torch.randn(2, 16, 32), queries(head))
        assert (logits.shape, logits.device, logits.dtype) == ((2, CLASSES), on_cuda, torch.float32)


@pytest.mark.parametrize("name", BACKBONES)
def test_backbones_stay_on_gpu(on_cuda, name):
    # timm reads values when it builds a network, which fake tensors do not have.
    with unset_fake_temporarily(), torch.device("meta"):
        backbone = TimmBackbone(pretrained=False, **BACKBONES[name])
        model = Classifier(backbone, networks.HEADS["groups"](backbone.num_features))
    model.to_empty(device=on_cuda)

    size = BACKBONES[name].get("image_size", SIZE)
    images = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    logits = model(images.to(memory_format=torch.channels_last))
    assert (logits.shape, logits.device) == ((2, CLASSES), on_cuda)


@pytest.mark.parametrize("path", LOSSES, ids=lambda path: path.stem)
def test_losses_stay_on_gpu(on_cuda, path):
    # timm reads the label counts when it builds a loss.
    with unset_fake_temporarily(), torch.device("cpu"):
        loss = loss_of_option(path, CLASSES)
    loss.to_empty(device=on_cuda)
    targets = torch.zeros(4, CLASSES, dtype=torch.int8)
    value = loss(torch.randn(4, CLASSES), targets)
    assert (value.shape, value.device) == ((), on_cuda)


@pytest.fixture
def targets_as_on_cuda(monkeypatch):
    """Disable the check of the targets, which losses do on a CPU only."""
    for module in (common, cross_entropy):
        monkeypatch.setattr(module, "check_valid", lambda valid, logits, message: logits)


@cache
def config() -> Config:
    return compose(["+experiment=digits", "optim.name=adamw", "train.clip_grad=1"])


def waits_of_a_step(head, loss, backbone=None, nonfinite="stop"):
    """Return the host syncs of the second step by name."""
    torch.manual_seed(0)
    backbone = backbone or Patches()
    model = Classifier(backbone, networks.HEADS[head](backbone.num_features))
    learner = Learner(
        override(config(), [f"train.nonfinite={nonfinite}"]),
        model,
        loss,
        device=torch.device("cpu"),
        steps=12,
        word_vectors=queries(head),
    )
    learner.train()

    images = torch.randint(256, (4, 3, SIZE, SIZE), dtype=torch.uint8)
    targets = torch.nn.functional.one_hot(torch.arange(4), CLASSES).to(torch.int8)
    step = partial(learner.learn, [Batch(images, targets, torch.arange(4))], 4)
    step()
    return seen(step)


@pytest.mark.usefixtures("targets_as_on_cuda")
@pytest.mark.parametrize("head", networks.HEADS)
def test_heads_need_no_host_sync(head):
    assert waits_of_a_step(head, loss_of_option(LOSSES[0].with_stem("asl"))) == {}


@pytest.mark.usefixtures("targets_as_on_cuda")
@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_network_needs_no_host_sync(nonfinite):
    backbone = TimmBackbone(pretrained=False, **BACKBONES["resnet"])
    loss = loss_of_option(LOSSES[0].with_stem("asl"))
    assert waits_of_a_step("groups", loss, backbone, nonfinite) == {}


@pytest.mark.usefixtures("targets_as_on_cuda")
@pytest.mark.parametrize("path", LOSSES, ids=lambda path: path.stem)
def test_losses_need_no_host_sync(path):
    assert not waits_of_a_step("groups", loss_of_option(path, CLASSES))
