"""What a calibrated checkpoint holds, and what no file may hold."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch

from mldec.checkpoint import Calibrated, Calibration, load_model
from mldec.checkpoint.state import Checkpoint, fits_classes
from mldec.data.fingerprint import Fingerprint
from mldec.data.types import Classes
from mldec.errors import CheckpointError

NAMES = hostile.NAMES
CALIBRATION = Calibration(
    weights="raw",
    objective="f1",
    scope="class",
    thresholds=(0.2, 0.4, 0.6),
    slopes=(0.5,),
    offsets=(0.0,),
    images=20,
    data={"_target_": "x", "size": [1, 2]},
    fingerprint=Fingerprint(20, "a", "b", "c"),
    date="2026-11-21T22:00:00+00:00",
)
PLATT = dataclasses.replace(CALIBRATION, slopes=(1.0, 2.0, 0.0), offsets=(0.0, -1.0, 3.0))


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return hostile.good()


def with_calibration(whole: dict[str, Any], calibration: Any) -> dict[str, Any]:
    return {**whole, "calibration": calibration}


@pytest.mark.parametrize("calibration", [CALIBRATION, PLATT, None])
def test_a_calibration_comes_back_from_a_file(
    whole: dict[str, Any], tmp_path: Path, calibration: Calibration | None
) -> None:
    checkpoint = dataclasses.replace(
        Checkpoint.from_state(whole, Path("x.pt")), calibration=calibration
    )
    torch.save(checkpoint.to_state(), tmp_path / "x.pt")
    assert load_model(tmp_path / "x.pt", weights="raw").calibration == calibration


def test_it_is_not_that_of_other_weights(
    whole: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calibration = dataclasses.asdict(dataclasses.replace(CALIBRATION, weights="ema"))
    torch.save(with_calibration(whole, calibration), tmp_path / "x.pt")
    assert load_model(tmp_path / "x.pt", weights="raw").calibration is None
    assert "x.pt was calibrated with its ema weights: its thresholds are not used" in caplog.text


@pytest.mark.parametrize("change", ["fewer", "more", "other classes"])
def test_another_calibration_is_refused_in_one_line(whole: dict[str, Any], change: str) -> None:
    calibration: Any = copy.deepcopy(dataclasses.asdict(CALIBRATION))
    if change == "fewer":
        del calibration["images"]
    elif change == "more":
        calibration["code"] = "x"
    else:
        calibration["thresholds"] = (0.1, 0.2)
    with pytest.raises(CheckpointError, match=r"^x\.pt "):
        Checkpoint.from_state(with_calibration(whole, calibration), Path("x.pt"))


def test_the_numbers_are_as_many_as_the_classes_need() -> None:
    several, one_label = Classes(NAMES), Classes(NAMES, exclusive=True)
    words = Classes(NAMES, queries=torch.zeros(3, 5))
    together = dataclasses.replace(CALIBRATION, scope="global", thresholds=(0.3,))
    without = dataclasses.replace(CALIBRATION, objective=None, scope=None, thresholds=())
    assert [fits_classes(CALIBRATION, classes) for classes in (several, one_label, words)] == [
        True,
        False,
        False,
    ]
    assert [fits_classes(together, classes) for classes in (several, one_label, words)] == [
        True,
        False,
        True,
    ]
    assert [fits_classes(without, classes) for classes in (several, one_label, words)] == [
        False,
        True,
        False,
    ]
    assert fits_classes(PLATT, several)
    assert not fits_classes(dataclasses.replace(PLATT, scope="global", thresholds=(0.3,)), words)


def test_logits_are_scaled_by_class_or_together() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 4.0]])
    assert CALIBRATION.scaled(logits).equal(logits / 2)
    expected = torch.tensor([[1.0, 3.0, 3.0], [-1.0, -1.0, 3.0]])
    assert PLATT.scaled(logits).equal(expected)

    class Half(torch.nn.Module):
        def forward(self, images: torch.Tensor, queries: Any) -> torch.Tensor:
            return logits.half()

    scaled = Calibrated(Half(), PLATT)(logits, None)
    assert scaled.dtype == torch.float32
    assert scaled.equal(expected)


def test_thresholds_follow_the_names_of_the_data() -> None:
    one, two, three = NAMES
    assert CALIBRATION.thresholds_of(NAMES, [three, one, two]) == [0.6, 0.2, 0.4]
    together = dataclasses.replace(CALIBRATION, scope="global", thresholds=(0.3,))
    assert together.thresholds_of(NAMES, ["any", "other"]) == [0.3]
