from copy import deepcopy
from pathlib import Path

import pytest
import torch
import yaml
from timm.layers import BatchNormAct2d, StdConv2d
from torch import nn
from torch.nn import functional as F

from mldec.backbones import TimmBackbone
from mldec.fast import fast, fold_batch_norm
from mldec.heads.gap import GAP
from mldec.heads.ml_decoder import MLDecoder
from mldec.model import Classifier

CPU = torch.device("cpu")
TINY = yaml.safe_load((Path(__file__).parents[1] / "configs" / "backbone" / "tiny.yaml").read_text())
TINY.pop("_target_")

# Settings of a network, side of the image in pixels, norms that stay.
NETWORKS = {
    "resnet18": ({}, 64, 0),
    "resnet50": ({}, 64, 0),
    "tresnet_m": ({"model_args": {"layers": [1, 2, 2, 1]}}, 64, 0),
    "tresnet_v2_l": ({"model_args": {"layers": [1, 2, 2, 1]}}, 64, 0),
    "regnety_002": ({}, 64, 0),
    "efficientnet_b0": ({}, 64, 0),
    "tf_efficientnet_b0": ({}, 64, 0),  # its padding depends on the image
    "convnext_atto": ({}, 64, 0),
    "vit_tiny_patch16_224": ({"image_size": 64, "model_args": {"depth": 2}}, 64, 0),
    "densenet121": ({"model_args": {"block_config": [2, 2, 2, 2]}}, 64, None),  # norms of what was put together
    "resnetv2_50": ({"model_args": {"layers": [1, 1, 2, 1]}}, 64, None),  # norms before convolutions
    "repvgg_a0": ({}, 64, None),  # norms of what is not a convolution's, side by side with others
    "tiny": (TINY, 64, 0),
}


def shake(model: nn.Module) -> None:
    """Give every parameter and statistic a value that cannot be left out unseen; scales have either sign."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                shape = module.running_mean.shape
                module.running_mean.copy_(0.3 * torch.randn(shape, generator=generator))
                module.running_var.copy_(0.5 + torch.rand(shape, generator=generator))
                if module.affine:
                    signs = torch.randint(2, shape, generator=generator) * 2 - 1
                    module.weight.copy_(signs * (0.2 + 0.8 * torch.rand(shape, generator=generator)))
                    module.bias.copy_(0.3 * torch.randn(shape, generator=generator))


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def compare(model: nn.Module, size: int) -> tuple[int, float]:
    """Fold, and return how many norms were, and the largest difference that this makes."""
    images = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before = model.eval()(images)
        folded = fold_batch_norm(model)
        after = model(images)
    assert before.isfinite().all()
    assert before.std() > 1e-3
    return folded, (after - before).abs().max().item()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("head", [GAP, MLDecoder])
def test_logits_stay_within_a_thousandth(name, head, record_property):
    settings, size, stay = NETWORKS[name]
    torch.manual_seed(0)
    backbone = TimmBackbone(**{"name": name, **settings})
    model = Classifier(backbone, head(backbone.num_features, 7))
    shake(model)
    before = norms(model)
    folded, difference = compare(model, size)
    record_property("difference", difference)
    assert difference < 1e-3
    assert norms(model) == before - folded
    if stay is None:
        assert 0 < folded < before
    else:
        assert norms(model) == stay


class Parts(nn.Module):
    """Two convolutions and two norms, put together in a way that a test gives."""

    def __init__(self, way, conv=nn.Conv2d, norm=nn.BatchNorm2d):
        super().__init__()
        self.first, self.second = conv(3, 3, 3, padding=1), conv(3, 3, 3, padding=1, bias=False)
        self.norm, self.other = norm(3), norm(3)
        self.way = way

    def forward(self, images):
        return self.way(self, images)


class DeafConv2d(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight, None, self.stride, self.padding)


class ScaledConv2d(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


class ScaledNorm(nn.BatchNorm2d):
    def forward(self, x):
        return 2 * super().forward(x)


# What the network does, the kinds of its convolutions and norms, how many can be folded.
WAYS = {
    "one after the other": (lambda m, x: m.other(m.second(m.norm(m.first(x)))), {}, 2),
    "an activation in the norm": (lambda m, x: m.other(m.second(m.norm(m.first(x)))), {"norm": BatchNormAct2d}, 2),
    "an activation between": (lambda m, x: m.norm(F.relu(m.first(x))), {}, 0),
    "an activation in place": (lambda m, x: m.norm(m.first(x).relu_()), {}, 0),
    "padding between": (lambda m, x: m.norm(F.pad(m.first(x), [1, 1, 1, 1])), {}, 0),
    "a norm first": (lambda m, x: m.first(m.norm(x)), {}, 0),
    "two norms of one convolution": (lambda m, x: m.norm(m.first(x)) + m.other(m.first(x)), {}, 0),
    "one output, two norms": (lambda m, x: (lambda y: m.norm(y) + m.other(y))(m.first(x)), {}, 0),
    "output used again": (lambda m, x: (lambda y: m.norm(y) + y)(m.first(x)), {}, 0),
    "norm used twice": (lambda m, x: m.norm(m.second(m.norm(m.first(x)))), {}, 0),
    "sum of two": (lambda m, x: m.norm(m.first(x) + m.second(x)), {}, 0),
    "weight used elsewhere": (lambda m, x: m.norm(m.first(x)) + m.first.weight.mean(), {}, 0),
    "norm's scale used elsewhere": (lambda m, x: m.norm(m.first(x)) + m.norm.weight.mean(), {}, 0),
    "standardised weights": (lambda m, x: m.norm(m.first(x)), {"conv": StdConv2d}, 0),
    "a convolution without ear for its bias": (lambda m, x: m.norm(m.second(x)), {"conv": DeafConv2d}, 0),
    "a convolution that does more": (lambda m, x: m.norm(m.second(x)), {"conv": ScaledConv2d}, 0),
    "a norm that does more": (lambda m, x: m.norm(m.second(x)), {"norm": ScaledNorm}, 0),
    "no scale": (lambda m, x: m.norm(m.first(x)), {"norm": lambda c: nn.BatchNorm2d(c, affine=False)}, 1),
    "a way that hangs on values": (lambda m, x: m.norm(m.first(x)) if x.mean() > 0 else x, {}, 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_only_a_norm_that_follows_a_convolution_alone_is_folded(way):
    function, kinds, folded = WAYS[way]
    model = Parts(function, **kinds)
    shake(model)
    found, difference = compare(model, 16)
    assert found == folded
    assert difference < 1e-5


def test_output_that_is_returned_stays():
    model = Parts(lambda m, x: (m.norm(y := m.first(x)), y)).eval()
    shake(model)
    images = torch.rand(1, 3, 16, 16)
    before = model(images)
    assert fold_batch_norm(model) == 0
    assert all(torch.equal(a, b) for a, b in zip(model(images), before, strict=True))


def test_norm_of_the_batch_itself_stays():
    model = Parts(lambda m, x: m.norm(m.first(x)), norm=lambda c: nn.BatchNorm2d(c, track_running_stats=False))
    assert compare(model, 16)[0] == 0


def test_norm_and_convolution_with_two_names():
    model = Parts(lambda m, x: m.other(m.second(x)))
    model.norm, model.first = model.other, model.second
    shake(model)
    folded, difference = compare(model, 16)
    assert folded == 1
    assert difference < 1e-5


def test_shared_parameter_keeps_its_values():
    model = Parts(lambda m, x: m.norm(m.first(x)) + m.second(x))
    model.second.weight = model.first.weight
    kept = model.second.weight.detach().clone()
    shake(model)
    folded, difference = compare(model, 16)
    assert folded == 1
    assert difference < 1e-5
    assert torch.equal(model.second.weight, kept)


def test_state_from_before_keeps_its_values():
    model = Parts(lambda m, x: m.norm(m.first(x)))
    shake(model)
    state = model.state_dict()
    kept = deepcopy(state)
    assert fold_batch_norm(model) == 1
    assert all(torch.equal(state[key], kept[key]) for key in kept)


def test_fast_gives_the_same_model_in_evaluation():
    backbone = TimmBackbone(**TINY, checkpointing=True)
    model = Classifier(backbone, GAP(backbone.num_features, 7)).train()
    shake(model)
    random_state = torch.get_rng_state()
    kept = [buffer.clone() for buffer in (backbone.mean, backbone.std)]
    expected = deepcopy(model).eval()(images := torch.full((1, 3, 64, 64), 200, dtype=torch.uint8))
    assert fast(model, CPU) is model
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(backbone.mean, kept[0])
    assert torch.equal(backbone.std, kept[1])
    assert norms(model) == 0
    assert not any(value.is_meta for value in model.state_dict().values())
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(images).isfinite().all()


def test_folding_twice_and_under_inference_mode():
    model = Parts(lambda m, x: m.norm(m.first(x)))
    shake(model)
    with torch.inference_mode():
        assert fold_batch_norm(model) == 1
    assert not model.first.weight.is_inference()
    assert fold_batch_norm(model) == 0


@pytest.mark.gpu
def test_fast_on_a_gpu():
    backbone = TimmBackbone(**TINY)
    model = Classifier(backbone, MLDecoder(backbone.num_features, 7))
    shake(model)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        before = model.eval()(images)
        after = fast(model, torch.device("cuda"))(images.cuda()).cpu()
    torch.testing.assert_close(after, before, rtol=0, atol=1e-2)  # two devices differ by themselves
