"""The layers of the decoder heads are those of torch, with positions."""

import pytest
import torch
import torch.nn.functional as F
from random_weights import noise, randomise
from torch import nn

from mldec.heads.layers import Attention, DecoderLayer, EncoderLayer

DIM, HEADS, MLP = 16, 4, 24
NAMES = {"cross_attn.": "multihead_attn.", "mlp.0.": "linear1.", "mlp.3.": "linear2."}


def as_in_torch(state):
    """Tensors of a layer under the names of torch's own transformer layers."""
    for ours, theirs in NAMES.items():
        state = {name.replace(ours, theirs): value for name, value in state.items()}
    return state


@torch.no_grad()
def test_an_encoder_layer_without_positions_is_that_of_torch():
    ours = randomise(EncoderLayer(DIM, HEADS, MLP, 0.1))
    theirs = nn.TransformerEncoderLayer(
        DIM, HEADS, MLP, batch_first=True, dtype=torch.float64
    ).eval()
    theirs.load_state_dict(as_in_torch(ours.state_dict()))
    tokens = noise(2, 9, DIM)
    torch.testing.assert_close(
        ours(tokens, torch.zeros(9, DIM)), theirs(tokens), rtol=1e-10, atol=1e-10
    )


@torch.no_grad()
def test_a_decoder_layer_without_positions_is_that_of_torch():
    ours = randomise(DecoderLayer(DIM, HEADS, MLP, 0.1, query_step="self_attention"))
    theirs = nn.TransformerDecoderLayer(
        DIM, HEADS, MLP, batch_first=True, dtype=torch.float64
    ).eval()
    theirs.load_state_dict(as_in_torch(ours.state_dict()))
    x, tokens = noise(2, 5, DIM), noise(2, 9, DIM, seed=2)
    torch.testing.assert_close(ours(x, tokens)[0], theirs(x, tokens), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_attention_is_that_of_torch(batch):
    """Also for a query of batch size 1, which the whole batch shares."""
    ours = randomise(Attention(DIM, HEADS, 0.1))
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=True, dtype=torch.float64).eval()
    theirs.load_state_dict(ours.state_dict())
    query, key, value = noise(batch, 5, DIM), noise(3, 9, DIM, seed=2), noise(3, 9, DIM, seed=3)

    attended, weights = ours(query, key, value, need_weights=True)
    expected, expected_weights = theirs(query.expand(3, -1, -1), key, value)
    torch.testing.assert_close(attended, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=0, atol=1e-6)
    assert ours(query, key, value)[1] is None


@pytest.mark.parametrize("batch", [1, 3])
def test_the_gradient_of_the_weights_is_that_of_an_attention_that_keeps_them(batch):
    layer = randomise(Attention(DIM, HEADS, 0.1))
    query, key, value = noise(batch, 5, DIM), noise(3, 9, DIM, seed=2), noise(3, 9, DIM, seed=3)
    direction = noise(3, 5, DIM, seed=4)

    # Plain attention, head by head, whose weights are in the graph.
    (wq, wk, wv), (bq, bk, bv) = layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3)
    q, k, v = query @ wq.T + bq, key @ wk.T + bk, value @ wv.T + bv
    weights, attended, width = [], [], DIM // HEADS
    for head in range(HEADS):
        part = slice(head * width, (head + 1) * width)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / width**0.5
        weights.append(scores.softmax(-1).expand(3, -1, -1))
        attended.append(weights[-1] @ v[..., part])
    attended = torch.cat(attended, -1) @ layer.out_proj.weight.T + layer.out_proj.bias
    expected = torch.autograd.grad((attended * direction).sum(), weights)

    gradients = layer.weight_gradients(value, direction)
    torch.testing.assert_close(gradients, torch.stack(expected, 1), rtol=1e-10, atol=1e-10)
    ours = layer.weights(query, key)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), torch.stack(weights, 1), rtol=0, atol=1e-6)


def test_attention_starts_as_that_of_torch():
    torch.manual_seed(0)
    ours = Attention(64, HEADS, 0.0)
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(64, HEADS, batch_first=True)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in ours.state_dict().items():
        reference = theirs.state_dict()[name]
        assert tensor.shape == reference.shape
        assert tensor.std().item() == pytest.approx(reference.std().item(), rel=0.1, abs=1e-9)


@pytest.mark.parametrize("query_step", ["self_attention", "double", "norm", "none"])
@torch.no_grad()
def test_a_decoder_layer_is_its_description(query_step):
    layer = randomise(DecoderLayer(DIM, HEADS, MLP, 0.1, query_step=query_step))
    x, tokens = noise(2, 5, DIM), noise(2, 9, DIM, seed=2)
    at, near = noise(5, DIM, seed=3), noise(9, DIM, seed=4)

    def norm(of, x):
        return F.layer_norm(x, (DIM,), of.weight, of.bias)

    expected = x
    if query_step == "self_attention":
        expected = norm(layer.norm1, x + layer.self_attn(x + at, x + at, x)[0])
    elif query_step == "double":
        expected = norm(layer.norm1, 2 * x)
    elif query_step == "norm":
        expected = norm(layer.norm1, x)
    attended, weights = layer.cross_attn(expected + at, tokens + near, tokens, need_weights=True)
    expected = norm(layer.norm2, expected + attended)
    expected = norm(layer.norm3, expected + layer.mlp(expected))

    decoded, given = layer(x, tokens, query_positions=at, token_positions=near, need_weights=True)
    torch.testing.assert_close(decoded, expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(given, weights)
    assert hasattr(layer, "norm1") == (query_step != "none")


@torch.no_grad()
def test_positions_of_an_encoder_layer_are_added_to_queries_and_keys_only():
    layer = randomise(EncoderLayer(DIM, HEADS, MLP, 0.1))
    tokens, positions = noise(2, 9, DIM), noise(9, DIM, seed=2)
    attended, _ = layer.self_attn(tokens + positions, tokens + positions, tokens)
    expected = layer.norm1(tokens + attended)
    expected = layer.norm2(expected + layer.mlp(expected))
    torch.testing.assert_close(layer(tokens, positions), expected, rtol=1e-10, atol=1e-10)
