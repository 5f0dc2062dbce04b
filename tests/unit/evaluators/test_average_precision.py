"""Average precision against scikit-learn and the loops of its definitions."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, precision_recall_curve

from mldec.evaluators.average_precision import (
    INTERPOLATIONS,
    Predictions,
    average_precision,
    average_precision_of_all,
)


def predictions(rows=200, classes=12, levels=None, unknown=0.0, seed=0):
    """Return scores and targets. `levels` limits the number of different scores."""
    rng = np.random.default_rng(seed)
    targets = (rng.uniform(size=(rows, classes)) < np.linspace(0.02, 0.6, classes)).astype(np.int8)
    targets[0] = 1  # no class is empty
    scores = rng.normal(size=(rows, classes)) + targets
    if levels:
        scores = np.round(scores * levels / 6)
    targets[rng.uniform(size=targets.shape) < unknown] = -1
    return torch.from_numpy(scores), torch.from_numpy(targets)


def columns(scores, targets):
    return list(zip(scores.numpy().T, targets.numpy().T, strict=True))


def one(scores, targets, name="none"):
    return average_precision(scores, targets, interpolations=(name,))[name]


def precision_and_recall(scores, labels):
    """Return (true positives, rank) from the highest score down."""
    found = []
    hits = 0
    for rank, index in enumerate(np.argsort(-scores), start=1):
        hits += int(labels[index])
        found.append((hits, rank))
    return found


def voc(scores, labels):
    """Return the area under the envelope of precision over recall, as the VOC devkit."""
    steps = precision_and_recall(scores, labels)
    recall = [0.0] + [hits / labels.sum() for hits, _ in steps] + [1.0]
    precision = [0.0] + [hits / rank for hits, rank in steps] + [0.0]
    for i in range(len(precision) - 2, -1, -1):
        precision[i] = max(precision[i], precision[i + 1])
    return sum((recall[i] - recall[i - 1]) * precision[i] for i in range(1, len(recall)))


def voc_2007(scores, labels):
    """Return the mean of the best precision at recall >= 0, 0.1, .. 1, with integers."""
    steps = precision_and_recall(scores, labels)
    total = 0.0
    for tenth in range(11):
        needed = tenth * int(labels.sum())
        total += max(hits / rank for hits, rank in steps if 10 * hits >= needed)
    return total / 11


@pytest.mark.parametrize("levels", [None, 4, 1])
@pytest.mark.parametrize(("rows", "classes"), [(1, 12), (10, 65), (500, 12)])
def test_average_precision_matches_sklearn(rows, classes, levels):
    scores, targets = predictions(rows, classes, levels=levels)
    pairs = columns(scores, targets)
    expected = [average_precision_score(labels, column) for column, labels in pairs]
    assert one(scores, targets).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("name", "reference"), [("envelope", voc), ("11point", voc_2007)])
@pytest.mark.parametrize("rows", [1, 7, 11, 33, 300])
def test_interpolations_match_loops_of_their_definitions(name, reference, rows):
    scores, targets = predictions(rows, seed=rows)
    expected = [reference(column, labels) for column, labels in columns(scores, targets)]
    assert one(scores, targets, name).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("levels", [2, 20])
def test_envelope_of_ties_matches_curve_of_sklearn(levels):
    scores, targets = predictions(levels=levels)
    envelope = one(scores, targets, "envelope")
    for found, (column, labels) in zip(envelope, columns(scores, targets), strict=True):
        precision, recall, _ = precision_recall_curve(labels, column)  # recall falls
        best = np.maximum.accumulate(precision[:-1])
        assert found.item() == pytest.approx((-np.diff(recall) * best).sum(), rel=1e-12)


def test_scores_that_differ_in_last_bit_are_not_tied():
    low = torch.tensor(1.0)
    high = torch.nextafter(low, torch.tensor(2.0))
    targets = torch.tensor([[1], [0]])
    assert one(torch.stack((high, low))[:, None], targets).item() == 1
    assert one(torch.stack((low, high))[:, None], targets).item() == 0.5
    assert one(torch.tensor([[0.0], [-0.0]]), targets).item() == 0.5  # 0.0 and -0.0 are equal


@pytest.mark.parametrize(("levels", "unknown"), [(None, 0.0), (5, 0.3)])
def test_result_does_not_depend_on_order_and_blocks(levels, unknown):
    scores, targets = predictions(1000, levels=levels, unknown=unknown)
    before = average_precision(scores, targets, interpolations=INTERPOLATIONS)
    assert before["none"].isfinite().all()
    for seed, size in enumerate((1, 7, 64, 1000)):
        order = torch.from_numpy(np.random.default_rng(seed).permutation(1000))
        blocks = [scores[order].split(size), targets[order].split(size)]
        arrays = [[block.numpy() for block in each] for each in blocks]
        for pair in (blocks, arrays):
            after = average_precision(*pair, interpolations=INTERPOLATIONS)
            assert all(torch.equal(after[name], before[name]) for name in INTERPOLATIONS)


@pytest.mark.parametrize("levels", [None, 5])
def test_unannotated_rows_are_ignored_per_class(levels):
    scores, targets = predictions(levels=levels, unknown=0.4)
    assert (targets == -1).any(0).all()
    for name in INTERPOLATIONS:
        found = one(scores, targets, name)
        for k in range(12):
            rows = targets[:, k] >= 0
            assert found[k] == one(scores[rows, k : k + 1], targets[rows, k : k + 1], name)


def test_class_without_positives_is_nan():
    scores, targets = predictions()
    targets[:, 3] = 0
    targets[:, 5] = -1
    for name in INTERPOLATIONS:
        found = one(scores, targets, name)
        assert found.isnan().nonzero().flatten().tolist() == [3, 5]


def test_predictions_are_stored_in_float32():
    close = torch.tensor([[1.0, 1.0 + 2**-20]])
    logits, targets = Predictions(2).add(close.double(), torch.tensor([[1.0, -1.0]]))
    assert (logits.dtype, targets.dtype) == (torch.float32, torch.int8)
    assert logits[0, 0] < logits[0, 1]
    assert targets.tolist() == [[1, -1]]


def test_rank_without_images_has_empty_blocks():
    logits, targets = Predictions(3).shared_by_classes()
    assert [block.shape for block in (*logits, *targets)] == [(0, 3), (0, 3)]
    assert average_precision_of_all(logits, targets)["none"].isnan().all()
