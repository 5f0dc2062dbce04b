"""The official forms compute what the product computes, and both sides of a step train alike."""

import argparse
import importlib.util
from pathlib import Path

import pytest
import torch

from mldec.heads.ml_decoder import MLDecoder
from mldec.tools.benchmark.throughput import prepare, settings

SCRIPT = Path(__file__).parents[3] / "scripts" / "maintainers" / "compare_with_official.py"
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
def script():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_head_gives_the_logits_and_gradients_of_ours(
    script,
):
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


def test_both_sides_train_alike(script):
    args = argparse.Namespace(experiment="digits", settings=[*SMALL, *OFFICIAL])
    tried = prepare(settings(args), 7)
    loop = script.official_loop(tried, script.official_model(tried))
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
    assert loop.memory_format is torch.channels_last
    for official_weight, weight in pairs:
        torch.testing.assert_close(official_weight, weight, rtol=1e-2, atol=1e-3)


def test_the_official_side_is_measured_as_released_and_with_our_settings(script, monkeypatch):
    monkeypatch.setattr(script.torch, "compile", lambda model, **_: ("compiled", model))
    args = argparse.Namespace(experiment="digits", settings=[*SMALL, "train.compile=true"])
    tried = prepare(settings(args), 7)
    released, equal = (
        script.official_loop(tried, script.official_model(tried), as_released=is_released)
        for is_released in (True, False)
    )
    assert released.memory_format is torch.contiguous_format
    assert released.net is released.model
    assert equal.net == ("compiled", equal.model)


def test_the_step_is_compared_with_both(script):
    args = argparse.Namespace(experiment="digits", settings=SMALL, classes=7, repeats=2)
    facts, first, last = script.step(args)
    assert (facts["batch_size"], first["rounds"], last["rounds"]) == (8, 1, 2)
    assert first.keys() == last.keys()
    figures = facts | last
    for side in ("", "official_", "official_equal_"):
        assert figures[f"{side}images_per_second"] == pytest.approx(
            8 / figures[f"{side}step_ms"] * 1000
        )
    assert figures["times_official_step"] > 0
    assert figures["times_official_step_equal"] > 0
