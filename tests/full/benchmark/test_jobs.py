"""Jobs of `mldec benchmark` on an experiment of each family."""

import argparse
import json
import math

import pytest
import torch

from mldec import build
from mldec.config.compose import compose
from mldec.data.types import Classes
from mldec.model import multiply_accumulates
from mldec.tools.benchmark import profile
from mldec.tools.benchmark.throughput import build_trial, compose_experiment

# A small network for all experiments. It does not have the layers that some of them freeze.
TINY = [
    "backbone=tiny",
    "backbone.name=resnet10t",  # some options name another network, and its size of images
    "backbone.image_size=null",
    "data.image_size=32",
    "train.batch_size=8",
    "train.accumulate=2",
    "train.freeze=[]",
    "train.freeze_batchnorm=null",
    "optim.layer_decay=null",
    "device=cpu",
]
# One of each family. All experiments are composed and checked in tests/unit/config.
FAMILIES = [
    "coco_tresnet_l",
    "coco_partial_rps",
    "coco_single_positive",
    "coco_zsl_48_17",
    "coco_dinov3_l_frozen",
    "asl_coco_tresnet_l_448",
    "q2l_coco_tresnet_l_448",
    "digits_zsl",
    "finetune",
    "finetune_frozen",
    "imagenet_resnet50_a1",
    "nuswide_zsl_tresnet_m",
    "openimages_tresnet_m",
    "tags_tresnet_l",
]


@pytest.mark.parametrize("experiment", FAMILIES)
def test_an_experiment_does_a_step(experiment):
    settings = list(TINY)
    if experiment.startswith("finetune") and experiment.endswith("_frozen"):
        settings.append("train.freeze=[backbone]")
    # The width of these heads is that of their backbone.
    if experiment.startswith("q2l_"):
        settings.append("head.input_proj=true")
    args = argparse.Namespace(experiment=experiment, settings=settings)
    trial = build_trial(compose_experiment(args), 12)
    learner = trial.learner()
    learner.train()
    learner.learn(trial.random_batches(), 8)
    [stats] = learner.read()
    assert math.isfinite(stats.loss)


@pytest.fixture
def profiled(cli, tmp_path, monkeypatch):
    """Profile a small step of digits, and return its figures."""
    monkeypatch.setitem(profile.SIDE, "cpu", 64)

    def run(*changed):
        file = tmp_path / "profile.json"
        words = ["--experiment", "digits", "--classes", "10", "--repeats", "1", "--json", file]
        sizes = ["data.image_size=32", "train.batch_size=16", "train.accumulate=2"]
        cli.out("benchmark", "profile", *words, *sizes, "device=cpu", "optim.name=adam", *changed)
        return json.loads(file.read_text())["figures"]

    return run


def test_operations_of_a_step(profiled):
    figures = profiled("head=gap")
    # Each product has two more in the backward pass, except for the gradient of the images. A
    # product and a sum are two operations.
    parts = build.check(compose(["+experiment=digits", "head=gap"]), build.MODEL_PARTS)
    model = build.model(parts, Classes(tuple("0123456789")), pretrained=False)
    first = model.backbone.network.conv1[0]
    outputs = first(torch.zeros(1, 3, 32, 32)).numel()
    first_macs = outputs * math.prod(first.weight.shape[1:])
    flops = 16 * 2 * (3 * multiply_accumulates(model, 32) - first_macs)
    assert figures["step_gflop"] == pytest.approx(flops / 1e9)
