"""Thresholds, calibrated scores and metrics, compared with brute force and other libraries."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, precision_score, recall_score
from torch.nn.functional import cross_entropy

from mldec.evaluation.run import Scores
from mldec.evaluators.calibration import (
    BINS,
    POWERS,
    TEMPERATURES,
    Choice,
    Tally,
    cross_fitted,
    fit,
    fit_threshold,
    temperature,
    uncalibrated,
)
from mldec.evaluators.platt import DEVIATION, common_slope, platt, soft_targets
from mldec.tools.calibrate import calibrate_single_label, parse_objective

# Few distinct values, so that there are many ties.
LOGITS = st.integers(-8, 8).map(lambda number: number / 2)
PAIRS = st.lists(st.tuples(LOGITS, st.booleans()), min_size=1, max_size=30)
OBJECTIVES = ["f1", "precision:0.5", "precision:0.9", "recall:0.8", "recall:1", "cost:1,5"]
OBJECTIVES += ["cost:3,.5", "cost:1,1"]
F1 = Choice(parse_objective("f1"), "class", 5)


def fitted_to(objective, *classes):
    pairs = [pair for own in classes for pair in own]
    logits = np.array([logit for logit, _ in pairs])
    present = np.array([shown for _, shown in pairs], bool)
    return fit_threshold(parse_objective(objective), logits, present)


def counted(pairs, lowest):
    """Return true positives, false positives and false negatives at a threshold."""
    hits = sum(present for score, present in pairs if score >= lowest)
    false_alarms = sum(not present for score, present in pairs if score >= lowest)
    return hits, false_alarms, sum(present for _, present in pairs) - hits


def by_brute_force(objective, pairs):
    """Return the counts at the best cut point, or the highest of equally good cut points."""
    kind, _, numbers = objective.partition(":")
    values = [float(number) for number in numbers.split(",") if number]
    cuts = [math.inf, *sorted({logit for logit, _ in pairs}, reverse=True)]
    counts = [counted(pairs, cut) for cut in cuts]

    def precision(count):
        return count[0] / (count[0] + count[1]) if count[0] else 0.0

    def recall(count):
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


@pytest.mark.parametrize("objective", OBJECTIVES)
@settings(max_examples=50)
@given(pairs=PAIRS)
def test_threshold_is_the_best_cut_point(objective, pairs):
    pairs = [*pairs, (0.25, True)]
    value, precision = fitted_to(objective, pairs)
    hits, false_alarms, misses = by_brute_force(objective, pairs)
    scores = [(float(expit(np.float64(logit))), present) for logit, present in pairs]
    assert counted(scores, value) == (hits, false_alarms, misses)
    assert 0 < value < 1
    expected = hits / (hits + false_alarms) if hits else 1
    if objective.startswith("precision") and expected < float(objective[10:]):
        assert precision == pytest.approx(expected)
    else:
        assert math.isnan(precision)


def test_threshold_is_halfway_to_the_next_score():
    value, _ = fitted_to("f1", [(2.0, True), (0.0, False), (-1.0, False)])
    assert value == pytest.approx((expit(2.0) + 0.5) / 2)
    assert fitted_to("f1", [(0.0, True)])[0] == 0.25

    # No prediction may have the lowest cost, and scores of 1 are still predicted.
    pairs = [(0.0, True), (1.0, False), (2.0, False)]
    assert expit(2.0) < fitted_to("cost:1,1.5", pairs)[0] < 1
    assert fitted_to("f1", [(90.0, True), (80.0, True), (70.0, False)])[0] < 1


def scores(*, images=200, classes=6, seed=0):
    """Return logits and labels [N, K] with a different scale and offset for each class."""
    rng = np.random.default_rng(seed)
    labels = rng.random((images, classes)) < rng.uniform(0.05, 0.4, classes)
    evidence = 2 * labels - 1 + rng.normal(size=labels.shape)
    logits = evidence * rng.uniform(0.5, 4, classes) + rng.uniform(-1, 1, classes)
    return logits.astype(np.float32), labels.astype(np.int8)


def of_all(logits, labels):
    return temperature(logits, labels, np.ones(len(logits), bool))


def of_one_label(*, images=200, seed=0):
    """Return logits and one-hot labels [N, 6], which are correlated."""
    logits, _ = scores(images=images)
    noisy = logits + np.random.default_rng(seed).normal(scale=6, size=logits.shape)
    return logits, np.eye(6, dtype=np.int8)[noisy.argmax(1)]


@pytest.mark.parametrize("margin", [1, 8, 100])
def test_separable_classes_have_no_best_temperature(margin):
    rng = np.random.default_rng(0)
    classes = rng.integers(4, size=60)
    logits = rng.normal(scale=0.1, size=(60, 4)) + 1
    logits[np.arange(60), classes] += margin
    labels = np.eye(4, dtype=np.int8)[classes]
    # The log loss falls with the temperature until all scores are 1.
    assert temperature(logits.astype(np.float32), labels, np.ones(60, bool)) is None


def test_temperature_is_the_best_of_a_fine_grid():
    logits, labels = of_one_label()
    fitted = of_all(logits, labels)
    grid = np.geomspace(*TEMPERATURES, 4000)
    targets = torch.from_numpy(labels).argmax(1)
    losses = [cross_entropy(torch.from_numpy(logits).double() / value, targets) for value in grid]
    assert fitted == pytest.approx(grid[np.argmin(losses)], rel=2e-3)
    assert fitted != pytest.approx(1, rel=0.02)
    assert of_all(3 * logits, labels) == pytest.approx(3 * fitted)

    # Images without a label are ignored.
    more = np.concatenate([logits, logits[:1]]), np.concatenate([labels, 0 * labels[:1]])
    assert of_all(*more) == fitted


def test_platt_scaling_equals_logistic_regression_with_soft_targets():
    logits, labels = scores()
    separated = np.array([-9.0, -8, -7, 5, 6])
    cases = [(column, label == 1) for column, label in zip(logits.T, labels.T, strict=True)]
    for column, present in [*cases, (separated, separated > 0)]:
        positives, negatives = present.sum(), (~present).sum()
        soft = np.where(present, (positives + 1) / (positives + 2), 1 / (negatives + 2))
        # Each image is a positive and a negative sample, weighted by its soft target.
        regression = LogisticRegression(C=1e9, tol=1e-8).fit(
            np.tile(column, 2)[:, None],
            np.repeat([1, 0], len(column)),
            np.concatenate([soft, 1 - soft]),
        )
        expected = regression.coef_[0, 0], regression.intercept_[0]
        np.testing.assert_allclose(platt(column, present), expected, rtol=2e-3, atol=2e-3)


def test_common_slope_equals_regression_with_intercept_per_class():
    logits, labels = scores()
    labels[::7, :3] = -1
    images, classes = np.nonzero(labels >= 0)
    targets, _ = soft_targets(labels == 1, labels == 0)
    soft = targets[images, classes]
    inputs = np.column_stack([logits[images, classes], np.eye(6)[classes]])
    regression = LogisticRegression(C=1e9, tol=1e-8, fit_intercept=False, max_iter=1000).fit(
        np.tile(inputs, (2, 1)), np.repeat([1, 0], len(soft)), np.concatenate([soft, 1 - soft])
    )
    assert common_slope(logits.astype(float), labels) == pytest.approx(
        regression.coef_[0, 0], rel=2e-3
    )
    # An offset does not matter. Constant logits have no slope.
    assert common_slope(30 + logits.astype(float), labels) == pytest.approx(
        regression.coef_[0, 0], rel=2e-3
    )
    assert common_slope(0 * logits, labels) == 1


def test_slope_is_shrunk_to_common_slope_with_few_images():
    logits, labels = scores(images=400)
    column, present = logits[:, 0].astype(float), labels[:, 0] == 1
    own, _ = platt(column, present)
    common = 3 * own
    distances = []
    for count in (400, 40):
        slope, offset = platt(column[:count], present[:count], common)
        distances.append(slope - platt(column[:count], present[:count])[0])

        # The fit is a local minimum.
        targets, _ = soft_targets(present[:count], ~present[:count])

        def loss(slope, offset, count=count, targets=targets):
            scaled = slope * column[:count] + offset
            entropy = (np.logaddexp(0, scaled) - targets * scaled).sum()
            return entropy + ((slope / common - 1) / DEVIATION) ** 2 / 2

        nearby = [(slope * a, offset + b) for a in (0.99, 1, 1.01) for b in (-0.01, 0, 0.01)]
        assert min(nearby, key=lambda values: loss(*values)) == (slope, offset)
    assert 0 < distances[0] < distances[1]


@pytest.mark.parametrize(
    ("logits", "present", "is_ordered"),
    [
        ([3.0, 3, 3, 3], [True, False, False, False], False),  # constant
        ([-2.0, 1, 2, 3], [True, False, False, False], True),  # worse than chance
        ([], [], False),
    ],
)
def test_uninformative_logits_give_the_class_frequency(logits, present, is_ordered):
    slope, offset = platt(np.array(logits), np.array(present, bool))
    assert (slope > 0) == is_ordered
    middle = np.mean(logits) if logits else 0
    expected = (sum(present) + 1) / (len(logits) + 2)
    assert expit(slope * middle + offset) == pytest.approx(expected)
    assert np.ptp(slope * np.array([middle, *logits])) < 0.03


def data(classes=70):
    """Return logits, labels with some -1, and a mask of all images. 70 classes are two blocks."""
    rng = np.random.default_rng(0)
    present = rng.random((300, classes)) < np.linspace(0.005, 0.4, classes)
    logits = 2.0 * present - 1 + rng.normal(size=present.shape)
    labels = np.where(rng.random(present.shape) < 0.1, -1, present)
    return logits.astype(np.float32), labels.astype(np.int8), np.ones(300, bool)


def test_each_class_is_fitted_to_its_annotated_images():
    logits, labels, every = data()
    images = every & (np.arange(300) % 3 > 0)
    few = (labels[images] == 1).sum(0) < 12
    assert 2 <= few.sum() < 20
    fitted = fit(logits, labels, images, Choice(F1.objective, "class", 12))
    assert fitted.is_shared.tolist() == few.tolist()
    common = common_slope(logits[images].astype(float), labels[images])

    def pairs(k):
        known = images & (labels[:, k] >= 0)
        present = labels[known, k] == 1
        slope, offset = platt(logits[known, k], present, common)
        return list(zip(slope * logits[known, k].astype(float) + offset, present, strict=True))

    for k in (30, 63, 64, 69):
        assert fitted.thresholds[k] == pytest.approx(fitted_to("f1", pairs(k))[0])
    together, _ = fitted_to("f1", *(pairs(k) for k in np.flatnonzero(few)))
    assert fitted.thresholds[few] == pytest.approx(together)


def test_classes_with_too_few_positives_together_use_threshold_of_all_classes():
    logits, labels, every = data(classes=6)
    labels[:, 0] = -1
    labels[:, 1] = np.minimum(labels[:, 1], 0)
    everything = fit(logits, labels, every, Choice(F1.objective, "global", 1))
    fitted = fit(logits, labels, every, F1)
    assert fitted.is_shared.tolist() == [True, True, False, False, False, False]
    assert fitted.thresholds[:2] == pytest.approx(everything.thresholds[:2])
    assert len(set(everything.thresholds)) == 1
    assert not everything.is_shared.any()


def best_decisions(logits, labels, per_image):
    """Return the decisions of the best power: the highest positions of all images together."""
    units = [[] for _ in range(logits.shape[1])]
    for k in np.flatnonzero((labels == 1).any(0)):
        gap = logits[labels[:, k] == 1, k].mean() - logits[labels[:, k] == 0, k].mean()
        units[k] = [gap] * (labels[:, k] == 1).sum()
    median = np.median([own[0] for own in units if own])

    positions = np.zeros((len(POWERS), *logits.shape))
    for k, column in enumerate(logits.T):
        centered = column - column[labels[:, k] == 0].mean()
        frequency = ((labels[:, k] == 1).sum() + 1) / ((labels[:, k] >= 0).sum() + 2)
        for number, power in enumerate(POWERS):
            positions[number, :, k] = centered / np.mean([*units[k], median]) / frequency**power

    found = []
    for own in positions:
        decisions = np.zeros(own.size, bool)
        decisions[np.argsort(-own, axis=None)[: round(per_image * len(own))]] = True
        decisions = decisions.reshape(own.shape)
        known = labels >= 0
        means = []
        for metric in (precision_score, recall_score):
            values = []
            for k in range(own.shape[1]):
                pair = labels[known[:, k], k], decisions[known[:, k], k]
                values.append(metric(*pair, zero_division=0))
            means.append(np.mean(values))
        found.append((2 * means[0] * means[1] / sum(means), decisions))
    return max(found, key=lambda pair: pair[0])[1]


@pytest.mark.parametrize("text", ["per_image:4", "per_image"])
def test_thresholds_give_a_number_of_classes_per_image(text):
    logits, labels, every = data(classes=12)
    labels[:, 3] = np.minimum(labels[:, 3], 0)
    fitted = fit(logits, labels, every, Choice(parse_objective(text), "class", 12))
    assert not fitted.is_shared.any()
    scaled = fitted.slopes * logits.astype(float) + fitted.offsets
    number = 4 if ":" in text else sum((own == 1).sum() / (own >= 0).sum() for own in labels.T)
    decisions = expit(scaled) >= fitted.thresholds
    assert decisions.sum() == round(number * 300)
    assert decisions.tolist() == best_decisions(scaled, labels, number).tolist()

    # A threshold for all classes predicts as many, with the highest scores.
    everywhere = fit(logits, labels, every, Choice(parse_objective(text), "global", 12))
    assert len(set(everywhere.thresholds)) == 1
    assert (expit(scaled) >= everywhere.thresholds).sum() == decisions.sum()


def test_number_of_classes_per_image_is_limited():
    logits, labels, every = data(classes=3)
    fitted = fit(logits, labels, every, Choice(parse_objective("per_image:9"), "class", 1))
    assert ((fitted.thresholds > 0) & (fitted.thresholds < 1)).all()
    scaled = fitted.slopes * logits.astype(float) + fitted.offsets
    assert (expit(scaled) >= fitted.thresholds).sum() >= 300 * 3 - 1


@pytest.mark.parametrize("shared", [False, True])
def test_platt_scaling_per_class_or_for_all_classes(shared):
    logits, labels, every = data(classes=4)
    # Large logits as of CLIP: all sigmoids are 1.
    logits = 20 + 2 * logits
    fitted = fit(logits, labels, every, Choice(F1.objective, "class", 1, single_slope=shared))
    common = None if shared else common_slope(logits.astype(float), labels)
    for k in range(4):
        chosen = [*range(4)] if shared else [k]
        known = labels[:, chosen] >= 0
        column, present = logits[:, chosen][known].astype(float), labels[:, chosen][known] == 1
        expected = platt(column, present, common)
        assert (fitted.slopes[k], fitted.offsets[k]) == pytest.approx(expected)


def test_tally_equals_scikit_learn():
    logits, labels, every = data(classes=5)
    fitted = fit(logits, labels, every, F1)
    tally = Tally(5)
    tally.add(fitted, logits, labels, np.arange(300) < 100)
    tally.add(fitted, logits, labels, np.arange(300) >= 100)

    scores = expit(fitted.slopes * logits.astype(float) + fitted.offsets)
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
    assert tally.summary()["ECE"] == pytest.approx(expected)


def test_score_at_threshold_is_present():
    tally = Tally(1)
    tally.add(uncalibrated(1), np.zeros((3, 1)), np.ones((3, 1), np.int8), np.ones(3, bool))
    assert tally.summary()["OR"] == 100


def test_cross_fitting_is_out_of_fold():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(200, 40)), (rng.random((200, 40)) < 0.3).astype(np.int8)
    folds, every = np.arange(200) % 5, np.ones(200, bool)
    tally = cross_fitted(logits, labels, folds, F1)

    expected, own = Tally(40), Tally(40)
    for fold in range(5):
        others = folds != fold
        fitted = fit(logits[others], labels[others], every[others], F1)
        expected.add(fitted, logits[~others], labels[~others], every[~others])
    assert tally.summary() == pytest.approx(expected.summary())
    assert tally.pairs == 8000

    # The labels are noise, so only an in-sample fit is better than chance.
    own.add(fit(logits, labels, every, F1), logits, labels, every)
    assert own.summary()["CP"] > tally.summary()["CP"] + 1


def test_single_label_calibration_is_cross_fitted():
    rng = np.random.default_rng(0)
    labels = np.eye(4, dtype=np.int8)[rng.integers(4, size=400)]
    logits = (9 * labels + 6 * rng.normal(size=labels.shape)).astype(np.float32)
    outcome = calibrate_single_label(Scores(np.arange(400), labels, logits, []), np.arange(400) % 5)
    assert outcome.thresholds == []
    assert outcome.slopes == pytest.approx([1 / of_all(logits, labels)])
    assert outcome.fitted["top1"] == outcome.cross_fitted["top1"] == outcome.uncalibrated["top1"]
    assert outcome.cross_fitted["ECE"] != outcome.fitted["ECE"]
    assert outcome.cross_fitted["ECE"] < outcome.uncalibrated["ECE"] / 2
