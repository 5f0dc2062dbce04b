"""Logits of heads against the official code, on rebuilt weights.

tests/unit/checkpoint/test_released.py and tests/full/checkpoint compare whole models.
"""

import fill
import numpy as np
import official
import pytest
import torch

from mldec.heads import CSRA
from mldec.heads.ml_decoder import MLDecoder
from mldec.heads.query2label import OFFICIAL_NAMES as QUERY2LABEL
from mldec.heads.query2label import Query2Label


def check(head, seed, channels, name, word_vectors=None):
    features = torch.from_numpy(fill.features(seed, (2, channels, 7, 7)))
    with torch.no_grad():
        logits = head.eval()(features, word_vectors)
    expected = np.load(official.NUMBERS / f"{name}.npz")["logits"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "seed", "classes", "groups"),
    [("full_decoding", 11, 20, 20), ("group_decoding", 12, 1001, 100), ("zero_shot", 13, 23, None)],
)
def test_ml_decoder_logits(name, seed, classes, groups):
    head = MLDecoder(512, classes, num_groups=groups, word_dim=None if groups else 300)
    head.load_state_dict(official.rebuilt(official.read(f"head_{name}.keys")))
    word_vectors = None if groups else torch.from_numpy(fill.word_vectors(classes))
    check(head, seed, 512, f"head_{name}", word_vectors)


@pytest.mark.parametrize("name", ["small", "self_attention"])
def test_query2label_logits(name):
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
    )
    weights = official.head_weights(facts["keys"], QUERY2LABEL)
    weights["fc_weight"] = weights["fc_weight"][0]
    weights["fc_bias"] = weights["fc_bias"][0]
    weights["input_proj.weight"] = weights["input_proj.weight"].flatten(1)  # a 1 x 1 convolution
    head.load_state_dict(weights)
    check(head, facts["features_seed"], facts["features"], f"query2label_{name}")


CSRA_NUMBERS = official.read("csra")


def normals(random, *shape):
    return torch.from_numpy(random.standard_normal(shape))


def assert_official(found, expected):
    np.testing.assert_allclose(found.detach().flatten(), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "case", CSRA_NUMBERS["cases"], ids=lambda case: f"{case['num_heads']}-{case['normalize']}"
)
def test_csra_logits_and_gradients(case):
    heads = case["num_heads"]
    random = np.random.RandomState(heads)
    features = normals(random, 2, 4, 2, 3).requires_grad_()
    weight = normals(random, heads, 2, 4)
    gradient = normals(random, 2, 2)

    settings = {"num_heads": heads, "normalize": case["normalize"], "lam": CSRA_NUMBERS["lam"]}
    head = CSRA(4, 2, **settings).double()
    with torch.no_grad():
        head.fc.weight.copy_(weight.transpose(0, 1).flatten(0, 1))
        if head.fc.bias is not None:
            head.fc.bias.zero_()
    logits = head(features)
    logits.backward(gradient)
    assert_official(logits, case["logits"])
    assert_official(features.grad, case["features_gradient"])
    weight_gradient = head.fc.weight.grad.unflatten(0, (2, heads)).transpose(0, 1)
    assert_official(weight_gradient, case["weight_gradient"])
