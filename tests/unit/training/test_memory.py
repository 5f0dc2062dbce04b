"""`train.batch_size=auto`: how a batch is divided, with made-up memory; there is no GPU here."""

from types import SimpleNamespace

import pytest
import torch
import yaml
from support import QUICK, one_line

from mldec import build
from mldec.config.compose import compose
from mldec.config.schema import Train
from mldec.errors import ConfigError
from mldec.runtime import distributed
from mldec.training import memory
from mldec.training.memory import divide_batch, divisions, measured

CUDA = torch.device("cuda")
SETTINGS = ["+experiment=digits", "train.batch_size=auto", "train.precision=fp32"]
VIT = ["backbone=timm", "backbone.name=vit_tiny_patch16_224", "backbone.image_size=64"]


def test_ways_to_divide_a_batch_are_all_and_in_order():
    ways = divisions(64, checkpointing=[False, True])
    pairs = [(64 // way.accumulate, way.checkpointing) for way in ways]
    large = [(64, False), (32, False), (16, False), (64, True), (32, True), (16, True)]
    small = [(images, recompute) for images in (8, 4, 2, 1) for recompute in (False, True)]
    assert pairs == large + small
    # A small batch is divided only if recomputing does not help.
    assert divisions(6, checkpointing=[False, True])[:3] == [(1, False), (1, True), (2, False)]


@pytest.fixture
def run(monkeypatch):
    """Return config and parts that `divide_batch` makes, for a free memory and a process count."""

    def divide(*words, gib=8.0, processes=1, saved=None, device=CUDA):
        monkeypatch.setattr(distributed, "world_size", lambda: processes)
        monkeypatch.setattr(distributed, "gather", lambda value: [value] * processes)
        monkeypatch.setattr(memory, "free_memory", lambda device: gib * 2**30)

        def made_up(config, parts, *_):
            images = config.train.micro_batch(processes)
            recompute = parts["backbone"].arguments.get("checkpointing", False)
            return images * (0.1 if recompute else 0.5) * 2**30

        monkeypatch.setattr(memory, "measured", made_up)
        config = compose([*SETTINGS, *VIT, *words])
        parts = build.check(config)
        return divide_batch(config, parts, None, None, saved, device)

    return divide


def chosen(config, parts):
    assert config.backbone == parts["backbone"].node
    assert not config.train.fit_memory
    return config.train.accumulate, config.backbone.get("checkpointing")


def test_the_batch_of_the_experiment_stays(run):
    batch = compose(["+experiment=digits"]).train.batch_size
    assert batch == 32
    config, parts = run(gib=9.0)
    assert (config.train.batch_size, *chosen(config, parts)) == (batch, 2, False)
    assert chosen(*run(gib=4.0)) == (1, True)
    assert chosen(*run(gib=4.0, processes=2)) == (1, True)
    assert chosen(*run(gib=9.0, processes=2)) == (1, False)
    assert chosen(*run(gib=1.0)) == (4, True)
    with pytest.raises(ConfigError, match=r"one image does not fit in the 0\.1 GiB .* cuda; lower"):
        run(gib=0.1)
    # Who recomputes anyway goes on to, and a frozen backbone keeps nothing.
    assert chosen(*run("backbone.checkpointing=true", gib=80.0)) == (1, True)
    assert chosen(*run("train.freeze=[backbone]", gib=4.0)) == (8, False)


def test_a_cpu_divides_nothing_and_a_resumed_run_what_it_did(run):
    assert chosen(*run(gib=1.0, device=torch.device("cpu"))) == (1, False)
    saved = {"train": {"accumulate": 4}, "backbone": {"checkpointing": True}}
    assert chosen(*run(gib=80.0, saved=SimpleNamespace(config=saved))) == (4, True)
    with pytest.raises(ConfigError, match="not divisible by 3 processes"):
        run(gib=80.0, processes=3, saved=SimpleNamespace(config=saved))


def test_a_division_of_ones_own_is_refused():
    for words in ({"accumulate": 2}, {"batch_per_gpu": 4}):
        with pytest.raises(ConfigError, match="chooses how the batch is divided"):
            Train(fit_memory=True, **words)


@pytest.mark.parametrize("fault", [None, torch.OutOfMemoryError("no"), ConfigError("no")])
def test_a_micro_batch_is_measured_and_leaves_no_trace(monkeypatch, fault):
    config = compose([*SETTINGS, "data.train_images=8", "data.val_images=8"])
    parts = build.check(config)
    data, loss = build.data(parts), build.loss(parts, list)
    seen = []

    def peak(device):
        if fault:
            raise fault
        seen.append(device)
        return 1000

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peak)
    before, device = torch.get_rng_state(), torch.device("cpu")
    if isinstance(fault, ConfigError):
        with pytest.raises(ConfigError):
            measured(config, parts, data, loss, device)
        return

    needed = measured(config, parts, data, loss, device)
    assert torch.equal(torch.get_rng_state(), before)
    weights = sum(
        value.nbytes
        for value in build.model(parts, data.train.classes).parameters()
        if value.requires_grad
    )
    assert needed == (float("inf") if fault else 1000 + 3 * weights)


def test_a_run_records_its_division_and_goes_on_with_it(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [word for word in QUICK if not word.startswith("train.batch_size")]
    words += ["train.batch_size=auto", "train.epochs=2", "name=auto"]
    out = cli.out("train", *words, "train.stop_epoch=1")
    assert "train.batch_size=auto: 32 images per step, train.accumulate=1" in out
    recorded = yaml.safe_load((tmp_path / "outputs/auto/config.yaml").read_text())["train"]
    assert (recorded["batch_size"], recorded["accumulate"]) == (32, 1)
    assert "as the checkpoint was trained" in cli.out("train", *words, "resume=auto")
    one_line(cli.fault("train", *words, "train.accumulate=2"), "leave train.accumulate")
