"""Image towers of open_clip, without weights."""

import sys

import pytest
import torch
from clip_models import CLIP, SIGLIP, WIDTH

from mldec.backbones import OpenClipBackbone
from mldec.errors import ConfigError

MEAN, STD = (0.5, 0.25, 0.0), (0.5, 0.25, 1.0)


def built(vision, **settings):
    settings = {"embed_dim": WIDTH, "image_size": 32, "mean": MEAN, "std": STD, **settings}
    return OpenClipBackbone("small", vision=vision, **settings).eval()


@torch.no_grad()
@pytest.mark.parametrize("model", [CLIP, SIGLIP], ids=["clip", "siglip"])
def test_an_image_has_one_token_its_embedding(model):
    backbone = built(model["vision_cfg"])
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    tokens = backbone(images)
    assert tokens.shape == (2, 1, WIDTH)
    assert backbone.num_features == WIDTH

    normalised = (images / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(tokens[:, 0], backbone.network(normalised))


@torch.no_grad()
def test_a_tower_that_gives_tokens_too_gives_its_embedding_only():
    vision = {**CLIP["vision_cfg"], "output_tokens": True}
    assert built(vision)(torch.zeros(1, 3, 32, 32)).shape == (1, 1, WIDTH)


def test_the_activation_is_part_of_the_tower():
    quick, usual = (built(CLIP["vision_cfg"], quick_gelu=value) for value in (True, False))
    names = [{type(module).__name__ for module in each.modules()} for each in (quick, usual)]
    assert "QuickGELU" in names[0]
    assert "QuickGELU" not in names[1]


@pytest.mark.parametrize("name", ["hf-hub:owner/name", "local-dir:/tmp", "no_such_network"])
def test_a_tower_of_timm_is_one_of_its_registry(name):
    vision = {**SIGLIP["vision_cfg"], "timm_model_name": name}
    with pytest.raises(ConfigError, match=r"backbone.vision.timm_model_name=.*no such network"):
        built(vision)


def test_what_cannot_be_built_is_one_line(monkeypatch):
    with pytest.raises(ConfigError, match=r"^backbone.vision: small cannot be used .*depth"):
        built({"depth": 3})
    with pytest.raises(ConfigError, match=r"backbone.std="):
        built(CLIP["vision_cfg"], std=(1, 1, 0))
    with pytest.raises(ConfigError, match=r"backbone.name=small cannot be used"):
        built({**CLIP["vision_cfg"], "patch_size": 64})

    monkeypatch.setitem(sys.modules, "open_clip.model", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[text\]'"):
        built(CLIP["vision_cfg"])
