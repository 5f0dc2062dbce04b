import pytest
import torch

from mldec.errors import ConfigError
from mldec.heads.words import WordGAP

IN, WORD = 24, 5


def some(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_the_baseline_equals_its_formula():
    torch.manual_seed(0)
    head = WordGAP(IN, 7, word_dim=WORD).double().eval()
    tokens, words = some(3, 9, IN), some(6, WORD)
    for image, row in zip(tokens, head(tokens, words), strict=True):
        vector = head.fc.weight @ image.mean(0) + head.fc.bias
        for word, logit in zip(words, row, strict=True):
            assert logit.item() == pytest.approx((vector @ word / word.norm() + head.bias).item())


@torch.no_grad()
def test_the_length_of_a_vector_does_not_matter_and_no_class_depends_on_another():
    head, tokens, words = WordGAP(IN, 7, word_dim=WORD).double(), some(2, 9, IN), some(6, WORD)
    logits = head(tokens, words)
    torch.testing.assert_close(head(tokens, 7 * words), logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(head(tokens, words[3:4]), logits[:, 3:4], rtol=1e-12, atol=1e-12)


def test_the_parameters_do_not_grow_with_the_classes():
    shapes = [
        {
            name: tensor.shape
            for name, tensor in WordGAP(IN, count, word_dim=WORD).state_dict().items()
        }
        for count in (3, 3000)
    ]
    assert shapes[0] == shapes[1]


def test_dropout_acts_on_pooled_features_in_training_only():
    head = WordGAP(IN, 7, word_dim=WORD, dropout=1.0)
    tokens, words = some(2, 9, IN).float(), some(6, WORD).float()
    nothing = head(torch.zeros(2, 9, IN), words)
    assert torch.equal(head.train()(tokens, words), nothing)
    assert not torch.allclose(head.eval()(tokens, words), nothing)


def test_gradients_reach_every_parameter_and_autocast_changes_little():
    head = WordGAP(IN, 7, word_dim=WORD)
    tokens, words = some(2, 9, IN).float(), some(6, WORD).float()
    with torch.autocast("cpu", torch.bfloat16):
        half = head(tokens, words)
    whole = head(tokens, words)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, whole, rtol=0.1, atol=0.2)
    whole.square().sum().backward()
    assert [name for name, parameter in head.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize(
    ("words", "expected"), [(None, "got none"), (some(3, 4), "got vectors of width 4")]
)
def test_wrong_queries_are_refused(words, expected):
    with pytest.raises(ConfigError, match=f"word_dim=5 .*{expected}"):
        WordGAP(IN, 7, word_dim=WORD)(some(1, 2, IN).float(), words)


def test_a_width_below_1_is_refused():
    with pytest.raises(ConfigError, match="word_dim is 0"):
        WordGAP(IN, 7, word_dim=0)
