"""The official forms compute what the product computes, and both sides of a step train alike."""

import argparse
import copy
import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mldec.benchmark.throughput import prepare, settings
from mldec.errors import ConfigError
from mldec.heads.ml_decoder import MLDecoder
from mldec.losses.asymmetric import AsymmetricLoss

SCRIPT = Path(__file__).parents[3] / "scripts" / "compare_with_official.py"
SMALL = [
    "data.image_size=32",
    "train.batch_size=8",
    "head.embed_dim=16",
    "head.mlp_dim=16",
    "head.dropout=0",
    "device=cpu",
]
# What the official loop does, which the experiment does in its own way.
OFFICIAL = ["optim.name=adam", "optim.weight_decay=1e-4", "schedule.pct_start=0.2"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("classes", "groups"), [(12, 4), (10, 4), (5, 5)])
@torch.no_grad()
def test_the_projection_is_one_product_per_class(
    script: ModuleType, classes: int, groups: int
) -> None:
    head = MLDecoder(6, classes, num_groups=groups, embed_dim=8, num_heads=2, mlp_dim=8)
    head.pool_weight.normal_()
    head.pool_bias.normal_()
    x = torch.randn(3, groups, 8)
    logits = script.group_projection(x, head.pool_weight, head.pool_bias)

    size = head.pool_weight.shape[2]
    for number in range(classes):
        group, slot = divmod(number, size)
        expected = x[:, group] @ head.pool_weight[group, :, slot] + head.pool_bias[number]
        torch.testing.assert_close(logits[:, number], expected)
    torch.testing.assert_close(logits, head.pool(x))


def test_the_head_gives_the_logits_and_gradients_of_ours(
    script: ModuleType,
) -> None:
    sizes = {"num_groups": 4, "embed_dim": 8, "num_heads": 2, "mlp_dim": 12, "dropout": 0.0}
    official, ours = script.OfficialHead(6, 10, **sizes), MLDecoder(6, 10, **sizes)
    ours.load_state_dict(official.state_dict())

    logits, gradients = [], []
    for head in (official, ours):
        tokens = torch.linspace(-1, 1, 2 * 5 * 6).view(2, 5, 6).requires_grad_()
        logits.append(head(tokens))
        logits[-1].square().sum().backward()
        gradients.append(tokens.grad)
    torch.testing.assert_close(logits[0], logits[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_loss_is_that_of_the_recipe(script: ModuleType) -> None:
    logits = torch.randn(4, 7).mul(3).requires_grad_()
    targets = (torch.rand(4, 7) < 0.3).long()
    values = [script.asymmetric_loss(logits, targets), AsymmetricLoss()(logits, targets)]
    gradients = [torch.autograd.grad(value, logits)[0] for value in values]
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_step_changes_the_weights_and_a_little_their_average(script: ModuleType) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    before = copy.deepcopy(model[1].weight.detach())
    loop = script.OfficialLoop(
        model, device=torch.device("cpu"), autocast=None, steps=10, lr=0.1, ema_decay=0.75
    )
    targets = torch.zeros(2, 3, 3, dtype=torch.int64)
    targets[:, 1, 2] = 1  # present in the second size only
    images = torch.rand(2, 3, 2, 2)
    expected = script.asymmetric_loss(model(images), targets.amax(1))

    torch.testing.assert_close(loop.step(images, targets), expected.detach())
    after = model[1].weight.detach()
    assert (after != before).all()
    torch.testing.assert_close(loop.ema[1].weight, 0.75 * before + 0.25 * after)


def test_the_head_job_compares_every_side(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "OPEN_IMAGES", script.Size(10, 3, 4))
    monkeypatch.setattr(script, "COCO", script.Size(5, 5, 2))
    ticks = itertools.count(1.0)

    def in_turns(jobs: dict[str, Callable[[], Any]], **_: Any) -> dict[str, list[float]]:
        for job in jobs.values():
            job()
        return {name: [next(ticks)] for name in jobs}

    monkeypatch.setattr(script, "in_turns", in_turns)
    figures = script.head(argparse.Namespace(device="cpu", batch_size=2))
    assert figures.pop("largest_difference") < 1e-4
    assert figures["times_faster"] == 1 / 2
    for name, (ours, official) in {
        "open_images": (3, 4),
        "coco_inference": (5, 6),
        "coco_training": (7, 8),
    }.items():
        assert figures[f"{name}_ours_ms"] == 1000 * ours
        assert figures[f"{name}_times_official"] == ours / official


def test_both_sides_train_alike(script: ModuleType) -> None:
    args = argparse.Namespace(experiment="digits", settings=[*SMALL, *OFFICIAL])
    tried = prepare(settings(args), 7)
    loop = script.official_loop(tried)
    learner = tried.learner()
    learner.train()

    [batch] = tried.random_batches()
    targets = batch.targets.long()[:, None].repeat(1, 3, 1)
    for _ in range(3):
        learner.learn([batch], len(batch.images))
        [ours] = learner.read()
        official = loop.step(batch.images.float() / 255, targets)
        assert ours.loss == pytest.approx(official.item(), rel=1e-3)

    pairs = zip(loop.model.backbone.parameters(), tried.model.backbone.parameters(), strict=True)
    for official_weight, weight in pairs:
        torch.testing.assert_close(official_weight, weight, rtol=1e-2, atol=1e-3)


def test_the_job_times_both_sides(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "step.json"
    words = ["step", "--experiment", "digits", "--repeats", "1", "--json", str(file), *SMALL]
    monkeypatch.setattr("sys.argv", ["script", *words])
    script.main()
    content = json.loads(file.read_text())
    assert content["benchmark"] == "official_step"
    figures = content["figures"]
    ratio = figures["official_step_ms"] / figures["step_ms"]
    assert figures["times_official_step"] == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("experiment", "setting", "part"),
    [
        ("digits", "loss=bce", "loss"),
        ("digits", "head=gap", "head"),
        pytest.param("digits_zsl", "", "head", marks=pytest.mark.slow),
    ],
)
def test_what_the_official_code_does_not_have_is_refused(
    script: ModuleType, experiment: str, setting: str, part: str
) -> None:
    words = ["step", "--experiment", experiment, *([setting] if setting else [])]
    with pytest.raises(ConfigError, match=f"^{part}: the official side has"):
        script.step(script.parse(words))


def test_the_head_takes_no_settings(script: ModuleType) -> None:
    with pytest.raises(SystemExit):
        script.parse(["head", "loss=bce"])
