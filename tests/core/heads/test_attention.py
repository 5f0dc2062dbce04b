"""The attention of the decoder heads is that of torch."""

import pytest
import torch
from random_weights import noise, randomise
from torch import nn

from mldec.heads.layers import Attention

DIM, HEADS = 16, 4


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
