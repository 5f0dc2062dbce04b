"""Ranges and dependencies of the settings, and checks against annotations."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, Union, get_type_hints

import pytest

from mldec import build
from mldec.config import schema
from mldec.config.compose import compose, diff, parse, to_dict
from mldec.config.schema import (
    HARMLESS,
    MAX_SEED,
    MAX_WORKERS,
    Config,
    Init,
    Mix,
    MixLabels,
    Optim,
    Schedule,
    ScheduleName,
    Train,
    matches,
)
from mldec.errors import ConfigError
from mldec.runtime import devices

PARTS = {"data": {}, "backbone": {}, "head": {}, "loss": {}}


@pytest.mark.parametrize(
    ("section", "name", "good", "bad"),
    [
        (Train, "epochs", [1], [0, -1]),
        (Train, "patience", [1, None], [0]),
        (Train, "max_drop", [2, 0.5, None], [0, -1]),
        (Train, "stop_epoch", [1, 40, None], [0, 41]),
        (Train, "ema_start_epoch", [1, 40], [0, 41]),
        (Train, "workers", [0, MAX_WORKERS], [-1, MAX_WORKERS + 1]),
        (Train, "clip_grad", [1e-9, None], [0.0, -1.0]),
        (Train, "ema_decay", [0.001, 0.9999, None], [0.0, 1.0, math.nan]),
        (Train, "query_noise", [0.0, 5.0], [-0.1]),
        (Mix, "prob", [0.0, 1.0], [-0.1, 1.1, math.nan]),
        (Mix, "smoothing", [0.0, 0.99], [-0.1, 1.0]),
        (Optim, "lr", [1e-9], [0.0, math.nan]),
        (Optim, "layer_decay", [0.5, None], [0.0, 1.0]),
        (Schedule, "pct_start", [0.01, 0.99, None], [0.0, 1.0]),
        (Schedule, "gamma", [0.1, None], [0.0, 1.0, -0.1]),
    ],
)
def test_ranges(section, name, good, bad):
    for value in good:
        assert getattr(section(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(ConfigError, match=f"^{section.__name__.lower()}\\.{name} is {value}"):
            section(**{name: value})


def whole(**settings):
    return Config(**{"name": "x", "mix": Mix(mixup=0.1), **PARTS, **settings})


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: Train(cache_features=True), "train.cache_features"),
        (
            lambda: whole(train=Train(cache_features=True, freeze=["backbone"])),
            "train.cache_features",
        ),
        (lambda: Schedule(name=ScheduleName.step), "schedule.milestones"),
        (lambda: Schedule(milestones=[0, 4]), "schedule.milestones"),
        (lambda: Schedule(milestones=[8, 4]), "schedule.milestones"),
        (lambda: whole(name="a/b"), "name"),
        (lambda: whole(device="tpu"), "device"),
        (lambda: whole(seed=MAX_SEED + 1), "seed"),
        (lambda: Train(batch_size=56).for_world_size(3), "train.batch_size.* 54 or 57$"),
        (
            lambda: Train(batch_size=10, accumulate=2).for_world_size(2),
            "train.batch_size.* 8 or 12$",
        ),
        (lambda: Train(pieces=1).for_world_size(2), "train.batch_size=auto"),
    ],
)
def test_invalid_combination_is_named(call, name):
    with pytest.raises(ConfigError, match=f"^{name}"):
        call()


@pytest.mark.parametrize(
    ("mix", "on", "soft"),
    [
        ({}, False, False),
        ({"mixup": 0.1}, True, True),
        ({"cutmix": 1.0, "prob": 0.0}, False, False),
        ({"smoothing": 0.1}, False, True),
        ({"labels": MixLabels.union, "cutmix": 1.0}, True, False),
        ({"labels": MixLabels.union, "cutmix": 1.0, "smoothing": 0.1}, True, True),
    ],
)
def test_mix_enabled_and_soft(mix, on, soft):
    assert (Mix(**mix).enabled, Mix(**mix).soft) == (on, soft)


def test_harmless_settings_exist():
    hints = get_type_hints(Config)
    known = set(hints)
    for name, hint in hints.items():
        if dataclasses.is_dataclass(hint):
            known |= {f"{name}.{field.name}" for field in dataclasses.fields(hint)}
    # Settings of the data are arguments of its readers: all of them have these.
    config = compose(["+experiment=digits", "data=csv", "data.root=/x"])
    known |= {f"data.{name}" for name in build.resolve("data", config.data).arguments}
    assert known >= HARMLESS


def test_init_is_path_or_settings():
    digits = ["+experiment=digits"]
    assert compose(digits).start == Init(path=None)
    plain = compose([*digits, "init=a.pt"])
    assert (plain.start, to_dict(plain)["init"]) == (Init(path="a.pt"), "a.pt")
    words = [*digits, "init=a.pt", "init.classes=by_name", "init.synonyms=s.txt"]
    config = compose(words)
    assert config.start == Init(path="a.pt", classes=schema.ByName.by_name, synonyms="s.txt")
    assert config == parse(to_dict(config))
    assert diff(config, plain) == []


def test_derived_batch_epochs_and_workers(monkeypatch):
    shared = Train(batch_size=56, accumulate=2)
    assert (shared.for_world_size(4), shared.micro_batch(4)) == (shared, 7)
    assert Train(pieces=1).for_world_size(1).pieces == 1
    per_gpu = Train(batch_size=56, batch_per_gpu=5, accumulate=2).for_world_size(3)
    assert (per_gpu.batch_size, per_gpu.micro_batch(3), per_gpu.for_world_size(3)) == (
        30,
        5,
        per_gpu,
    )

    for steps, epochs in ((None, 6), (60, 6), (61, 7), (700, 70)):
        assert Train(epochs=6, min_steps=steps).with_resolved_epochs(10).epochs == epochs
    assert Train(epochs=80).last_epoch == 80
    assert Train(epochs=80, stop_epoch=41).last_epoch == 41

    for count, on_cpu, on_cuda in ((2, 2, 1), (8, 8, 6), (64, 16, 16)):
        monkeypatch.setattr(devices, "processors", lambda count=count: count)
        assert Train().loader_workers("cpu") == on_cpu
        assert Train().loader_workers("cuda") == on_cuda
    assert Train(workers=0).loader_workers("cuda") == 0


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
    [
        (3, float, True),
        (True, int, False),
        (1, bool, False),
        (None, int | None, True),
        (3, Union[str, int], True),  # noqa: UP007
        ([1, True], list[int], False),
        ([1, 2], Sequence[float], True),
        ("ab", Sequence[str], False),  # a string is not a list of letters
        (math.nan, float, False),
        ("sum", Literal["sum", "mean"], True),
        ("max", Literal["sum", "mean"], False),
    ],
)
def test_matches_checks_value_against_annotation(value, hint, fits):
    assert matches(value, hint) is fits
