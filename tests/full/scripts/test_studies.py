"""The studies: their rows compose, their claims are about rows, and the verdicts follow."""

import importlib
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


def test_every_row_composes() -> None:
    for row in digits.ROWS:
        build.check(compose(row.settings(0)))
    for row in photos.ROWS:
        build.check(compose([*photos.COMMON, *photos.PARTS[row.part][1], *row.own_settings]))


@pytest.mark.parametrize("study", [digits, photos])
def test_the_claims_are_about_rows(study: Any) -> None:
    names = [row.name for row in study.ROWS]
    assert len(set(names)) == len(names)
    about = {name for claim in study.CLAIMS for name in (claim.first, claim.second)}
    assert about <= set(names)


@pytest.mark.parametrize(
    ("first", "second", "better", "verdict"),
    [
        ([90, 91, 92], [80, 81, 82], True, "holds"),
        ([80, 81, 82], [90, 91, 92], True, "does not hold"),
        ([90, 80, 85], [85, 90, 80], True, "open: within the spread"),
        ([80, 81, 82], [90, 91, 92], False, "does not hold"),
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
