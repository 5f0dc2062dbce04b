"""Relevance of tokens, against independent forms: plain attention, pooling, autograd."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_weights import randomise
from torch import Tensor, nn

from mldec.errors import ConfigError
from mldec.heads import GAP, MLDecoder, Query2Label, WordGAP, WordGroupDecoder
from mldec.model import Classifier
from mldec.predict import heat_maps as relevance

IN, CLASSES, SIDE = 6, 7, 3
SIZES: dict[str, Any] = {"embed_dim": 16, "num_heads": 4, "mlp_dim": 12}
WORDS = torch.randn(CLASSES, 5, generator=torch.Generator().manual_seed(5)).double()
WANTED = [[4, 0], [], [6, 1, 2]]


def tokens(batch: int = 3) -> Tensor:
    return torch.randn(batch, SIDE**2, IN, generator=torch.Generator().manual_seed(1)).double()


def model(head: nn.Module) -> Classifier:
    return Classifier(nn.Identity(), randomise(head))


def groups(num_groups: int | None, **options: Any) -> Classifier:
    return model(MLDecoder(IN, CLASSES, num_groups=num_groups, **SIZES, **options))


def test_with_one_query_per_class_the_relevance_is_its_attention() -> None:
    for given, queries in (
        (groups(None, num_layers=2), None),
        (groups(None, self_attention=True), None),
        (model(Query2Label(IN, CLASSES, input_proj=True, **SIZES)), None),
        (model(MLDecoder(IN, 0, num_groups=None, word_dim=5, **SIZES)), WORDS),
        (model(WordGroupDecoder(IN, 0, word_dim=5, group_size=1, **SIZES)), WORDS),
    ):
        method, function = relevance.choose(given, tokens(1), queries)
        assert method == relevance.ATTENTION
        result = function(given, tokens(), WANTED, queries)

        _, attention = given.classify(tokens(), queries, attention=True)
        assert [rows.shape for rows in result] == [(2, 9), (0, 9), (3, 9)]
        assert torch.equal(result[2], attention[2, [6, 1, 2]].detach())
        torch.testing.assert_close(result[0].sum(1), torch.ones(2))


def plain_groups(head: Any, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """An ML-Decoder written out, whose attention weights [B, heads, G, N] are in the graph."""
    memory = F.relu(head.embed(tokens))
    x, all_weights = head.queries.expand(len(tokens), -1, -1), []
    for layer in head.layers:
        x = layer.norm1(x + x)
        attn = layer.cross_attn
        (wq, wk, wv), (bq, bk, bv) = attn.in_proj_weight.chunk(3), attn.in_proj_bias.chunk(3)
        heads = [
            part.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)
            for part in (x @ wq.T + bq, memory @ wk.T + bk, memory @ wv.T + bv)
        ]
        q, k, v = heads
        all_weights.append((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1))
        x = layer.norm2(x + attn.out_proj((all_weights[-1] @ v).transpose(1, 2).flatten(2)))
        x = layer.norm3(x + layer.mlp(x))
    logits = torch.einsum("bgd,gds->bgs", x, head.pool_weight).flatten(1)
    return logits[:, : head.num_classes] + head.pool_bias, all_weights


@pytest.mark.parametrize("num_layers", [1, 2])
def test_of_groups_it_is_the_rule_of_chefer(num_layers: int) -> None:
    given = groups(3, num_layers=num_layers)
    method, function = relevance.choose(given, tokens(1), None)
    assert method == relevance.THROUGH_ATTENTION
    result = function(given, tokens(), WANTED, None)

    # As in the authors' code: the relevance of queries to tokens, R, begins at 0; each layer adds
    # the mean over heads of ReLU(gradient * weight), since R of queries to queries is the identity.
    head: Any = given.head
    logits, all_weights = plain_groups(head, tokens())
    torch.testing.assert_close(logits, given.classify(tokens()))
    for image, wanted in enumerate(WANTED):
        assert len(result[image]) == len(wanted)
        for row, k in zip(result[image], wanted, strict=True):
            gradients = torch.autograd.grad(logits[image, k], all_weights, retain_graph=True)
            expected = torch.zeros(head.queries.shape[0], SIDE**2, dtype=torch.float64)
            for weights, gradient in zip(all_weights, gradients, strict=True):
                expected += (gradient * weights)[image].clamp(min=0).mean(0)
            row_of_group = expected[k // 3]  # ceil(7 / 3) classes per group
            torch.testing.assert_close(row.double(), row_of_group, rtol=1e-5, atol=1e-7)
            assert row_of_group.max() > 0


def test_word_groups_with_several_classes_per_query_use_the_gradient_too() -> None:
    given = model(WordGroupDecoder(IN, 0, word_dim=5, group_size=2, **SIZES))
    method, function = relevance.choose(given, tokens(1), WORDS)
    assert method == relevance.THROUGH_ATTENTION
    result = function(given, tokens(), WANTED, WORDS)
    assert [rows.shape for rows in result] == [(2, 9), (0, 9), (3, 9)]
    assert (result[0] >= 0).all()
    assert not torch.allclose(result[2][1], result[2][2]), "two classes, two maps"


@pytest.mark.parametrize("bottleneck", [None, 4])
def test_of_pooling_it_is_the_class_activation_map(bottleneck: int | None) -> None:
    head = GAP(IN, CLASSES, bottleneck=bottleneck)
    given = model(head)
    method, function = relevance.choose(given, tokens(1), None)
    assert method == relevance.ACTIVATION
    result = function(given, tokens(), WANTED, None)

    # The head without its biases, applied to every token instead of their mean.
    weight: Any = head.fc.weight
    if bottleneck:
        weight = weight @ head.bottleneck.weight
    expected = tokens() @ weight.T
    torch.testing.assert_close(result[2].double(), expected[2, :, [6, 1, 2]].T.detach())

    no_bias = given.classify(tokens()) - given.classify(torch.zeros(1, SIDE**2, IN).double())
    torch.testing.assert_close(result[0].mean(1).double(), no_bias[0, [4, 0]].detach())


def test_of_pooled_word_vectors_too() -> None:
    given = model(WordGAP(IN, 0, word_dim=5))
    method, function = relevance.choose(given, tokens(1), WORDS)
    assert method == relevance.ACTIVATION
    [row] = function(given, tokens(1), [[3]], WORDS)
    zero = given.classify(torch.zeros(1, SIDE**2, IN).double(), WORDS)
    difference = (given.classify(tokens(1), WORDS) - zero)[0, [3]]
    torch.testing.assert_close(row.mean(1).double(), difference.detach())


class Largest(nn.Module):
    """A head of a user's own: the largest value of each channel, without attention."""

    def forward(self, tokens: Tensor, queries: Tensor | None = None) -> Tensor:
        return tokens.amax(1)


class Counting(nn.Module):
    def forward(self, tokens: Tensor, queries: Tensor | None = None) -> Tensor:
        return (tokens > 0).sum(1)


def test_any_other_head_gets_the_gradient_times_the_tokens() -> None:
    given = Classifier(nn.Identity(), Largest())
    method, function = relevance.choose(given, tokens(1), None)
    assert method == relevance.TIMES_TOKENS
    [row] = function(given, tokens(1), [[2]], None)
    column = tokens(1)[0, :, 2]
    expected = torch.where(column == column.max(), SIDE**2 * column, 0)
    torch.testing.assert_close(row[0].double(), expected)


def test_a_head_without_gradients_is_named() -> None:
    given = Classifier(nn.Identity(), Counting())
    _, function = relevance.choose(given, tokens(1), None)
    with pytest.raises(ConfigError, match=r"^head Counting: its logits have no gradient"):
        function(given, tokens(1), [[0]], None)


@pytest.mark.parametrize("head", ["gap", "groups"])
def test_an_image_does_not_depend_on_its_batch(head: str) -> None:
    given = groups(3) if head == "groups" else model(GAP(IN, CLASSES))
    _, function = relevance.choose(given, tokens(1), None)
    together = function(given, tokens(), WANTED, None)
    for image, wanted in enumerate(WANTED):
        [alone] = function(given, tokens()[image : image + 1], [wanted], None)
        torch.testing.assert_close(alone, together[image])
        assert not alone.requires_grad
    assert all(parameter.grad is None for parameter in given.parameters())
