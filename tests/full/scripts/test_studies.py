"""The studies: their rows compose, they go on where they stopped, and the verdicts follow."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mldec import build
from mldec.config.compose import compose

TOP = Path(__file__).parents[3]


def load(name: str) -> ModuleType:
    folder = str(TOP / "scripts" / "studies")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


digits, photos, verdicts = load("digits"), load("photos"), load("verdicts")
SETTINGS = {
    "digits": {row.name: row.settings(0) for row in digits.ROWS},
    "photos": {
        row.name: [*photos.COMMON, *photos.PARTS[row.part][1], *row.own_settings]
        for row in photos.ROWS
    },
}


def test_the_report_of_the_digits_study_is_drawn_a_panel_per_dataset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = TOP / "benchmarks" / "small_study.json"
    drawn = []
    monkeypatch.setattr(digits, "save", lambda figure, path: drawn.append(figure))
    report = json.loads(path.read_text())
    digits.plot(report["rows"], tmp_path / "plot.png")
    [figure] = drawn
    assert [axes.get_title() for axes in figure.axes] == list(report["data"].values())
    for axes, data in zip(figure.axes, report["data"], strict=True):
        shown = [row for row in report["rows"] if row["data"] == data]
        drawn_points = [container[0].get_xydata()[0].tolist() for container in axes.containers]
        assert drawn_points == [[row["gmac"] * 1e3, row["mean"]] for row in shown]
        assert axes.get_xlabel() == "million multiply-accumulates per image"
        assert axes.get_ylabel() == f"{shown[0]['metric']} in percent"


@pytest.mark.parametrize(
    ("first", "second", "better", "verdict"),
    [
        ([90, 91, 92], [80, 81, 82], True, "holds"),
        ([80, 81, 82], [90, 91, 92], True, "does not hold"),
        ([90, 80, 85], [85, 90, 80], True, "open: within the spread"),
        ([90, 80, 85], [85, 90, 80], False, "open: within the spread"),
        ([80, 81, 82], [90, 91, 92], False, "does not hold"),
        ([90, 91, 92], [80, 81, 82], False, "holds"),
        ([90, 90], [90.08, 90.08], False, "open: within the spread"),
        ([90], [80], True, "not run"),
    ],
)
def test_verdicts(first: list[float], second: list[float], better: bool, verdict: str) -> None:
    given = {
        name: {str(seed): float(value) for seed, value in enumerate(values)}
        for name, values in (("a", first), ("b", second))
    }
    judged = verdicts.judge(verdicts.Claim("x", "a", "b", better), given)
    assert judged["verdict"] == verdict
    assert verdicts.verdict_line(judged).split("  ")[0] == verdict


@pytest.mark.parametrize(
    ("study", "name"), [(study, name) for study, rows in SETTINGS.items() for name in rows]
)
def test_every_row_composes(study: str, name: str) -> None:
    build.check(compose(SETTINGS[study][name]))


@pytest.mark.parametrize("study", [digits, photos])
def test_the_claims_are_about_rows(study: Any) -> None:
    names = [row.name for row in study.ROWS]
    assert len(set(names)) == len(names)
    about = {name for claim in study.CLAIMS for name in (claim.first, claim.second)}
    assert about <= set(names)


def test_the_digits_study_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(digits, "WORK", tmp_path)
    asked = []

    def fake(row: object, seed: int) -> dict:
        asked.append((row.name, seed))
        return {
            "row": row.name,
            "seed": seed,
            "metric": "mAP",
            "value": 50.0 + seed,
            "cpu_seconds": 1.0,
        }

    monkeypatch.setattr(digits, "run", fake)
    line = {"row": "gap", "seed": 1, "metric": "mAP", "value": 7.0, "cpu_seconds": 1.0}
    (tmp_path / "runs.jsonl").write_text(json.dumps(line) + "\n")
    digits.study(digits.ROWS[:2])
    assert asked == [
        ("gap", 0),
        ("transformer", 0),
        ("transformer", 1),
        ("gap", 2),
        ("transformer", 2),
    ]
    digits.forget("gap")
    assert {result["row"] for result in digits.finished()} == {"transformer"}


class Runs:
    """The study on photos, with runs that are only written down; 1e-3 is the best rate."""

    def __init__(self, best: float) -> None:
        self.best = best
        self.asked: list[tuple[str, float, bool, int]] = []

    def run(self, row: Any, rate: float, more: list[str]) -> dict[str, Any]:
        tuning = more == photos.TUNING
        seed = 0 if tuning else int(more[0].removeprefix("seed="))
        self.asked.append((row.name, rate, tuning, seed))
        value = 60.0 - abs(photos.RATES.index(rate) - photos.RATES.index(self.best))
        average_precision = dict.fromkeys(
            ("bottle", "car", "pottedplant", "tvmonitor", "cat"), 50.0
        )
        return {
            "row": row.name,
            "rate": rate,
            "seed": seed,
            "tuning": tuning,
            "mAP": value + seed / 10,
            "AP": average_precision,
            "seconds": 1.0,
            "cpu_seconds": 1.0,
            "mAP_on_training": 99.0,
        }


@pytest.fixture
def in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(photos, "RUNS", tmp_path / "runs.jsonl")
    monkeypatch.setattr(photos, "COSTS", tmp_path / "costs.json")
    monkeypatch.setattr(photos, "OUT", tmp_path / "photos.json")
    return tmp_path


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (1e-3, [3e-4, 1e-3, 3e-3]),
        (3e-3, [3e-4, 1e-3, 3e-3, 1e-2]),
        (3e-2, [3e-4, 1e-3, 3e-3, 1e-2, 3e-2]),
        (1e-4, [3e-4, 1e-3, 3e-3, 1e-4]),
    ],
)
def test_the_grid_grows_where_the_best_rate_is_at_its_end(
    in_a_folder: Path, monkeypatch: pytest.MonkeyPatch, best: float, tried: list[float]
) -> None:
    runs = Runs(best)
    study = photos.Study(Path("photos"), None, None)
    monkeypatch.setattr(study, "run", runs.run)
    row = next(row for row in photos.ROWS if row.name == "gap")
    study.do([row])
    assert [rate for _, rate, tuning, _ in runs.asked if tuning] == tried
    assert [entry for entry in runs.asked if not entry[2]] == [
        ("gap", best, False, seed) for seed in photos.SEEDS
    ]

    # Nothing is done twice.
    runs.asked.clear()
    study.do([row])
    assert not runs.asked


def test_a_row_with_the_rate_of_another_tunes_that_one(
    in_a_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(1e-3)
    study = photos.Study(Path("photos"), None, None)
    monkeypatch.setattr(study, "run", runs.run)
    study.do([row for row in photos.ROWS if row.name == "groups_3"])
    assert {(name, tuning) for name, _, tuning, _ in runs.asked} == {
        ("ml_decoder", True),
        ("groups_3", False),
    }


def test_the_report_on_photos_says_what_was_not_run(
    in_a_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(1e-3)
    study = photos.Study(Path("photos"), None, None)
    monkeypatch.setattr(study, "run", runs.run)
    names = ("gap", "ml_decoder", "small_gap")
    study.do([row for row in photos.ROWS if row.name in names])

    # The work of one row stands for that of all: each would be a network of its own.
    work = photos.work(next(row for row in photos.ROWS if row.name == "gap"))
    monkeypatch.setattr(photos, "work", lambda row: work)
    photos.report()

    report = json.loads((in_a_folder / "photos.json").read_text())
    assert not report["complete"]
    rows = {row["row"]: row for row in report["rows"]}
    assert rows["gap"]["values"] == {"0": 60.0, "1": 60.1, "2": 60.2}
    assert rows["gap"]["mean"] == pytest.approx(60.1)
    assert rows["gap"]["mAP_rare"] == [50.0, 50.0, 50.0]
    assert rows["small_gap"]["mAP_on_training"] == [99.0, 99.0, 99.0]
    assert rows["query2label"]["mean"] is None
    judged = {claim["first"]: claim["verdict"] for claim in report["claims"]}
    assert judged["trained_ml_decoder"] == "not run"
    assert (in_a_folder / "photos.png").stat().st_size > 10_000
