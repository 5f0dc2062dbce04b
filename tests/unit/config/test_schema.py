"""The fixed settings: their ranges, and settings that depend on one another; annotations."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Optional, Union, get_type_hints

import numpy as np
import pytest
import torch

from mldec import build
from mldec.config import schema
from mldec.config.compose import compose, diff, parse, to_dict
from mldec.config.schema import (
    HARMLESS,
    MAX_SEED,
    MAX_SHOWN,
    MAX_WORKERS,
    Config,
    Init,
    Log,
    Mix,
    MixLabels,
    Optim,
    Schedule,
    Train,
    describe,
    matches,
)
from mldec.errors import ConfigError

PARTS = {"data": {}, "backbone": {}, "head": {}, "loss": {}}


@pytest.mark.parametrize(
    ("section", "name", "good", "bad"),
    [
        (Train, "epochs", [1], [0, -1]),
        (Train, "batch_size", [1], [0]),
        (Train, "repeats", [1], [0]),
        (Train, "eval_every", [1], [0]),
        (Train, "keep_last", [1], [0]),
        (Train, "min_steps", [1, None], [0]),
        (Train, "patience", [1, None], [0]),
        (Train, "batch_per_gpu", [1, None], [0]),
        (Train, "stop_epoch", [1, 40, None], [0, 41]),
        (Train, "ema_start_epoch", [1, 40], [0, 41]),
        (Train, "workers", [0, MAX_WORKERS], [-1, MAX_WORKERS + 1]),
        (Train, "clip_grad", [1e-9, None], [0.0, -1.0]),
        (Train, "ema_decay", [0.001, 0.9999, None], [0.0, 1.0, math.nan]),
        (Train, "query_noise", [0.0, 5.0], [-0.1]),
        (Train, "random_queries", [0], [-1]),
        (Train, "save_every_steps", [1, None], [0]),
        (Train, "save_every_minutes", [0.01, None], [0.0]),
        (Mix, "mixup", [0.0, 3.0], [-0.1]),
        (Mix, "prob", [0.0, 1.0], [-0.1, 1.1, math.nan]),
        (Mix, "smoothing", [0.0, 0.99], [-0.1, 1.0]),
        (Optim, "lr", [1e-9], [0.0, math.nan]),
        (Optim, "weight_decay", [0.0], [-1e-9]),
        (Optim, "backbone_lr", [1e-9, None], [0.0]),
        (Optim, "layer_decay", [0.5, None], [0.0, 1.0]),
        (Log, "images", [0, MAX_SHOWN], [-1, MAX_SHOWN + 1]),
        (Log, "project", ["Scenes_2.0-b", None], ["", "a/b", "..", "-x", "x" * 101, "caf\u00e9"]),
        (Schedule, "pct_start", [0.01, 0.99, None], [0.0, 1.0]),
    ],
)
def test_ranges(section, name, good, bad):
    for value in good:
        assert getattr(section(**{name: value}), name) == value
    for value in bad:
        message = f"^{section.__name__.lower()}\\.{name} is {value}: it must be "
        with pytest.raises(ConfigError, match=message):
            section(**{name: value})


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        (Train, {"cache_features": True}, "cache_features needs train.freeze=.backbone.: pass it"),
        (Config, {"name": "a/b"}, "^name 'a/b' cannot be the name of a folder"),
        (Config, {"name": ".."}, "^name '..' cannot be the name of a folder"),
        (Config, {"device": "tpu"}, "^device 'tpu' is unknown"),
        (Config, {"seed": -1}, "^seed is -1: it must be from 0 to 92233"),
        (Config, {"seed": MAX_SEED + 1}, "^seed is .*: it must be from 0 to 92233"),
    ],
)
def test_settings_that_do_not_fit_each_other_or_the_machine(section, settings, message):
    if section is Config:
        settings = {"name": "x", **PARTS, **settings}
    with pytest.raises(ConfigError, match=message):
        section(**settings)


def test_the_highest_seed_is_one_of_torch_and_numpy():
    torch.Generator().manual_seed(Config(name="x", seed=MAX_SEED, **PARTS).seed)
    np.random.default_rng(MAX_SEED)


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
def test_when_images_are_mixed_and_labels_soft(mix, on, soft):
    assert (Mix(**mix).enabled, Mix(**mix).soft) == (on, soft)


def test_settings_that_may_differ_at_a_resume_exist():
    """A setting that is renamed must be renamed there too, or a resume would refuse it."""
    hints = get_type_hints(Config)
    known = set(hints)
    for name, hint in hints.items():
        if dataclasses.is_dataclass(hint):
            known |= {f"{name}.{field.name}" for field in dataclasses.fields(hint)}
    # Settings of the data are arguments of its readers: all of them have these.
    config = compose(["+experiment=digits", "data=csv", "data.root=/x"])
    known |= {f"data.{name}" for name in build.resolve("data", config.data).arguments}
    known |= {f"init.{field.name}" for field in dataclasses.fields(Init)}
    assert known >= HARMLESS >= {key for key in known if key.startswith("log.")}


@pytest.mark.parametrize(
    ("batch_size", "processes", "accumulate", "nearest"),
    [(56, 3, 1, "54 or 57"), (10, 2, 2, "8 or 12"), (2, 3, 1, "3")],
)
def test_a_batch_that_processes_cannot_share_is_answered_with_the_nearest_that_they_can(
    batch_size, processes, accumulate, nearest
):
    train = Train(batch_size=batch_size, accumulate=accumulate)
    with pytest.raises(ConfigError) as caught:
        train.for_world_size(processes)
    assert str(caught.value) == (
        f"train.batch_size {batch_size} is not divisible by {processes} processes x "
        f"train.accumulate {accumulate}; use {nearest}, the nearest that is"
    )


def test_init_is_a_path_or_has_settings_of_its_own():
    digits = ["+experiment=digits"]
    assert compose(digits).start == Init(path=None)
    plain = compose([*digits, "init=a.pt"])
    assert (plain.start, to_dict(plain)["init"]) == (Init(path="a.pt"), "a.pt")
    words = [*digits, "init=a.pt", "init.classes=by_name", "init.synonyms=s.txt"]
    config = compose(words)
    assert config.start == Init(path="a.pt", classes=schema.ByName.by_name, synonyms="s.txt")
    assert config == parse(to_dict(config))
    assert diff(config, plain) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["init=[3]"], "init is [3]: it must be the path of a checkpoint"),
        (["init.classes=by_name"], "nothing is chosen for init.path"),
        (["init=a", "init.classes=all"], "init.classes: Invalid value 'all', expected one of [by_"),
        (["init=a", "init.clases=by_name"], "init.clases: "),
    ],
)
def test_a_wrong_setting_of_init_is_one_line(words, message):
    with pytest.raises(ConfigError) as caught:
        compose(["+experiment=digits", *words])
    assert str(caught.value).startswith(message)


def test_batches_epochs_and_workers_follow_from_the_settings(monkeypatch):
    shared = Train(batch_size=56, accumulate=2)
    assert (shared.for_world_size(4), shared.micro_batch(4)) == (shared, 7)
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

    for count, expected in ((2, 2), (64, 16)):
        monkeypatch.setattr(schema, "processors", lambda count=count: count)
        assert Train().loader_workers == expected
    assert Train(workers=0).loader_workers == 0


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("train", {"epochs": "abc"}, "train.epochs: Value 'abc' of type 'str' could not be conver"),
        ("train", {"epochs": None}, "train.epochs: "),
        ("train", {"precision": "fp8"}, "train.precision: Invalid value 'fp8', expected one of [a"),
        ("train", {"freeze": "backbone"}, "train.freeze is no list: write train.freeze=[VALUE]"),
        ("train", {"epoch": 3}, "train.epoch: train has no setting 'epoch'; did you mean 'epochs'"),
    ],
)
def test_a_value_of_another_type_is_one_line(section, values, message):
    with pytest.raises(ConfigError) as caught:
        parse({**to_dict(compose(["+experiment=digits"])), section: values})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


# Annotations


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
    [
        (3, int, True),
        (3, float, True),
        (True, int, False),
        (True, bool, True),
        (1, bool, False),
        (None, int | None, True),
        (None, Optional[str], True),  # noqa: UP045
        ("x", bool | str, True),
        (3, Union[str, int], True),  # noqa: UP007
        ([1, 2], list[int], True),
        ([1, True], list[int], False),
        ([1, 2], Sequence[float], True),
        ((1, 2), tuple[int, ...], True),
        ("ab", Sequence[str], False),  # a text is no list of letters
        ([0.5, "x"], list[float], False),
        (math.nan, float, False),
        ([math.inf], list[float] | None, False),
        ({"a": [1]}, dict[str, Any], True),
        ([1], dict[str, Any], False),
        ({}, Mapping[str, float], True),
        (object(), Any, True),
        ("sum", Literal["sum", "mean"], True),
        ("max", Literal["sum", "mean"], False),
    ],
)
def test_values_are_held_to_the_annotation(value, hint, fits):
    assert matches(value, hint) is fits


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (int | None, "a whole number or null"),
        (Union[str, float, None], "text or a finite number or null"),  # noqa: UP007
        (Literal["sum", "mean"] | None, "one of sum, mean or null"),
        (tuple[float, float], "a list"),
        (dict[str, Any], "a mapping"),
    ],
)
def test_an_annotation_is_described_as_in_yaml(hint, said):
    assert describe(hint) == said
