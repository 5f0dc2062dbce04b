"""Backbones of timm and transformers that are slow to test. Nothing is downloaded."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import yaml
from safetensors.torch import save_file
from torch.nn import functional as F

from mldec.backbones import TimmBackbone

FOLDER = Path(__file__).parents[3] / "configs" / "backbone"
# Option files with a network of timm.
FILES = [path for path in FOLDER.glob("*.yaml") if path.stem != "timm"]
OPTIONS = sorted(path for path in FILES if "TimmBackbone" in path.read_text(encoding="utf-8"))
PARAMETERS = {"tresnet_m": 29.34, "tresnet_l": 44.13, "tresnet_xl": 67.25}  # published, millions
CVT = {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}
MEAN = [0.5, 0.4, 0.3]
STD = [0.2, 0.3, 0.4]

SHALLOW = {"depth": 2, "embed_dim": 64, "num_heads": 4}
# Name, settings, pixels per side, number of tokens.
NETWORKS = [
    ("tresnet_m", {}, 64, 4),
    ("efficientnet_b0", {}, 64, 4),
    ("swinv2_tiny_window8_256", {"image_size": 64}, 64, 4),
    ("volo_d1_224", {"image_size": 64}, 64, 16),
    ("hiera_tiny_224", {}, 224, 49),
    ("eva02_tiny_patch14_224", {"image_size": 56}, 56, 16),
    ("vit_small_patch14_reg4_dinov2", {"image_size": 56, "model_args": SHALLOW}, 56, 16),
    ("vit_base_patch16_siglip_224.v2_webli", {"image_size": 64, "model_args": SHALLOW}, 64, 16),
]


def noise(size):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (2, 3, size, size), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("name", "settings", "size", "count"), NETWORKS)
@torch.no_grad()
def test_weights_are_loaded_and_mean_token_is_pooled_feature(tmp_path, name, settings, size, count):
    torch.manual_seed(0)
    images = noise(size)
    arguments = dict(settings.get("model_args", {}))
    if "image_size" in settings:
        arguments["img_size"] = size
    whole = timm.create_model(name, num_classes=5, **arguments)
    torch.save(whole.state_dict(), tmp_path / "weights.pth")
    backbone = TimmBackbone(name, pretrained=str(tmp_path / "weights.pth"), **settings).eval()
    state = whole.state_dict()
    own = backbone.network.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in own.items())
    tokens = backbone(images)
    assert tokens.shape == (2, count, backbone.num_features)

    # These networks have no norm after the pooling.
    if name.startswith(("tresnet", "efficientnet", "swin")):
        normalized = (images.float() / 255 - backbone.mean) / backbone.std
        features = whole.eval().forward_features(normalized)
        pooled = whole.forward_head(features, pre_logits=True).flatten(1)
        torch.testing.assert_close(tokens.mean(1), pooled)


# Encoders of the recipes: name, number of prefix tokens, and pixels per side of a patch.
ENCODERS = [
    ("vit_base_patch16_dinov3.lvd1689m", 5, 16),
    ("vit_base_patch14_reg4_dinov2.lvd142m", 5, 14),
    ("vit_large_patch14_clip_quickgelu_336.openai", 1, 14),
    ("vit_base_patch16_siglip_gap_224.v2_webli", 0, 16),
]


@pytest.mark.parametrize(("name", "prefix", "patch"), ENCODERS)
@torch.no_grad()
def test_position_embeddings_are_resampled(name, prefix, patch, tmp_path):
    shallow = {"embed_dim": 32, "depth": 1, "num_heads": 2}
    state = timm.create_model(name, num_classes=0, **shallow).state_dict()
    save_file(state, tmp_path / "weights.safetensors")
    size = 10 * patch
    settings = {"pretrained": str(tmp_path / "weights.safetensors"), "image_size": size}
    backbone = TimmBackbone(name, model_args=shallow, **settings).eval()

    # Resample the embeddings of the patches. DINOv3 has rotary positions, which are not stored.
    if "pos_embed" in state:
        old = state["pos_embed"]
        side = int(old.shape[1] ** 0.5)
        own, grid = old.split([old.shape[1] - side**2, side**2], dim=1)
        image = grid.unflatten(1, (side, side)).permute(0, 3, 1, 2)
        new = F.interpolate(image, (10, 10), mode="bicubic", antialias=True)
        state["pos_embed"] = torch.cat([own, new.flatten(2).transpose(1, 2)], 1)
    by_hand = timm.create_model(name, num_classes=0, img_size=size, **shallow).eval()
    by_hand.load_state_dict(state)

    normalized = (noise(size).float() / 255 - backbone.mean) / backbone.std
    expected = by_hand.forward_features(normalized)[:, prefix:]
    torch.testing.assert_close(backbone(noise(size)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: path.stem)
def test_option_builds_network_of_documented_size(path):
    node = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert node.pop("_target_") == "mldec.backbones.TimmBackbone"
    settings = {key: 224 if value == "${data.image_size}" else value for key, value in node.items()}
    if settings.pop("pretrained", False):
        # The name has a tag, because the default of timm may change.
        hub_id = timm.models.get_pretrained_cfg(settings["name"]).hf_hub_id
        assert hub_id == f"timm/{settings['name']}"
        assert "." in settings["name"]

    with torch.device("meta"):
        backbone = TimmBackbone(**settings)
    tokens = backbone(torch.empty(2, 3, 224, 224, dtype=torch.uint8, device="meta"))
    assert tokens.shape[::2] == (2, backbone.num_features)
    assert tokens.shape[1] >= 49
    millions = sum(parameter.numel() for parameter in backbone.network.parameters()) / 1e6
    written = re.match(r"# .*?([\d.]+) M parameters", path.read_text(encoding="utf-8"))
    assert float(written[1]) == pytest.approx(millions, rel=0.03)
    if path.stem in PARAMETERS:
        assert millions == pytest.approx(PARAMETERS[path.stem], abs=0.005)
        assert backbone.num_features == 2048


def save_cvt(folder):
    """Save a small CvT as transformers does."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    config = transformers.CvtConfig(**CVT)
    transformers.CvtForImageClassification(config).save_pretrained(folder)
    text = f'{{"image_mean": {MEAN}, "image_std": {STD}}}'
    (folder / "preprocessor_config.json").write_text(text)


HUB = """
import time
from mldec.backbones import HFBackbone, TimmBackbone

slept = []
time.sleep = slept.append
TimmBackbone("resnet10t", pretrained=True)
cvt = {"model_type": "cvt", "embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}
HFBackbone("owner/cached", config=cvt, pretrained=True)
for attempt in (
    lambda: TimmBackbone("resnet18.tv_in1k", pretrained=True),
    lambda: TimmBackbone("gcvit_xxtiny", pretrained=True),
    lambda: HFBackbone("microsoft/cvt-w24-384-22k", config=cvt, pretrained=True),
):
    try:
        attempt()
    except ValueError as error:
        print(len(slept), error)
"""


def test_only_cache_is_used_offline(tmp_path):
    cached = [tmp_path / f"models--{name}" for name in ("timm--resnet10t.c3_in1k", "owner--cached")]
    for folder in cached:
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
    resnet, cvt = (folder / "snapshots" / ("0" * 40) for folder in cached)
    resnet.mkdir(parents=True)
    save_file(timm.create_model("resnet10t").state_dict(), resnet / "model.safetensors")
    save_cvt(cvt)

    dead = "http://127.0.0.1:9"  # a closed port
    variables = {"HF_ENDPOINT": dead, "HTTPS_PROXY": dead, "https_proxy": dead}
    variables |= {"HF_HUB_CACHE": str(tmp_path), "TORCH_HOME": str(tmp_path)}
    environment = os.environ | variables | {"NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", HUB]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("0 backbone.") for line in lines)
    assert "Traceback" not in done.stderr
