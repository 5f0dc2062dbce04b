"""TimmBackbone: tokens, norms and weights against timm."""

from functools import cache

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from mldec.backbones import TimmBackbone
from mldec.errors import ConfigError

VIT = {"image_size": 64, "model_args": {"depth": 2, "embed_dim": 64, "num_heads": 4}}
SWIN = {"image_size": 64, "model_args": {"depths": [1, 1, 1, 1]}}
IMAGES = torch.randint(256, (2, 3, 64, 64), generator=torch.Generator().manual_seed(1)).byte()


def build(name, **settings):
    """Return a backbone with noisy parameters, because a weight of 0 or 1 could hide an error."""
    torch.manual_seed(0)
    backbone = TimmBackbone(name, **settings).eval()
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return backbone


@cache
def cached(name):
    """Return the backbone of a network of `NETWORKS`. Tests must not change it."""
    return build(name, **NETWORKS[name][0])


def normalized(backbone):
    """Return the images, normalized with the values of timm."""
    cfg = backbone.network.pretrained_cfg
    mean, std = (torch.tensor(cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    return (IMAGES.float() / 255 - mean) / std


def frozen(module):
    return {key for key, value in module.named_parameters() if not value.requires_grad}


# Settings, tokens per side, and the norm after the pooling. tests/full/backbones covers many
# networks of timm.
NETWORKS = {
    "resnet18": ({}, 2, None),
    "convnext_atto": ({}, 2, "head.norm"),
    "swin_tiny_patch4_window7_224": (SWIN, 2, None),
    "vit_tiny_patch16_224": (VIT, 4, None),
    "deit_tiny_distilled_patch16_224": (VIT, 4, None),
    "beit_base_patch16_224": (VIT, 4, "fc_norm"),
}


@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_tokens_match_feature_map_of_timm(name):
    settings, side, path = NETWORKS[name]
    backbone = cached(name)
    options = {"indices": 1, "norm": True, "output_fmt": "NCHW", "intermediates_only": True}
    *_, features = backbone.network.forward_intermediates(normalized(backbone), **options)
    assert features.shape[2:] == (side, side)
    expected = features.flatten(2).transpose(1, 2)
    if path is None:
        torch.testing.assert_close(backbone(IMAGES), expected)
        return

    norm = backbone.network.get_submodule(path)
    normed = F.layer_norm(expected, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    torch.testing.assert_close(backbone(IMAGES), normed)

    plain = TimmBackbone(name, **settings, feature_norm="none").eval()
    plain.load_state_dict(backbone.state_dict())
    torch.testing.assert_close(plain(IMAGES), expected)
    assert frozen(plain) == {f"network.{path}.weight", f"network.{path}.bias"}


def test_new_norm_is_applied_to_tokens():
    backbone = TimmBackbone("resnet10t", feature_norm="new")
    torch.testing.assert_close(backbone(IMAGES).mean(-1), torch.zeros(2, 4), atol=1e-5, rtol=0)
    assert backbone.norm.weight.requires_grad
    assert backbone.layers_below_head()["norm.weight"] == 0


@torch.no_grad()
def test_images_are_normalized_in_dtype_of_parameters():
    backbone = build("resnet10t")
    single = backbone(IMAGES)
    assert torch.equal(backbone(IMAGES.float() / 255), single)
    assert torch.equal(backbone(IMAGES.double() / 255), single)

    inputs = []
    hook = backbone.network.conv1.register_forward_pre_hook(lambda _, given: inputs.append(given))
    with torch.autocast("cpu", torch.bfloat16):
        assert backbone(IMAGES).dtype == torch.bfloat16
    hook.remove()
    torch.testing.assert_close(inputs[0][0], normalized(backbone))

    double = backbone.double()(IMAGES)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), single, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_mean_and_std_are_part_of_state_dict():
    state = TimmBackbone("vit_base_patch16_clip_224.openai", **VIT).state_dict()
    assert state["mean"].flatten().tolist() == pytest.approx([0.48145466, 0.4578275, 0.40821073])
    ours = build("resnet10t", mean=[0.1, 0.2, 0.3], std=[1, 2, 3])
    other = build("resnet10t")
    assert not torch.allclose(ours(IMAGES), other(IMAGES))
    other.load_state_dict(ours.state_dict())
    assert torch.equal(ours(IMAGES), other(IMAGES))


@pytest.mark.parametrize(
    ("name", "unused"),
    [
        ("resnet10t", set()),
        ("mobilenetv3_small_050", {"network.conv_head.weight", "network.conv_head.bias"}),
    ],
)
def test_unused_parameters_are_frozen(name, unused):
    backbone = TimmBackbone(name)
    assert frozen(backbone) == unused
    backbone.requires_grad_()
    backbone(IMAGES).square().sum().backward()
    assert {key for key, value in backbone.named_parameters() if value.grad is None} == unused


def test_drop_path_and_checkpointing_are_passed_to_network():
    backbone = TimmBackbone("resnet18", drop_path=0.2, checkpointing=True)
    drops = [module for module in backbone.modules() if type(module).__name__ == "DropPath"]
    assert drops[-1].drop_prob == pytest.approx(0.2)
    assert backbone.network.grad_checkpointing


# Weights from a file


@pytest.fixture
def trained():
    torch.manual_seed(7)
    return timm.create_model("resnet10t", num_classes=7).eval()


@pytest.mark.parametrize("kind", ["whole", "wrapped", "headless", "safetensors"])
@torch.no_grad()
def test_weights_of_file_are_loaded(tmp_path, trained, kind):
    state = trained.state_dict()
    file = tmp_path / f"weights.{kind}"
    forms = {
        "whole": state,
        "wrapped": {f"module.{key}": value for key, value in state.items()},
        "headless": {key: value for key, value in state.items() if not key.startswith("fc.")},
    }
    save_file(state, file) if kind == "safetensors" else torch.save(forms[kind], file)

    torch.manual_seed(5)
    plain = TimmBackbone("resnet10t")
    after = torch.rand(4)
    torch.manual_seed(5)
    backbone = TimmBackbone("resnet10t", pretrained=str(file)).eval()
    # The initialization of the head does not depend on pretrained weights.
    assert torch.equal(torch.rand(4), after)
    assert backbone.state_dict().keys() == plain.state_dict().keys()

    features = trained.forward_features(normalized(backbone))
    torch.testing.assert_close(backbone(IMAGES), features.flatten(2).transpose(1, 2))


@torch.no_grad()
def test_weights_of_efficientnet_pytorch_are_renamed(tmp_path):
    # Independent of the order of the layers: the names in the two packages.
    outside = {"conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1"}
    outside["classifier"] = "_fc"
    first = {"conv_dw": "_depthwise_conv", "bn1": "_bn1", "conv_pw": "_project_conv", "bn2": "_bn2"}
    later = {"conv_pw": "_expand_conv", "bn1": "_bn0", "conv_dw": "_depthwise_conv", "bn2": "_bn1"}
    later |= {"conv_pwl": "_project_conv", "bn3": "_bn2"}
    torch.manual_seed(3)
    network = timm.create_model("tf_efficientnet_lite0", num_classes=5)
    blocks = [
        f"blocks.{s}.{b}" for s, stage in enumerate(network.blocks) for b in range(len(stage))
    ]
    state = {}
    for key, value in network.state_dict().items():
        value = value + torch.rand(value.shape) if value.is_floating_point() else value
        block, _, rest = key.rpartition(".")[0].rpartition(".")
        if block:
            number = blocks.index(block)
            name = f"_blocks.{number}.{(later if number else first)[rest]}"
        else:
            name = outside[rest]
        state[f"{name}.{key.rpartition('.')[2]}"] = value
        network.state_dict()[key].copy_(value)

    torch.save(state, tmp_path / "theirs.pth")
    backbone = TimmBackbone("tf_efficientnet_lite0", pretrained=str(tmp_path / "theirs.pth"))
    expected = network.state_dict()
    assert all(torch.equal(v, expected[key]) for key, v in backbone.network.state_dict().items())

    # A sorted file has another order, which must not mix up layers.
    torch.save(dict(sorted(state.items())), tmp_path / "sorted.pth")
    with pytest.raises(ConfigError, match=r"backbone\.pretrained.*order"):
        TimmBackbone("tf_efficientnet_lite0", pretrained=str(tmp_path / "sorted.pth"))


ERRORS = [
    ({"name": "resnet81"}, r"backbone\.name=resnet81.*resnet18"),
    ({"name": "vit_tiny_patch16_224", "image_size": 10}, r"backbone\.name=.*10 x 10"),
    ({"model_args": {"checkpoint_path": "x.pth"}}, r"backbone\.model_args\.checkpoint_path"),
    ({"feature_norm": "pretrained"}, r"backbone\.feature_norm=pretrained: resnet10t"),
    ({"pretrained": "gap"}, r"backbone\.pretrained=gap.*layer3\.0\.conv1\.weight"),
    ({"pretrained": "other"}, r"backbone\.pretrained=other.* and \d+ more"),
]


@pytest.mark.parametrize(("settings", "name"), ERRORS)
def test_errors_are_one_line_and_name_the_setting(tmp_path, monkeypatch, trained, settings, name):
    monkeypatch.chdir(tmp_path)
    state = trained.state_dict()
    del state["layer3.0.conv1.weight"]
    torch.save(state, "gap")
    torch.save({f"_{name}": tensor for name, tensor in state.items()}, "other")

    with pytest.raises(ConfigError, match=name) as caught:
        TimmBackbone(**{"name": "resnet10t", **settings})
    assert "\n" not in str(caught.value)
    if "pretrained" in settings:
        assert caught.value.__suppress_context__, "Python shows no error of a library"


@torch.no_grad()
def test_blocks_equal_the_pooled_maps_of_hooks(tmp_path):
    torch.manual_seed(0)
    network = timm.create_model("test_efficientnet", num_classes=7).eval()
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    file = str(tmp_path / "weights.safetensors")
    backbone = TimmBackbone("test_efficientnet", pretrained=file, blocks=True).eval()

    maps = {}
    for number, stage in enumerate([*network.blocks, network.bn2]):
        stage.register_forward_hook(lambda *args, number=number: maps.update({number: args[2]}))
    logits = network(normalized(backbone))
    *stages, last = (maps[number].flatten(2) for number in sorted(maps))
    expected = {"mean": last.mean(2)}
    for number, stage in enumerate(reversed(stages[-3:]), 1):
        expected[f"s{number}"] = torch.cat([stage.mean(2), stage.std(2, correction=0)], 1)
    # The network's classifier at each position; its mean logit is the logit of the network.
    classified = network.classifier(last.transpose(1, 2))
    torch.testing.assert_close(classified.mean(1), logits)
    expected["prob"] = classified.softmax(2).mean(1)
    expected["top"] = classified.amax(1)

    assert backbone.block_sizes == {name: value.shape[1] for name, value in expected.items()}
    blocks = backbone(IMAGES)
    assert blocks.shape == (2, 1, backbone.num_features)
    torch.testing.assert_close(blocks[:, 0], torch.cat(list(expected.values()), 1))

    # A checkpoint is loaded without the file of weights.
    loaded = TimmBackbone("test_efficientnet", blocks=True).eval()
    assert "prob" not in loaded.block_sizes
    loaded.allocate(backbone.state_dict())
    loaded.load_state_dict(backbone.state_dict())
    assert torch.equal(loaded(IMAGES), blocks)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("resnet18", 3),
        ("convnext_atto", 3),
        ("swin_tiny_patch4_window7_224", 3),
        ("vit_tiny_patch16_224", 0),
    ],
)
@torch.no_grad()
def test_networks_have_the_blocks_of_their_maps(name, stages):
    backbone = build(name, blocks=True, **NETWORKS[name][0])
    names = ["mean", *[f"s{number}" for number in range(1, stages + 1)]]
    assert list(backbone.block_sizes) == names
    tokens = cached(name)(IMAGES)
    width = backbone.block_sizes["mean"]
    torch.testing.assert_close(backbone(IMAGES)[:, 0, :width], tokens.mean(1))
