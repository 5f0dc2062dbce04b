"""The study of zero-shot heads: its rows, what is not repeated, and its report."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mldec import build
from mldec.config.compose import compose

STUDIES = Path(__file__).parents[3] / "scripts" / "studies"


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the script, which write to a folder of the test."""
    monkeypatch.syspath_prepend(str(STUDIES))
    names = runpy.run_path(str(STUDIES / "zero_shot.py"))
    own = names["do"].__globals__
    own["WORK"], own["RUNS"] = tmp_path, tmp_path / "runs.jsonl"
    own["OUT"] = tmp_path / "zero_shot.json"
    return own


def test_every_run_composes(study: dict[str, Any]) -> None:
    causes = {row: study["Run"]("causes", row, "", 0.0, 0, False) for row in study["CAUSES"]}
    settings = {row: compose([*run.settings, "name=x"]) for row, run in causes.items()}
    # Each cause changes something; the length of the vectors is no setting.
    before = settings.pop("before")
    assert settings.pop("unit") == before
    assert all(config != before for config in settings.values())

    for part in ("digits", "photos"):
        for head in study["HEADS"]:
            run = study["Run"](part, head, "muon", 3e-3, 0, True)
            build.check(
                compose(
                    [*run.settings, "name=x", "data.root=."]
                    if part == "photos"
                    else [*run.settings, "name=x"]
                )
            )


def test_a_run_is_measured_once(study: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["data.train_images=16", "data.val_images=40", "data.image_size=32", "train.epochs=2"]
    monkeypatch.setitem(study, "DIGITS", [*study["DIGITS"], *small])
    monkeypatch.setitem(
        study["CAUSES"], "unit", ("vectors of length 1", [*study["BEFORE"], *small])
    )
    run = study["Run"]("causes", "unit", "", 0.0, 3, False)

    result = study["do"](run, None)
    assert [set(epoch) for epoch in result["curve"]] == [set(study["METRICS"])] * 2
    monkeypatch.setitem(study, "measure", None)  # a second measurement would call it
    assert study["do"](run, None) == result


def test_vectors_are_scaled(study: dict[str, Any]) -> None:
    data = build.data(build.check(compose(["+experiment=digits_zsl", "name=x"]), ["data"]))
    queries = study["with_unit_vectors"](data).val.classes.queries
    torch.testing.assert_close(queries.norm(dim=1), torch.ones(40))


def test_the_best_rate_of_the_seen_classes_is_chosen(
    study: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = dict(zip(study["GRID"], (10.0, 30.0, 20.0), strict=True))

    def measure(run: Any, photos: object) -> dict[str, Any]:
        # The unseen classes would choose another one.
        metrics = {
            "zsl_mAP": -seen[run.optimiser, run.rate],
            "seen_mAP": seen[run.optimiser, run.rate],
        }
        return {"curve": [{**metrics, "gzsl_mAP": 0.0, "harmonic_mAP": 0.0}], "cpu_seconds": 1.0}

    monkeypatch.setitem(study, "measure", measure)
    assert study["tuned"]("digits", "gap", None) == study["GRID"][1]


def test_the_report_of_an_interrupted_study(
    study: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with study["RUNS"].open("w") as file:
        for seed in (0, 1):
            for row, zsl in (("official", 40.0), ("per_class", 60.0 + seed)):
                run = study["Run"]("digits", row, "muon", 3e-3, seed, False)
                curve = [dict.fromkeys(study["METRICS"], value) for value in (20.0, zsl)]
                file.write(json.dumps({**run._asdict(), "curve": curve, "cpu_seconds": 8.0}) + "\n")

    study["report"]()
    out = capsys.readouterr().out
    assert "zsl_mAP 60.5 +- 0.7" in out
    assert "GAP                                0 runs  not run" in out

    content = json.loads(study["OUT"].read_text())
    claim = content["claims"][0]
    assert (claim["part"], claim["difference"], claim["verdict"]) == ("digits", 20.5, "holds")
    assert study["OUT"].with_suffix(".png").stat().st_size > 1_000


def test_photos_need_vectors(study: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["zero_shot.py", "--part", "photos"])
    with pytest.raises(SystemExit) as raised:
        study["main"]()
    assert raised.value.code == 1
