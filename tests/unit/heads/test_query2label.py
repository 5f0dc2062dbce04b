"""Initialization, sizes and dropout of Query2Label; tests/parity checks its logits."""

import math

import pytest
import torch
from random_weights import noise, randomize

from mldec.heads.query2label import Query2Label


def test_dropout_of_label_queries_differs_between_images():
    sizes = {"embed_dim": 16, "num_heads": 4, "mlp_dim": 24}
    head = randomize(Query2Label(16, 5, **sizes, dropout=0.5, self_attention=True)).train()
    inputs = []
    head.decoder[0].norm1.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    head(noise(1, 9, 16).expand(2, -1, -1))
    assert not torch.equal(inputs[0][0], inputs[0][1])


def test_initialization_matches_official_code():
    torch.manual_seed(0)
    sizes = {"embed_dim": 64, "num_heads": 4, "mlp_dim": 256}
    state = Query2Label(48, 300, **sizes, input_proj=True, self_attention=True).state_dict()
    bounds = {"input_proj.weight": 48**-0.5, "fc_weight": 64**-0.5, "fc_bias": 64**-0.5}
    for name, tensor in state.items():
        if name.startswith(("encoder.", "decoder.")) and tensor.dim() == 2:
            bounds[name] = math.sqrt(6 / sum(tensor.shape))
        elif ".norm" in name or name.startswith("norm."):
            assert (tensor == int(name.endswith("weight"))).all(), name
        elif "attn" in name:
            assert not tensor.any(), name

    for name, bound in bounds.items():
        values = state[name]
        assert bound * (1 - 20 / values.numel()) < values.abs().max() <= bound, name
        spread = pytest.approx(bound / math.sqrt(3), rel=6 / math.sqrt(2 * values.numel()))
        assert values.std().item() == spread, name
    assert state["queries"].std().item() == pytest.approx(1, abs=0.03)
    assert state["queries"].abs().max() > 3.5


def test_default_sizes_are_official():
    with torch.device("meta"):
        head = Query2Label(2048, 80)
    attention = 4 * 2048 * 2048 + 4 * 2048
    mlp = 2 * 2048 * 8192 + 8192 + 2048
    layer = attention + mlp + 2 * 2 * 2048
    assert (len(head.encoder), len(head.decoder)) == (1, 2)
    assert head.decoder[0].cross_attn.num_heads == 4
    count = sum(value.numel() for value in head.parameters())
    assert count == 3 * layer + 2 * 2048 + 2 * 80 * 2048 + 80
