import copy
import math
import subprocess
import sys

import pytest
import timm
import torch
from support import assert_equal
from timm.optim import Lamb, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from mldec.backbones import TimmBackbone
from mldec.errors import ConfigError
from mldec.files import torch_files
from mldec.heads.ml_decoder import MLDecoder
from mldec.model import Classifier
from mldec.training.optim import (
    build_optimizer,
    build_schedule,
    fast_forward,
    load_state,
    parameter_groups,
)

DECAYED = ["conv.weight", "fc.weight", "table"]
FREE = ["conv.bias", "norm.weight", "norm.bias", "fc.bias", "scale", "number", "wide.bias"]


class WideBias(nn.Module):
    """A bias of two dimensions: the name decides."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 3))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 5)
        self.table = nn.Parameter(torch.randn(2, 4, 3))
        self.scale = nn.Parameter(torch.randn(6))
        self.number = nn.Parameter(torch.tensor(1.5))
        self.wide = WideBias()
        self.frozen = nn.Parameter(torch.randn(7, 7), requires_grad=False)
        self.register_buffer("queries", torch.randn(2, 2))


def net(seed=0):
    torch.manual_seed(seed)
    return Net()


def optimizer(model, name="adam", lr=0.01, weight_decay=0.1, decay="weights", **options):
    return build_optimizer(
        model, name=name, lr=lr, weight_decay=weight_decay, decay=decay, options=options
    )


def by_hand(model, kind=torch.optim.Adam, lr=0.01, weight_decay=0.1):
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [parameters[name] for name in FREE], "weight_decay": 0.0},
        {"params": [parameters[name] for name in DECAYED], "weight_decay": weight_decay},
    ]
    return kind(groups, lr=lr, fused=True)


def push(model, step):
    """Give every trainable parameter a gradient that follows from the step."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient if parameter.requires_grad else None


def trained(model, optimiser, steps):
    for step in range(steps):
        push(model, step)
        optimiser.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# Parameter groups


def test_biases_and_parameters_of_one_dimension_do_not_decay():
    model = net()
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = {
        group["weight_decay"]: {names[p] for p in group["params"]}
        for group in parameter_groups(model, lr=0.01, weight_decay=0.3)
    }
    assert groups == {0.3: set(DECAYED), 0.0: set(FREE)}


def test_each_trainable_parameter_is_in_one_group_and_a_frozen_one_in_none():
    model = net()
    inside = [
        id(p)
        for group in parameter_groups(model, lr=0.01, weight_decay=0.3)
        for p in group["params"]
    ]
    assert sorted(inside) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert id(model.frozen) not in inside


def test_a_parameter_frozen_later_is_left_out():
    model = net()
    model.fc.requires_grad_(False)
    inside = [
        id(p)
        for group in parameter_groups(model, lr=0.01, weight_decay=0.3)
        for p in group["params"]
    ]
    assert id(model.fc.weight) not in inside
    assert id(model.fc.bias) not in inside


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lamb"])
def test_the_groups_keep_their_decay_in_the_optimiser(name):
    built = optimizer(net(), name)
    assert [group["weight_decay"] for group in built.param_groups] == [0.0, 0.1]
    assert [len(group["params"]) for group in built.param_groups] == [len(FREE), len(DECAYED)]
    assert [group["lr"] for group in built.param_groups] == [0.01, 0.01]


# The names of the classifier in a network of timm, and what of it is frozen in these tests.
NETWORKS = {
    "resnet18": ("fc.", ["conv1", "bn1", "layer1"]),
    "vit_tiny_patch16_224": ("head.", ["patch_embed", "blocks.0"]),
    "convnext_atto": ("head.fc.", ["stem", "stages.0"]),
}


def classifier(name):
    """Build a network of timm with our head, and the same one with its own, without memory."""
    with torch.device("meta"):
        backbone = TimmBackbone(name)
        ours = Classifier(backbone, MLDecoder(backbone.num_features, 20, embed_dim=32))
        return ours, timm.create_model(name, num_classes=20)


def freeze_in_both(name, ours, theirs):
    for part in NETWORKS[name][1]:
        ours.backbone.network.get_submodule(part).requires_grad_(False)
        theirs.get_submodule(part).requires_grad_(False)


def named_groups(model, groups):
    """Return (rate, weight decay, names) of each group that is not empty."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        (group["lr"], group["weight_decay"], frozenset(names[p] for p in group["params"]))
        for group in groups
        if group["params"]
    }


def in_network(groups, own="", *, without=()):
    """Return the groups with the names inside the network, less those of a classifier."""
    inside = set()
    for lr, weight_decay, names in groups:
        kept = {name for name in names if name.startswith(own) and not name.startswith(without)}
        if kept:
            inside.add((lr, weight_decay, frozenset(name.removeprefix(own) for name in kept)))
    return inside


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("decay", ["weights", "all"])
@pytest.mark.parametrize("name", NETWORKS)
class TestGroupsOfTimm:
    def test_layer_decay_gives_the_groups_of_timm(self, name, decay, frozen):
        ours, theirs = classifier(name)
        if frozen:
            freeze_in_both(name, ours, theirs)

        settings = {"lr": 1e-3, "weight_decay": 0.05, "decay": decay, "layer_decay": 0.7}
        groups = named_groups(ours, parameter_groups(ours, **settings))
        expected = param_groups_layer_decay(
            theirs, 0.05, layer_decay=0.7, weight_decay_exclude_1d=decay == "weights"
        )
        for group in expected:
            group["lr"] = 1e-3 * group["lr_scale"]

        classifier_name = NETWORKS[name][0]
        found = in_network(groups, "backbone.network.")
        assert found == in_network(named_groups(theirs, expected), without=classifier_name)
        assert len({lr for lr, _, _ in found}) > 3

        # The head stands in the place of timm's classifier: it has the whole rate.
        head = {lr for lr, _, names in groups for name in names if name.startswith("head.")}
        assert head == {1e-3}

    def test_without_layer_decay_too(self, name, decay, frozen):
        ours, theirs = classifier(name)
        if frozen:
            freeze_in_both(name, ours, theirs)

        groups = named_groups(ours, parameter_groups(ours, lr=1e-3, weight_decay=0.05, decay=decay))
        expected = param_groups_weight_decay(
            theirs, 0.05, weight_decay_exclude_1d=decay == "weights"
        )
        for group in expected:
            group["lr"] = 1e-3

        found = in_network(groups, "backbone.network.")
        assert found == in_network(named_groups(theirs, expected), without=NETWORKS[name][0])


def test_the_backbone_has_a_rate_of_its_own_from_which_its_layers_decay():
    model, _ = classifier("resnet18")
    settings = {"lr": 1e-3, "weight_decay": 0.1, "backbone_lr": 1e-5}

    groups = named_groups(model, parameter_groups(model, **settings))
    rates = {name: lr for lr, _, names in groups for name in names}
    assert {lr for name, lr in rates.items() if name.startswith("backbone.")} == {1e-5}
    assert {lr for name, lr in rates.items() if name.startswith("head.")} == {1e-3}

    groups = named_groups(model, parameter_groups(model, **settings, layer_decay=0.5))
    rates = {name: lr for lr, _, names in groups for name in names}
    assert rates["backbone.network.layer4.1.conv1.weight"] == 1e-5 * 0.5
    assert rates["backbone.network.layer4.0.conv1.weight"] == 1e-5 * 0.25
    assert {lr for name, lr in rates.items() if name.startswith("head.")} == {1e-3}


def test_the_first_two_groups_have_the_rate_of_the_head_in_every_case():
    model, _ = classifier("resnet18")
    for settings in ({}, {"decay": "all"}, {"backbone_lr": 1e-5}, {"layer_decay": 0.5}):
        groups = parameter_groups(model, lr=1e-3, weight_decay=0.1, **settings)
        assert [(group["lr"], group["weight_decay"]) for group in groups[:2]] == [
            (1e-3, 0.0),
            (1e-3, 0.1),
        ]
        assert all(group["params"] for group in groups[2:])


@pytest.mark.parametrize(("setting", "value"), [("backbone_lr", 1e-5), ("layer_decay", 0.5)])
def test_a_rate_for_a_frozen_backbone_is_refused(setting, value):
    model, _ = classifier("resnet18")
    model.backbone.requires_grad_(False)
    with pytest.raises(ConfigError, match=rf"optim\.{setting} has no effect on a frozen"):
        parameter_groups(model, lr=1e-3, weight_decay=0.1, **{setting: value})


def test_layer_decay_needs_a_backbone_with_layers():
    model = Classifier(nn.Linear(3, 3), MLDecoder(3, 2, embed_dim=8))
    with pytest.raises(ConfigError, match=r"optim\.layer_decay: Linear does not say which layers"):
        parameter_groups(model, lr=1e-3, weight_decay=0.1, layer_decay=0.5)


# Optimisers


def test_decay_of_all_is_adamw_on_all_parameters_as_in_query2label():
    ours, theirs = net(), net()
    found = trained(ours, optimizer(ours, "adamw", decay="all"), 3)
    everything = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    expected = trained(
        theirs, torch.optim.AdamW(everything, lr=0.01, weight_decay=0.1, fused=True), 3
    )
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize(
    ("name", "options", "fused"),
    [
        ("adam", {}, True),
        ("adamw", {}, True),
        ("adamw", {"foreach": True}, None),
        ("adamw", {"fused": False}, False),
        ("sgd", {}, None),
    ],
)
def test_steps_are_fused_where_they_can_be(name, options, fused):
    groups = optimizer(net(), name, **options).param_groups
    assert {group.get("fused") for group in groups} == {fused}
    on_meta = net().to("meta")
    assert not optimizer(on_meta, name).param_groups[0].get("fused")


def test_adam_is_that_of_torch_with_decay_in_the_gradient():
    ours, theirs, decoupled = net(), net(), net()
    assert type(optimizer(ours)) is torch.optim.Adam
    found = trained(ours, optimizer(ours), 2)
    expected = trained(theirs, by_hand(theirs), 2)
    other = trained(decoupled, by_hand(decoupled, torch.optim.AdamW), 2)
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name
        if name in DECAYED:
            assert not torch.allclose(parameter, other[name]), name
    assert torch.equal(found["frozen"], net().frozen)


def test_adam_follows_the_formula_with_coupled_decay():
    model = net()
    built = optimizer(model)
    start = model.fc.weight.detach().double()
    first = second = torch.zeros_like(start)
    for step in (1, 2, 3):
        push(model, step)
        gradient = model.fc.weight.grad.double() + 0.1 * start
        built.step()
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        start = start - 0.01 * (first / (1 - 0.9**step)) / (
            (second / (1 - 0.999**step)).sqrt() + 1e-8
        )
        torch.testing.assert_close(model.fc.weight.detach().double(), start, rtol=1e-5, atol=1e-6)


def test_adamw_is_that_of_torch_with_decoupled_decay():
    ours, theirs = net(), net()
    found = trained(ours, optimizer(ours, "adamw"), 2)
    expected = trained(theirs, by_hand(theirs, torch.optim.AdamW), 2)
    for name, parameter in found.items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["lamb", "adamw", "sgd", "Adam"])
def test_other_optimisers_of_timm_build_and_move_the_parameters(name):
    model = net()
    after = trained(model, optimizer(model, name), 2)
    before = dict(net().named_parameters())
    for key, parameter in after.items():
        assert parameter.isfinite().all()
        assert torch.equal(parameter, before[key]) == (key == "frozen"), key


def test_options_reach_the_optimiser():
    built = optimizer(net(), eps=1e-4, betas=[0.8, 0.99])
    assert [group["eps"] for group in built.param_groups] == [1e-4, 1e-4]
    assert [tuple(group["betas"]) for group in built.param_groups] == [(0.8, 0.99)] * 2


@pytest.mark.parametrize(
    ("name", "near"), [("adm", "adam"), ("lambb", "lamb"), ("adam_w", "adamw")]
)
def test_an_unknown_optimiser_is_refused_with_the_nearest_name(name, near):
    with pytest.raises(
        ConfigError, match=rf"optim\.name '{name}' is unknown; did you mean '{near}'\?"
    ) as caught:
        optimizer(net(), name)
    assert "\n" not in str(caught.value)


def test_an_unknown_option_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"optim\.name=adam.*optim\.options.*epsilon") as caught:
        optimizer(net(), epsilon=1e-4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"eps": -1.0}, {"betas": [2.0, 0.9]}])
def test_an_option_out_of_range_is_refused_in_one_line(options):
    with pytest.raises(ConfigError, match=r"optim\.options") as caught:
        optimizer(net(), **options)
    assert "\n" not in str(caught.value)


# Schedules


def rates(built, schedule, steps):
    """The rate and the momentum of each group at each step of a run."""
    seen = []
    for step in range(steps):
        seen.append(
            [
                (group["lr"], group.get("betas"), group.get("momentum"))
                for group in built.param_groups
            ]
        )
        if step < steps - 1:
            built.step()
            schedule.step()
    return seen


@pytest.mark.parametrize("steps", [20, 37, 1000])
@pytest.mark.parametrize("pct_start", [0.2, 0.3])
def test_onecycle_is_that_of_torch_with_beta1(steps, pct_start):
    built = optimizer(net(), lr=3e-4)
    schedule = build_schedule(built, name="onecycle", lr=3e-4, steps=steps, pct_start=pct_start)
    reference = by_hand(net(), lr=3e-4)
    theirs = OneCycleLR(reference, max_lr=3e-4, total_steps=steps, pct_start=pct_start)
    assert rates(built, schedule, steps) == rates(reference, theirs, steps)


def test_onecycle_has_the_official_values():
    lr, steps = 1e-4, 1000
    built = optimizer(net(), lr=lr)
    seen = rates(built, build_schedule(built, name="onecycle", lr=lr, steps=steps), steps)
    top = 0.2 * steps - 1
    for step, groups in enumerate(seen):
        if step <= top:
            share, rate, beta = step / top, (lr / 25, lr), (0.95, 0.85)
        else:
            share, rate, beta = (step - top) / (steps - 1 - top), (lr, lr / 250_000), (0.85, 0.95)
        fall = (1 + math.cos(math.pi * share)) / 2
        for value, betas, _ in groups:
            assert value == pytest.approx(rate[1] + (rate[0] - rate[1]) * fall, rel=1e-9)
            assert betas[0] == pytest.approx(beta[1] + (beta[0] - beta[1]) * fall, rel=1e-9)
            assert betas[1] == 0.999
    assert seen[0][0][0] == pytest.approx(4e-6)
    assert seen[199][0][0] == pytest.approx(1e-4)
    assert seen[-1][0][0] == pytest.approx(4e-10)


def test_onecycle_cycles_the_momentum_of_sgd():
    built = optimizer(net(), "sgd", momentum=0.9)
    seen = rates(built, build_schedule(built, name="onecycle", lr=0.01, steps=100), 100)
    assert [seen[step][0][2] for step in (0, 19, 99)] == pytest.approx([0.95, 0.85, 0.95])


@pytest.mark.parametrize("steps", range(1, 31))
def test_onecycle_has_rates_for_a_run_of_any_length(steps):
    built = optimizer(net(), lr=0.01)
    seen = rates(built, build_schedule(built, name="onecycle", lr=0.01, steps=steps), steps)
    assert all(0 < value <= 0.01 * (1 + 1e-9) for groups in seen for value, _, _ in groups)


@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
@pytest.mark.parametrize("min_lr", [0.0, 1e-5])
@pytest.mark.parametrize("steps", [6, 40])
def test_cosine_follows_its_formula(warmup_steps, min_lr, steps):
    lr = 2e-3
    built = optimizer(net(), lr=lr)
    schedule = build_schedule(
        built, name="cosine", lr=lr, steps=steps, warmup_steps=warmup_steps, min_lr=min_lr
    )
    for step, groups in enumerate(rates(built, schedule, steps + 3)):
        if step < warmup_steps:
            expected = lr * (step + 1) / (warmup_steps + 1)
        else:
            share = min(1, (step - warmup_steps) / (steps - warmup_steps))
            expected = min_lr + (lr - min_lr) * (1 + math.cos(math.pi * share)) / 2
        for value, betas, _ in groups:
            assert value == pytest.approx(expected, rel=1e-9, abs=1e-15)
            assert betas == (0.9, 0.999)


def test_cosine_without_warm_up_is_that_of_torch():
    built, reference = optimizer(net()), by_hand(net())
    ours = build_schedule(built, name="cosine", lr=0.01, steps=50, min_lr=1e-4)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(reference, T_max=50, eta_min=1e-4)
    found = [groups[0][0] for groups in rates(built, ours, 51)]
    assert found == pytest.approx(
        [groups[0][0] for groups in rates(reference, theirs, 51)], rel=1e-9
    )


@pytest.mark.parametrize(
    ("epochs", "warmup", "cooldown", "warmup_lr", "min_lr"),
    [
        (300, 5, 10, 1e-4, 1e-6),
        (600, 5, 10, 1e-4, 1e-6),
        (12, 0, 0, 1e-5, 0.0),
        (9, 3, 2, 0.0, 1e-5),
    ],
)
def test_cosine_by_epochs_is_that_of_timm(epochs, warmup, cooldown, warmup_lr, min_lr):
    reference, built, n = (
        by_hand(net(), lr=4e-3),
        optimizer(net(), "lamb", lr=4e-3),
        3,
    )  # steps an epoch
    theirs, total = create_scheduler_v2(
        reference,
        sched="cosine",
        num_epochs=epochs,
        warmup_epochs=warmup,
        warmup_lr=warmup_lr,
        min_lr=min_lr,
        cooldown_epochs=cooldown,
    )
    assert total == epochs + cooldown
    ours = build_schedule(
        built,
        name="cosine_epochs",
        lr=4e-3,
        steps=total * n,
        warmup_steps=warmup * n,
        min_lr=min_lr,
        warmup_lr=warmup_lr,
        cooldown_steps=cooldown * n,
        epoch_steps=n,
    )
    found, expected = [], []
    for epoch in range(total):
        expected += [reference.param_groups[0]["lr"]] * n
        theirs.step(epoch + 1)
        for _ in range(n):
            found.append(built.param_groups[0]["lr"])
            ours.step()
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)
    assert found[-1] == pytest.approx(min_lr if cooldown else expected[-1])


def layered():
    """Return a Classifier of two linear layers, and its optimiser with a rate for each."""
    torch.manual_seed(0)
    model = Classifier(nn.Linear(3, 3), nn.Linear(3, 2))
    settings = {"lr": 0.01, "weight_decay": 0.1, "backbone_lr": 0.002}
    return model, build_optimizer(model, name="adam", options={}, **settings)


@pytest.mark.parametrize(
    "options",
    [
        {"name": "onecycle"},
        {"name": "cosine", "warmup_steps": 7, "min_lr": 1e-4},
        {"name": "cosine_epochs", "min_lr": 1e-4, "epoch_steps": 5},
    ],
)
def test_a_group_follows_the_schedule_in_proportion_to_its_own_rate(options):
    _, built = layered()
    schedule = build_schedule(built, lr=0.01, steps=100, **options)
    seen = rates(built, schedule, 100)
    assert len(seen[0]) == 4
    highest = [max(step[number][0] for step in seen) for number in range(4)]
    assert highest == pytest.approx([0.01, 0.01, 0.002, 0.002])
    for groups in seen:
        lr = [group[0] for group in groups]
        assert lr[0] == lr[1]
        assert lr[2:] == pytest.approx([0.2 * lr[0]] * 2, rel=1e-9)


def test_scaled_rates_are_those_of_timms_schedule():
    _, built = layered()
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    scaled = [
        {"params": [parameters[0]], "lr_scale": 1.0},
        {"params": [parameters[1]], "lr_scale": 0.2},
    ]
    reference = torch.optim.Adam(scaled, lr=0.01)
    settings = {"warmup_lr": 1e-5, "min_lr": 1e-4}
    theirs, total = create_scheduler_v2(
        reference, sched="cosine", num_epochs=9, warmup_epochs=3, **settings
    )
    ours = build_schedule(
        built, name="cosine_epochs", lr=0.01, steps=total, warmup_steps=3, **settings
    )
    for epoch in range(total):
        expected = [group["lr"] for group in reference.param_groups]
        found = [built.param_groups[number]["lr"] for number in (0, 2)]
        assert found == pytest.approx(expected, rel=1e-9)
        theirs.step(epoch + 1)
        ours.step()


# LAMB


def test_lamb_with_our_groups_is_that_of_timm_with_its_own():
    ours, theirs = net(), net()
    found = trained(ours, optimizer(ours, "lamb", lr=4e-3, weight_decay=0.02), 4)
    groups = param_groups_weight_decay(theirs, 0.02)
    assert [len(group["params"]) for group in groups] == [len(FREE), len(DECAYED)]
    expected = trained(theirs, Lamb(groups, lr=4e-3), 4)
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name


def test_lamb_clips_all_gradients_together_to_a_norm_of_one():
    inside, by_us = net(), net()
    clipping, plain = optimizer(inside, "lamb"), optimizer(by_us, "lamb", max_grad_norm=None)
    for step in range(3):
        push(inside, step)
        push(by_us, step)
        norm = nn.utils.clip_grad_norm_([p for p in by_us.parameters() if p.grad is not None], 1.0)
        assert norm > 1
        clipping.step()
        plain.step()
    for one, other in zip(inside.parameters(), by_us.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


# Going on in the middle

SCHEDULES = [
    {"name": "onecycle"},
    {"name": "onecycle", "pct_start": 0.4},
    {"name": "cosine"},
    {"name": "cosine", "warmup_steps": 7, "min_lr": 1e-5},
    {
        "name": "cosine_epochs",
        "warmup_steps": 20,
        "min_lr": 1e-5,
        "cooldown_steps": 10,
        "epoch_steps": 5,
    },
]


def state(built):
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in built.param_groups
    ]


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("options", SCHEDULES)
@pytest.mark.parametrize("done", [0, 1, 6, 7, 8, 19, 20, 50, 98, 99])
def test_fast_forward_is_as_many_steps_to_the_last_bit(options, done):
    walked, jumped = optimizer(net()), optimizer(net())
    walk = build_schedule(walked, lr=0.01, steps=100, **options)
    jump = build_schedule(jumped, lr=0.01, steps=100, **options)
    for _ in range(done):
        walked.step()
        walk.step()
    fast_forward(jump, done)
    assert state(jumped) == state(walked)
    assert jump.get_last_lr() == walk.get_last_lr()
    for _ in range(99 - done):
        for built, schedule in ((walked, walk), (jumped, jump)):
            built.step()
            schedule.step()
        assert state(jumped) == state(walked)


def test_going_on_in_the_middle_warns_of_nothing():
    program = """
from torch import nn
from mldec.training.optim import build_optimizer, build_schedule, fast_forward
for name in ("onecycle", "cosine"):
    optimizer = build_optimizer(nn.Linear(2, 2), name="adam", lr=0.01, weight_decay=0.0, options={})
    fast_forward(build_schedule(optimizer, name=name, lr=0.01, steps=100), 7)
"""
    run = subprocess.run(
        [sys.executable, "-W", "default", "-c", program], capture_output=True, text=True, check=True
    )
    assert "UserWarning" not in run.stderr


def after_steps(name, steps=3, **options):
    """Return a net and its optimiser after some steps."""
    torch.manual_seed(0)
    net = Net()
    optimizer = build_optimizer(net, name=name, lr=0.01, weight_decay=0.1, options=options)
    build_schedule(optimizer, name="onecycle", lr=0.01, steps=10)
    for _ in range(steps):
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return net, optimizer


KINDS = [("adam", {}), ("adamw", {}), ("sgd", {}), ("lamb", {}), ("adafactor", {}), ("nadam", {})]
KINDS += [("adam", {"amsgrad": True}), ("rmsprop", {}), ("adan", {}), ("lion", {})]


@pytest.mark.parametrize(("name", "options"), KINDS)
@pytest.mark.parametrize("steps", [0, 3])
def test_an_optimiser_goes_on_from_its_own_state(name, options, steps):
    _, optimizer = after_steps(name, steps, **options)
    state = torch_files.snapshot(optimizer.state_dict())
    net, resumed = after_steps(name, steps=0, **options)
    load_state(resumed, copy.deepcopy(state))
    assert_equal(resumed.state_dict(), state)
    push(net, 0)
    resumed.step()


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("value", [torch.zeros(3, 3), torch.zeros(1)])
def test_an_average_of_another_shape_never_reaches_a_fused_kernel(name, value):
    _, optimizer = after_steps(name)
    state = torch_files.snapshot(optimizer.state_dict())
    state["state"][0]["exp_avg"] = value
    with pytest.raises(ValueError, match="an 'exp_avg' has another shape than its parameter"):
        load_state(after_steps(name, steps=0)[1], state)
