import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mldec.errors import ConfigError
from mldec.heads.ml_decoder import MLDecoder

IN, DIM, HEADS, MLP = 24, 16, 4, 20
SMALL = {"embed_dim": DIM, "num_heads": HEADS, "mlp_dim": MLP}


def small(num_classes=7, seed=0, **options):
    """A small head in float64 whose every parameter is random, so that no bias or norm can hide."""
    torch.manual_seed(seed)
    head = MLDecoder(IN, num_classes, **{**SMALL, **options}).double().eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0, 0.3)
    return head


def some_tokens(batch=3, tokens=9, seed=1):
    return torch.randn(
        batch, tokens, IN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def some_words(count, width=5, seed=2):
    return torch.randn(
        count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def part(head, prefix):
    """The tensors below a name, without it."""
    return {
        name[len(prefix) :]: value
        for name, value in head.state_dict().items()
        if name.startswith(prefix)
    }


def norm(x, weights, name):
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)


def official(head, tokens, *, doubled=True, words=None):
    """The official forward with torch's attention, queries first; the pooling is a loop."""
    state, dim = head.state_dict(), head.embed.out_features
    memory = F.relu(F.linear(tokens, state["embed.weight"], state["embed.bias"])).transpose(
        0, 1
    )  # [N, B, D]
    if words is None:
        queries = state["queries"]
    else:
        projected = F.linear(words, state["word_proj.weight"], state["word_proj.bias"])
        queries = F.relu(projected)
    target = queries[:, None].expand(-1, len(tokens), -1)  # [K, B, D]
    for number in range(len(head.layers)):
        weights = part(head, f"layers.{number}.")
        attention = nn.MultiheadAttention(dim, HEADS, dtype=tokens.dtype)
        attention.load_state_dict(part(head, f"layers.{number}.cross_attn."))
        target = norm(target + target if doubled else target, weights, "norm1")
        attended, averaged = attention(target, memory, memory)
        target = norm(target + attended, weights, "norm2")
        hidden = F.relu(F.linear(target, weights["mlp.0.weight"], weights["mlp.0.bias"]))
        target = norm(
            target + F.linear(hidden, weights["mlp.3.weight"], weights["mlp.3.bias"]),
            weights,
            "norm3",
        )
    return pooled(head, target.transpose(0, 1)), averaged


def pooled(head, decoded):
    """Class c from group c // g, slot c % g, one at a time."""
    weight, bias = head.pool_weight, head.pool_bias
    if weight.dim() == 2:
        columns = [decoded[:, group] @ weight[:, 0] + bias[0] for group in range(decoded.shape[1])]
    else:
        size = weight.shape[2]
        columns = [
            decoded[:, c // size] @ weight[c // size, :, c % size] + bias[c]
            for c in range(len(bias))
        ]
    return torch.stack(columns, dim=1)


# The forward pass


@pytest.mark.parametrize(
    ("num_classes", "num_groups"),
    [(7, None), (7, 7), (7, 100), (12, 4), (7, 3), (7, 1), (1, None), (23, 11)],
)
@pytest.mark.parametrize("queries", ["random", "learned", "orthogonal"])
@torch.no_grad()
def test_forward_equals_the_official_description(num_classes, num_groups, queries):
    head = small(num_classes, num_groups=num_groups, queries=queries)
    expected, _ = official(head, some_tokens())
    logits = head(some_tokens())
    assert logits.shape == (3, num_classes)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_forward_without_the_doubled_query_equals_the_description_without_that_addition():
    head = small(doubled_query=False)
    torch.testing.assert_close(
        head(some_tokens()), official(head, some_tokens(), doubled=False)[0], rtol=1e-10, atol=1e-10
    )


@torch.no_grad()
def test_two_layers_are_the_layer_applied_twice_with_weights_of_their_own():
    head = small(11, num_groups=4, num_layers=2)
    torch.testing.assert_close(
        head(some_tokens()), official(head, some_tokens())[0], rtol=1e-10, atol=1e-10
    )
    changed = copy.deepcopy(head)
    changed.layers[1].mlp[0].weight.mul_(2)
    assert not torch.allclose(changed(some_tokens()), head(some_tokens()))


@pytest.mark.parametrize(("num_groups", "num_layers"), [(None, 1), (3, 1), (None, 2)])
@torch.no_grad()
def test_with_self_attention_it_is_the_transformer_decoder_of_torch(num_groups, num_layers):
    head = small(num_groups=num_groups, num_layers=num_layers, self_attention=True)
    names = {"cross_attn": "multihead_attn", "mlp.0": "linear1", "mlp.3": "linear2"}
    target = head.queries.expand(3, -1, -1)
    memory = F.relu(head.embed(some_tokens()))
    for number in range(num_layers):
        layer = nn.TransformerDecoderLayer(
            DIM, HEADS, MLP, dropout=0.1, batch_first=True, dtype=torch.float64
        ).eval()
        state = part(head, f"layers.{number}.")
        for ours, theirs in names.items():
            state = {name.replace(f"{ours}.", f"{theirs}."): value for name, value in state.items()}
        layer.load_state_dict(state)
        target = layer(target, memory)
    torch.testing.assert_close(head(some_tokens()), pooled(head, target), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "options", [{}, {"num_groups": 3}, {"self_attention": True}, {"doubled_query": False}]
)
@torch.no_grad()
def test_training_without_dropout_equals_evaluation(options):
    head = small(dropout=0.0, **options)
    evaluated = head(some_tokens())
    torch.testing.assert_close(head.train()(some_tokens()), evaluated, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_an_image_has_the_same_logits_in_any_batch():
    head = small(num_groups=3)
    alone = torch.cat([head(image) for image in some_tokens().split(1)])
    torch.testing.assert_close(head(some_tokens()), alone, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_the_order_of_the_tokens_does_not_matter():
    head, order = small(), torch.tensor([4, 0, 8, 2, 6, 1, 7, 3, 5])
    torch.testing.assert_close(
        head(some_tokens()[:, order]), head(some_tokens()), rtol=1e-12, atol=1e-12
    )


# Groups


@pytest.mark.parametrize(
    ("num_classes", "num_groups", "groups", "size"),
    [
        (80, 100, 80, 1),
        (80, None, 80, 1),
        (80, 80, 80, 1),
        (1000, 100, 100, 10),
        (1001, 100, 100, 11),
        (9605, 200, 200, 49),
        (10001, 10000, 10000, 2),
        (5001, 5000, 5000, 2),
        (5, 4, 4, 2),
        (1, 100, 1, 1),
    ],
)
def test_groups_are_clipped_to_the_classes_and_their_size_is_a_true_ceiling(
    num_classes, num_groups, groups, size
):
    head = MLDecoder(4, num_classes, num_groups=num_groups, embed_dim=8, num_heads=2, mlp_dim=8)
    assert head.queries.shape == (groups, 8)
    assert head.pool_weight.shape == (groups, 8, size)
    assert head.pool_bias.shape == (num_classes,)
    assert head(torch.randn(1, 2, 4)).shape == (1, num_classes)


def test_one_hundred_groups_are_the_default():
    assert MLDecoder(4, 1000, embed_dim=8, mlp_dim=8).queries.shape == (100, 8)


@pytest.mark.parametrize(
    ("num_classes", "num_groups"), [(12, 4), (13, 4), (1001, 100), (6, 6), (5, 4)]
)
@torch.no_grad()
def test_a_class_is_decided_by_its_group_and_by_no_other(num_classes, num_groups):
    head = small(num_classes, num_groups=num_groups)
    before, size = head(some_tokens()), math.ceil(num_classes / num_groups)
    for group in {0, 1, num_groups // 2, num_groups - 1}:
        changed = copy.deepcopy(head)
        changed.queries[group].normal_()
        moved = (changed(some_tokens()) != before).all(0).nonzero().flatten().tolist()
        assert moved == [c for c in range(num_classes) if c // size == group]


@torch.no_grad()
def test_a_class_has_a_slot_and_a_bias_of_its_own():
    head = small(13, num_groups=4)
    before = head(some_tokens())
    for place in range(16):
        group, slot = divmod(place, 4)
        changed = copy.deepcopy(head)
        changed.pool_weight[group, :, slot] += 1
        moved = (changed(some_tokens()) != before).any(0).nonzero().flatten().tolist()
        assert moved == ([place] if place < 13 else [])
    for place in range(13):
        changed = copy.deepcopy(head)
        changed.pool_bias[place] += 1
        expected = before + F.one_hot(torch.tensor(place), 13)
        torch.testing.assert_close(changed(some_tokens()), expected, rtol=1e-12, atol=1e-12)


# The start


def check_uniform(tensor, bound):
    """The bound holds, is nearly reached, and the spread is that of the uniform distribution."""
    assert tensor.abs().max() <= bound
    assert tensor.abs().max() > bound * (1 - 20 / tensor.numel())
    check_moments(tensor, bound / math.sqrt(3))


def check_moments(tensor, std):
    """Mean 0 and this standard deviation, within six standard errors of the sample."""
    size = tensor.numel()
    assert abs(tensor.mean().item()) < 6 * std / math.sqrt(size)
    assert tensor.std().item() == pytest.approx(std, rel=6 / math.sqrt(2 * size))


def test_every_tensor_starts_as_in_the_official_code():
    torch.manual_seed(0)
    head = MLDecoder(2048, 1000, num_groups=100)
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
    constant = {
        "layers.0.cross_attn.in_proj_bias": 0,
        "layers.0.cross_attn.out_proj.bias": 0,
        "pool_bias": 0,
        **{
            f"layers.0.norm{number}.{name}": value
            for number in (1, 2, 3)
            for name, value in (("weight", 1), ("bias", 0))
        },
    }
    normal = {"queries": 1.0, "pool_weight": math.sqrt(2 / ((768 + 100) * 10))}
    state = head.state_dict()
    assert set(state) == {*uniform, *constant, *normal}
    for name, bound in uniform.items():
        check_uniform(state[name], bound)
    for name, value in constant.items():
        assert (state[name] == value).all(), name
    for name, std in normal.items():
        check_moments(state[name], std)
        assert state[name].abs().max() > 3.5 * std  # a normal distribution has tails


@pytest.mark.parametrize(
    ("num_classes", "num_groups", "std"),
    [(80, 100, 0.0486), (1000, 100, 0.0152), (9605, 200, 0.0065)],
)
def test_the_pooling_starts_with_the_spread_measured_in_the_official_code(
    num_classes, num_groups, std
):
    torch.manual_seed(0)
    head = MLDecoder(8, num_classes, num_groups=num_groups, mlp_dim=8)
    assert head.pool_weight.std().item() == pytest.approx(std, rel=0.02)
    assert abs(head.pool_weight.mean().item()) < 0.02 * std


def test_the_pooling_of_a_zero_shot_head_starts_with_the_official_spread():
    torch.manual_seed(0)
    heads = [MLDecoder(8, 3, mlp_dim=8, word_dim=5, num_groups=None) for _ in range(20)]
    assert heads[0].pool_weight.shape == (768, 1)
    assert heads[0].pool_bias.tolist() == [0]
    check_moments(torch.cat([head.pool_weight for head in heads]).detach(), math.sqrt(2 / 769))
    check_uniform(heads[0].word_proj.weight.detach(), 5**-0.5)


@pytest.mark.parametrize(
    ("num_classes", "options", "count"),
    [
        (80, {}, 7_150_672),
        (20, {}, 7_104_532),
        (1000, {"num_groups": 100}, 7_858_152),
        (9605, {"num_groups": 100}, 14_548_357),
        (9605, {"num_groups": 200}, 14_625_157),
        (925, {"num_groups": None, "word_dim": 300}, 7_321_089),
        (81, {"num_groups": None, "word_dim": 300}, 7_321_089),
    ],
)
def test_the_number_of_trainable_parameters_is_that_of_the_official_head(
    num_classes, options, count
):
    with torch.device("meta"):
        head = MLDecoder(2048, num_classes, **options)
    assert (
        sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
        == count
    )


# Queries


@pytest.mark.parametrize("queries", ["random", "orthogonal"])
def test_frozen_queries_are_saved_but_not_trained(queries):
    head = MLDecoder(IN, 7, queries=queries, **SMALL)
    assert "queries" in head.state_dict()
    assert "queries" not in dict(head.named_parameters())
    assert not head.queries.requires_grad


def test_learned_queries_are_trained_from_the_same_start_as_random_ones():
    heads = []
    for queries in ("random", "learned"):
        torch.manual_seed(3)
        heads.append(MLDecoder(IN, 7, queries=queries, **SMALL))
    assert torch.equal(heads[0].queries, heads[1].queries)
    assert heads[1].queries.requires_grad
    assert "queries" in dict(heads[1].named_parameters())


@pytest.mark.parametrize("groups", [1, 10, 64])
def test_orthogonal_queries_are_orthogonal_and_as_long_as_random_ones(groups):
    head = MLDecoder(IN, groups, embed_dim=64, mlp_dim=8, queries="orthogonal")
    torch.testing.assert_close(
        head.queries @ head.queries.t(), 64 * torch.eye(groups), rtol=0, atol=1e-3
    )


def test_more_orthogonal_queries_than_dimensions_keep_their_length():
    head = MLDecoder(IN, 100, embed_dim=16, num_heads=2, mlp_dim=8, queries="orthogonal")
    torch.testing.assert_close(head.queries.norm(dim=1), torch.full((100,), 4.0))
    assert torch.linalg.matrix_rank(head.queries) == 16


@pytest.mark.parametrize("queries", ["random", "learned", "orthogonal"])
def test_queries_follow_from_the_seed(queries):
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(MLDecoder(IN, 7, queries=queries, **SMALL).queries)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


# The doubled query


@torch.no_grad()
def test_the_doubled_query_changes_next_to_nothing_in_evaluation():
    torch.manual_seed(0)
    doubled = MLDecoder(2048, 80).eval()
    plain = MLDecoder(2048, 80, doubled_query=False).eval()
    plain.load_state_dict(doubled.state_dict())
    tokens = torch.randn(2, 49, 2048).relu()
    difference = (doubled(tokens) - plain(tokens)).abs().max()
    assert 0 < difference < 1e-4


def seen_by_the_first_norm(head, tokens):
    seen = []
    handle = head.layers[0].norm1.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].detach().clone())
    )
    head(tokens)
    handle.remove()
    return seen[0]


def test_the_doubled_query_is_noise_of_two_values_in_training():
    torch.manual_seed(0)
    head = MLDecoder(8, 80, mlp_dim=8).double().train()
    tokens = torch.randn(4, 3, 8, dtype=torch.float64)
    factor = seen_by_the_first_norm(head, tokens) / head.queries
    assert factor.shape == (4, 80, 768)
    kept, dropped = 1 + 1 / 0.9, 1.0
    is_kept, is_dropped = (factor - kept).abs() < 1e-9, (factor - dropped).abs() < 1e-9
    assert (is_kept | is_dropped).all()
    assert is_dropped.double().mean().item() == pytest.approx(0.1, abs=0.003)
    assert not torch.equal(factor[0], factor[1])  # each image draws its own
    assert (seen_by_the_first_norm(head.eval(), tokens) == 2 * head.queries).all()


def test_without_the_doubled_query_training_puts_no_noise_on_it():
    head = MLDecoder(8, 80, mlp_dim=8, doubled_query=False).train()
    assert (seen_by_the_first_norm(head, torch.randn(4, 3, 8)) == head.queries).all()


def test_dropout_acts_in_training_and_not_in_evaluation():
    head = small(dropout=0.5)
    assert torch.equal(head(some_tokens()), head(some_tokens()))
    head.train()
    assert not torch.allclose(head(some_tokens()), head(some_tokens()))


# Attention


@pytest.mark.parametrize(("num_groups", "num_layers"), [(None, 1), (3, 1), (None, 2)])
@torch.no_grad()
def test_attention_is_that_of_the_last_layer_averaged_over_heads(num_groups, num_layers):
    head = small(num_groups=num_groups, num_layers=num_layers)
    logits, weights = head(some_tokens(), attention=True)
    _, expected = official(head, some_tokens())
    assert weights.shape == (3, num_groups or 7, 9)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), rtol=0, atol=1e-5)
    torch.testing.assert_close(weights.double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(logits, head(some_tokens()))


@torch.no_grad()
def test_attention_of_a_zero_shot_head_has_a_row_a_word():
    head = small(word_dim=5, num_groups=None)
    _, weights = head(some_tokens(), some_words(11), attention=True)
    _, expected = official(head, some_tokens(), words=some_words(11))
    assert weights.shape == (3, 11, 9)
    torch.testing.assert_close(weights.double(), expected, rtol=0, atol=1e-5)


# Zero-shot


@pytest.mark.parametrize("count", [1, 7, 30])
@torch.no_grad()
def test_zero_shot_decodes_any_number_of_classes_as_described(count):
    head = small(word_dim=5, num_groups=None)
    expected, _ = official(head, some_tokens(), words=some_words(count))
    logits = head(some_tokens(), some_words(count))
    assert logits.shape == (3, count)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_word_as_wide_as_the_decoder_is_not_projected():
    head = small(word_dim=DIM, num_groups=None)
    assert not [name for name in head.state_dict() if name.startswith("word_proj")]
    words = some_words(4, DIM)
    closed = small(4, num_groups=None)
    closed.load_state_dict(
        {
            **head.state_dict(),
            "queries": words.relu(),
            "pool_weight": head.pool_weight.expand(4, -1, -1),
         "pool_bias": head.pool_bias.expand(4)}
    )  # fmt: skip
    torch.testing.assert_close(
        head(some_tokens(), words), closed(some_tokens()), rtol=1e-12, atol=1e-12
    )


@torch.no_grad()
def test_zero_shot_queries_do_not_see_each_other():
    head, words = small(word_dim=5, num_groups=None), some_words(12)
    together = head(some_tokens(), words)
    torch.testing.assert_close(
        head(some_tokens(), words[:5]), together[:, :5], rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(
        head(some_tokens(), words.flip(0)), together.flip(1), rtol=1e-12, atol=1e-12
    )


def test_no_parameter_of_a_zero_shot_head_belongs_to_a_class():
    shapes = [
        {
            name: tensor.shape
            for name, tensor in small(count, word_dim=5, num_groups=None).state_dict().items()
        }
        for count in (3, 1000)
    ]
    assert shapes[0] == shapes[1]
    assert "queries" not in shapes[0]


# Training and number formats


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_groups": 3},
        {"queries": "learned"},
        {"doubled_query": False, "queries": "learned"},
        {"self_attention": True, "queries": "learned"},
        {"num_layers": 2},
        {"word_dim": 5, "num_groups": None},
        {"word_dim": DIM, "num_groups": None},
    ],
)
def test_every_trainable_parameter_gets_a_gradient(options):
    head = small(9, **options).train()
    words = some_words(9, options["word_dim"]) if "word_dim" in options else None
    head(some_tokens(), words).square().sum().backward()
    without = [
        name for name, p in head.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0
    ]
    assert not without


@pytest.mark.parametrize(
    "options", [{}, {"num_groups": 3}, {"self_attention": True}, {"num_layers": 2}]
)
@torch.no_grad()
def test_bfloat16_autocast_stays_near_float32(options):
    torch.manual_seed(0)
    head = MLDecoder(64, 20, embed_dim=64, mlp_dim=128, **options).eval()
    tokens = torch.randn(4, 49, 64)
    exact = head(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = head(tokens)
    assert logits.isfinite().all()
    assert (logits.float() - exact).abs().max() < 0.05 * exact.std()


@torch.no_grad()
def test_float64_agrees_with_float32():
    torch.manual_seed(0)
    head = MLDecoder(64, 20, num_groups=6, embed_dim=64, mlp_dim=128).eval()
    tokens = torch.randn(4, 49, 64)
    exact = copy.deepcopy(head).double()(tokens.double())
    assert exact.dtype == torch.float64
    torch.testing.assert_close(head(tokens).double(), exact, rtol=0, atol=1e-4)
    assert not torch.equal(head(tokens).double(), exact)


# Errors


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"embed_dim": 18, "num_heads": 4}, ["head.embed_dim", "18", "head.num_heads", "4"]),
        ({"num_heads": 0}, ["head.num_heads", "0"]),
        ({"num_groups": 0}, ["head.num_groups", "0"]),
        ({"num_groups": -1}, ["head.num_groups", "-1"]),
        ({"num_layers": 0}, ["head.num_layers", "0"]),
        ({"mlp_dim": 0}, ["head.mlp_dim", "0"]),
        ({"embed_dim": 0}, ["head.embed_dim", "0"]),
        ({"queries": "radnom"}, ["head.queries", "radnom", "random", "learned", "orthogonal"]),
        ({"word_dim": 300, "num_groups": 100}, ["head.num_groups", "100", "head.word_dim", "null"]),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_name_and_value(options, names):
    with pytest.raises(ConfigError) as caught:
        MLDecoder(IN, 7, **{**SMALL, **options})
    message = str(caught.value)
    assert "\n" not in message
    assert [name for name in names if name not in message] == []


def test_a_head_without_classes_is_refused():
    with pytest.raises(ConfigError, match="num_classes is 0"):
        MLDecoder(IN, 0, **SMALL)


def test_a_head_of_word_vectors_needs_no_classes_of_its_own():
    head = MLDecoder(IN, 0, **{**SMALL, "num_groups": None, "word_dim": 5})
    assert head(torch.randn(2, 9, IN), torch.randn(3, 5)).shape == (2, 3)


@pytest.mark.parametrize(
    ("options", "words", "names"),
    [
        ({}, some_words(7, DIM), ["head.word_dim"]),
        ({"word_dim": 5, "num_groups": None}, None, ["head.word_dim=5", "none"]),
        ({"word_dim": 5, "num_groups": None}, some_words(7, 6), ["head.word_dim=5", "6"]),
    ],
)
def test_words_must_fit_the_head(options, words, names):
    with pytest.raises(ConfigError) as caught:
        small(**options)(some_tokens(), words)
    assert "\n" not in str(caught.value)
    assert [name for name in names if name not in str(caught.value)] == []


@torch.no_grad()
def test_full_decoding_of_one_class_does_not_depend_on_the_others():
    """Why one pass over all classes serves all zero-shot numbers."""
    head, tokens, words = small(num_groups=None, word_dim=5), some_tokens(), some_words(6)
    alone = torch.cat([head(tokens, word[None]) for word in words], 1)
    torch.testing.assert_close(head(tokens, words), alone, rtol=1e-12, atol=1e-12)


# Maps, and the state dict of an official head


@pytest.mark.parametrize("options", [{}, {"num_groups": 3}, {"self_attention": True}])
@torch.no_grad()
def test_a_map_gives_the_numbers_of_its_tokens(options):
    torch.manual_seed(0)
    head = MLDecoder(IN, 7, **SMALL, **options).eval()
    features = torch.randn(3, IN, 4, 5)
    tokens = torch.stack([features[:, :, y, x] for y in range(4) for x in range(5)], dim=1)
    torch.testing.assert_close(head(features), head(tokens), rtol=1e-5, atol=1e-6)
    assert torch.equal(head(features), head(features.flatten(2).transpose(1, 2)))


def test_a_strict_load_of_official_names_misses_and_leaves_nothing():
    head = small(5, word_dim=6, num_groups=None)
    state = {
        "wordvec_proj.weight": torch.ones(DIM, 6),
        "decoder.duplicate_pooling_bias": torch.full((1,), 3.0),
        "decoder.no_such_tensor": torch.zeros(1),
    }
    given = dict(state)
    missing, unexpected = nn.Sequential(head).load_state_dict(
        {f"0.{key}": value for key, value in state.items()}, strict=False
    )
    assert unexpected == ["0.decoder.no_such_tensor"]
    assert {"0.word_proj.weight", "0.pool_bias"}.isdisjoint(missing)
    assert "0.pool_weight" in missing
    assert (head.word_proj.weight == 1).all()
    assert head.pool_bias.tolist() == [3]
    assert state == given  # what the caller holds keeps its names
