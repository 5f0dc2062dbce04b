"""Fits and their judgement, against loops and scikit-learn."""

import numpy as np
import pytest
from scipy.special import expit
from sklearn.calibration import calibration_curve
from sklearn.metrics import f1_score, precision_score, recall_score

from mldec import calibration as fitting
from mldec.calibration import (
    BINS,
    Choice,
    Tally,
    by_class,
    cross_fitted,
    fit,
    fit_temperature,
    fit_threshold,
    parse_objective,
    platt,
    temperature,
    unscaled,
)
from mldec.errors import DataError

F1 = Choice(parse_objective("f1"), "class", 5, platt=False)


def data(
    *, images: int = 300, classes: int = 70, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits, labels with some -1, and all images as bool [N]."""
    rng = np.random.default_rng(seed)
    present = rng.random((images, classes)) < np.linspace(0.005, 0.4, classes)
    logits = 2.0 * present - 1 + rng.normal(size=present.shape)
    labels = np.where(rng.random(present.shape) < 0.1, -1, present)
    return logits.astype(np.float32), labels.astype(np.int8), np.ones(images, bool)


def test_each_class_is_fitted_to_its_annotated_images() -> None:
    logits, labels, every = data()
    images = every & (np.arange(300) % 3 > 0)
    fitted = fit(logits, labels, images, F1)
    slope = 1 / temperature(logits[images], labels[images], exclusive=False)
    assert fitted.slopes == pytest.approx(slope)
    assert not fitted.offsets.any()
    for k in (30, 63, 64, 69):
        known = images & (labels[:, k] >= 0)
        column = slope * logits[known, k].astype(float), labels[known, k] == 1
        assert fitted.thresholds[k] == pytest.approx(fit_threshold(F1.objective, [column]).value)


def test_classes_with_few_positives_share_a_threshold() -> None:
    logits, labels, every = data()
    few = (labels == 1).sum(0) < 12
    assert 2 <= few.sum() < 20
    choice = Choice(F1.objective, "class", 12, platt=False)
    fitted = fit(logits, labels, every, choice)
    assert fitted.shares.tolist() == few.tolist()

    columns = [
        (
            fitted.slopes[0] * logits[labels[:, k] >= 0, k].astype(float),
            labels[labels[:, k] >= 0, k] == 1,
        )
        for k in np.flatnonzero(few)
    ]
    shared = fit_threshold(F1.objective, columns).value
    assert fitted.thresholds[few] == pytest.approx(shared)
    assert len(set(fitted.thresholds[~few])) > 10


def test_too_few_positives_even_together_take_the_threshold_of_all_classes() -> None:
    logits, labels, every = data(classes=6)
    labels[:, 0] = -1
    labels[:, 1] = np.minimum(labels[:, 1], 0)
    everything = fit(logits, labels, every, Choice(F1.objective, "global", 1, platt=False))
    fitted = fit(logits, labels, every, F1)
    assert fitted.shares.tolist() == [True, True, False, False, False, False]
    assert fitted.thresholds[:2] == pytest.approx(everything.thresholds[:2])
    assert len(set(everything.thresholds)) == 1
    assert not everything.shares.any()


def test_a_precision_that_a_class_cannot_reach_is_known() -> None:
    logits = np.array([[2.0, 2], [1, 1], [0, 0]])
    labels = np.array([[0, 1], [1, 1], [0, 0]], np.int8)
    choice = Choice(parse_objective("precision:0.9"), "class", 1, platt=False)
    fitted = fit(logits, labels, np.ones(3, bool), choice)
    assert fitted.best_precision[0] == 0.5
    assert np.isnan(fitted.best_precision[1])


def test_platt_scaling_is_per_class() -> None:
    logits, labels, every = data(classes=4)
    fitted = fit(logits, labels, every, Choice(F1.objective, "class", 1, platt=True))
    for k in range(4):
        known = labels[:, k] >= 0
        expected = platt(logits[known, k].astype(float), labels[known, k] == 1)
        assert (fitted.slopes[k], fitted.offsets[k]) == pytest.approx(expected)


def test_classes_that_may_be_any_share_their_platt_scaling() -> None:
    logits, labels, every = data()
    # Far above 0, as the logits of CLIP: a temperature could make no scores of them.
    logits = 20 + 2 * logits
    images = every & (np.arange(300) % 3 > 0)
    shared = Choice(F1.objective, "global", 5, platt=True, shared=True)
    fitted = fit(logits, labels, images, shared)

    known = (labels >= 0) & images[:, None]
    slope, offset = platt(logits[known], labels[known] == 1)
    assert slope > 0
    assert fitted.slopes == pytest.approx(slope)
    assert fitted.offsets == pytest.approx(offset)
    assert len(set(fitted.thresholds)) == 1
    # The mean score is the share of positives.
    scores = expit(slope * logits[known] + offset)
    assert scores.mean() == pytest.approx((labels[known] == 1).mean(), abs=1e-3)


def test_a_tally_is_that_of_scikit_learn() -> None:
    logits, labels, every = data(classes=5)
    fitted = fit(logits, labels, every, F1)
    tally = Tally(5)
    tally.add(fitted, logits, labels, np.arange(300) < 100)
    tally.add(fitted, logits, labels, np.arange(300) >= 100)

    scores = expit(fitted.slopes * logits.astype(float))
    per_class = tally.counts.per_class()
    for k in range(5):
        known = labels[:, k] >= 0
        pair = labels[known, k], scores[known, k] >= fitted.thresholds[k]
        assert per_class["precision"][k] == pytest.approx(precision_score(*pair, zero_division=0))
        assert per_class["recall"][k] == pytest.approx(recall_score(*pair))
        assert per_class["f1"][k] == pytest.approx(f1_score(*pair))

    known = labels >= 0
    share, mean = calibration_curve(labels[known], scores[known], n_bins=BINS)
    images = np.histogram(scores[known], bins=BINS, range=(0, 1))[0]
    expected = 100 * np.abs(share - mean) @ images[images > 0] / images.sum()
    assert tally.calibration_error() == pytest.approx(expected)


def test_no_image_is_judged_by_a_fit_that_has_seen_it() -> None:
    """Labels that are noise: a threshold that has seen them is better than chance, another not."""
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(200, 40)), (rng.random((200, 40)) < 0.3).astype(np.int8)
    folds = np.arange(200) % 5
    tally = cross_fitted(logits, labels, folds, F1)

    expected = Tally(40)
    for fold in range(5):
        others = folds != fold
        fitted = fit(logits[others], labels[others], np.ones(160, bool), F1)
        expected.add(fitted, logits[~others], labels[~others], np.ones(40, bool))
    assert tally.counts.summary() == expected.counts.summary()
    assert tally.calibration_error() == pytest.approx(expected.calibration_error())
    assert tally.pairs == 8000

    own = Tally(40)
    own.add(fit(logits, labels, np.ones(200, bool), F1), logits, labels, np.ones(200, bool))
    assert own.counts.summary()["CP"] > tally.counts.summary()["CP"] + 1


def test_without_a_positive_there_is_no_fit() -> None:
    logits, labels, every = data(classes=3)
    with pytest.raises(DataError, match="no label is positive among the validation images"):
        fit(logits, np.minimum(labels, 0), every, F1)
    labels = np.zeros_like(labels)
    labels[0] = 1
    with pytest.raises(DataError, match="no label is positive"):
        cross_fitted(logits, labels, np.arange(300) % 2, F1)


def test_classes_are_read_in_blocks() -> None:
    logits, labels, _ = data()
    indices, scores, targets = zip(*by_class(logits, labels), strict=True)
    assert indices == tuple(range(70))
    np.testing.assert_array_equal(np.stack(scores, 1), logits)
    np.testing.assert_array_equal(np.stack(targets, 1), labels)


def test_a_temperature_needs_only_some_of_many_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels, every = data(images=4000, classes=5)
    whole = fit_temperature(logits, labels, every, exclusive=False)
    monkeypatch.setattr(fitting, "MOST_SCORES", 10_000)
    some = fit_temperature(logits, labels, every, exclusive=False)
    assert some == temperature(logits[::3], labels[::3], exclusive=False)
    assert some == pytest.approx(whole, rel=0.1)


def test_unscaled_scores_are_the_model_s_own() -> None:
    fitted = unscaled(3, 0.5)
    column, present = fitted.column(
        1, np.array([1.0, 2, 3]), np.array([1, -1, 0]), np.array([True, True, True])
    )
    assert column.tolist() == [1, 3]
    assert present.tolist() == [True, False]
