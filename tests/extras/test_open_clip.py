"""OpenClipBackbone: image towers of open_clip, without weights."""

import sys

import pytest
from clip_models import CLIP, SIGLIP, WIDTH

from mldec.backbones import OpenClipBackbone
from mldec.errors import ConfigError

MEAN = (0.5, 0.25, 0.0)
STD = (0.5, 0.25, 1.0)


def build(vision, **settings):
    settings = {"embed_dim": WIDTH, "image_size": 32, "mean": MEAN, "std": STD, **settings}
    return OpenClipBackbone("small", vision=vision, **settings).eval()


def test_quick_gelu_selects_activation():
    for quick_gelu in (True, False):
        modules = build(CLIP["vision_cfg"], quick_gelu=quick_gelu).modules()
        assert ("QuickGELU" in {type(module).__name__ for module in modules}) == quick_gelu


def with_trunk(name):
    return {**SIGLIP["vision_cfg"], "timm_model_name": name}


@pytest.mark.parametrize(
    ("vision", "settings", "name"),
    [
        (with_trunk("hf-hub:owner/name"), {}, r"backbone\.vision\.timm_model_name=hf-hub"),
        ({"depth": 3}, {}, r"backbone\.vision: small.*depth"),
        (CLIP["vision_cfg"], {"std": (1, 1, 0)}, r"backbone\.std"),
        (None, {}, r"pip install -e '\.\[text\]'"),
    ],
)
def test_errors_name_the_setting(monkeypatch, vision, settings, name):
    if vision is None:
        vision = CLIP["vision_cfg"]
        monkeypatch.setitem(sys.modules, "open_clip.model", None)
    with pytest.raises(ConfigError, match=name):
        build(vision, **settings)
