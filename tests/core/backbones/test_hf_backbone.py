"""Networks of transformers as backbones, with tiny configs of real architectures."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support import one_line
from torch import Tensor, nn
from torch.nn import functional as F

from mldec import build
from mldec.backbones import HFBackbone
from mldec.checkpoint import load_model
from mldec.config.compose import compose
from mldec.errors import CheckpointError, ConfigError

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64}
SMALL_VIT = {**SMALL, "intermediate_size": 48}
STAGES = {"depths": [1, 1, 1, 1]}
# Type, settings, side of the image in pixels, tokens per side.
NETWORKS = [
    ("vit", SMALL_VIT, 64, 4),
    ("vit", SMALL_VIT, 96, 6),
    ("deit", SMALL_VIT, 64, 4),
    ("dinov2", {**SMALL, "image_size": 56, "patch_size": 14}, 56, 4),
    ("dinov2_with_registers", {**SMALL, "image_size": 56, "patch_size": 14}, 56, 4),
    (
        "swin",
        {**STAGES, "embed_dim": 16, "num_heads": [1, 2, 4, 8], "image_size": 96, "window_size": 3},
        96,
        3,
    ),
    ("resnet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}, 64, 8),
    ("convnext", {**STAGES, "hidden_sizes": [8, 12, 16, 24]}, 64, 2),
    ("cvt", {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, 64, 4),
]
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
IDS = {"ids": lambda value: str(value)[:24]}


def classifier(model_type: str, settings: dict[str, Any]) -> nn.Module:
    """Return transformers' own network, without parameters of 0 or 1, so that each one counts."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**settings)
    network_class = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[type(config)]
    # DeiT has two, without and with a classifier for distillation.
    if isinstance(network_class, tuple):
        network_class = network_class[0]
    network = network_class(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return network


def saved(folder: Path, network: nn.Module) -> dict[str, Any]:
    """Save a network as transformers does, and return what names it."""
    network.save_pretrained(folder)
    processor = {"do_normalize": True, "image_mean": MEAN, "image_std": STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return {"name": str(folder)}


def opened(**arguments: Any) -> HFBackbone:
    return HFBackbone(**HFBackbone.complete(arguments))


def message(**arguments: Any) -> str:
    """Return the one line that a user sees."""
    with pytest.raises(ConfigError) as caught:
        opened(**arguments)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("backbone")
    assert len(text) < 500
    return text


def photos(size: int, count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


def normalised(images: Tensor) -> Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def hidden_state(network: nn.Module, images: Tensor) -> Tensor:
    """Return the last hidden state of transformers' own forward."""
    options = {}
    if "interpolate_pos_encoding" in inspect.signature(network.base_model.forward).parameters:
        options["interpolate_pos_encoding"] = True
    with torch.no_grad():
        return network.base_model(normalised(images), **options).last_hidden_state


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def as_published(network: nn.Module) -> nn.Module:
    """Give a CvT of transformers the activation that its authors trained it with."""
    for module in network.modules():
        if type(module).__name__ == "CvtIntermediate":
            module.activation = QuickGELU()
    return network


class TestTokens:
    @pytest.mark.parametrize(("model_type", "settings", "size", "side"), NETWORKS, **IDS)
    def test_they_are_those_of_transformers_to_the_last_bit(
        self, tmp_path: Path, model_type: str, settings: dict[str, Any], size: int, side: int
    ) -> None:
        network = as_published(classifier(model_type, settings))
        backbone = opened(
            **saved(tmp_path, network), pretrained=True, image_size=size, feature_norm="none"
        ).eval()
        expected = hidden_state(network, photos(size))
        with torch.no_grad():
            tokens = backbone(photos(size))

        assert tokens.shape == (2, side * side, backbone.num_features)
        if expected.ndim == 4:
            for row in range(side):
                for column in range(side):
                    token = tokens[:, row * side + column]
                    assert torch.equal(token, expected[:, :, row, column])
        else:
            prefix = expected.shape[1] - side * side
            assert prefix == {"vit": 1, "deit": 2, "dinov2": 1, "swin": 0}.get(model_type, 5)
            assert torch.equal(tokens, expected[:, prefix:])

    @pytest.mark.parametrize(("model_type", "settings", "size", "side"), NETWORKS[-2:], **IDS)
    def test_the_norm_behind_the_pooling_is_applied_to_each(
        self, tmp_path: Path, model_type: str, settings: dict[str, Any], size: int, side: int
    ) -> None:
        network = as_published(classifier(model_type, settings))
        norm = (network if model_type == "cvt" else network.base_model).layernorm
        backbone = opened(**saved(tmp_path, network), pretrained=True).eval()

        tokens = hidden_state(network, photos(size)).flatten(2).transpose(1, 2)
        expected = F.layer_norm(tokens, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        with torch.no_grad():
            assert torch.equal(backbone(photos(size)), expected)

    def test_a_new_norm_is_a_layer_norm_on_top(self, tmp_path: Path) -> None:
        name = saved(tmp_path, classifier("vit", SMALL_VIT))
        tokens = opened(**name, feature_norm="new")(photos(64))
        torch.testing.assert_close(tokens.mean(-1), torch.zeros(2, 16), atol=1e-5, rtol=0)


class TestTraining:
    @pytest.mark.parametrize(("model_type", "settings", "size", "side"), NETWORKS, **IDS)
    def test_what_takes_no_part_is_frozen_and_all_else_gets_a_gradient(
        self, tmp_path: Path, model_type: str, settings: dict[str, Any], size: int, side: int
    ) -> None:
        backbone = opened(**saved(tmp_path, classifier(model_type, settings)), image_size=size)
        assert backbone.training
        frozen = {key for key, value in backbone.named_parameters() if not value.requires_grad}
        backbone.requires_grad_()
        backbone(photos(size)).square().sum().backward()
        assert frozen == {key for key, value in backbone.named_parameters() if value.grad is None}
        assert not any("classifier" in key for key in backbone.state_dict())

    def test_checkpointing_changes_no_gradient(self, tmp_path: Path) -> None:
        name = saved(tmp_path, classifier("vit", SMALL_VIT))
        plain, sparing = (
            opened(**name, pretrained=True, checkpointing=value) for value in (False, True)
        )
        for backbone in (plain, sparing):
            backbone(photos(64)).square().mean().backward()
        for expected, parameter in zip(plain.parameters(), sparing.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)

    def test_drop_path_of_a_cvt_drops_branches_of_the_last_stage_only(self, tmp_path: Path) -> None:
        name = saved(tmp_path, classifier(*NETWORKS[-1][:2]))
        backbone = opened(**name, pretrained=True, drop_path=0.9)
        drops = [module for module in backbone.modules() if type(module).__name__ == "DropPath"]
        rates = [drop.drop_prob for drop in drops]
        assert rates == pytest.approx([0, 0, 0.45, 0.45, 0.9, 0.9])

        # With both branches dropped, a layer hands its input on. transformers would return zeros.
        layer = backbone.network.base_model.encoder.stages[-1].layers[-1].train()
        x = torch.randn(64, 17, 64)
        unchanged = (layer(x, 4, 4) == x).all(dim=(1, 2))
        assert 30 < unchanged.sum() < 64

    def test_drop_path_replaces_the_rate_of_the_config(self, tmp_path: Path) -> None:
        settings = {**STAGES, "hidden_sizes": [8, 12, 16, 24], "drop_path_rate": 0.1}
        name = saved(tmp_path, classifier("convnext", settings))
        for rate in (0.0, 0.4):
            network = opened(**name, drop_path=rate).network
            assert network.config.drop_path_rate == rate


class TestWeights:
    def test_a_base_model_without_a_classifier_fits(self, tmp_path: Path) -> None:
        network = classifier("dinov2", NETWORKS[3][1])
        name = saved(tmp_path, network.base_model)
        backbone = opened(**name, pretrained=True, image_size=56).eval()
        expected = hidden_state(network, photos(56))[:, 1:]
        with torch.no_grad():
            assert torch.equal(backbone(photos(56)), expected)

    def test_a_file_of_weights_fits(self, tmp_path: Path) -> None:
        network = classifier("vit", SMALL_VIT)
        name = saved(tmp_path, network)
        torch.save(network.state_dict(), tmp_path / "weights.bin")
        torch.manual_seed(5)
        plain = opened(**name)
        after = torch.rand(4)
        torch.manual_seed(5)
        backbone = opened(**name, pretrained=str(tmp_path / "weights.bin"))
        assert torch.equal(torch.rand(4), after)
        key = "network.vit.embeddings.cls_token"
        assert torch.equal(backbone.state_dict()[key], network.vit.embeddings.cls_token)
        assert not torch.equal(plain.state_dict()[key], network.vit.embeddings.cls_token)

    def test_weights_with_a_gap_or_of_another_shape_are_refused(self, tmp_path: Path) -> None:
        network = classifier("vit", SMALL_VIT)
        name = saved(tmp_path, network)
        state = network.state_dict()
        lost = "vit.layernorm.weight"
        torch.save({key: state[key] for key in state if key != lost}, tmp_path / "gap.bin")
        text = message(**name, pretrained=str(tmp_path / "gap.bin"))
        assert "1 missing, such as vit.layernorm.weight" in text
        torch.save({**state, lost: torch.ones(31)}, tmp_path / "other.bin")
        assert "do not fit" in message(**name, pretrained=str(tmp_path / "other.bin"))
        assert "no such file" in message(**name, pretrained=str(tmp_path / "none.bin"))
        (tmp_path / "model.safetensors").unlink()
        assert f"cannot be had from {tmp_path}" in message(**name, pretrained=True)


class TestConfig:
    def test_it_is_complete_plain_data_of_the_architecture_alone(self, tmp_path: Path) -> None:
        network = classifier("vit", {**SMALL_VIT, "num_labels": 3})
        arguments = HFBackbone.complete(saved(tmp_path, network))
        config = arguments["config"]
        assert arguments["mean"] == MEAN
        assert arguments["std"] == STD
        assert config["model_type"] == "vit"
        assert config["hidden_size"] == 32
        assert "patch_size" in config
        assert not config.keys() & {"id2label", "architectures", "dtype", "auto_map"}
        assert json.loads(json.dumps(config)) == config
        assert HFBackbone.complete(arguments) == arguments

    def test_code_in_a_repository_is_never_run(self, tmp_path: Path) -> None:
        name = saved(tmp_path, classifier("vit", SMALL_VIT))
        (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
        path = tmp_path / "config.json"
        content = json.loads(path.read_text())
        code = {
            "auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"},
            "_attn_implementation_internal": "someone/kernels",
            "attn_implementation": "someone/kernels",
        }
        path.write_text(json.dumps({**content, **code}))
        arguments = HFBackbone.complete({**name, "pretrained": True})
        assert not arguments["config"].keys() & code.keys()
        HFBackbone(**arguments)
        assert not (tmp_path / "mark").exists()
        path.write_text(json.dumps({**content, **code, "model_type": "evil"}))
        assert "no image classification network of this type" in message(**name)

    @pytest.mark.parametrize("setting", ["attn_implementation", "id2label", "auto_map", "sise"])
    def test_a_setting_that_is_not_of_the_architecture_is_refused(self, setting: str) -> None:
        config = {"model_type": "vit", **SMALL_VIT, setting: {}}
        text = message(name="x", config=config, mean=MEAN, std=STD)
        assert text.startswith(f"backbone.config.{setting}: ViTConfig has no such setting")

    @pytest.mark.parametrize(
        ("config", "part"),
        [
            ({"model_type": "bert"}, "model_type=bert: transformers"),
            ({"model_type": "clip"}, "no image classification network of this type"),
            ({"model_type": "timm_wrapper"}, "no image classification network of this type"),
            ({"hidden_size": 32}, "model_type=None"),
            ({"model_type": "hgnet_v2"}, "its features are not one map or sequence"),
            ({"model_type": "vit", "hidden_size": "wide"}, "transformers refuses these settings"),
            ({"model_type": "vit", "patch_size": 0}, "transformers cannot build x"),
            ({"model_type": "vit", **SMALL_VIT, "num_channels": 4}, "failed"),
        ],
    )
    def test_other_networks_are_refused_in_one_line(
        self, config: dict[str, Any], part: str
    ) -> None:
        assert part in message(name="x", config=config, mean=MEAN, std=STD)

    @pytest.mark.parametrize(
        ("settings", "part"),
        [
            ({"feature_norm": "pretrained"}, "no norm behind its pooling"),
            ({"feature_norm": "nwe"}, "feature_norm=nwe: unknown; did you mean 'new'?"),
            ({"drop_path": 1}, "drop_path=1: give a rate in [0, 1)"),
            ({"drop_path": 0.1}, "drop_path=0.1: vit takes no such setting"),
            ({"mean": [0.5]}, "backbone.mean=[0.5]: give red, green and blue"),
            ({"image_size": 8}, "a trial image of 8 x 8 pixels failed"),
        ],
    )
    def test_other_settings_are_refused_in_one_line(
        self, settings: dict[str, Any], part: str
    ) -> None:
        arguments = {"config": {"model_type": "vit", **SMALL_VIT}, "mean": MEAN, "std": STD}
        assert part in message(name="x", **{**arguments, **settings})

    def test_cvt_has_no_checkpointing(self) -> None:
        config = {"model_type": "cvt", **NETWORKS[-1][1]}
        text = message(name="x", config=config, mean=MEAN, std=STD, checkpointing=True)
        assert text == "backbone.checkpointing=true: x does not support it; leave it out"

    def test_the_order_and_the_range_of_the_channels(self, tmp_path: Path) -> None:
        name = saved(tmp_path, classifier("vit", SMALL_VIT))
        path = tmp_path / "preprocessor_config.json"
        path.write_text('{"do_normalize": false}')
        arguments = HFBackbone.complete(name)
        assert (arguments["mean"], arguments["std"]) == ([0, 0, 0], [1, 1, 1])
        path.write_text('{"do_flip_channel_order": true}')
        assert "blue, green and red" in message(**name)
        path.write_text("{}")
        assert "give backbone.mean=[R,G,B] backbone.std=[R,G,B]" in message(**name)
        path.unlink()
        assert "give backbone.mean=[R,G,B] backbone.std=[R,G,B]" in message(**name)
        assert HFBackbone.complete({**name, "mean": MEAN, "std": STD})["mean"] == MEAN

    def test_nothing_is_read_for_a_config_that_a_checkpoint_leaves_out(
        self, tmp_path: Path
    ) -> None:
        name = saved(tmp_path, classifier("vit", SMALL_VIT))
        with pytest.raises(ConfigError, match=r"backbone.config=null: HFBackbone needs config"):
            HFBackbone(**name, mean=MEAN, std=STD)


def test_it_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["+experiment=digits", "backbone=cvt_w24"])
    parts = build.check(config)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'mldec\[hf\]'$"):
        build.complete(parts)


def test_the_option_of_cvt_is_that_of_the_paper() -> None:
    folder = Path(__file__).parents[3] / "configs" / "backbone"
    node = yaml.safe_load((folder / "cvt_w24.yaml").read_text())
    assert node.pop("_target_") == "mldec.backbones.HFBackbone"
    sizes = {"embed_dim": [192, 768, 1024], "num_heads": [3, 12, 16], "depth": [2, 2, 20]}
    config = {"model_type": "cvt", **sizes}
    with torch.device("meta"):
        backbone = HFBackbone(**{**node, "pretrained": False}, config=config, mean=MEAN, std=STD)
    millions = sum(parameter.numel() for parameter in backbone.network.parameters()) / 1e6
    assert millions == pytest.approx(276, abs=0.5)
    tokens = backbone(torch.empty(1, 3, 384, 384, dtype=torch.uint8, device="meta"))
    assert tokens.shape == (1, 24 * 24, 1024)


def test_a_run_is_trained_resumed_and_loaded_without_its_folder(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    saved(model, classifier(*NETWORKS[-1][:2]))
    words = [
        "+experiment=digits",
        "backbone=hf",
        f"backbone.name={model}",
        "data.train_images=64",
        "data.val_images=32",
        "train.workers=0",
        "train.batch_size=32",
        "device=cpu",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    status, _, err = cli("train", *words, "train.epochs=1")
    assert status == 0, err
    model.rename(tmp_path / "gone")
    loaded = load_model(tmp_path / "run")
    assert loaded.config.backbone["config"]["embed_dim"] == [16, 32, 64]
    assert loaded.config.backbone["_target_"] == "mldec.backbones.HFBackbone"
    assert loaded.model.backbone.mean.flatten().tolist() == pytest.approx(MEAN)
    with torch.no_grad():
        assert loaded.model(photos(64)).shape[0] == 2

    # A stranger's file cannot make us read a folder or ask the hub, or build what it cannot fill.
    path = tmp_path / "run" / "checkpoints" / "last.pt"
    state = torch.load(path, weights_only=True)
    path.with_name("last.pt.sha256").unlink()
    for change, part in [
        ({"config": None, "name": str(tmp_path / "gone")}, "backbone.config=null"),
        ({"config": {"model_type": "vit", "hidden_size": 2**30}}, "does not fit the model"),
        ({"config": {"model_type": "vit", "num_hidden_layers": 40}}, "does not fit the model"),
        ({"config": {"model_type": "vit", "auto_map": {}}}, "no such setting"),
    ]:
        backbone = {**state["config"]["backbone"], **change}
        torch.save({**state, "config": {**state["config"], "backbone": backbone}}, path)
        with pytest.raises(CheckpointError) as caught:
            load_model(path)
        one_line(f"mldec: {caught.value}\n", part)


HUB = """
import time
from mldec.backbones import HFBackbone

slept = []
time.sleep = slept.append

print(HFBackbone.complete({"name": "owner/cached"})["config"]["hidden_size"])
try:
    HFBackbone.complete({"name": "microsoft/cvt-w24-384-22k"})
except ValueError as error:
    print(len(slept), error)
"""


def test_the_hub_without_a_network(tmp_path: Path) -> None:
    """From the cache at once, else one line and no wait: nothing listens at the address."""
    cached = tmp_path / "models--owner--cached"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    saved(cached / "snapshots" / ("0" * 40), classifier("vit", SMALL_VIT))
    dead = "http://127.0.0.1:9"
    network = {"HF_ENDPOINT": dead, "HTTPS_PROXY": dead, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", HUB],
        env={**os.environ, **network, "HF_HUB_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    size, refusal = done.stdout.splitlines()
    assert size == "32"
    waits, _, text = refusal.partition(" ")
    assert waits == "0"
    address = f"config.json cannot be had from {dead}/microsoft/cvt-w24-384-22k"
    assert text.startswith(f"backbone.name=microsoft/cvt-w24-384-22k: {address}")
    assert text.endswith("give a folder that save_pretrained wrote as backbone.name")
