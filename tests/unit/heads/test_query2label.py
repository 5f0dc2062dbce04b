"""Query2Label against independent code of its formulas and of its initialization."""

import math

import pytest
import torch
import torch.nn.functional as F
from random_weights import noise, randomize
from torch import nn

from mldec.heads.query2label import Query2Label

DIM, HEADS, MLP = 16, 4, 24


def small(num_classes=5, in_features=DIM, **options):
    sizes = {"embed_dim": DIM, "num_heads": HEADS, "mlp_dim": MLP}
    return randomize(Query2Label(in_features, num_classes, **{**sizes, **options}))


def attend(attention, query, key, value):
    reference = nn.MultiheadAttention(query.shape[-1], HEADS, batch_first=True, dtype=query.dtype)
    reference.load_state_dict(attention.state_dict())
    return reference(query, key, value)


def feed_forward(layer, x):
    hidden = F.relu(F.linear(x, layer.mlp[0].weight, layer.mlp[0].bias))
    return F.linear(hidden, layer.mlp[3].weight, layer.mlp[3].bias)


def norm(layer, x):
    return F.layer_norm(x, x.shape[-1:], layer.weight, layer.bias, 1e-5)


def detr_positions(height, width, dim):
    """Return the sine positions of DETR, channel by channel."""
    ones = torch.ones(height, width)
    half, channels = dim // 2, []
    for count in (ones.cumsum(0), ones.cumsum(1)):  # y, then x
        angle = count / (count.max() + 1e-6) * 2 * math.pi
        for channel in range(half):
            wave = torch.cos if channel % 2 else torch.sin
            channels.append(wave(angle / 10_000 ** (2 * (channel // 2) / half)))
    return torch.stack(channels, dim=-1).reshape(height * width, dim)


def official(head, tokens):
    """Return logits and attention weights of the official transformer."""
    memory = head.input_proj(tokens)
    side = math.isqrt(tokens.shape[1])
    positions = detr_positions(side, side, memory.shape[-1]).double()
    for layer in head.encoder:
        placed = memory + positions
        memory = norm(layer.norm1, memory + attend(layer.self_attn, placed, placed, memory)[0])
        memory = norm(layer.norm2, memory + feed_forward(layer, memory))
    labels = head.queries.expand(len(tokens), -1, -1)
    x, weights = torch.zeros_like(labels), None
    for layer in head.decoder:
        if hasattr(layer, "self_attn"):
            x = norm(layer.norm1, x + attend(layer.self_attn, x + labels, x + labels, x)[0])
        attended, weights = attend(layer.cross_attn, x + labels, memory + positions, memory)
        x = norm(layer.norm2, x + attended)
        x = norm(layer.norm3, x + feed_forward(layer, x))
    x = norm(head.norm, x)
    logits = [x[:, k] @ head.fc_weight[k] + head.fc_bias[k] for k in range(len(head.fc_bias))]
    return torch.stack(logits, dim=1), weights


@pytest.mark.parametrize(
    ("side", "options"),
    [
        (4, {}),
        (1, {}),
        (7, {"self_attention": True}),
        (4, {"encoder_layers": 0}),
        (4, {"encoder_layers": 2, "decoder_layers": 1}),
        (4, {"decoder_layers": 3, "self_attention": True}),
        (4, {"in_features": 10, "input_proj": True}),
        (4, {"in_features": DIM, "input_proj": True}),
    ],
)
@torch.no_grad()
def test_logits_and_attention_match_official_formula(side, options):
    head = small(**options)
    tokens = noise(3, side**2, options.get("in_features", DIM))
    logits, weights = head(tokens, attention=True)
    expected, expected_weights = official(head, tokens)
    assert logits.shape == (3, 5)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)  # positions are float32
    torch.testing.assert_close(weights.double(), expected_weights, rtol=0, atol=1e-5)
    assert torch.equal(logits, head(tokens))


def test_dropout_of_label_queries_differs_between_images():
    head = small(dropout=0.5, self_attention=True).train()
    inputs = []
    head.decoder[0].norm1.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    head(noise(1, 9, DIM).expand(2, -1, -1))
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
