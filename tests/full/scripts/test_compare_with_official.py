"""The official forms in compare_with_official.py compute the same numbers as ours."""

import argparse
import importlib.util
from pathlib import Path

import benchmark
import pytest
import torch
from benchmark import build_trial, compose_experiment
from pictures import picture, saved

from mldec.data.sampling import SampleRandom

SCRIPT = Path(__file__).parents[3] / "scripts" / "maintainers" / "compare_with_official.py"
SMALL = [
    "data.image_size=32",
    "train.batch_size=8",
    "head.embed_dim=16",
    "head.mlp_dim=16",
    "head.dropout=0",
    "device=cpu",
]
# Settings of the official loop that differ in the experiment.
OFFICIAL = ["optim.name=adam", "optim.weight_decay=1e-4", "schedule.pct_start=0.2"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trial_of(*changed):
    args = argparse.Namespace(experiment="digits", settings=[*SMALL, *changed])
    return build_trial(compose_experiment(args), 7)


def test_training_steps_are_equal(script):
    trial = trial_of(*OFFICIAL)
    loop = script.official_loop(trial, script.official_model(trial))
    learner = trial.learner()
    learner.train()

    [batch] = trial.random_batches()
    targets = batch.targets.long()[:, None].repeat(1, 3, 1)
    for _ in range(3):
        learner.learn([batch], len(batch.images))
        [ours] = learner.read()
        official = loop.step(batch.images.float() / 255, targets)
        assert ours.loss == pytest.approx(official.item(), rel=1e-3)

    pairs = zip(loop.model.backbone.parameters(), trial.model.backbone.parameters(), strict=True)
    assert loop.memory_format is torch.channels_last
    for official_weight, weight in pairs:
        torch.testing.assert_close(official_weight, weight, rtol=1e-2, atol=1e-3)


def test_transforms_have_equal_pixels(script, tmp_path):
    photo = str(saved(picture(120, 90), tmp_path / "photo.jpg", quality=90))
    official, ours = script.official_transform(64), benchmark.pipeline(64)
    assert tuple(official) == tuple(ours) == benchmark.PARTS[1:-1]
    for seed in range(150):
        images = []
        for steps in (official, ours):
            rng = SampleRandom(seed)
            image = photo
            for step in steps.values():
                image = step(image, rng)
            images.append(image)
        assert images[0].dtype == torch.float32
        assert torch.equal((255 * images[0]).round().to(torch.uint8), images[1]), seed
