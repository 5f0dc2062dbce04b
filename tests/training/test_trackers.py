"""Trackers: by a stand-in of their interface, and with the real packages, which work offline."""

import dataclasses
import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import QUICK, numbers, one_line

from mldec.config.compose import compose
from mldec.config.schema import Config, Log
from mldec.errors import ConfigError
from mldec.training import trackers
from mldec.training.details import Curve, Details, Histogram
from mldec.training.runlog import RunLog

CONFIG = compose(["+experiment=digits"])
NAMES = ("wandb", "trackio")
SECRET = "8d1f0000feed0000feed0000feed0000feed1c2b"
CURVE = Curve(*np.zeros((6, 3)))
DETAILS = Details(
    scalars={"val_AP/cat": 12.5},
    histograms={"h": Histogram(np.array([2, 1]), np.array([0.0, 1.0, 2.0]), 0.0, 2.0, 3.0, 5.0)},
    curves={"val_pr/micro": CURVE},
    images={"val_images": Image.new("RGB", (4, 3))},
)


class StandIn:
    """The interface that wandb and trackio share, in memory."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, Any], int | None]] = []
        self.opened: dict[str, Any] = {}
        self.defined: list[tuple[str, str]] = []
        self.finished = 0
        self.broken = False

    def init(self, **named: Any) -> "StandIn":
        self._check()
        self.opened = named
        return self

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self._check()
        self.rows.append((values, step))

    def define_metric(self, name: str, step_metric: str) -> None:
        self.defined.append((name, step_metric))

    def finish(self) -> None:
        self._check()
        self.finished += 1

    def _check(self) -> None:
        if self.broken:
            raise ConnectionError("no\nnetwork")

    def Settings(self, **named: Any) -> dict[str, Any]:
        return named

    def Histogram(self, *, np_histogram: Any) -> tuple[str, Any]:
        return "histogram", [part.tolist() for part in np_histogram]

    def Image(self, image: Image.Image) -> tuple[str, Any]:
        return "image", image.size


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def package(name: str, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    package = StandIn()
    monkeypatch.setitem(sys.modules, name, package)
    return package


def config(*names: str) -> Config:
    return dataclasses.replace(CONFIG, log=Log(**dict.fromkeys(names, True)))


def test_the_numbers_of_a_step_and_the_details_of_an_evaluation_are_sent(
    name: str, package: StandIn, tmp_path: Path
) -> None:
    log = RunLog(tmp_path)
    log.trackers = trackers.start(config(name), tmp_path)
    log.scalars(7, 1, {"val/mAP": 50.0, "val/odd": float("nan")})
    log.details(7, DETAILS)
    log.close()
    log.close()

    sent = [
        {"val/mAP": 50.0},
        {
            "val_AP/cat": 12.5,
            "h": ("histogram", [[2, 1], [0.0, 1.0, 2.0]]),
            "val_images": ("image", (4, 3)),
        },
    ]
    if name == "wandb":
        assert package.rows == [({"step": 7, **values}, None) for values in sent]
        assert package.defined == [("*", "step")]
    else:
        assert package.rows == [(values, 7) for values in sent]
    assert package.finished == 1
    assert package.opened["project"] == "mldec"
    assert package.opened["resume"] == "allow"
    assert package.opened["config"]["optim"]["lr"] == 1e-2


def test_a_resumed_run_goes_on_with_its_record(name: str, package: StandIn, tmp_path: Path) -> None:
    records = []
    for folder in ("a", "a", "b"):
        (tmp_path / folder).mkdir(exist_ok=True)
        trackers.start(config(name), tmp_path / folder)
        records.append(package.opened["id" if name == "wandb" else "name"])
    assert records[0] == records[1] != records[2]

    (tmp_path / "a" / trackers.ID_FILE).write_text("damaged\n")
    trackers.start(config(name), tmp_path / "a")
    assert len((tmp_path / "a" / trackers.ID_FILE).read_text()) == 17


@pytest.mark.parametrize("moment", ["start", "scalars", "details", "close"])
def test_a_tracker_that_fails_is_left_out_with_one_warning(
    name: str, package: StandIn, tmp_path: Path, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    package.broken = moment == "start"
    (tracker,) = trackers.start(config(name), tmp_path)
    package.broken = moment in ("start", "scalars")
    tracker.scalars(1, {"train/loss": 1.0})
    tracker.scalars(2, {"train/loss": 1.0})
    package.broken = moment != "close"
    tracker.details(2, DETAILS)
    package.broken = True
    tracker.close()
    tracker.close()

    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == (
        f"log.{name}: ConnectionError: no network; training goes on, nothing more is sent"
    )
    assert len(package.rows) == {"start": 0, "scalars": 0, "details": 2, "close": 3}[moment]


def test_nothing_of_the_keys_in_the_environment_becomes_part_of_a_record(
    name: str, package: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    trackers.start(config(name), tmp_path)
    assert SECRET not in repr(package.opened)
    if name == "wandb":
        settings = package.opened["settings"]
        assert settings["x_disable_meta"]
        assert settings["disable_git"]
        assert settings["disable_code"]


def test_without_a_choice_no_package_is_imported(
    package: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trackers.start(config(), tmp_path) == []
    assert (package.opened, list(tmp_path.iterdir())) == ({}, [])

    monkeypatch.setattr(trackers.distributed, "is_main", lambda: False)
    assert trackers.start(config(*NAMES), tmp_path) == []


def test_a_package_that_is_not_installed_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers.require(config().log)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"log\.{name}=true .*pip install 'mldec\[{name}\]'"):
        trackers.require(config(name).log)


def test_training_without_the_package_ends_before_anything_is_written(
    cli: Callable[..., tuple[int, str, str]],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, _, err = cli("train", *QUICK, f"log.{name}=true")
    assert status == 1
    one_line(err, f"log.{name}=true needs the package {name}")
    assert not list(tmp_path.rglob("*.pt"))


def train(folder: Path, *words: str, **environment: str) -> None:
    """Train in a real process with a secret in its environment."""
    done = subprocess.run(
        [sys.executable, "-m", "mldec.train", *QUICK, "log.images=2", *words],
        cwd=folder,
        env={**os.environ, "WANDB_API_KEY": SECRET, "HF_TOKEN": SECRET, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "nothing more is sent" not in done.stdout
    assert SECRET not in done.stdout + done.stderr


def assert_no_secret(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


def wandb_records(path: Path) -> Iterator[Any]:
    """Read the records of a .wandb file: pieces of at most 32 KiB, as in a log of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(content):
        _, length, kind = struct.unpack_from("<IHB", content, position)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole record, or its last piece
            yield Record.FromString(record)
            record = b""
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768


def nested(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_keeps_the_numbers_of_a_resumed_run_in_one_record(tmp_path: Path) -> None:
    for words in (["train.stop_epoch=1"], ["resume=auto"]):
        train(tmp_path, "log.wandb=true", *words, WANDB_MODE="offline", HOME=str(tmp_path))
    run = tmp_path / "outputs" / "digits"

    rows, ids = [], set()
    for path in sorted(
        run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime
    ):
        for record in wandb_records(path):
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                rows.append(nested(record.history.item))
    assert ids == {(run / trackers.ID_FILE).read_text().strip()}

    lines = numbers(run)
    assert [row["step"] for row in rows if "val/mAP" in row] == [4, 8]
    for key in ("train/loss", "val/mAP", "val_raw/mAP"):
        expected = [(line["step"], line[key]) for line in lines if key in line]
        assert [(row["step"], row[key]) for row in rows if key in row] == expected
    images = [row["val_images/_type"] for row in rows if "val_images/_type" in row]
    assert images == ["image-file", "image-file"]
    histograms = [row for row in rows if row.get("val_logits/positives/_type") == "histogram"]
    assert [row["step"] for row in histograms] == [4, 8]
    assert len(list(run.glob("wandb/*/files/media/images/*.png"))) >= 2
    assert_no_secret(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackio_keeps_the_numbers_of_a_resumed_run_in_one_record(tmp_path: Path) -> None:
    store = tmp_path / "trackio"
    for words in (["train.stop_epoch=1"], ["resume=auto"]):
        train(tmp_path, "log.trackio=true", "log.project=scenes", *words, TRACKIO_DIR=str(store))
    run = tmp_path / "outputs" / "digits"

    with sqlite3.connect(store / "scenes.db") as database:
        runs = set(database.execute("SELECT run_name FROM metrics"))
        rows = [
            (step, json.loads(values))
            for step, values in database.execute("SELECT step, metrics FROM metrics ORDER BY id")
        ]
    assert runs == {("digits-" + (run / trackers.ID_FILE).read_text().strip(),)}
    for key in ("train/loss", "val/mAP", "val_raw/mAP"):
        expected = [(line["step"], line[key]) for line in numbers(run) if key in line]
        assert [(step, row[key]) for step, row in rows if key in row] == expected
    shown = [row for _, row in rows if "val_images" in row]
    assert [row["val_logits/positives"]["_type"] for row in shown] == ["trackio.histogram"] * 2
    assert len(list(store.rglob("*.png"))) == 2
    assert_no_secret(tmp_path)
