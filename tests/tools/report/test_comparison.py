"""Two models on the same images: pairs that changed sides, paired intervals, and the test."""

import numpy as np
import pytest

from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.report import comparison
from mldec.report.comparison import changes, differences, keep, p_value, per_class, significance
from mldec.report.statistics import (
    Answers,
    Numbers,
    draw,
    metrics,
    normalise,
    precision_of_classes,
    resample,
)


def two_models(images: int, classes: int, *, better: float = 0.0, seed: int = 0) -> list[Answers]:
    """Return two models that differ by noise, the first one better by so much."""
    rng = np.random.default_rng(seed)
    labels = (rng.random((images, classes)) < 0.3).astype(np.int8)
    common = rng.normal(size=labels.shape) + labels
    models = []
    for gain in (better, 0.0):
        logits = common + gain * labels + 0.7 * rng.normal(size=labels.shape)
        models.append(
            Answers(
                logits=logits.astype(np.float32), labels=labels, exclusive=False, lowest=0.4 * gain
            )
        )
    return models


def numbers_of(answers: Answers, weights: np.ndarray) -> Numbers:
    evaluator = MultiLabelEvaluator(answers.labels.shape[1])
    values = metrics(evaluator, answers.logits, answers.labels)
    return resample(values, answers, weights)


@pytest.mark.parametrize("most", [10, 10_000])
def test_pairs_that_changed_sides_are_found(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MOST_CHANGED", most)
    first, second = two_models(101, 70, better=1)
    first.labels[::7, ::3] = -1
    surest, num_fixed, num_broken = changes(keep(first), second)

    expected = {}
    for row, k in np.argwhere(first.labels >= 0):
        present = first.labels[row, k] == 1
        right = (first.logits[row, k] > 0.4) == present
        if right != ((second.logits[row, k] > 0) == present):
            scores = [float(own.probabilities(own.logits[row, k])) for own in (first, second)]
            expected[row, k] = (present, *scores, right)

    fixed = [pair for pair in expected if expected[pair][3]]
    assert (num_fixed, num_broken) == (len(fixed), len(expected) - len(fixed))
    assert len(surest) == min(most, len(expected))
    for change in surest:
        present, score, other_score, right = expected[change.row, change.class_index]
        assert (change.present, change.fixed) == (present, right)
        assert change.score == pytest.approx(score, abs=1e-3)
        assert change.other_score == pytest.approx(other_score, abs=1e-6)
    gaps = [abs(change.score - change.other_score) for change in surest]
    assert gaps == sorted(gaps, reverse=True)


def test_an_image_of_one_label_changes_sides_once() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(4, size=50)
    labels = np.eye(4, dtype=np.int8)[truth]
    labels[0] = 0
    models = []
    for _ in range(2):
        logits = (rng.normal(size=labels.shape) + labels).astype(np.float32)
        normalise(logits)
        models.append(Answers(logits=logits, labels=labels, exclusive=True, lowest=None))
    right, other_right = (model.predicted == truth for model in models)
    surest, num_fixed, num_broken = changes(keep(models[0]), models[1])
    assert num_fixed == (right & ~other_right)[1:].sum()
    assert num_broken == (~right & other_right)[1:].sum()
    for change in surest:
        assert change.class_index == truth[change.row]
        assert change.present
        own = models[1].logits[change.row, change.class_index]
        assert change.other_score == pytest.approx(np.exp(own), abs=1e-6)


def test_paired_intervals_are_narrower() -> None:
    weights = draw(200, 6)[:2]
    first, second = (numbers_of(answers, weights) for answers in two_models(200, 6))
    own, other, gap = differences(first, second)["mAP"]
    assert gap.value == pytest.approx(own.value - other.value)
    assert gap.low < gap.value < gap.high
    unpaired = np.hypot(own.high - own.low, other.high - other.low)
    assert gap.high - gap.low < 0.9 * unpaired

    for row, difference in zip(
        per_class(first, second), 100 * (first.precision - second.precision), strict=True
    ):
        assert row.value == pytest.approx(difference)
        assert row.low < row.value < row.high


def test_the_test_tells_a_real_difference() -> None:
    weights = draw(200, 6)[:2]
    first, second = (numbers_of(answers, weights) for answers in two_models(200, 6, better=0.6))
    p, text = significance(first, second)
    assert p == pytest.approx(2 / 201)
    assert "200 resamples" in text
    assert "at least 0.010" in text
    assert significance(first, first)[0] == 1


def test_without_a_difference_p_values_are_spread_evenly() -> None:
    values = []
    for seed in range(200):
        weights = np.random.default_rng(seed).standard_exponential((1, 120, 100), np.float32)
        gaps = [
            precision_of_classes(answers, weights).mean(1)
            for answers in two_models(120, 3, seed=seed)
        ]
        values.append(p_value(gaps[0] - gaps[1]))
    for level in (0.1, 0.3, 0.5, 0.7, 0.9):
        assert np.mean(np.array(values) <= level) == pytest.approx(level, abs=0.1)
