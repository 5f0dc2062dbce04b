import math
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, precision_recall_curve
from torchmetrics.functional.classification import multilabel_average_precision

from mldec.errors import DataError
from mldec.evaluators.average_precision import INTERPOLATIONS, average_precision


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


def official(scores, labels):
    """Mean of the precision at each positive, going down the ranking."""
    hits, total = 0, 0.0
    for rank, index in enumerate(np.argsort(-scores), start=1):
        if labels[index]:
            hits += 1
            total += hits / rank
    return total / hits


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


@pytest.mark.parametrize("levels", [None, 4, 20, 1])
@pytest.mark.parametrize("rows", [1, 2, 10, 500])
def test_it_is_that_of_scikit_learn(rows, levels):
    scores, targets = predictions(rows, levels=levels)
    expected = [
        average_precision_score(labels, column) for column, labels in columns(scores, targets)
    ]
    assert one(scores, targets).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("levels", [None, 4])
@pytest.mark.parametrize("unknown", [0.0, 0.3])
def test_it_is_that_of_torchmetrics(levels, unknown):
    scores, targets = predictions(levels=levels, unknown=unknown)
    probabilities = scores.sigmoid()
    expected = multilabel_average_precision(
        probabilities, targets.long(), num_labels=12, average="none", ignore_index=-1
    )
    torch.testing.assert_close(one(probabilities, targets), expected.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "reference"), [("none", official), ("envelope", voc), ("11point", voc_2007)]
)
@pytest.mark.parametrize("rows", [1, 7, 10, 11, 300])
def test_without_ties_it_is_the_loop_of_its_definition(name, reference, rows):
    scores, targets = predictions(rows, seed=rows)
    expected = [reference(column, labels) for column, labels in columns(scores, targets)]
    assert one(scores, targets, name).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("positives", range(1, 41))
def test_the_11_points_fall_on_exact_recalls(positives):
    rng = np.random.default_rng(positives)
    labels = rng.permutation(np.r_[np.ones(positives), np.zeros(30)])
    scores = rng.permutation(len(labels)).astype(float)
    found = one(torch.from_numpy(scores)[:, None], torch.from_numpy(labels)[:, None], "11point")
    assert found.item() == pytest.approx(voc_2007(scores, labels), rel=1e-12)


@pytest.mark.parametrize("levels", [2, 5, 20])
def test_the_envelope_of_tied_scores_is_that_of_the_curve_of_scikit_learn(levels):
    scores, targets = predictions(levels=levels)
    for found, (column, labels) in zip(
        one(scores, targets, "envelope"), columns(scores, targets), strict=True
    ):
        precision, recall, _ = precision_recall_curve(labels, column)  # recall falls
        best = np.maximum.accumulate(precision[:-1])
        assert found.item() == pytest.approx((-np.diff(recall) * best).sum(), rel=1e-12)


def test_equal_scores_share_one_rank():
    assert one(torch.zeros(10, 1), (torch.arange(10) < 3)[:, None].int()).tolist() == pytest.approx(
        [0.3]
    )


def test_an_interpolation_never_lowers_the_value():
    found = average_precision(*predictions(levels=10), interpolations=INTERPOLATIONS)
    assert tuple(found) == ("none", "envelope", "11point")
    assert (found["envelope"] >= found["none"]).all()
    assert (found["envelope"] > found["none"]).any()


@pytest.mark.parametrize("names", [INTERPOLATIONS, ("11point",), ("envelope", "none")])
def test_the_interpolations_are_those_asked_for_in_that_order(names):
    scores, targets = predictions(levels=10)
    found = average_precision(scores, targets, interpolations=names)
    assert tuple(found) == names
    for name in names:
        assert found[name].dtype == torch.float64
        assert torch.equal(found[name], one(scores, targets, name))


def test_a_perfect_ranking_is_1_and_a_reversed_one_is_as_low_as_can_be():
    labels = torch.tensor([1, 1, 0, 0, 0])[:, None]
    ranks = torch.tensor([5.0, 4, 3, 2, 1])[:, None]
    for name in INTERPOLATIONS:
        assert one(ranks, labels, name).item() == 1
    assert one(-ranks, labels).item() == pytest.approx((1 / 4 + 2 / 5) / 2)


def test_all_positive_is_1():
    for name in INTERPOLATIONS:
        assert one(torch.randn(9, 1), torch.ones(9, 1), name).item() == 1


@pytest.mark.parametrize("levels", [None, 8])
def test_only_the_order_of_the_scores_matters(levels):
    scores, targets = predictions(levels=levels)
    for name in INTERPOLATIONS:
        assert torch.equal(
            one(scores, targets, name), one(torch.exp(scores / 4) - 7, targets, name)
        )


def test_scores_apart_by_one_unit_in_the_last_place_are_not_tied():
    low = torch.tensor(1.0)
    high = torch.nextafter(low, torch.tensor(2.0))
    targets = torch.tensor([[1], [0]])
    assert one(torch.stack((high, low))[:, None], targets).item() == 1
    assert one(torch.stack((low, high))[:, None], targets).item() == 0.5
    assert one(torch.tensor([[0.0], [-0.0]]), targets).item() == 0.5  # the two zeros are one score


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("target_dtype", [torch.int8, torch.int64, torch.float32])
def test_the_number_formats_do_not_matter(dtype, target_dtype):
    scores, targets = predictions(levels=9)
    assert torch.equal(one(scores.to(dtype), targets.to(target_dtype)), one(scores, targets))


# Rows, blocks and classes


@pytest.mark.parametrize("levels", [None, 5])
@pytest.mark.parametrize("unknown", [0.0, 0.3])
def test_the_order_of_the_rows_does_not_change_a_bit(levels, unknown):
    scores, targets = predictions(1000, levels=levels, unknown=unknown)
    before = average_precision(scores, targets, interpolations=INTERPOLATIONS)
    assert before["none"].isfinite().all()
    for seed in range(5):
        order = torch.from_numpy(np.random.default_rng(seed).permutation(1000))
        after = average_precision(scores[order], targets[order], interpolations=INTERPOLATIONS)
        for name in INTERPOLATIONS:
            assert torch.equal(after[name], before[name])


@pytest.mark.parametrize("size", [1, 7, 64, 200, 500])
def test_blocks_of_rows_are_the_same_as_one_tensor(size):
    scores, targets = predictions(levels=5, unknown=0.2)
    whole = average_precision(scores, targets, interpolations=INTERPOLATIONS)
    blocks = average_precision(
        scores.split(size), targets.split(size), interpolations=INTERPOLATIONS
    )
    for name in INTERPOLATIONS:
        assert torch.equal(blocks[name], whole[name])


@pytest.mark.parametrize("classes", [1, 63, 64, 65, 200])
def test_any_number_of_classes_keeps_its_order(classes):
    scores, targets = predictions(30, classes, levels=9)
    expected = [
        average_precision_score(labels, column) for column, labels in columns(scores, targets)
    ]
    assert one(scores, targets).tolist() == pytest.approx(expected, rel=1e-12)


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("label", [1, 0, -1])
def test_a_score_that_is_not_finite_is_refused(value, label):
    scores, targets = predictions()
    scores[17, 4], targets[17, 4] = value, label
    with pytest.raises(DataError, match="not finite") as caught:
        average_precision(scores, targets)
    assert "\n" not in str(caught.value)


def test_the_inputs_are_not_changed():
    scores, targets = predictions(unknown=0.2)
    before = scores.clone(), targets.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average_precision(scores, targets, interpolations=INTERPOLATIONS)
    assert torch.equal(scores, before[0])
    assert torch.equal(targets, before[1])


# Memory

PROGRAM = r"""
import re, sys, time
from pathlib import Path
import torch
from mldec.evaluators.multi_label import MultiLabelEvaluator

rows, classes = int(sys.argv[1]), int(sys.argv[2])
generator = torch.Generator().manual_seed(0)

def memory(name):
    return 1024 * int(re.search(name + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

def blocks(rows):
    for start in range(0, rows, 100):
        logits = torch.randn(min(100, rows - start), classes, generator=generator)
        yield logits, (logits > 2).to(torch.int8)

small = MultiLabelEvaluator(classes)  # what the first use loads is not the evaluator's
for logits, targets in blocks(50):
    small.update(logits, targets)
small.compute()
batches = list(blocks(rows))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = memory("VmRSS")
start = time.perf_counter()
evaluator = MultiLabelEvaluator(classes)
for logits, targets in batches:
    evaluator.update(logits, targets)
metrics = evaluator.compute()
assert 0 < metrics["mAP"] <= 100
print(memory("VmHWM") - before, time.perf_counter() - start)
"""


def peak_beyond_the_input(rows, classes):
    """Bytes that the evaluator needs at its peak beyond the predictions, in its own process."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the peak of the memory is read from /proc")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rows), str(classes)],
        env={**os.environ, "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    peak, seconds = map(float, run.stdout.split())
    print(f"{rows} x {classes}: {peak / 2**20:.0f} MiB beyond the input, {seconds:.1f} s")
    return peak


def test_a_large_test_set_needs_little_more_memory_than_its_predictions():
    assert peak_beyond_the_input(4_000, 960) < 2 * 2**30 * (4_000 * 960) / (40_000 * 9_605)


@pytest.mark.slow
def test_a_test_set_of_the_size_of_open_images_needs_less_than_2_gib_beyond_its_predictions():
    assert peak_beyond_the_input(40_000, 9_605) < 2 * 2**30
