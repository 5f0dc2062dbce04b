"""Logits of the official code on rebuilt weights: heads alone, and whole models."""

import fill
import numpy as np
import official
import pytest
import torch

from mldec import build
from mldec.config.compose import compose, override
from mldec.data.types import Classes
from mldec.heads.ml_decoder import MLDecoder
from mldec.heads.query2label import OFFICIAL_NAMES as QUERY2LABEL
from mldec.heads.query2label import Query2Label


def feature_map(seed: int, channels: int) -> torch.Tensor:
    return torch.from_numpy(fill.features(seed, (2, channels, 7, 7)))


@pytest.mark.parametrize(
    ("name", "seed", "classes", "groups"),
    [("full_decoding", 11, 20, 20), ("group_decoding", 12, 1001, 100), ("zero_shot", 13, 23, None)],
)
def test_ml_decoder(name: str, seed: int, classes: int, groups: int | None) -> None:
    head = MLDecoder(512, classes, num_groups=groups, word_dim=None if groups else 300).eval()
    head.load_state_dict(official.rebuilt(official.read(f"head_{name}.keys")))
    queries = None if groups else torch.from_numpy(fill.word_vectors(classes))
    with torch.no_grad():
        logits = head(feature_map(seed, 512), queries)
    expected = np.load(official.NUMBERS / f"head_{name}.npz")["logits"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["small", "self_attention"])
def test_query2label(name: str) -> None:
    facts = official.read(f"query2label_{name}")
    head = Query2Label(
        facts["features"],
        facts["classes"],
        embed_dim=facts["d_model"],
        num_heads=facts["nhead"],
        mlp_dim=facts["dim_feedforward"],
        encoder_layers=facts["encoder_layers"],
        decoder_layers=facts["decoder_layers"],
        input_proj=facts["input_proj"],
        self_attention=facts["decoder_self_attention"],
    ).eval()
    weights = official.head_weights(facts["keys"], QUERY2LABEL)
    weights["fc_weight"], weights["fc_bias"] = weights["fc_weight"][0], weights["fc_bias"][0]
    weights["input_proj.weight"] = weights["input_proj.weight"].flatten(
        1
    )  # a 1 x 1 convolution there
    head.load_state_dict(weights)
    with torch.no_grad():
        logits = head(feature_map(facts["features_seed"], facts["features"]))
    expected = np.load(official.NUMBERS / f"query2label_{name}.npz")["logits"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "backbone", "size", "classes", "groups"),
    [
        ("tresnet_m_coco_224", "tresnet_m", 224, 80, 80),
        ("tresnet_l_coco_448", "tresnet_l", 448, 80, 80),
        ("tresnet_m_openimages_224", "tresnet_m", 224, 9605, 200),
    ],
)
def test_whole_model(name: str, backbone: str, size: int, classes: int, groups: int) -> None:
    config = override(compose([f"+experiment=coco_{backbone}"]), [f"head.num_groups={groups}"])
    model = build.model(
        build.check(config), Classes(tuple(map(str, range(classes)))), pretrained=False
    ).eval()
    weights = official.model_weights(official.read(f"{name}.keys"))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(
        key.endswith(("num_batches_tracked", "backbone.mean", "backbone.std")) for key in missing
    )
    images = torch.from_numpy(fill.images(size))
    with torch.no_grad():
        pooled, logits = model.backbone(images).mean(1), model(images)
    expected = np.load(official.NUMBERS / f"{name}.npz")
    np.testing.assert_allclose(pooled, expected["pooled_features"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)
