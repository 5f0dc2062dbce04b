import pytest
import torch

from mldec.errors import ConfigError
from mldec.heads.gap import GAP


def test_logits_are_linear_in_the_mean_of_the_tokens():
    head, tokens = GAP(6, 4).double(), torch.randn(2, 9, 6, dtype=torch.float64)
    weight, bias = head.fc.weight.tolist(), head.fc.bias.tolist()
    logits = head(tokens)
    assert logits.shape == (2, 4)
    for b in range(2):
        means = [sum(tokens[b, n, c].item() for n in range(9)) / 9 for c in range(6)]
        expected = [
            sum(w * m for w, m in zip(weight[k], means, strict=True)) + bias[k] for k in range(4)
        ]
        assert logits[b].tolist() == pytest.approx(expected, rel=1e-9)


def test_it_is_one_linear_layer():
    assert {name: tuple(value.shape) for name, value in GAP(6, 4).state_dict().items()} == {
        "fc.weight": (4, 6),
        "fc.bias": (4,),
    }


def test_a_bottleneck_is_one_more_linear_layer():
    head, tokens = GAP(6, 4, bottleneck=3).double(), torch.randn(2, 9, 6, dtype=torch.float64)
    assert {name: tuple(value.shape) for name, value in head.state_dict().items()} == {
        "bottleneck.weight": (3, 6),
        "bottleneck.bias": (3,),
        "fc.weight": (4, 3),
        "fc.bias": (4,),
    }
    # Nothing stands between the two layers: together they are one of rank 3.
    weight = head.fc.weight @ head.bottleneck.weight
    bias = head.fc.weight @ head.bottleneck.bias + head.fc.bias
    torch.testing.assert_close(head(tokens), tokens.mean(1) @ weight.T + bias)


def test_a_bottleneck_of_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"head\.bottleneck is 0: it must be at least 1"):
        GAP(6, 4, bottleneck=0)


def test_tokens_of_another_width_are_refused():
    for head in (GAP(6, 4), GAP(6, 4, bottleneck=3)):
        with pytest.raises(ValueError, match=r"give floating point \[B, N, 6\]"):
            head(torch.randn(2, 9, 5))


def test_dropout_acts_on_the_pooled_features_in_training_only():
    torch.manual_seed(0)
    head = GAP(1000, 1, dropout=0.25)
    torch.nn.init.ones_(head.fc.weight)
    torch.nn.init.zeros_(head.fc.bias)
    tokens = torch.ones(1, 49, 1000)
    assert head.eval()(tokens).item() == pytest.approx(1000)
    kept = head.train()(tokens).item() * 0.75  # each kept feature counts 4 / 3
    assert kept == pytest.approx(round(kept), abs=1e-2)
    assert 680 < kept < 820


def test_words_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"GAP takes no word queries.*head\.word_dim") as caught:
        GAP(6, 4)(torch.randn(2, 9, 6), torch.randn(4, 6))
    assert "\n" not in str(caught.value)
