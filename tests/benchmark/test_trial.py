"""Every experiment can be timed: its model, loss and targets can be made, for a step."""

import argparse
import math

import pytest
import torch

from mldec.benchmark import trial
from mldec.benchmark.trial import Trial
from mldec.config.compose import experiments
from mldec.model import TokenClassifier

# A small network in place of each, whose layers have other names than those that are frozen.
TINY = [
    "backbone=tiny",
    "backbone.name=resnet10t",  # some experiments name another network
    "data.image_size=32",
    "train.batch_size=8",
    "train.accumulate=2",
    "train.freeze=[]",
    "train.freeze_batchnorm=null",
    "optim.layer_decay=null",
    "device=cpu",
]


def prepare(experiment: str, *settings: str) -> Trial:
    args = argparse.Namespace(experiment=experiment, settings=[*TINY, *settings])
    return trial.prepare(trial.settings(args), 12)


def step(tried: Trial) -> float:
    learner = tried.learner()
    learner.train()
    learner.learn(tried.random_batches(), 8)
    [numbers] = learner.read()
    return numbers.loss


def test_several_labels_per_image() -> None:
    tried = prepare("digits")
    batches = tried.random_batches()
    assert [list(batch.images.shape) for batch in batches] == [[4, 3, 32, 32]] * 2
    assert batches[0].images.dtype == torch.uint8
    assert batches[0].targets.shape == (4, 12)
    assert sorted(torch.cat([batch.indices for batch in batches]).tolist()) == list(range(8))
    assert tried.classes.queries is None


def test_one_label_per_image() -> None:
    for batch in prepare("digits_single").random_batches():
        assert batch.targets.sum(1).tolist() == [1, 1, 1, 1]


def test_word_queries() -> None:
    queries = prepare("nuswide_zsl_tresnet_m").classes.queries
    assert queries is not None
    assert queries.shape == (12, 300)


def test_mixed_images_have_soft_labels() -> None:
    [first, _] = prepare("imagenet_resnet18_a2").random_batches()
    assert first.targets.dtype == torch.float32


def test_stored_tokens_are_trained_on() -> None:
    tried = prepare("finetune_frozen", "train.freeze=[backbone]")
    assert isinstance(tried.trained, TokenClassifier)
    [first, _] = tried.random_batches()
    assert first.images.shape[2] == tried.model.backbone.num_features
    assert not first.images.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("experiment", experiments())
def test_every_experiment_does_a_step(experiment: str) -> None:
    settings = []
    if experiment == "finetune_frozen":
        settings.append("train.freeze=[backbone]")
    # Some of these heads have the width of their own network.
    if experiment.startswith("q2l_"):
        settings.append("head.input_proj=true")
    assert math.isfinite(step(prepare(experiment, *settings)))
