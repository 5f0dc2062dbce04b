"""Jobs of `mldec benchmark` on everything that they can measure."""

import argparse
import json
import math
from pathlib import Path

import pytest
import torch

from mldec import build
from mldec.config.compose import compose
from mldec.data.types import Classes
from mldec.model import multiply_accumulates
from mldec.tools.benchmark import profile
from mldec.tools.benchmark.cost import cost
from mldec.tools.benchmark.throughput import prepare, settings

# A small network in place of each, whose layers have other names than those that are frozen.
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
    changed = []
    if experiment.startswith("finetune") and experiment.endswith("_frozen"):
        changed.append("train.freeze=[backbone]")
    # Some of these heads have the width of their own network.
    if experiment.startswith("q2l_"):
        changed.append("head.input_proj=true")
    args = argparse.Namespace(experiment=experiment, settings=[*TINY, *changed])
    trial = prepare(settings(args), 12)
    learner = trial.learner()
    learner.train()
    learner.learn(trial.random_batches(), 8)
    [numbers] = learner.read()
    assert math.isfinite(numbers.loss)


def test_the_committed_costs_are_those_of_the_command():
    committed = Path(__file__).parents[3] / "benchmarks" / "cpu_cost.json"
    assert json.loads(committed.read_text())["figures"] == cost()


@pytest.fixture
def profiled(cli, tmp_path, monkeypatch):
    """Profile a small step of digits, and return its figures."""
    monkeypatch.setitem(profile.SIDE, "cpu", 64)

    def run(*changed):
        file = tmp_path / "profile.json"
        words = ["--experiment", "digits", "--repeats", "1", "--json", file]
        sizes = ["data.image_size=32", "data.train_images=40", "train.batch_size=16"]
        rest = ["train.accumulate=2", "train.workers=0", "device=cpu", "optim.name=adam"]
        done = cli("benchmark", "profile", *words, *sizes, *rest, *changed)
        assert done.status == 0, done.err
        return json.loads(file.read_text())["figures"]

    return run


def test_the_operations_are_counted(profiled):
    figures = profiled("head=gap")
    # Every product has two more in the backward pass, but for the gradient of the images. A product
    # and a sum are two operations.
    parts = build.check(compose(["+experiment=digits", "head=gap"]), build.MODEL_PARTS)
    model = build.model(parts, Classes(tuple("0123456789")), pretrained=False)
    first = model.backbone.network.conv1[0]
    outputs = first(torch.zeros(1, 3, 32, 32)).numel()
    first_macs = outputs * math.prod(first.weight.shape[1:])
    flops = 16 * 2 * (3 * multiply_accumulates(model, 32) - first_macs)
    assert figures["step_gflop"] == pytest.approx(flops / 1e9)


def test_a_compiled_model_is_one_part(profiled):
    figures = profiled("train.compile=true", "head.embed_dim=16", "head.mlp_dim=16")
    assert figures["model_ms"] > 0
    assert "backbone_ms" not in figures
    assert figures["step_gflop"] > 0
