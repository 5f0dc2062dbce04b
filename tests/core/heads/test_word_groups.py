import pytest
import torch
import torch.nn.functional as F

from mldec.errors import ConfigError
from mldec.heads.words import WordGroupDecoder

IN, WORD, DIM = 24, 5, 16
SMALL = {"embed_dim": DIM, "num_heads": 4, "mlp_dim": 20, "word_dim": WORD}


def groups(group_size=4, **options):
    """A small head in float64 whose every parameter is random, so that no bias or norm can hide."""
    torch.manual_seed(0)
    head = WordGroupDecoder(IN, 7, group_size=group_size, **{**SMALL, **options}).double().eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0, 0.3)
    return head


def some(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slowly(head, tokens, words):
    """The description, one image, one group and one class at a time."""
    size = head.group_size
    words = [word / word.norm() for word in words]
    columns = []
    for image in tokens:
        memory = F.relu(head.embed(image))[None]
        row = []
        for start in range(0, len(words), size):
            members = words[start : start + size]
            padded = members + [torch.zeros(WORD, dtype=torch.float64)] * (size - len(members))
            x = torch.cat([head.query_proj.weight @ word for word in padded])[None, None]
            for layer in head.layers:
                x, _ = layer(x, memory)
            row += [(head.pool_proj @ word) @ x[0, 0] + head.pool_bias[0] for word in members]
        columns.append(torch.stack(row))
    return torch.stack(columns)


@pytest.mark.parametrize(
    ("group_size", "count"), [(4, 8), (4, 7), (4, 3), (4, 1), (1, 5), (16, 40), (8, 9)]
)
@pytest.mark.parametrize("num_layers", [1, 2])
@torch.no_grad()
def test_group_decoding_equals_the_description(group_size, count, num_layers):
    head = groups(group_size, num_layers=num_layers)
    tokens, words = some(3, 9, IN), some(count, WORD, seed=2)
    logits = head(tokens, words)
    assert logits.shape == (3, count)
    torch.testing.assert_close(logits, slowly(head, tokens, words), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_in_training_classes_are_dealt_anew_and_answers_stay_in_their_columns():
    head, tokens, words = groups(dropout=0.0).train(), some(3, 9, IN), some(10, WORD, seed=2)
    torch.manual_seed(7)
    logits = head(tokens, words)
    torch.manual_seed(7)
    order = torch.randperm(10)
    dealt = slowly(head, tokens, words[order])
    torch.testing.assert_close(logits[:, order], dealt, rtol=1e-10, atol=1e-10)
    assert not torch.equal(order, torch.arange(10))
    assert not torch.allclose(head(tokens, words), logits)  # other companions


@torch.no_grad()
def test_a_class_depends_on_the_members_of_its_group_only():
    head, tokens, words = groups(), some(2, 9, IN), some(12, WORD, seed=2)
    before = head(tokens, words)
    for place in (0, 5, 11):
        changed = words.clone()
        changed[place] = some(WORD, seed=3)
        moved = (head(tokens, changed) - before).abs().amax(0) > 1e-12
        assert moved.nonzero().flatten().tolist() == [c for c in range(12) if c // 4 == place // 4]


@torch.no_grad()
def test_the_length_of_a_vector_does_not_matter():
    head, tokens, words = groups(), some(2, 9, IN), some(6, WORD, seed=2)
    torch.testing.assert_close(head(tokens, words * 7), head(tokens, words), rtol=1e-10, atol=1e-10)


def test_the_parameters_do_not_grow_with_the_classes():
    shapes = [
        {
            name: parameter.shape
            for name, parameter in WordGroupDecoder(IN, count, **SMALL).named_parameters()
        }
        for count in (3, 3000)
    ]
    assert shapes[0] == shapes[1]
    assert shapes[0]["query_proj.weight"] == (DIM // 4, WORD)
    assert shapes[0]["pool_proj"] == (DIM, WORD)


def test_logits_begin_with_a_spread_of_about_one():
    torch.manual_seed(0)
    head = WordGroupDecoder(64, 7).eval()
    logits = head(torch.randn(4, 9, 64), 5 * torch.randn(100, 300))
    assert 0.5 < logits.std() < 2


@torch.no_grad()
def test_attention_is_of_each_group():
    logits, attention = groups()(some(2, 9, IN), some(10, WORD), attention=True)
    assert attention.shape == (2, 3, 9)
    torch.testing.assert_close(attention.sum(-1), torch.ones(2, 3))
    assert logits.shape == (2, 10)


def test_gradients_reach_every_parameter_and_autocast_changes_little():
    head = groups().float()
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
        WordGroupDecoder(IN, 7, word_dim=WORD)(some(1, 2, IN).float(), words)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"group_size": 5}, "group_size 5 does not divide head.embed_dim 16"),
        ({"group_size": 0}, "group_size is 0"),
        ({"word_dim": 0}, "word_dim is 0"),
        ({"num_layers": 0}, "num_layers is 0"),
    ],
)
def test_wrong_sizes_are_refused(options, expected):
    with pytest.raises(ConfigError, match=expected):
        WordGroupDecoder(IN, 7, **{**SMALL, **options})
