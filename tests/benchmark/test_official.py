"""A training step beside that of the official code."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mldec.benchmark import trial
from mldec.benchmark.official import official_loop

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


def test_both_sides_train_alike() -> None:
    args = argparse.Namespace(experiment="digits", settings=[*SMALL, *OFFICIAL])
    tried = trial.prepare(trial.settings(args), 7)
    loop = official_loop(tried)
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


def test_the_job_times_both_sides(cli: Callable[..., Any]) -> None:
    options = ["--experiment", "digits", "--repeats", "1", *SMALL]
    status, out, err = cli("benchmark", "official", *options)
    assert status == 0, err
    figures = dict(line.split(maxsplit=1) for line in out.splitlines())
    ratio = float(figures["official_step_ms"]) / float(figures["step_ms"])
    assert float(figures["times_official_step"]) == pytest.approx(ratio, rel=1e-2)


@pytest.mark.parametrize(
    ("experiment", "setting", "part"),
    [
        ("digits", "loss=bce", "loss"),
        ("digits", "head=gap", "head"),
        pytest.param("digits_zsl", "", "head", marks=pytest.mark.slow),
    ],
)
def test_what_the_official_code_does_not_have_is_refused(
    cli: Callable[..., Any], experiment: str, setting: str, part: str
) -> None:
    settings = [setting] if setting else []
    done = cli("benchmark", "official", "--experiment", experiment, *settings)
    assert done.status == 1
    assert done.err.startswith(f"mldec: {part}: the official side has")
