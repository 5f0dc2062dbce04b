"""Networks of transformers as backbones, with tiny configs of real architectures."""

import inspect
import json
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mldec import build
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
# Type, settings, side of the image in pixels, tokens per side, tokens in front of them.
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
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


def classifier(model_type, settings, classes=7):
    """Return transformers' own network, without parameters of 0 or 1, so that each one counts.

    A CvT has the activation that its authors trained it with.
    """
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**settings, num_labels=classes)
    network_class = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[type(config)]
    # DeiT has two, without and with a classifier for distillation.
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
    """Save a network as transformers does, and return what names it."""
    network.save_pretrained(folder)
    processor = {"do_normalize": True, "image_mean": MEAN, "image_std": STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return {"name": str(folder)}


def opened(**arguments):
    return HFBackbone(**HFBackbone.complete(arguments))


def message(**arguments):
    """Return the one line that a user sees."""
    with pytest.raises(ConfigError) as caught:
        opened(**arguments)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("backbone")
    return text


def photos(size):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (2, 3, size, size), dtype=torch.uint8, generator=generator)


def hidden_state(network, images):
    """Return the last hidden state of transformers' own forward."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    options = {}
    if "interpolate_pos_encoding" in inspect.signature(network.base_model.forward).parameters:
        options["interpolate_pos_encoding"] = True
    with torch.no_grad():
        return network.base_model((images.float() / 255 - mean) / std, **options).last_hidden_state


@pytest.mark.parametrize(("kind", "settings", "size", "side", "prefix"), NETWORKS, ids=IDS)
def test_tokens_are_those_of_transformers_to_the_last_bit(
    tmp_path, kind, settings, size, side, prefix
):
    network = classifier(kind, settings)
    backbone = opened(
        **saved(tmp_path, network), pretrained=True, image_size=size, feature_norm="none"
    ).eval()
    expected = hidden_state(network, photos(size))[:, prefix:]
    if expected.ndim == 4:
        expected = torch.stack(
            [expected[:, :, row, column] for row in range(side) for column in range(side)], 1
        )
    with torch.no_grad():
        tokens = backbone(photos(size))
    assert tokens.shape == (2, side * side, backbone.num_features)
    assert torch.equal(tokens, expected)

    # What takes no part is frozen, and all else gets a gradient.
    assert not any("classifier" in key for key in backbone.state_dict())
    frozen = {key for key, value in backbone.named_parameters() if not value.requires_grad}
    backbone.requires_grad_()
    backbone.train()(photos(size)).square().sum().backward()
    assert frozen == {key for key, value in backbone.named_parameters() if value.grad is None}


@pytest.mark.parametrize(("kind", "settings", "size"), [row[:3] for row in NETWORKS[-2:]])
def test_the_norm_behind_the_pooling_is_applied_to_each(tmp_path, kind, settings, size):
    network = classifier(kind, settings)
    norm = (network if kind == "cvt" else network.base_model).layernorm
    backbone = opened(**saved(tmp_path, network), pretrained=True).eval()

    tokens = hidden_state(network, photos(size)).flatten(2).transpose(1, 2)
    expected = F.layer_norm(tokens, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    with torch.no_grad():
        assert torch.equal(backbone(photos(size)), expected)


def test_a_new_norm_and_checkpointing(tmp_path):
    name = saved(tmp_path, classifier("vit", VIT))
    backbone = opened(**name, feature_norm="new", checkpointing=True)
    modules = backbone.network.modules()
    assert any(getattr(module, "gradient_checkpointing", False) for module in modules)
    tokens = backbone.eval()(photos(64))
    torch.testing.assert_close(tokens.mean(-1), torch.zeros(2, 16), atol=1e-5, rtol=0)


def test_drop_path_of_a_cvt_drops_branches_of_the_last_stage_only(tmp_path):
    name = saved(tmp_path, classifier("cvt", NETWORKS[-1][1]))
    backbone = opened(**name, pretrained=True, drop_path=0.9)
    drops = [module for module in backbone.modules() if type(module).__name__ == "DropPath"]
    assert [drop.drop_prob for drop in drops] == pytest.approx([0, 0, 0.45, 0.45, 0.9, 0.9])

    # With both branches dropped, a layer hands its input on. transformers would return zeros.
    layer = backbone.network.base_model.encoder.stages[-1].layers[-1].train()
    x = torch.randn(64, 17, 64)
    unchanged = (layer(x, 4, 4) == x).all(dim=(1, 2))
    assert 30 < unchanged.sum() < 64


def test_drop_path_replaces_the_rate_of_the_config(tmp_path):
    settings = {**NETWORKS[-2][1], "drop_path_rate": 0.1}
    name = saved(tmp_path, classifier("convnext", settings))
    for rate in (0.0, 0.4):
        assert opened(**name, drop_path=rate).network.config.drop_path_rate == rate


# Weights and configs


@pytest.mark.parametrize("form", ["base model", "bin"])
def test_weights_without_a_classifier_and_of_a_file_fit(tmp_path, form):
    network = classifier("vit", VIT)
    name = saved(tmp_path, network.base_model if form == "base model" else network)
    pretrained = True
    if form == "bin":
        pretrained = str(tmp_path / "weights.bin")
        torch.save(network.state_dict(), pretrained)

    torch.manual_seed(5)
    opened(**name)
    after = torch.rand(4)
    torch.manual_seed(5)
    backbone = opened(**name, pretrained=pretrained).eval()
    assert torch.equal(torch.rand(4), after)
    with torch.no_grad():
        assert torch.equal(backbone(photos(64)), hidden_state(network, photos(64))[:, 1:])


def test_weights_with_a_gap_or_of_another_shape_are_refused(tmp_path):
    name = saved(tmp_path, classifier("vit", VIT))
    state, lost = classifier("vit", VIT).state_dict(), "vit.layernorm.weight"
    wide = classifier("vit", {**VIT, "intermediate_size": 64}).state_dict()
    for wrong in ({key: state[key] for key in state if key != lost}, wide, {"a": torch.ones(1)}):
        torch.save(wrong, tmp_path / "wrong.bin")
        text = message(**name, pretrained=str(tmp_path / "wrong.bin"))
        assert "cannot be used (ValueError: " in text
        assert "do not fit, such as vit." in text


def test_the_record_of_a_config_gives_it_back_without_code(tmp_path):
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
    assert "its config cannot be used" in message(**name)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("setting", ["attn_implementation", "id2label", "auto_map", "sise"])
def test_a_setting_that_is_not_of_the_architecture_is_refused(setting):
    config = {"model_type": "vit", **VIT, setting: {}}
    text = message(name="x", config=config, mean=MEAN, std=STD)
    assert text.startswith(f"backbone.config.{setting}: ViTConfig has no such setting")


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"config": {"model_type": "bert"}}, "model_type=bert: transformers"),
        ({"config": {"model_type": "clip"}}, "no image classification network of this type"),
        ({"config": {"model_type": "hgnet_v2"}}, "tried with 224 x 224 pixels"),
        (
            {"config": {"model_type": "vit", "hidden_size": "wide"}},
            "x cannot be used",
        ),
        ({"config": {"model_type": "cvt"}, "checkpointing": True}, "checkpointing=true: x does"),
        ({"feature_norm": "pretrained"}, "no norm behind its pooling"),
        ({"drop_path": 1}, "drop_path=1: give a rate in [0, 1)"),
        ({"drop_path": 0.1}, "drop_path=0.1: x takes no such setting"),
        ({"image_size": 8}, "tried with 8 x 8 pixels"),
    ],
)
def test_other_networks_and_settings_are_refused_in_one_line(settings, part):
    arguments = {"config": {"model_type": "vit", **VIT}, "mean": MEAN, "std": STD}
    assert part in message(name="x", **{**arguments, **settings})


def test_the_order_and_the_range_of_the_channels(tmp_path):
    name = saved(tmp_path, classifier("vit", VIT))
    path = tmp_path / "preprocessor_config.json"
    path.write_text('{"do_normalize": false}')
    arguments = HFBackbone.complete(name)
    assert (arguments["mean"], arguments["std"]) == ([0, 0, 0], [1, 1, 1])
    for text in ('{"do_flip_channel_order": true}', "{}", "[1]"):
        path.write_text(text)
        assert "give backbone.mean=[R,G,B] backbone.std=[R,G,B]" in message(**name)
    assert HFBackbone.complete({**name, "mean": MEAN, "std": STD})["mean"] == MEAN


def test_nothing_is_read_for_a_config_that_a_checkpoint_leaves_out(tmp_path):
    name = saved(tmp_path, classifier("vit", VIT))
    with pytest.raises(ConfigError, match=r"backbone.config=null: HFBackbone needs config"):
        HFBackbone(**name, mean=MEAN, std=STD)


def test_it_is_an_extra(monkeypatch):
    parts = build.check(compose(["+experiment=digits", "backbone=cvt_w24"]))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install -e '\.\[hf\]'$"):
        build.complete(parts)
