"""GAP, WordGAP, Cosine and WordGroupDecoder against their formulas. tests/parity checks CSRA."""

import math

import pytest
import torch
import torch.nn.functional as F
from random_weights import noise, randomize

from mldec.heads import GAP, Cosine, WordGAP, WordGroupDecoder

IN, WORD, DIM = 24, 5, 16
SMALL = {"embed_dim": DIM, "num_heads": 4, "mlp_dim": 20, "word_dim": WORD}
TOKENS = noise(2, 9, IN)


@pytest.mark.parametrize("bottleneck", [None, 3])
@torch.no_grad()
def test_gap_matches_formula(bottleneck):
    head = randomize(GAP(IN, 4, bottleneck=bottleneck))
    weight = head.fc.weight
    bias = head.fc.bias
    if bottleneck:
        # The two layers are one layer of rank 3.
        bias = weight @ head.bottleneck.bias + bias
        weight = weight @ head.bottleneck.weight
    expected = torch.stack([weight @ sum(image) / 9 + bias for image in TOKENS])
    torch.testing.assert_close(head(TOKENS), expected)
    assert len(head.state_dict()) == (4 if bottleneck else 2)


@torch.no_grad()
def test_word_gap_matches_formula():
    head = randomize(WordGAP(IN, 0, word_dim=WORD))
    words = noise(6, WORD)
    vectors = TOKENS.mean(1) @ head.fc.weight.T + head.fc.bias
    expected = torch.stack([vectors @ word / word.norm() for word in words], 1) + head.bias
    torch.testing.assert_close(head(TOKENS, words), expected)


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_cosine_matches_formula(bias):
    head = Cosine(IN, 0, bias=bias).double()
    words = noise(5, IN)
    head.logit_scale.fill_(math.log(100))
    if bias:
        head.logit_bias.fill_(-10)
    assert len(head.state_dict()) == 1 + bias
    cosines = F.cosine_similarity(TOKENS.mean(1)[:, None], words[None], dim=2)
    torch.testing.assert_close(head(TOKENS, words), 100 * cosines - 10 * bias)


# WordGroupDecoder


def groups(group_size=4, **options):
    return randomize(WordGroupDecoder(IN, 7, group_size=group_size, **{**SMALL, **options}))


def reference(head, words):
    """Return the logits of one group and one class at a time."""
    size = head.group_size
    memory = F.relu(head.embed(TOKENS))
    units = [word / word.norm() for word in words]
    logits = []
    for start in range(0, len(units), size):
        members = units[start : start + size]
        padded = members + [torch.zeros(WORD, dtype=torch.float64)] * (size - len(members))
        x = torch.cat([head.query_proj.weight @ word for word in padded])[None, None]
        for layer in head.layers:
            x, _ = layer(x, memory)
        logits += [x[:, 0] @ (head.pool_proj @ word) + head.pool_bias[0] for word in members]
    return torch.stack(logits, 1)


@pytest.mark.parametrize(
    ("group_size", "count", "num_layers"), [(4, 8, 1), (4, 7, 2), (4, 1, 1), (1, 5, 1), (16, 40, 1)]
)
@torch.no_grad()
def test_word_groups_match_formula(group_size, count, num_layers):
    head = groups(group_size, num_layers=num_layers)
    words = noise(count, WORD, seed=2)
    logits, attention = head(TOKENS, words, attention=True)
    torch.testing.assert_close(logits, reference(head, words), rtol=1e-10, atol=1e-10)
    assert attention.shape == (2, -(-count // group_size), 9)
    torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:2]))


@torch.no_grad()
def test_word_groups_are_random_in_training():
    head = groups(dropout=0.0).train()
    words = noise(10, WORD, seed=2)
    torch.manual_seed(7)
    logits = head(TOKENS, words)
    torch.manual_seed(7)
    order = torch.randperm(10)
    expected = reference(head, words[order])
    torch.testing.assert_close(logits[:, order], expected, rtol=1e-10, atol=1e-10)
    assert not torch.equal(order, torch.arange(10))
    assert not torch.allclose(head(TOKENS, words), logits)


def test_word_groups_have_no_class_parameters_and_initial_logits_near_1():
    torch.manual_seed(0)
    head = WordGroupDecoder(64, 7).eval()
    assert head.query_proj.weight.shape == (768 // 4, 300)
    assert head.pool_proj.shape == (768, 300)
    logits = head(torch.randn(4, 9, 64), 5 * torch.randn(100, 300))
    assert 0.5 < logits.std() < 2
