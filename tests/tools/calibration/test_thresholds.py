"""Thresholds, against a search over every cut point by plain counting."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit

from mldec.calibration import Threshold, fit_threshold, parse_objective
from mldec.errors import ConfigError

# Few different logits, so that many are equal.
LOGITS = st.integers(-8, 8).map(lambda number: number / 2)
PAIRS = st.lists(st.tuples(LOGITS, st.booleans()), min_size=1, max_size=30)
OBJECTIVES = ["f1", "precision:0.5", "precision:0.9", "recall:0.8", "recall:1", "cost:1,5"]
OBJECTIVES += ["cost:3,.5", "cost:1,1"]


def columns_of(*classes: list[tuple[float, bool]]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [
        (
            np.array([logit for logit, _ in pairs], float),
            np.array([is_in for _, is_in in pairs], bool),
        )
        for pairs in classes
    ]


def counted(pairs: list[tuple[float, bool]], lowest: float) -> tuple[int, int, int]:
    """Return true positives, false positives and misses, if scores from `lowest` on are present."""
    hits = sum(present for logit, present in pairs if logit >= lowest)
    false_alarms = sum(not present for logit, present in pairs if logit >= lowest)
    return hits, false_alarms, sum(present for _, present in pairs) - hits


def by_brute_force(objective: str, pairs: list[tuple[float, bool]]) -> tuple[int, int, int]:
    """Return the counts at the best of all cut points, of equally good ones at the highest."""
    kind, _, numbers = objective.partition(":")
    values = [float(number) for number in numbers.split(",") if number]
    cuts = [math.inf, *sorted({logit for logit, _ in pairs}, reverse=True)]
    counts = [counted(pairs, cut) for cut in cuts]

    def precision(count: tuple[int, int, int]) -> float:
        return count[0] / (count[0] + count[1]) if count[0] else 0.0

    def recall(count: tuple[int, int, int]) -> float:
        return count[0] / (count[0] + count[2])

    if kind == "f1":
        return max(counts, key=lambda count: 2 * count[0] / (2 * count[0] + count[1] + count[2]))
    if kind == "cost":
        return min(counts, key=lambda count: values[0] * count[1] + values[1] * count[2])
    if kind == "recall":
        return next(count for count in counts if recall(count) >= values[0])

    highest = max(map(precision, counts))
    good = [count for count in counts if precision(count) >= min(values[0], highest)]
    return max(good, key=lambda count: (recall(count), -count[1]))


def decisions(threshold: Threshold, pairs: list[tuple[float, bool]]) -> tuple[int, int, int]:
    """Return the counts at a threshold, as `predict` applies it."""
    scores = [(float(expit(np.float64(logit))), present) for logit, present in pairs]
    return counted(scores, threshold.value)


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(pairs=PAIRS)
def test_a_threshold_is_the_best_of_all_cut_points(
    objective: str, pairs: list[tuple[float, bool]]
) -> None:
    pairs = [*pairs, (0.25, True)]
    threshold = fit_threshold(parse_objective(objective), columns_of(pairs))
    hits, false_alarms, misses = by_brute_force(objective, pairs)
    assert decisions(threshold, pairs) == (hits, false_alarms, misses)
    assert 0 < threshold.value < 1
    if hits:
        assert threshold.precision == pytest.approx(hits / (hits + false_alarms))
        assert threshold.recall == pytest.approx(hits / (hits + misses))
    if objective.startswith("precision"):
        assert threshold.is_reached == (threshold.precision >= float(objective[10:]))


@given(one=PAIRS, two=PAIRS)
def test_classes_that_share_a_threshold_are_one_class_with_all_their_images(
    one: list[tuple[float, bool]], two: list[tuple[float, bool]]
) -> None:
    one = [*one, (1.0, True)]
    for text in OBJECTIVES:
        objective = parse_objective(text)
        together = fit_threshold(objective, columns_of(one, [], two))
        assert together == fit_threshold(objective, columns_of(one + two))


def test_a_threshold_lies_halfway_to_the_next_score() -> None:
    columns = [(np.array([2.0, 0.0, -1.0]), np.array([True, False, False]))]
    threshold = fit_threshold(parse_objective("f1"), columns)
    assert threshold.value == pytest.approx((expit(np.float64(2)) + 0.5) / 2)
    assert threshold == Threshold(threshold.value, True, 1.0, 1.0)

    alone = fit_threshold(parse_objective("f1"), [(np.array([0.0]), np.array([True]))])
    assert alone.value == 0.25


def test_it_may_be_cheapest_to_predict_nothing() -> None:
    columns = [(np.array([0.0, 1.0, 2.0]), np.array([True, False, False]))]
    threshold = fit_threshold(parse_objective("cost:1,1.5"), columns)
    assert expit(np.float64(2)) < threshold.value < 1
    assert (threshold.precision, threshold.recall) == (0, 0)


def test_scores_of_1_are_still_predicted() -> None:
    columns = [(np.array([90.0, 80.0, 70.0]), np.array([True, True, False]))]
    threshold = fit_threshold(parse_objective("f1"), columns)
    assert threshold.value < 1 == expit(np.float64(80))


@pytest.mark.parametrize(
    "text",
    [
        *["", "F1", "f2", "f1 ", "precision", "precision:0", "precision:1.1", "precision:-1"],
        *["precision:nan", "recall:", "recall:1e-1", "cost:1", "cost:0,1", "cost:1,0"],
        *["cost:1,2,3", "cost:inf,1", f"cost:{'9' * 400},1"],
    ],
)
def test_other_objectives_are_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--objective .*: it must be f1, precision:P or recall:R"
    ):
        parse_objective(text)


def test_objectives_are_read() -> None:
    assert parse_objective("precision:.9").values == (0.9,)
    assert parse_objective("recall:1").kind == "recall"
    assert parse_objective("cost:1,2.5").values == (1, 2.5)
