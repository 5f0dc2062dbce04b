"""ML-Decoder against independent code of its formulas and of its initialization."""

import math

import pytest
import torch
import torch.nn.functional as F
from random_weights import noise, randomize
from torch import nn

from mldec.heads.layers import Attention
from mldec.heads.ml_decoder import MLDecoder

IN, DIM, HEADS = 24, 16, 4
SMALL = {"embed_dim": DIM, "num_heads": HEADS, "mlp_dim": 20}
TOKENS = noise(3, 9, IN)


def small(num_classes=7, **options):
    return randomize(MLDecoder(IN, num_classes, **{**SMALL, **options}))


def part(head, prefix):
    """Return the tensors with this prefix of their names, without the prefix."""
    state = head.state_dict().items()
    return {name.removeprefix(prefix): value for name, value in state if name.startswith(prefix)}


def norm(x, weights, name):
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)


def official(head, tokens, *, doubled=True, words=None):
    """Return logits and attention weights of the official forward, with torch's attention."""
    state, dim = head.state_dict(), head.embed.out_features
    memory = F.relu(F.linear(tokens, state["embed.weight"], state["embed.bias"])).transpose(0, 1)
    if words is None:
        queries = state["queries"]
    else:
        queries = F.relu(F.linear(words, state["word_proj.weight"], state["word_proj.bias"]))
    target = queries[:, None].expand(-1, len(tokens), -1)  # queries first: [K, B, D]
    for number in range(len(head.layers)):
        weights = part(head, f"layers.{number}.")
        attention = nn.MultiheadAttention(dim, HEADS, dtype=tokens.dtype)
        attention.load_state_dict(part(head, f"layers.{number}.cross_attn."))
        target = norm(target + target if doubled else target, weights, "norm1")
        attended, averaged = attention(target, memory, memory)
        target = norm(target + attended, weights, "norm2")
        hidden = F.relu(F.linear(target, weights["mlp.0.weight"], weights["mlp.0.bias"]))
        hidden = F.linear(hidden, weights["mlp.3.weight"], weights["mlp.3.bias"])
        target = norm(target + hidden, weights, "norm3")
    return pooled(head, target.transpose(0, 1)), averaged


def pooled(head, decoded):
    """Return the logits of decoded queries: class c is slot c % g of group c // g."""
    weight, bias = head.pool_weight, head.pool_bias
    if weight.dim() == 2:
        return torch.stack([query @ weight[:, 0] + bias[0] for query in decoded.unbind(1)], dim=1)
    columns = []
    for c in range(len(bias)):
        group, slot = divmod(c, weight.shape[2])
        columns.append(decoded[:, group] @ weight[group, :, slot] + bias[c])
    return torch.stack(columns, dim=1)


def check(head, expected, expected_weights, *words):
    logits, weights = head(TOKENS, *words, attention=True)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=0, atol=1e-5)
    assert torch.equal(logits, head(TOKENS, *words))
    return logits


FORMS = [
    (7, {"num_groups": None}),
    (7, {"num_groups": 100, "init_queries": "learned"}),
    (12, {"num_groups": 4, "init_queries": "orthogonal"}),
    (7, {"num_groups": 3}),
    (7, {"num_groups": 1}),
    (1, {"num_groups": None}),
    (23, {"num_groups": 11}),
    (11, {"num_groups": 4, "num_layers": 2}),
    (7, {"doubled_query": False}),
]


@pytest.mark.parametrize(("num_classes", "options"), FORMS)
@torch.no_grad()
def test_logits_and_attention_match_official_formula(num_classes, options):
    head = small(num_classes, **options)
    expected = official(head, TOKENS, doubled=head.layers[0].query_step != "norm")
    assert check(head, *expected).shape == (3, num_classes)


@pytest.mark.parametrize(("num_groups", "num_layers"), [(3, 1), (None, 2)])
@torch.no_grad()
def test_self_attention_matches_transformer_decoder_of_torch(num_groups, num_layers):
    head = small(num_groups=num_groups, num_layers=num_layers, self_attention=True)
    names = {"cross_attn": "multihead_attn", "mlp.0": "linear1", "mlp.3": "linear2"}
    target = head.queries.expand(3, -1, -1)
    memory = F.relu(head.embed(TOKENS))
    for number in range(num_layers):
        layer = nn.TransformerDecoderLayer(DIM, HEADS, 20, batch_first=True, dtype=torch.float64)
        state = part(head, f"layers.{number}.")
        for ours, theirs in names.items():
            state = {name.replace(f"{ours}.", f"{theirs}."): value for name, value in state.items()}
        layer.eval().load_state_dict(state)
        target = layer(target, memory)
    torch.testing.assert_close(head(TOKENS), pooled(head, target), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("count", [1, 7, 30])
@torch.no_grad()
def test_zero_shot_matches_formula_and_decodes_each_class_independently(count):
    head = small(0, word_dim=5, num_groups=None)
    words = noise(count, 5, seed=2)
    logits = check(head, *official(head, TOKENS, words=words), words)
    alone = torch.cat([head(TOKENS, word[None]) for word in words], 1)
    torch.testing.assert_close(logits, alone, rtol=1e-12, atol=1e-12)
    assert "queries" not in head.state_dict()


@torch.no_grad()
def test_word_vectors_of_decoder_width_are_not_projected():
    head = small(0, word_dim=DIM, num_groups=None)
    words = noise(4, DIM)
    closed = small(4, num_groups=None)
    of_classes = {
        "queries": words.relu(),
        "pool_weight": head.pool_weight.expand(4, -1, -1),
        "pool_bias": head.pool_bias.expand(4),
    }
    closed.load_state_dict({**head.state_dict(), **of_classes})
    torch.testing.assert_close(head(TOKENS, words), closed(TOKENS), rtol=1e-12, atol=1e-12)


# Initialization


def check_uniform(tensor, bound):
    """Check a uniform distribution by its maximum and moments."""
    assert bound * (1 - 20 / tensor.numel()) < tensor.abs().max() <= bound
    check_moments(tensor, bound / math.sqrt(3))


def check_moments(tensor, std):
    """Check mean 0 and the standard deviation within six standard errors."""
    size = tensor.numel()
    assert abs(tensor.mean().item()) < 6 * std / math.sqrt(size)
    assert tensor.std().item() == pytest.approx(std, rel=6 / math.sqrt(2 * size))


def test_official_call_names_the_arguments_of_this_class():
    with pytest.raises(TypeError, match=r"in_features.*MLDecoder\(2048, 80\)"):
        MLDecoder(80)


def test_initialization_matches_official_code():
    torch.manual_seed(0)
    state = MLDecoder(2048, 1000).state_dict()  # 100 groups are the default
    uniform = {
        "embed.weight": 2048**-0.5,
        "embed.bias": 2048**-0.5,
        "layers.0.cross_attn.in_proj_weight": math.sqrt(6 / (768 + 3 * 768)),
        "layers.0.cross_attn.out_proj.weight": 768**-0.5,
        "layers.0.mlp.0.weight": 768**-0.5,
        "layers.0.mlp.0.bias": 768**-0.5,
        "layers.0.mlp.3.weight": 2048**-0.5,
        "layers.0.mlp.3.bias": 2048**-0.5,
    }
    zeros = ["layers.0.cross_attn.in_proj_bias", "layers.0.cross_attn.out_proj.bias", "pool_bias"]
    zeros += [f"layers.0.norm{number}.bias" for number in (1, 2, 3)]
    ones = [f"layers.0.norm{number}.weight" for number in (1, 2, 3)]
    normal = {"queries": 1.0, "pool_weight": math.sqrt(2 / ((768 + 100) * 10))}
    assert set(state) == {*uniform, *zeros, *ones, *normal}
    for name, bound in uniform.items():
        check_uniform(state[name], bound)
    assert not any(state[name].any() for name in zeros)
    assert all((state[name] == 1).all() for name in ones)
    for name, std in normal.items():
        check_moments(state[name], std)
        assert state[name].abs().max() > 3.5 * std  # a normal distribution has tails


def test_initialization_of_zero_shot_head_matches_official_code():
    torch.manual_seed(0)
    heads = [MLDecoder(8, 3, mlp_dim=8, word_dim=5, num_groups=None) for _ in range(20)]
    assert heads[0].pool_weight.shape == (768, 1)
    assert heads[0].pool_bias.tolist() == [0]
    check_moments(torch.cat([head.pool_weight for head in heads]).detach(), math.sqrt(2 / 769))
    check_uniform(heads[0].word_proj.weight.detach(), 5**-0.5)


def test_queries_depend_on_seed_and_only_learned_ones_are_parameters():
    drawn = {}
    for kind in ("random", "learned", "orthogonal"):
        torch.manual_seed(3)
        head = MLDecoder(IN, 10, init_queries=kind, embed_dim=64, mlp_dim=8)
        assert "queries" in head.state_dict()
        assert ("queries" in dict(head.named_parameters())) == (kind == "learned")
        drawn[kind] = head.queries.detach()
    assert torch.equal(drawn["random"], drawn["learned"])
    gram = drawn["orthogonal"] @ drawn["orthogonal"].t()
    torch.testing.assert_close(gram, 64 * torch.eye(10), rtol=0, atol=1e-3)

    # With G > D, the rows still have norm sqrt(D).
    sizes = {"embed_dim": 16, "num_heads": 2, "mlp_dim": 8}
    many = MLDecoder(IN, 100, init_queries="orthogonal", **sizes).queries
    torch.testing.assert_close(many.norm(dim=1), torch.full((100,), 4.0))


def input_of_first_norm(head, tokens):
    inputs = []
    hook = head.layers[0].norm1.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    head(tokens)
    hook.remove()
    return inputs[0].detach()


def test_doubled_query_adds_its_own_dropout():
    torch.manual_seed(0)
    head = MLDecoder(8, 80, mlp_dim=8).double().train()
    tokens = noise(4, 3, 8)
    factor = input_of_first_norm(head, tokens) / head.queries
    is_kept = (factor - 1 - 1 / 0.9).abs() < 1e-9
    is_dropped = (factor - 1).abs() < 1e-9
    assert (is_kept | is_dropped).all()
    assert is_dropped.double().mean().item() == pytest.approx(0.1, abs=0.003)
    assert not torch.equal(factor[0], factor[1])  # independent per image
    assert (input_of_first_norm(head.eval(), tokens) == 2 * head.queries).all()
    plain = MLDecoder(8, 80, mlp_dim=8, doubled_query=False).double().train()
    assert (input_of_first_norm(plain, tokens) == plain.queries).all()


@pytest.mark.parametrize("batch", [1, 3])
def test_attention_weights_and_their_gradient_match_autograd(batch):
    layer = randomize(Attention(DIM, HEADS, 0.1))
    query = noise(batch, 5, DIM)
    key = noise(3, 9, DIM, seed=2)
    value = noise(3, 9, DIM, seed=3)
    direction = noise(3, 5, DIM, seed=4)

    # Plain attention per head, with the weights in the graph.
    projected = []
    parts = zip(layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True)
    for x, (weight, bias) in zip((query, key, value), parts, strict=True):
        projected.append((x @ weight.T + bias).unflatten(2, (HEADS, -1)).transpose(1, 2))
    q, k, v = projected
    weights = (q @ k.transpose(2, 3) / (DIM // HEADS) ** 0.5).softmax(-1).expand(3, -1, -1, -1)
    attended = (weights @ v).transpose(1, 2).flatten(2) @ layer.out_proj.weight.T
    [expected] = torch.autograd.grad(((attended + layer.out_proj.bias) * direction).sum(), weights)

    gradient = layer.weight_gradients(value, direction)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)
    found = layer.weights(query, key)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), weights, rtol=0, atol=1e-6)
