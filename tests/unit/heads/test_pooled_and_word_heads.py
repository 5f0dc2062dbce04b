"""GAP, CSRA, and the zero-shot heads beside ML-Decoder, by their formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from random_weights import noise, randomise

from mldec.heads import CSRA, GAP, Cosine, WordGAP, WordGroupDecoder

IN, WORD, DIM = 24, 5, 16
SMALL = {"embed_dim": DIM, "num_heads": 4, "mlp_dim": 20, "word_dim": WORD}


@pytest.mark.parametrize("bottleneck", [None, 3])
@torch.no_grad()
def test_gap_is_linear_in_the_mean_of_the_tokens(bottleneck):
    head, tokens = randomise(GAP(IN, 4, bottleneck=bottleneck)), noise(2, 9, IN)
    weight, bias = head.fc.weight, head.fc.bias
    if bottleneck:
        # Nothing stands between the two layers: together they are one of rank 3.
        bias = weight @ head.bottleneck.bias + bias
        weight = weight @ head.bottleneck.weight
    expected = torch.stack([weight @ sum(image) / 9 + bias for image in tokens])
    torch.testing.assert_close(head(tokens), expected)
    assert len(head.state_dict()) == (4 if bottleneck else 2)


@torch.no_grad()
def test_dropout_of_gap_acts_on_the_pooled_features():
    torch.manual_seed(0)
    head = GAP(1000, 1, dropout=0.25).train()
    head.fc.weight.fill_(1)
    head.fc.bias.zero_()
    kept = head(torch.ones(1, 49, 1000)).item() * 0.75  # each kept feature counts 4 / 3
    assert kept == pytest.approx(round(kept), abs=1e-2)
    assert 680 < kept < 820


@pytest.mark.parametrize(
    ("num_heads", "temperatures"), [(1, [1]), (2, [1, 1e9]), (4, [1, 2, 4, 1e9])]
)
@torch.no_grad()
def test_csra_equals_its_formula(num_heads, temperatures):
    head = randomise(CSRA(IN, 3, num_heads=num_heads, lam=0.3))
    tokens = noise(2, 9, IN)
    expected = torch.zeros(2, 3, dtype=torch.float64)
    for image in range(2):
        for i in range(3):
            for h, temperature in enumerate(temperatures):
                m, b = head.fc.weight[num_heads * i + h], head.fc.bias[num_heads * i + h]
                x = tokens[image]
                attention = (temperature * (x @ m)).softmax(0)
                g, a = x.mean(0), sum(s * x_j for s, x_j in zip(attention, x, strict=True))
                expected[image, i] += m @ (g + 0.3 * a) + 1.3 * b
    torch.testing.assert_close(head(tokens), expected)


def test_without_its_attention_csra_is_gap_in_training_too():
    gap, csra = GAP(IN, 4, dropout=0.5), CSRA(IN, 4, lam=0.0, dropout=0.5)
    csra.load_state_dict(gap.state_dict())
    tokens = noise(2, 9, IN).float()
    torch.testing.assert_close(csra.eval()(tokens), gap.eval()(tokens))

    # A dropped feature is dropped in all tokens.
    ones = torch.ones(3, 9, IN)
    dropped = CSRA(IN, 1, dropout=0.5).train().dropout(ones.transpose(1, 2))
    assert set(dropped.amin(2).flatten().tolist()) == {0.0, 2.0}
    assert torch.equal(dropped.amin(2), dropped.amax(2))


@torch.no_grad()
def test_word_gap_equals_its_formula():
    head, tokens, words = randomise(WordGAP(IN, 0, word_dim=WORD)), noise(3, 9, IN), noise(6, WORD)
    for image, row in zip(tokens, head(tokens, words), strict=True):
        vector = head.fc.weight @ image.mean(0) + head.fc.bias
        for word, logit in zip(words, row, strict=True):
            assert logit.item() == pytest.approx((vector @ word / word.norm() + head.bias).item())


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_cosine_equals_its_formula(bias):
    head, tokens, words = Cosine(IN, 0, bias=bias).double(), noise(2, 4, IN), noise(5, IN)
    head.logit_scale.fill_(math.log(100))
    if bias:
        head.logit_bias.fill_(-10)
    assert len(head.state_dict()) == 1 + bias
    for image, row in zip(tokens, head(tokens, words), strict=True):
        pooled = image.mean(0)
        for word, logit in zip(words, row, strict=True):
            cosine = (pooled @ word / pooled.norm() / word.norm()).item()
            assert logit.item() == pytest.approx(100 * cosine - 10 * bias)


# Group decoding of words


def groups(group_size=4, **options):
    return randomise(WordGroupDecoder(IN, 7, group_size=group_size, **{**SMALL, **options}))


def slowly(head, tokens, words):
    """Return the logits by the description: one image, one group and one class at a time."""
    size, rows = head.group_size, []
    units = [word / word.norm() for word in words]
    for image in tokens:
        memory = F.relu(head.embed(image))[None]
        row = []
        for start in range(0, len(units), size):
            members = units[start : start + size]
            padded = members + [torch.zeros(WORD, dtype=torch.float64)] * (size - len(members))
            x = torch.cat([head.query_proj.weight @ word for word in padded])[None, None]
            for layer in head.layers:
                x, _ = layer(x, memory)
            row += [(head.pool_proj @ word) @ x[0, 0] + head.pool_bias[0] for word in members]
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("group_size", "count", "num_layers"), [(4, 8, 1), (4, 7, 2), (4, 1, 1), (1, 5, 1), (16, 40, 1)]
)
@torch.no_grad()
def test_group_decoding_equals_the_description(group_size, count, num_layers):
    head = groups(group_size, num_layers=num_layers)
    tokens, words = noise(3, 9, IN), noise(count, WORD, seed=2)
    logits, attention = head(tokens, words, attention=True)
    torch.testing.assert_close(logits, slowly(head, tokens, words), rtol=1e-10, atol=1e-10)
    assert attention.shape == (3, -(-count // group_size), 9)
    torch.testing.assert_close(attention.sum(-1), torch.ones(attention.shape[:2]))


@torch.no_grad()
def test_in_training_classes_are_dealt_anew_and_answers_stay_in_their_columns():
    head, tokens, words = groups(dropout=0.0).train(), noise(3, 9, IN), noise(10, WORD, seed=2)
    torch.manual_seed(7)
    logits = head(tokens, words)
    torch.manual_seed(7)
    order = torch.randperm(10)
    dealt = slowly(head, tokens, words[order])
    torch.testing.assert_close(logits[:, order], dealt, rtol=1e-10, atol=1e-10)
    assert not torch.equal(order, torch.arange(10))
    assert not torch.allclose(head(tokens, words), logits)  # other companions


def test_its_parameters_do_not_grow_with_the_classes_and_logits_begin_near_1():
    torch.manual_seed(0)
    head = WordGroupDecoder(64, 7).eval()
    assert head.query_proj.weight.shape == (768 // 4, 300)
    assert head.pool_proj.shape == (768, 300)
    logits = head(torch.randn(4, 9, 64), 5 * torch.randn(100, 300))
    assert 0.5 < logits.std() < 2
