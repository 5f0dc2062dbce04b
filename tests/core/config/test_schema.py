"""The ranges of the fixed settings, and settings that depend on one another."""

import dataclasses
import math
from typing import Any, get_type_hints

import pytest

from mldec.config import schema
from mldec.config.compose import compose
from mldec.config.schema import (
    HARMLESS,
    MAX_SEED,
    MAX_SHOWN,
    MAX_WORKERS,
    Config,
    Log,
    Mix,
    MixLabels,
    Optim,
    Schedule,
    ScheduleName,
    Train,
)
from mldec.errors import ConfigError

PARTS: dict[str, Any] = {"data": {}, "backbone": {}, "head": {}, "loss": {}}


@pytest.mark.parametrize(
    ("section", "name", "good", "bad"),
    [
        (Train, "epochs", [1], [0, -1]),
        (Train, "batch_size", [1], [0]),
        (Train, "accumulate", [1], [0]),
        (Train, "repeats", [1], [0]),
        (Train, "eval_batch_size", [1], [0]),
        (Train, "eval_every", [1], [0]),
        (Train, "log_every", [1], [0]),
        (Train, "keep_last", [1], [0]),
        (Train, "workers", [0, MAX_WORKERS], [-1, MAX_WORKERS + 1]),
        (Train, "clip_grad", [1e-9, None], [0.0, -1.0]),
        (Train, "ema_decay", [0.001, 0.9999, None], [0.0, 1.0]),
        (Train, "query_noise", [0.0, 5.0], [-0.1]),
        (Train, "random_queries", [0], [-1]),
        (Train, "save_every_steps", [1, None], [0]),
        (Train, "save_every_minutes", [0.01, None], [0.0]),
        (Mix, "mixup", [0.0, 3.0], [-0.1]),
        (Mix, "cutmix", [0.0], [-0.1]),
        (Mix, "prob", [0.0, 1.0], [-0.1, 1.1]),
        (Mix, "switch_prob", [0.0, 1.0], [-0.1, 1.1]),
        (Mix, "smoothing", [0.0, 0.99], [-0.1, 1.0]),
        (Optim, "lr", [1e-9], [0.0]),
        (Optim, "weight_decay", [0.0], [-1e-9]),
        (Log, "images", [0, MAX_SHOWN], [-1, MAX_SHOWN + 1]),
        (Log, "classes", [0, MAX_SHOWN], [-1, MAX_SHOWN + 1]),
        (Schedule, "pct_start", [0.01, 0.99, None], [0.0, 1.0]),
    ],
)
def test_ranges(section: type, name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(section(**{name: value}), name) == value
    for value in bad:
        message = f"^{section.__name__.lower()}\\.{name} is {value}: it must be "
        with pytest.raises(ConfigError, match=message):
            section(**{name: value})


def test_what_is_no_number_is_in_no_range() -> None:
    for section, name in ((Train, "ema_decay"), (Mix, "prob"), (Optim, "lr")):
        with pytest.raises(ConfigError, match="is nan: it must be"):
            section(**{name: math.nan})


@pytest.mark.parametrize(
    ("mix", "on", "soft"),
    [
        ({}, False, False),
        ({"mixup": 0.1}, True, True),
        ({"cutmix": 1.0}, True, True),
        ({"cutmix": 1.0, "prob": 0.0}, False, False),
        ({"smoothing": 0.1}, False, True),
        ({"mixup": 0.1, "prob": 0.0, "smoothing": 0.1}, False, True),
        ({"labels": MixLabels.union}, False, False),
        ({"labels": MixLabels.union, "cutmix": 1.0}, True, False),
        ({"labels": MixLabels.union, "cutmix": 1.0, "smoothing": 0.1}, True, True),
        ({"labels": MixLabels.union, "smoothing": 0.1}, False, True),
    ],
)
def test_when_images_are_mixed_and_labels_soft(mix: dict[str, Any], on: bool, soft: bool) -> None:
    assert (Mix(**mix).on, Mix(**mix).soft) == (on, soft)


# Written anew, from the comments of the class: what each schedule looks at.
USED = {
    "onecycle": {"pct_start"},
    "cosine": {"warmup_epochs", "min_lr"},
    "cosine_epochs": {"warmup_epochs", "min_lr", "warmup_lr", "cooldown_epochs"},
}
VALUES = {
    "pct_start": 0.3,
    "warmup_epochs": 2.0,
    "min_lr": 1e-6,
    "warmup_lr": 1e-6,
    "cooldown_epochs": 3,
}


@pytest.mark.parametrize("schedule", USED)
@pytest.mark.parametrize("name", VALUES)
def test_a_setting_without_effect_is_refused(schedule: str, name: str) -> None:
    settings: dict[str, Any] = {"name": ScheduleName(schedule), name: VALUES[name]}
    if name in USED[schedule]:
        assert getattr(Schedule(**settings), name) == VALUES[name]
        if name != "pct_start":
            with pytest.raises(ConfigError, match=f"schedule.{name} is -1: it must be 0 or more"):
                Schedule(**{**settings, name: -1})
    else:
        message = f"schedule.{name} has no effect with schedule.name={schedule}: leave it out"
        with pytest.raises(ConfigError, match=message):
            Schedule(**settings)


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:9999"])
def test_devices(name: str) -> None:
    assert Config(name="x", device=name, **PARTS).device == name


@pytest.mark.parametrize("seed", [0, MAX_SEED])
def test_a_seed_is_one_of_torch_and_numpy(seed: int) -> None:
    import numpy as np
    import torch

    torch.Generator().manual_seed(Config(name="x", seed=seed, **PARTS).seed)
    np.random.default_rng(seed)
    with pytest.raises(ConfigError, match=r"^seed is -1: it must be from 0 to 92233"):
        Config(name="x", seed=-1, **PARTS)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^device 'tpu' is unknown"):
        Config(name="x", device="tpu", **PARTS)


def test_a_name_is_that_of_a_folder_and_only_one_start_is_taken() -> None:
    for name in ("", ".", "..", "a/b"):
        with pytest.raises(ConfigError, match=f"^name '{name}' cannot be the name of a folder"):
            Config(name=name, **PARTS)
    with pytest.raises(ConfigError, match=r"^init=a has no effect with resume=b: leave one out$"):
        Config(name="x", init="a", resume="b", **PARTS)


@pytest.mark.parametrize(
    ("changed", "accepted"),
    [({}, False), ({"changed": "refuse"}, False), ({"changed": "allow"}, True)],
)
def test_changed_data_is_accepted_if_the_config_says_so(
    changed: dict[str, str], accepted: bool
) -> None:
    assert Config(name="x", **{**PARTS, "data": changed}).accepts_changed_data is accepted


def test_settings_that_may_differ_at_a_resume_exist() -> None:
    """A setting that is renamed must be renamed here too, or a resume would refuse it."""
    hints = get_type_hints(Config)
    known = set(hints)
    for name, hint in hints.items():
        if dataclasses.is_dataclass(hint):
            known |= {f"{name}.{field.name}" for field in dataclasses.fields(hint)}
    assert {key for key in HARMLESS if not key.startswith("data.")} <= known

    # Settings of the data are arguments of its readers: all of them have these.
    from mldec import build

    config = compose(["+experiment=digits", "data=csv", "data.root=/x"])
    arguments = build.resolve("data", config.data).arguments
    assert {key for key in HARMLESS if key.startswith("data.")} <= {
        f"data.{name}" for name in arguments
    }


@pytest.mark.parametrize(
    ("batch_size", "processes", "accumulate", "nearest"),
    [(56, 3, 1, "54 or 57"), (56, 16, 1, "48 or 64"), (10, 2, 2, "8 or 12"), (2, 3, 1, "3")],
)
def test_a_batch_that_processes_cannot_share_is_answered_with_the_nearest_that_they_can(
    batch_size: int, processes: int, accumulate: int, nearest: str
) -> None:
    train = Train(batch_size=batch_size, accumulate=accumulate)
    with pytest.raises(ConfigError) as caught:
        train.on(processes)
    assert str(caught.value) == (
        f"train.batch_size {batch_size} is not divisible by {processes} processes x "
        f"train.accumulate {accumulate}; use {nearest}, the nearest that is"
    )


def test_a_batch_that_processes_can_share_stays() -> None:
    train = Train(batch_size=56, accumulate=2)
    assert train.on(4) == train
    assert train.micro_batch(4) == 7


def test_the_batch_per_gpu_is_of_a_micro_batch_on_each_process() -> None:
    train = Train(batch_size=56, batch_per_gpu=5, accumulate=2).on(3)
    assert train.batch_size == 30
    assert train.micro_batch(3) == 5
    assert train.on(3) == train


def test_the_last_epoch_is_the_planned_one_or_the_one_to_stop_after() -> None:
    assert Train(epochs=80).last_epoch == 80
    assert Train(epochs=80, stop_epoch=41).last_epoch == 41
    assert Train(epochs=80, stop_epoch=80).last_epoch == 80


@pytest.mark.parametrize("project", ["", "a/b", "..", "a b", "-x", "x" * 101, "caf\u00e9"])
def test_a_project_of_trackers_is_the_name_of_a_file(project: str) -> None:
    with pytest.raises(ConfigError, match=r"log\.project .* cannot be the name of a project"):
        Log(wandb=True, project=project)


def test_a_project_needs_a_tracker() -> None:
    for settings in ({"wandb": True}, {"trackio": True}):
        assert Log(**settings, project="Scenes_2.0-b").project == "Scenes_2.0-b"
    with pytest.raises(ConfigError, match=r"log\.project has no effect without log\.wandb=true"):
        Log(project="scenes")


def test_what_is_logged_may_change_at_a_resume() -> None:
    logged = {f"log.{field.name}" for field in dataclasses.fields(Log)}
    assert logged <= HARMLESS


def test_loader_workers_are_the_processors_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, expected in ((2, 2), (64, 16)):
        monkeypatch.setattr(schema, "processors", lambda count=count: count)
        assert Train().loader_workers == expected
    assert Train(workers=0).loader_workers == 0
