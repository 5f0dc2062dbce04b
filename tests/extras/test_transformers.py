"""HFBackbone: tiny networks of transformers."""

import inspect
import json
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mldec import build as build_parts
from mldec.backbones import HFBackbone
from mldec.config.compose import compose
from mldec.errors import ConfigError

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "intermediate_size": 48,
}
DINO = {key: value for key, value in VIT.items() if key != "intermediate_size"} | {
    "image_size": 56,
    "patch_size": 14,
}
STAGES = {"depths": [1, 1, 1, 1]}
SWIN = {**STAGES, "embed_dim": 16, "num_heads": [1, 2, 4, 8], "image_size": 96, "window_size": 3}
# Type, settings, pixels per side, tokens per side, number of prefix tokens.
NETWORKS = [
    ("vit", VIT, 64, 4, 1),
    ("vit", VIT, 96, 6, 1),
    ("deit", VIT, 64, 4, 2),
    ("dinov2_with_registers", DINO, 56, 4, 5),
    ("swin", SWIN, 96, 3, 0),
    ("resnet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, 64, 8, 0),
    ("convnext", {**STAGES, "hidden_sizes": [8, 12, 16, 24]}, 64, 2, 0),
    ("cvt", {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, 64, 4, 0),
]
IDS = [f"{kind}-{size}" for kind, _, size, *_ in NETWORKS]
MEAN = [0.5, 0.4, 0.3]
STD = [0.2, 0.3, 0.4]


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


def classifier(model_type, settings, classes=7):
    """Return a network of transformers with noisy parameters. CvT has its original activation."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**settings, num_labels=classes)
    network_class = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[type(config)]
    # DeiT has two classes. The second one has a distillation classifier.
    if isinstance(network_class, tuple):
        network_class = network_class[0]
    network = network_class(config).eval()
    for module in network.modules():
        if type(module).__name__ == "CvtIntermediate":
            module.activation = QuickGELU()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return network


def saved(folder, network):
    """Save a network in the format of transformers, and return its `name` setting."""
    network.save_pretrained(folder)
    processor = {"do_normalize": True, "image_mean": MEAN, "image_std": STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return {"name": str(folder)}


def build(**arguments):
    return HFBackbone(**HFBackbone.complete(arguments))


def noise(size):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (2, 3, size, size), dtype=torch.uint8, generator=generator)


def hidden_state(network, images):
    """Return the last hidden state of a network of transformers."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    options = {}
    if "interpolate_pos_encoding" in inspect.signature(network.base_model.forward).parameters:
        options["interpolate_pos_encoding"] = True
    with torch.no_grad():
        return network.base_model((images.float() / 255 - mean) / std, **options).last_hidden_state


@pytest.mark.parametrize(("kind", "settings", "size", "side", "prefix"), NETWORKS, ids=IDS)
def test_tokens_match_transformers(tmp_path, kind, settings, size, side, prefix):
    network = classifier(kind, settings)
    options = {"pretrained": True, "image_size": size, "feature_norm": "none"}
    backbone = build(**saved(tmp_path, network), **options).eval()
    expected = hidden_state(network, noise(size))[:, prefix:]
    if expected.ndim == 4:
        expected = expected.flatten(2).transpose(1, 2)
    with torch.no_grad():
        tokens = backbone(noise(size))
    assert tokens.shape == (2, side * side, backbone.num_features)
    assert torch.equal(tokens, expected)

    # Only unused parameters are frozen.
    assert not any("classifier" in key for key in backbone.state_dict())
    frozen = {key for key, value in backbone.named_parameters() if not value.requires_grad}
    backbone.requires_grad_()
    backbone.train()(noise(size)).square().sum().backward()
    assert frozen == {key for key, value in backbone.named_parameters() if value.grad is None}


@pytest.mark.parametrize(("kind", "settings", "size"), [row[:3] for row in NETWORKS[-2:]])
def test_norm_after_pooling_is_applied_to_each_token(tmp_path, kind, settings, size):
    network = classifier(kind, settings)
    norm = (network if kind == "cvt" else network.base_model).layernorm
    backbone = build(**saved(tmp_path, network), pretrained=True).eval()

    tokens = hidden_state(network, noise(size)).flatten(2).transpose(1, 2)
    expected = F.layer_norm(tokens, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    with torch.no_grad():
        assert torch.equal(backbone(noise(size)), expected)


def test_new_norm_and_checkpointing(tmp_path):
    name = saved(tmp_path, classifier("vit", VIT))
    backbone = build(**name, feature_norm="new", checkpointing=True)
    modules = backbone.network.modules()
    assert any(getattr(module, "gradient_checkpointing", False) for module in modules)
    tokens = backbone.eval()(noise(64))
    torch.testing.assert_close(tokens.mean(-1), torch.zeros(2, 16), atol=1e-5, rtol=0)


def test_drop_path_of_cvt_drops_branches_of_last_stage(tmp_path):
    name = saved(tmp_path, classifier("cvt", NETWORKS[-1][1]))
    backbone = build(**name, pretrained=True, drop_path=0.9)
    drops = [module for module in backbone.modules() if type(module).__name__ == "DropPath"]
    assert [drop.drop_prob for drop in drops] == pytest.approx([0, 0, 0.45, 0.45, 0.9, 0.9])

    # A layer without its branches returns its input. transformers would return zeros.
    layer = backbone.network.base_model.encoder.stages[-1].layers[-1].train()
    x = torch.randn(64, 17, 64)
    unchanged = (layer(x, 4, 4) == x).all(dim=(1, 2))
    assert 30 < unchanged.sum() < 64


@pytest.mark.parametrize("form", ["base model", "bin"])
def test_weights_of_base_model_and_of_file_are_loaded(tmp_path, form):
    network = classifier("vit", VIT)
    name = saved(tmp_path, network.base_model if form == "base model" else network)
    pretrained = True
    if form == "bin":
        pretrained = str(tmp_path / "weights.bin")
        torch.save(network.state_dict(), pretrained)

    backbone = build(**name, pretrained=pretrained).eval()
    with torch.no_grad():
        assert torch.equal(backbone(noise(64)), hidden_state(network, noise(64))[:, 1:])


def test_recorded_config_is_complete_and_without_code(tmp_path):
    network = classifier("vit", VIT)
    name = saved(tmp_path, network)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    path = tmp_path / "config.json"
    code = {
        "auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"},
        "_attn_implementation_internal": "someone/kernels",
        "attn_implementation": "someone/kernels",
    }
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **code}))

    arguments = HFBackbone.complete({**name, "pretrained": True})
    config = arguments["config"]
    assert json.loads(json.dumps(arguments)) == arguments
    assert (config["model_type"], config["hidden_size"]) == ("vit", 32)
    assert not config.keys() & {*code, "id2label", "architectures"}
    HFBackbone(**arguments)
    path.write_text(json.dumps({**content, **code, "model_type": "evil"}))
    with pytest.raises(ConfigError, match=r"backbone\.name="):
        build(**name)
    assert not (tmp_path / "mark").exists()


def test_do_normalize_false_keeps_range_of_images(tmp_path):
    name = saved(tmp_path, classifier("vit", VIT))
    (tmp_path / "preprocessor_config.json").write_text('{"do_normalize": false}')
    arguments = HFBackbone.complete(name)
    assert arguments["mean"] == [0, 0, 0]
    assert arguments["std"] == [1, 1, 1]
    assert HFBackbone.complete({**name, "mean": MEAN, "std": STD})["mean"] == MEAN


def gap():
    state = classifier("vit", VIT).state_dict()
    del state["vit.layernorm.weight"]
    return state


def wide():
    return classifier("vit", {**VIT, "intermediate_size": 64}).state_dict()


ERRORS = [
    ({"config": None}, r"backbone\.config"),
    ({"config": {"model_type": "bert"}}, r"backbone\.config\.model_type=bert"),
    ({"config": {"model_type": "cvt"}, "checkpointing": True}, r"backbone\.checkpointing=true: x"),
    ({"image_size": 8}, "8 x 8"),
    ({"pretrained": gap}, r"backbone\.pretrained=.*vit\.layernorm\.weight"),
    ({"pretrained": wide}, r"backbone\.pretrained=.*such as vit\."),
]
for key in ("attn_implementation", "auto_map"):
    ERRORS.append(
        ({"config": {"model_type": "vit", **VIT, key: {}}}, rf"backbone\.config\.{key}: ")
    )
ERRORS.append(('{"do_flip_channel_order": true}', r"backbone\.name="))
ERRORS.append((None, r"pip install -e '\.\[hf\]'"))


@pytest.mark.parametrize(("settings", "name"), ERRORS)
def test_errors_are_one_line_and_name_the_setting(tmp_path, monkeypatch, settings, name):
    arguments = {"name": "x", "config": {"model_type": "vit", **VIT}, "mean": MEAN, "std": STD}
    construct = HFBackbone
    if settings is None:
        parts = build_parts.check(compose(["+experiment=digits", "backbone=cvt_w24"]))
        monkeypatch.setitem(sys.modules, "transformers", None)
        arguments = {"parts": parts}
        construct = build_parts.complete
    elif isinstance(settings, str):
        arguments = saved(tmp_path, classifier("vit", VIT))
        (tmp_path / "preprocessor_config.json").write_text(settings)
        construct = build
    else:
        arguments |= settings
    if "pretrained" in arguments:
        torch.save(arguments["pretrained"](), tmp_path / "weights.bin")
        arguments["pretrained"] = str(tmp_path / "weights.bin")

    with pytest.raises(ConfigError, match=name) as caught:
        construct(**arguments)
    assert "\n" not in str(caught.value)
