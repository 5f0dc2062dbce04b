"""Average precision against scikit-learn, torchmetrics and the loops of its definitions."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, precision_recall_curve

from mldec.errors import DataError
from mldec.evaluators.average_precision import (
    INTERPOLATIONS,
    Predictions,
    average_precision,
    average_precision_of_all,
)


def predictions(rows=200, classes=12, levels=None, unknown=0.0, seed=0):
    """Informative scores of rare and frequent classes; `levels` is the number of their values."""
    rng = np.random.default_rng(seed)
    targets = (rng.uniform(size=(rows, classes)) < np.linspace(0.02, 0.6, classes)).astype(np.int8)
    targets[0] = 1  # no class is empty
    scores = rng.normal(size=(rows, classes)) + targets
    if levels:
        scores = np.round(scores * levels / 6)
    else:
        assert all(len(np.unique(column)) == rows for column in scores.T)
    targets[rng.uniform(size=targets.shape) < unknown] = -1
    return torch.from_numpy(scores), torch.from_numpy(targets)


def test_numpy_arrays_have_the_values_of_tensors():
    scores, targets = predictions(rows=50, classes=3)
    expected = one(scores, targets)
    assert torch.equal(one(scores.numpy(), targets.numpy()), expected)
    halves = [scores.numpy()[:20], scores[20:]], [targets[:20], targets.numpy()[20:]]
    assert torch.equal(one(*halves), expected)


def columns(scores, targets):
    return list(zip(scores.numpy().T, targets.numpy().T, strict=True))


def one(scores, targets, name="none"):
    return average_precision(scores, targets, interpolations=(name,))[name]


def precision_and_recall(scores, labels):
    """True positives and ranks from the highest score down, as lists."""
    found, hits = [], 0
    for rank, index in enumerate(np.argsort(-scores), start=1):
        hits += int(labels[index])
        found.append((hits, rank))
    return found


def voc(scores, labels):
    """Area under the envelope of precision over recall, with the sentinels of the VOC devkit."""
    steps, positives = precision_and_recall(scores, labels), labels.sum()
    recall = [0.0, *(hits / positives for hits, _ in steps), 1.0]
    precision = [0.0, *(hits / rank for hits, rank in steps), 0.0]
    for i in range(len(precision) - 2, -1, -1):
        precision[i] = max(precision[i], precision[i + 1])
    return sum((recall[i] - recall[i - 1]) * precision[i] for i in range(1, len(recall)))


def voc_2007(scores, labels):
    """Mean of the best precision at recall of at least 0, 0.1, .. 1, in whole numbers."""
    steps, positives = precision_and_recall(scores, labels), int(labels.sum())
    return (
        sum(
            max(hits / rank for hits, rank in steps if 10 * hits >= tenth * positives)
            for tenth in range(11)
        )
        / 11
    )


# Definitions


@pytest.mark.parametrize("levels", [None, 4, 1])
@pytest.mark.parametrize(("rows", "classes"), [(1, 12), (10, 65), (500, 12)])
def test_it_is_that_of_scikit_learn(rows, classes, levels):
    scores, targets = predictions(rows, classes, levels=levels)
    expected = [
        average_precision_score(labels, column) for column, labels in columns(scores, targets)
    ]
    assert one(scores, targets).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("name", "reference"), [("envelope", voc), ("11point", voc_2007)])
@pytest.mark.parametrize("rows", [1, 7, 11, 300])
def test_without_ties_it_is_the_loop_of_its_definition(name, reference, rows):
    scores, targets = predictions(rows, seed=rows)
    expected = [reference(column, labels) for column, labels in columns(scores, targets)]
    assert one(scores, targets, name).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("positives", [1, 3, 7, 9, 10, 11, 20, 30, 33])
def test_the_11_points_fall_on_exact_recalls(positives):
    rng = np.random.default_rng(positives)
    labels = rng.permutation(np.r_[np.ones(positives), np.zeros(30)])
    scores = rng.permutation(len(labels)).astype(float)
    found = one(torch.from_numpy(scores)[:, None], torch.from_numpy(labels)[:, None], "11point")
    assert found.item() == pytest.approx(voc_2007(scores, labels), rel=1e-12)


@pytest.mark.parametrize("levels", [2, 20])
def test_the_envelope_of_tied_scores_is_that_of_the_curve_of_scikit_learn(levels):
    scores, targets = predictions(levels=levels)
    for found, (column, labels) in zip(
        one(scores, targets, "envelope"), columns(scores, targets), strict=True
    ):
        precision, recall, _ = precision_recall_curve(labels, column)  # recall falls
        best = np.maximum.accumulate(precision[:-1])
        assert found.item() == pytest.approx((-np.diff(recall) * best).sum(), rel=1e-12)


def test_the_interpolations_are_those_asked_for_in_that_order():
    scores, targets = predictions(levels=10)
    names = ("envelope", "none", "11point")
    found = average_precision(scores, targets, interpolations=names)
    assert tuple(found) == names
    for name in names:
        assert found[name].dtype == torch.float64
        assert torch.equal(found[name], one(scores, targets, name))
        # Only the order of the scores matters.
        assert torch.equal(found[name], one(torch.exp(scores / 4) - 7, targets, name))
    assert (found["envelope"] >= found["none"]).all()


def test_scores_apart_by_one_unit_in_the_last_place_are_not_tied():
    low = torch.tensor(1.0)
    high = torch.nextafter(low, torch.tensor(2.0))
    targets = torch.tensor([[1], [0]])
    assert one(torch.stack((high, low))[:, None], targets).item() == 1
    assert one(torch.stack((low, high))[:, None], targets).item() == 0.5
    assert one(torch.tensor([[0.0], [-0.0]]), targets).item() == 0.5  # the two zeros are one score


# Rows, blocks and classes


@pytest.mark.parametrize(("levels", "unknown"), [(None, 0.0), (5, 0.3)])
def test_the_order_of_the_rows_and_their_blocks_do_not_change_a_bit(levels, unknown):
    scores, targets = predictions(1000, levels=levels, unknown=unknown)
    before = average_precision(scores, targets, interpolations=INTERPOLATIONS)
    assert before["none"].isfinite().all()
    for seed, size in enumerate((1, 7, 64, 1000)):
        order = torch.from_numpy(np.random.default_rng(seed).permutation(1000))
        blocks = scores[order].split(size), targets[order].split(size)
        after = average_precision(*blocks, interpolations=INTERPOLATIONS)
        for name in INTERPOLATIONS:
            assert torch.equal(after[name], before[name])


@pytest.mark.parametrize("levels", [None, 5])
def test_unannotated_rows_are_left_out_of_their_class_only(levels):
    scores, targets = predictions(levels=levels, unknown=0.4)
    assert (targets == -1).any(0).all()
    for name in INTERPOLATIONS:
        expected = torch.cat([
            one(scores[rows, k : k + 1], targets[rows, k : k + 1], name)
            for k in range(12)
            for rows in [targets[:, k] >= 0]
        ])  # fmt: skip
        assert torch.equal(one(scores, targets, name), expected)


def test_a_class_without_a_positive_has_no_value():
    scores, targets = predictions()
    targets[:, 3] = 0
    targets[:, 5] = -1
    for name in INTERPOLATIONS:
        found = one(scores, targets, name)
        assert found.isnan().nonzero().flatten().tolist() == [3, 5]


@pytest.mark.parametrize(("value", "label"), [(math.nan, 1), (math.inf, 0), (-math.inf, -1)])
def test_a_score_that_is_not_finite_is_refused(value, label):
    scores, targets = predictions()
    scores[17, 4], targets[17, 4] = value, label
    with pytest.raises(DataError, match="not finite"):
        average_precision(scores, targets)


# As evaluators keep the predictions


def test_predictions_are_kept_in_full_precision_and_read_in_any_batches():
    close = torch.tensor([[1.0, 1.0 + 2**-20]])
    logits, targets = Predictions(2).add(close.double(), torch.tensor([[1.0, -1.0]]))
    assert (logits.dtype, targets.dtype) == (torch.float32, torch.int8)
    assert logits[0, 0] < logits[0, 1]
    assert targets.tolist() == [[1, -1]]

    scores, labels = predictions(30, unknown=0.3)
    kept = Predictions(12)
    for batch in zip(scores.float().split(7), labels.split(7), strict=True):
        kept.add(*batch)
    found = average_precision_of_all(*kept.shared_by_classes())["none"]
    assert torch.equal(found.nan_to_num(-1), one(scores.float(), labels).nan_to_num(-1))


def test_a_process_without_images_has_blocks_without_rows():
    logits, targets = Predictions(3).shared_by_classes()
    assert [block.shape for block in (*logits, *targets)] == [(0, 3), (0, 3)]
    assert average_precision_of_all(logits, targets)["none"].isnan().all()
