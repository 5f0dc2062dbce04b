"""HFBackbone: a tiny CvT of transformers."""

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mldec.backbones import HFBackbone
from mldec.errors import ConfigError

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

SIZES = {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}
CVT = {"model_type": "cvt", **SIZES}
MEAN = [0.5, 0.4, 0.3]
STD = [0.2, 0.3, 0.4]


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


def classifier(**settings):
    """Return CvT with noisy parameters, and with the activation of the original code."""
    torch.manual_seed(0)
    config = transformers.CvtConfig(**{**SIZES, **settings}, num_labels=7)
    network = transformers.CvtForImageClassification(config).eval()
    for module in network.modules():
        if type(module).__name__ == "CvtIntermediate":
            module.activation = QuickGELU()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return network


def build(name="x", **arguments):
    return HFBackbone(**{"name": str(name), "config": CVT, "mean": MEAN, "std": STD, **arguments})


def noise(size=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (2, 3, size, size), dtype=torch.uint8, generator=generator)


def hidden_state(network, images):
    """Return the last hidden state of transformers as tokens."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    with torch.no_grad():
        maps = network.base_model((images.float() / 255 - mean) / std).last_hidden_state
    return maps.flatten(2).transpose(1, 2)


@pytest.mark.parametrize("size", [64, 96])
def test_tokens_match_transformers(tmp_path, size):
    network = classifier()
    network.save_pretrained(tmp_path)
    backbone = build(tmp_path, pretrained=True, image_size=size, feature_norm="none").eval()
    with torch.no_grad():
        tokens = backbone(noise(size))
    assert tokens.shape == (2, (size // 16) ** 2, backbone.num_features)
    assert torch.equal(tokens, hidden_state(network, noise(size)))

    # Only unused parameters are frozen.
    assert not any("classifier" in key for key in backbone.state_dict())
    frozen = {key for key, value in backbone.named_parameters() if not value.requires_grad}
    backbone.requires_grad_()
    backbone.train()(noise(size)).square().sum().backward()
    assert frozen == {key for key, value in backbone.named_parameters() if value.grad is None}


@pytest.mark.parametrize("form", ["folder", "bin"])
def test_norm_after_pooling_is_applied_to_each_token(tmp_path, form):
    network = classifier()
    norm = network.layernorm
    pretrained = True
    if form == "bin":
        pretrained = str(tmp_path / "weights.bin")
        torch.save(network.state_dict(), pretrained)
    else:
        network.save_pretrained(tmp_path)
    backbone = build(tmp_path, pretrained=pretrained).eval()

    tokens = hidden_state(network, noise())
    expected = F.layer_norm(tokens, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    with torch.no_grad():
        assert torch.equal(backbone(noise()), expected)


def test_new_norm():
    tokens = build(feature_norm="new").eval()(noise())
    torch.testing.assert_close(tokens.mean(-1), torch.zeros(2, 16), atol=1e-5, rtol=0)


def test_drop_path_drops_branches_of_last_stage(tmp_path):
    classifier().save_pretrained(tmp_path)
    backbone = build(tmp_path, pretrained=True, drop_path=0.9)
    drops = [module for module in backbone.modules() if type(module).__name__ == "DropPath"]
    assert [drop.drop_prob for drop in drops] == pytest.approx([0, 0, 0.45, 0.45, 0.9, 0.9])

    # A layer without its branches returns its input. transformers would return zeros.
    layer = backbone.network.base_model.encoder.stages[-1].layers[-1].train()
    x = torch.randn(64, 17, 64)
    unchanged = (layer(x, 4, 4) == x).all(dim=(1, 2))
    assert 30 < unchanged.sum() < 64


def gap():
    state = classifier().state_dict()
    del state["layernorm.weight"]
    return state


def wide():
    return classifier(embed_dim=[32, 32, 64]).state_dict()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"config": {"model_type": "vit"}}, r"backbone\.config\.model_type=vit: .*5852d40b"),
        ({"checkpointing": True}, r"backbone\.checkpointing=true: x"),
        ({"config": {**CVT, "depth": 1}}, r"backbone\.config"),
        # Settings of the base class of all configs may load code.
        ({"config": {**CVT, "attn_implementation": "x/y"}}, r"backbone\.config\.attn_impl"),
        ({"config": {**CVT, "auto_map": {}}}, r"backbone\.config\.auto_map: "),
        ({"pretrained": gap}, r"backbone\.pretrained=.*layernorm\.weight"),
        ({"pretrained": wide}, r"backbone\.pretrained=.*such as cvt\."),
        (None, r"pip install -e '\.\[hf\]'"),
    ],
)
def test_errors_are_one_line_and_name_the_setting(tmp_path, monkeypatch, settings, name):
    if settings is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        settings = {}
    elif "pretrained" in settings:
        torch.save(settings["pretrained"](), tmp_path / "weights.bin")
        settings = {"pretrained": str(tmp_path / "weights.bin")}
    with pytest.raises(ConfigError, match=name) as caught:
        build(**settings)
    assert "\n" not in str(caught.value)
