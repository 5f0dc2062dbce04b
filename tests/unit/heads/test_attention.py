"""The weights of an attention and their gradient, of which heat maps are made."""

import pytest
import torch
from random_weights import noise, randomise

from mldec.heads.layers import Attention

DIM, HEADS = 16, 4


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
