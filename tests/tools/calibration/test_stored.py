"""Which thresholds a command uses; the commands are in test_command.py."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mldec.checkpoint import Calibration
from mldec.data.fingerprint import fingerprint
from mldec.data.types import Classes, Split
from mldec.errors import ConfigError
from mldec.evaluation import chosen_thresholds, stored_thresholds

TRAINED, CURRENT = Classes(("a", "b", "c")), Classes(("c", "a", "b"))
IMAGES: Any = range(7)
DATA: Any = SimpleNamespace(val=Split(IMAGES, CURRENT))
CALIBRATION = Calibration(
    weights="raw",
    objective="f1",
    scope="class",
    thresholds=(0.1, 0.2, 0.3),
    slopes=(1.0,),
    offsets=(0.0,),
    images=7,
    data={},
    fingerprint=fingerprint(DATA.val),
    date="2026-11-21",
)
GLOBAL = replace(CALIBRATION, scope="global", thresholds=(0.4,))
ONE_LABEL = replace(CALIBRATION, objective=None, scope=None, thresholds=())


def loaded(calibration: Calibration | None, classes: Classes = TRAINED) -> Any:
    return SimpleNamespace(calibration=calibration, classes=classes)


def args(threshold: float | None = None, *settings: str) -> Any:
    return SimpleNamespace(threshold=threshold, settings=list(settings), checkpoint="x.pt")


def test_predict_has_one_threshold_per_class_or_none() -> None:
    assert stored_thresholds(loaded(CALIBRATION)) == [0.1, 0.2, 0.3]
    assert stored_thresholds(loaded(GLOBAL)) == [0.4, 0.4, 0.4]
    assert stored_thresholds(loaded(ONE_LABEL)) is None
    assert stored_thresholds(loaded(None)) is None


@pytest.mark.parametrize(
    ("calibration", "chosen", "expected"),
    [
        (CALIBRATION, args(), [0.3, 0.1, 0.2]),
        (GLOBAL, args(), [0.4]),
        (ONE_LABEL, args(), None),
        (None, args(), None),
        (CALIBRATION, args(0.7), [0.7]),
        (None, args(0.7), [0.7]),
        (CALIBRATION, args(None, "data.threshold=0.8"), None),
    ],
)
def test_evaluate_takes_them_in_the_order_of_the_data(
    calibration: Calibration | None, chosen: Any, expected: list[float] | None
) -> None:
    assert chosen_thresholds(DATA, loaded(calibration), chosen) == expected


@pytest.mark.parametrize(("images", "part"), [(7, "too good"), (8, "fitted on 7 other images")])
def test_it_is_said_whether_they_were_fitted_on_these_images(
    caplog: pytest.LogCaptureFixture, images: int, part: str
) -> None:
    dataset: Any = range(images)
    data: Any = SimpleNamespace(val=Split(dataset, CURRENT))
    with caplog.at_level(logging.INFO, "mldec"):
        chosen_thresholds(data, loaded(CALIBRATION), args())
    assert part in caplog.text


def test_one_label_has_no_threshold() -> None:
    exclusive = loaded(ONE_LABEL, Classes(("a", "b"), exclusive=True))
    with pytest.raises(ConfigError, match="--threshold has no effect"):
        chosen_thresholds(DATA, exclusive, args(0.5))
