import numpy as np
import pytest
import torch
import torch.nn.functional as F
from random_weights import randomise
from torch import nn

from mldec.errors import ConfigError
from mldec.heads.layers import (
    Attention,
    DecoderLayer,
    EncoderLayer,
    as_tokens,
    at_least_one,
    check_words,
)

DIM, HEADS, MLP = 16, 4, 24
NAMES = {"cross_attn.": "multihead_attn.", "mlp.0.": "linear1.", "mlp.3.": "linear2."}


def noise(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


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


@pytest.mark.parametrize(("embed_dim", "num_heads"), [(16, 3), (16, 0), (16, -4)])
def test_heads_divide_the_width(embed_dim, num_heads):
    with pytest.raises(ConfigError, match=f"{embed_dim} is not a multiple of .* {num_heads}$"):
        Attention(embed_dim, num_heads, 0.0)


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


def test_a_size_below_1_is_named():
    at_least_one(embed_dim=1, num_layers=3)
    with pytest.raises(ConfigError, match=r"^head\.num_layers is 0: it must be at least 1$"):
        at_least_one(embed_dim=1, num_layers=0, mlp_dim=-1)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (np.zeros((2, 9, 16)), "tokens are a ndarray: give a tensor"),
        (torch.zeros(2, 16), r"of the shape \[2, 16\]: give floating point \[B, N, 16\]"),
        (torch.zeros(2, 9, 8), r"of the shape \[2, 9, 8\]"),
        (torch.zeros(2, 9, 16, dtype=torch.int64), "tokens are torch.int64"),
    ],
)
def test_what_is_no_token_is_refused(tokens, said):
    good = torch.zeros(2, 9, 16, dtype=torch.float16)
    assert as_tokens(good, 16) is good
    with pytest.raises(ValueError, match=said):
        as_tokens(tokens, 16)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (None, "got none"),
        ([[1.0] * 5], "got a list"),
        (torch.zeros(3, 4), "got vectors of width 4"),
        (torch.zeros(5), r"got torch.float32 of the shape \[5\]"),
        (torch.zeros(3, 5, dtype=torch.int64), r"got torch.int64 of the shape \[3, 5\]"),
    ],
)
def test_what_is_no_word_vector_is_refused(words, given):
    good = torch.zeros(3, 5)
    assert check_words(good, 5) is good
    with pytest.raises(ConfigError, match=f"head.word_dim=5 needs word queries .*{given}"):
        check_words(words, 5)
