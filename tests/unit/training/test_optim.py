"""Groups, optimizers, schedules and frozen parts against timm, torch and closed formulas."""

import copy
import math

import pytest
import timm
import torch
from random_weights import batch_norms, randomize_norms
from support import assert_equal
from timm.layers import freeze_batch_norm_2d
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.utils import freeze as timm_freeze
from torch import nn
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, OneCycleLR

from mldec.backbones import TimmBackbone
from mldec.config.schema import FreezeBatchNorm, Schedule, ScheduleName, Train
from mldec.errors import ConfigError
from mldec.files import torch_files
from mldec.heads.ml_decoder import MLDecoder
from mldec.model import Classifier
from mldec.training.optim import (
    build_optimizer,
    build_schedule,
    fast_forward,
    freeze,
    load_state,
    parameter_groups,
    step_if,
)

DECAYED = ["conv.weight", "fc.weight", "table"]
FREE = ["conv.bias", "norm.weight", "norm.bias", "fc.bias", "scale", "number", "wide.bias"]
# Prefix of the classifier in networks of timm, parts that these tests freeze, and arguments.
NETWORKS = {
    "resnet18": ("fc.", ["conv1", "bn1", "layer1"], {}),
    "vit_tiny_patch16_224": ("head.", ["patch_embed", "blocks.0"], {"depth": 2}),
    "convnext_atto": ("head.fc.", ["stem", "stages.0"], {"depths": (1, 1, 2, 1)}),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 5)
        self.table = nn.Parameter(torch.randn(2, 4, 3))
        self.scale = nn.Parameter(torch.randn(6))
        self.number = nn.Parameter(torch.tensor(1.5))
        # A bias with two dimensions.
        self.wide = nn.Module()
        self.wide.bias = nn.Parameter(torch.randn(2, 3))
        self.frozen = nn.Parameter(torch.randn(7, 7), requires_grad=False)
        self.register_buffer("queries", torch.randn(2, 2))


def optimizer(model, name="adam", lr=0.01, **options):
    return build_optimizer(model, name=name, lr=lr, weight_decay=0.1, options=options)


def by_hand(model, kind=Adam, lr=0.01):
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [parameters[name] for name in FREE], "weight_decay": 0.0},
        {"params": [parameters[name] for name in DECAYED], "weight_decay": 0.1},
    ]
    return kind(groups, lr=lr, fused=True)


def trained(model, optimizer, steps=3):
    """Do steps with random gradients, and return the parameters."""
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient if parameter.requires_grad else None
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def classifier(name, **arguments):
    backbone = TimmBackbone(name, model_args=arguments)
    return Classifier(backbone, MLDecoder(backbone.num_features, 4, embed_dim=32))


def named_groups(model, groups, inside="", without="-"):
    """Return (rate, weight decay, names) of each group, for the parameters of a part."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = set()
    for group in groups:
        of_group = [names[parameter] for parameter in group["params"]]
        kept = [name for name in of_group if name.startswith(inside)]
        kept = [name.removeprefix(inside) for name in kept if not name.startswith(without)]
        if kept:
            found.add((group["lr"], group["weight_decay"], frozenset(kept)))
    return found


@pytest.mark.parametrize("layer_decay", [None, 0.7])
@pytest.mark.parametrize("decay", ["weights", "all"])
@pytest.mark.parametrize("name", NETWORKS)
def test_groups_equal_timm(name, decay, layer_decay):
    own_head, frozen, arguments = NETWORKS[name]
    with torch.device("meta"):
        ours = classifier(name, **arguments)
        theirs = timm.create_model(name, num_classes=20, **arguments)
    for part in frozen:
        ours.backbone.network.get_submodule(part).requires_grad_(False)
        theirs.get_submodule(part).requires_grad_(False)

    options = {"weight_decay_exclude_1d": decay == "weights"}
    expected = param_groups_weight_decay(theirs, 0.05, **options)
    if layer_decay:
        expected = param_groups_layer_decay(theirs, 0.05, layer_decay=layer_decay, **options)
    for group in expected:
        group["lr"] = 1e-3 * group.get("lr_scale", 1.0)

    settings = {"decay": decay, "layer_decay": layer_decay}
    groups = parameter_groups(ours, lr=1e-3, weight_decay=0.05, **settings)
    found = named_groups(ours, groups, "backbone.network.")
    assert found == named_groups(theirs, expected, without=own_head)

    # The head, like timm's classifier, has the base rate.
    assert {lr for lr, _, _ in named_groups(ours, groups, "head.")} == {1e-3}
    assert [(group["lr"], group["weight_decay"]) for group in groups[:2]] == [
        (1e-3, 0.0),
        (1e-3, 0.05),
    ]


def test_layer_rates_decay_from_backbone_lr():
    with torch.device("meta"):
        model = classifier("resnet18")
    settings = {"lr": 1e-3, "weight_decay": 0.1, "backbone_lr": 1e-5}
    assert {lr for lr, _, _ in named_groups(model, parameter_groups(model, **settings))} == {
        1e-3,
        1e-5,
    }
    groups = named_groups(model, parameter_groups(model, **settings, layer_decay=0.5))
    rates = {name: lr for lr, _, names in groups for name in names}
    assert rates["backbone.network.layer4.1.conv1.weight"] == 1e-5 * 0.5
    assert rates["backbone.network.layer4.0.conv1.weight"] == 1e-5 * 0.25
    assert {lr for name, lr in rates.items() if name.startswith("head.")} == {1e-3}

    model.backbone.requires_grad_(False)
    assert {lr for lr, _, _ in named_groups(model, parameter_groups(model, **settings))} == {1e-3}


@pytest.mark.parametrize(("name", "kind"), [("adam", Adam), ("adamw", AdamW)])
def test_adam_and_adamw_equal_torch(name, kind):
    ours, theirs = Net(), Net()
    assert_equal(trained(ours, optimizer(ours, name)), trained(theirs, by_hand(theirs, kind)))


@pytest.mark.parametrize(
    ("name", "options", "fused"),
    [("adam", {}, True), ("adamw", {"foreach": True}, None), ("adamw", {"fused": False}, False)],
)
def test_adam_is_fused_by_default(name, options, fused):
    groups = optimizer(Net(), name, **options).param_groups
    assert {group.get("fused") for group in groups} == {fused}
    assert not optimizer(Net().to("meta"), name).param_groups[0].get("fused")


@pytest.mark.parametrize(("name", "nesterov"), [("sgd", True), ("momentum", False)])
def test_sgd_uses_nesterov_and_momentum_does_not(name, nesterov):
    built = optimizer(Net(), name)
    assert type(built) is torch.optim.SGD
    assert (built.defaults["nesterov"], built.defaults["momentum"]) == (nesterov, 0.9)
    assert optimizer(Net(), name, momentum=0.8).defaults["momentum"] == 0.8


@pytest.mark.parametrize("name", ["adam", "sgd", "lamb", "adafactor", "rmsprop", "lion"])
def test_restored_optimizer_continues_exactly(name):
    whole = Net()
    first = optimizer(whole, name)
    schedule_of(first, "onecycle", lr=0.01, steps=10)
    trained(whole, first)
    state = torch_files.snapshot(first.state_dict())

    second = copy.deepcopy(whole)
    resumed = optimizer(second, name)
    load_state(resumed, copy.deepcopy(state))
    assert_equal(resumed.state_dict(), state)
    assert_equal(trained(second, resumed), trained(whole, first))


def test_muon_uses_float32_on_cpu():
    # With these coefficients, the update is the normalized gradient.
    layer = nn.Linear(8, 16, bias=False)
    before = layer.weight.detach().clone()
    options = {"ns_steps": 1, "ns_coefficients": (1.0, 0.0, 0.0)}
    muon = build_optimizer(layer, name="muon", lr=1.0, weight_decay=0.0, options=options)
    layer.weight.grad = torch.randn(16, 8)
    step_if(torch.tensor(True), muon)
    update = (before - layer.weight).detach()
    gradient = layer.weight.grad
    torch.testing.assert_close(update / update.norm(), gradient / gradient.norm())


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_fused_sgd_skips_first_step(name):
    layer = nn.Linear(8, 4)
    fused = build_optimizer(layer, name=name, lr=0.1, weight_decay=0.01, options={"fused": True})
    plain = copy.deepcopy(layer)
    reference = build_optimizer(plain, name=name, lr=0.1, weight_decay=0.01, options={})
    assert not reference.param_groups[0]["fused"]
    before = copy.deepcopy(layer.state_dict())

    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    step_if(torch.tensor(False), fused)
    assert_equal(layer.state_dict(), before)

    for _ in range(3):
        for one, other in zip(layer.parameters(), plain.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        step_if(torch.tensor(True), fused)
        step_if(torch.tensor(True), reference)
    torch.testing.assert_close(layer.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-7)


def rates(built, schedule, steps):
    """Return rate and momentum of each group at each step."""
    seen = []
    for _ in range(steps):
        groups = built.param_groups
        seen.append([(group["lr"], group.get("betas"), group.get("momentum")) for group in groups])
        if len(seen) < steps:
            built.step()
            schedule.step()
    return seen


def schedule_of(optimizer, name, *, lr, steps, epochs=None, **settings):
    """Build a schedule. Without `epochs`, an epoch has one step."""
    schedule = Schedule(name=ScheduleName[name], **settings)
    return build_schedule(optimizer, schedule, lr=lr, steps=steps, epochs=epochs or steps)


@pytest.mark.parametrize("steps", [20, 1000])
@pytest.mark.parametrize("pct_start", [0.2, 0.3])
def test_onecycle_equals_torch(steps, pct_start):
    built, reference = optimizer(Net(), lr=3e-4), by_hand(Net(), lr=3e-4)
    schedule = schedule_of(built, "onecycle", lr=3e-4, steps=steps, pct_start=pct_start)
    theirs = OneCycleLR(reference, max_lr=3e-4, total_steps=steps, pct_start=pct_start)
    assert rates(built, schedule, steps) == rates(reference, theirs, steps)


def test_onecycle_has_official_values():
    built = optimizer(Net(), lr=1e-4)
    seen = rates(built, schedule_of(built, "onecycle", lr=1e-4, steps=1000), 1000)
    values = [seen[step][0] for step in (0, 199, 999)]
    assert [value[0] for value in values] == pytest.approx([4e-6, 1e-4, 4e-10])
    assert [value[1][0] for value in values] == pytest.approx([0.95, 0.85, 0.95])

    sgd = optimizer(Net(), "sgd", momentum=0.9)
    seen = rates(sgd, schedule_of(sgd, "onecycle", lr=0.01, steps=100), 100)
    assert [seen[step][0][2] for step in (0, 19, 99)] == pytest.approx([0.95, 0.85, 0.95])

    for steps in range(1, 31):
        built = optimizer(Net(), lr=0.01)
        seen = rates(built, schedule_of(built, "onecycle", lr=0.01, steps=steps), steps)
        assert all(0 < value <= 0.01 * (1 + 1e-9) for groups in seen for value, _, _ in groups)


@pytest.mark.parametrize("warmup_steps", [0, 5])
@pytest.mark.parametrize("min_lr", [0.0, 1e-5])
def test_cosine_equals_formula_and_torch(warmup_steps, min_lr):
    built, reference = optimizer(Net()), by_hand(Net())
    settings = {"warmup_epochs": warmup_steps, "min_lr": min_lr}
    ours = schedule_of(built, "cosine", lr=0.01, steps=40, **settings)
    found = [groups[0][0] for groups in rates(built, ours, 41)]

    length = 40 - warmup_steps
    theirs = CosineAnnealingLR(reference, T_max=length, eta_min=min_lr)
    warmup = [0.01 * (step + 1) / (warmup_steps + 1) for step in range(warmup_steps)]
    cosine = [groups[0][0] for groups in rates(reference, theirs, length + 1)]
    assert found == pytest.approx(warmup + cosine, rel=1e-9, abs=1e-15)
    half = min_lr + (0.01 - min_lr) * (1 + math.cos(math.pi / 5)) / 2
    assert found[warmup_steps + length // 5] == pytest.approx(half)


@pytest.mark.parametrize(
    ("epochs", "warmup", "cooldown", "warmup_lr", "min_lr"),
    [(300, 5, 10, 1e-4, 1e-6), (12, 0, 0, 1e-5, 0.0), (9, 3, 2, 0.0, 1e-5)],
)
def test_cosine_epochs_equals_timm(epochs, warmup, cooldown, warmup_lr, min_lr):
    scaled = [{"params": [nn.Parameter(torch.zeros(1))], "lr_scale": scale} for scale in (1.0, 0.2)]
    reference, n = Adam(scaled, lr=0.01), 3  # steps per epoch
    theirs, total = create_scheduler_v2(
        reference,
        sched="cosine",
        num_epochs=epochs,
        warmup_epochs=warmup,
        warmup_lr=warmup_lr,
        min_lr=min_lr,
        cooldown_epochs=cooldown,
    )
    built = layered()
    settings = {"warmup_epochs": warmup, "warmup_lr": warmup_lr, "cooldown_epochs": cooldown}
    ours = schedule_of(
        built, "cosine_epochs", lr=0.01, steps=total * n, epochs=total, min_lr=min_lr, **settings
    )
    for epoch in range(total):
        expected = [group["lr"] for group in reference.param_groups]
        for _ in range(n):
            found = [built.param_groups[number]["lr"] for number in (0, 2)]
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-15)
            ours.step()
        theirs.step(epoch + 1)


@pytest.mark.parametrize("warmup", [0, 2])
def test_step_equals_torch_with_the_warmup_of_csra(warmup):
    built, reference = layered(), layered()
    steps = 3  # per epoch
    theirs = MultiStepLR(reference, milestones=[4, 6], gamma=0.2)
    settings = {"warmup_epochs": warmup, "milestones": [4, 6], "gamma": 0.2}
    ours = schedule_of(built, "step", lr=0.01, steps=8 * steps, epochs=8, **settings)
    for epoch in range(8):
        for step in range(steps):
            # CSRA's WarmUpLR sets the rate after each step, starting at 0.
            ramp = min(1.0, (epoch * steps + step) / (warmup * steps)) if warmup else 1.0
            for number in (0, 2):
                expected = ramp * reference.param_groups[number]["lr"]
                assert built.param_groups[number]["lr"] == pytest.approx(expected, rel=1e-9)
            ours.step()
        reference.step()
        theirs.step()


def layered():
    """Return an optimizer of two linear layers with different rates."""
    model = Classifier(nn.Linear(3, 3), nn.Linear(3, 2))
    settings = {"lr": 0.01, "weight_decay": 0.1, "backbone_lr": 0.002}
    return build_optimizer(model, name="adam", options={}, **settings)


SCHEDULES = [
    {"name": "onecycle"},
    {"name": "cosine", "warmup_epochs": 7, "min_lr": 1e-5},
    {"name": "cosine_epochs", "epochs": 20, "warmup_epochs": 4, "cooldown_epochs": 2},
    {"name": "step", "warmup_epochs": 7, "milestones": [7, 20, 50]},
]


@pytest.mark.parametrize("options", SCHEDULES)
@pytest.mark.parametrize("done", [0, 1, 7, 19, 20, 99])
def test_fast_forward_equals_single_steps(options, done):
    walked, jumped = optimizer(Net()), optimizer(Net())
    walk = schedule_of(walked, lr=0.01, steps=100, **options)
    jump = schedule_of(jumped, lr=0.01, steps=100, **options)
    rates(walked, walk, done + 1)
    fast_forward(jump, done)
    assert rates(jumped, jump, 100 - done) == rates(walked, walk, 100 - done)


def trainable_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("name", NETWORKS)
def test_frozen_parts_equal_timm(name):
    _, parts, arguments = NETWORKS[name]
    with torch.device("meta"):
        ours = classifier(name, **arguments)
        theirs = timm.create_model(name, num_classes=0, **arguments)
        has_batch_norm = any(batch_norms(ours))
        timm_freeze(theirs, parts, include_bn_running_stats=has_batch_norm)

    train = Train(
        freeze=[f"backbone.network.{part}" for part in parts],
        freeze_batchnorm=FreezeBatchNorm.frozen if has_batch_norm else None,
    )
    norms = freeze(ours, train)
    assert trainable_names(ours.backbone.network) == trainable_names(theirs)
    assert trainable_names(ours.head) == {key for key, _ in ours.head.named_parameters()}
    # timm replaces frozen batch norms by another module.
    assert len(batch_norms(ours)) - len(norms) == len(batch_norms(theirs))
    assert bool(norms) is has_batch_norm


def test_frozen_batch_norms_match_timm():
    ours = randomize_norms(classifier("test_resnet"))
    theirs = copy.deepcopy(ours)
    theirs.backbone.network = freeze_batch_norm_2d(theirs.backbone.network)

    norms = freeze(ours, Train(freeze_batchnorm=FreezeBatchNorm.all))
    ours.train()
    for norm in norms:
        norm.eval()
    images = torch.rand(2, 3, 64, 64)
    tokens = ours.backbone(images)
    expected = theirs.train().backbone(images)
    torch.testing.assert_close(tokens, expected, rtol=1e-4, atol=1e-4)
    assert trainable_names(ours) == trainable_names(theirs)


def test_freeze_matches_whole_names():
    model = nn.ModuleDict({"layer1": nn.Linear(2, 2), "layer10": nn.Linear(2, 2)})
    freeze(model, Train(freeze=["layer1", "layer10.bias"]))
    assert trainable_names(model) == {"layer10.weight"}


def frozen(*parts, batchnorm=None):
    freeze(classifier("test_resnet"), Train(freeze=list(parts), freeze_batchnorm=batchnorm))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: frozen("backbone.network.layr1"), "'backbone.network.layer1'"),
        (lambda: frozen("backbone", "head"), "train.freeze"),
        (lambda: frozen("head", batchnorm=FreezeBatchNorm.frozen), "freeze_batchnorm"),
        (lambda: optimizer(Net(), "adm"), r"optim\.name.*'adam'"),
        (lambda: optimizer(Net(), epsilon=1e-4), "epsilon"),
        (
            lambda: parameter_groups(
                Classifier(nn.Linear(3, 3), nn.Linear(3, 2)), lr=1, weight_decay=0, layer_decay=0.5
            ),
            r"optim\.layer_decay",
        ),
    ],
)
def test_error_names_the_setting(call, name):
    with pytest.raises(ConfigError, match=name):
        call()
