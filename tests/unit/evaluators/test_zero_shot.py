"""Zero-shot metrics against scikit-learn and loops over the images."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, precision_recall_fscore_support
from support import in_processes

from mldec.evaluators.zero_shot import ZeroShotEvaluator

ROWS = 150
CLASSES = 14
UNSEEN = (3, 4, 7, 9, 10, 12)
SEEN = [c for c in range(CLASSES) if c not in UNSEEN]


def predictions(empty=()):
    generator = torch.Generator().manual_seed(0)
    targets = (torch.rand(ROWS, CLASSES, generator=generator) < 0.12).to(torch.int8)
    targets[:, list(empty)] = 0
    return torch.randn(ROWS, CLASSES, generator=generator) + targets, targets


def evaluated(logits, targets, **options):
    evaluator = ZeroShotEvaluator(CLASSES, **{"unseen": UNSEEN, **options})
    for pair in zip(logits.split(40), targets.split(40), strict=True):
        evaluator.update(*pair)
    return evaluator, evaluator.compute()


def precisions(logits, targets):
    values = np.zeros(targets.shape[1])
    for c in targets.any(0).nonzero().flatten().tolist():
        values[c] = 100 * average_precision_score(targets[:, c], logits[:, c])
    return values


def at_k(logits, targets, k):
    """Return P, R and F1 in percent, one image at a time."""
    hits = 0
    for row, labels in zip(logits.tolist(), targets.tolist(), strict=True):
        hits += sum(labels[c] for c in sorted(range(len(row)), key=row.__getitem__)[-k:])
    precision = 100 * hits / (len(logits) * k)
    recall = 100 * hits / targets.sum().item()
    return [precision, recall, 2 * precision * recall / (precision + recall)]


def check(found, kind, logits, targets):
    """Check the metrics of a kind against these logits and targets."""
    precision = precisions(logits, targets)
    skipped = precision[targets.any(0).numpy()].mean()
    assert found[f"{kind}_mAP"] == pytest.approx(precision.mean(), abs=1e-9)
    assert found[f"{kind}_mAP_skip_empty"] == pytest.approx(skipped, abs=1e-9)
    for k in (3, 5):
        values = [found[f"{kind}_{name}@{k}"] for name in ("P", "R", "F1")]
        assert values == pytest.approx(at_k(logits, targets, k))


@pytest.mark.parametrize("empty", [(), (4, 8)])
@pytest.mark.parametrize("images", ["unseen", "all"])
def test_metrics_match_sklearn_and_loops(images, empty):
    logits, targets = predictions(empty)
    evaluator, found = evaluated(logits, targets, images=images)
    rows = targets[:, UNSEEN].any(1)
    assert 0 < rows.sum() < ROWS
    check(found, "zsl", logits[rows][:, UNSEEN], targets[rows][:, UNSEEN])
    if images == "all":
        check(found, "zsl_all", logits[:, UNSEEN], targets[:, UNSEEN])
        assert found["zsl_mAP"] > found["zsl_all_mAP"]  # fewer negatives
    else:
        logits, targets = logits[rows], targets[rows]
    check(found, "gzsl", logits, targets)

    seen = precisions(logits[:, SEEN], targets[:, SEEN]).mean()
    unseen = found["zsl_all_mAP" if images == "all" else "zsl_mAP"]
    assert found["seen_mAP"] == pytest.approx(seen)
    assert found["harmonic_mAP"] == pytest.approx(2 * seen * unseen / (seen + unseen))
    assert next(iter(found)) == "zsl_mAP"  # the main metric
    json.dumps(found, allow_nan=False)

    columns = evaluator.per_class()
    assert columns["positives"] == targets.sum(0).tolist()
    assert np.flatnonzero(columns["unseen"]).tolist() == list(UNSEEN)
    assert np.nan_to_num(columns["AP"]) == pytest.approx(precisions(logits, targets))
    if images == "all":
        zsl = np.array(columns["AP_zsl"])
        assert np.isnan(zsl[SEEN]).all()
        assert np.nan_to_num(zsl[list(UNSEEN)]).mean() == pytest.approx(found["zsl_mAP"])


def test_metrics_at_threshold_match_sklearn():
    threshold = 0.75
    logits, targets = predictions()
    _, metrics = evaluated(logits, targets, images="all", threshold=threshold)
    rows = targets[:, UNSEEN].any(1)
    views = {
        "zsl": (logits[rows][:, UNSEEN], targets[rows][:, UNSEEN]),
        "zsl_all": (logits[:, UNSEEN], targets[:, UNSEEN]),
        "gzsl": (logits, targets),
    }
    for kind, (scores, labels) in views.items():
        decided = scores.double().sigmoid() > threshold
        for average, letter in (("macro", "C"), ("micro", "O")):
            precision, recall, f1, _ = precision_recall_fscore_support(
                labels, decided, average=average, zero_division=0
            )
            found = [metrics[f"{kind}_{letter}{name}"] for name in ("P", "R")]
            assert found == pytest.approx([100 * precision, 100 * recall])
            f1_name = f"{kind}_CF1_mean" if letter == "C" else f"{kind}_OF1"
            assert metrics[f1_name] == pytest.approx(100 * f1)


@pytest.mark.parametrize("images", ["unseen", "all"])
def test_metrics_of_seen_classes_are_omitted_without_them(images):
    logits, targets = predictions()
    _, metrics = evaluated(logits, targets, unseen=range(CLASSES), images=images)
    assert next(iter(metrics)) == "zsl_mAP"
    assert not {"seen_mAP", "harmonic_mAP"} & metrics.keys()
    rows = targets.any(1)
    check(metrics, "zsl", logits[rows], targets[rows])
    expected = (logits, targets) if images == "all" else (logits[rows], targets[rows])
    check(metrics, "gzsl", *expected)


def test_metrics_of_unseen_classes_are_omitted_without_them():
    logits, targets = predictions((4, 8))
    evaluator, metrics = evaluated(logits, targets, unseen=[], images="all")
    assert next(iter(metrics)) == "gzsl_mAP"
    assert not [name for name in metrics if name.startswith(("zsl", "harmonic"))]
    check(metrics, "gzsl", logits, targets)
    assert metrics["seen_mAP"] == metrics["gzsl_mAP"]
    assert evaluator.per_class()["unseen"] == [0] * CLASSES


def evaluate_on_rank(rank, world_size, folder):
    logits, targets = predictions((4, 8))
    first, last = [0, 0, 50, ROWS][rank : rank + 2]  # rank 0 has no images
    for images in ("unseen", "all"):
        evaluator = ZeroShotEvaluator(CLASSES, unseen=UNSEEN, images=images)
        evaluator.update(logits[first:last], targets[first:last])
        torch.save((evaluator.compute(), evaluator.per_class()), f"{folder}/{images}-{rank}.pt")


def test_metrics_do_not_depend_on_ranks(tmp_path):
    in_processes(evaluate_on_rank, 3, str(tmp_path))
    for images in ("unseen", "all"):
        evaluator, alone = evaluated(*predictions((4, 8)), images=images)
        for rank in range(3):
            metrics, columns = torch.load(tmp_path / f"{images}-{rank}.pt")
            assert metrics == alone
            assert columns.keys() == evaluator.per_class().keys()
            for name, column in evaluator.per_class().items():
                np.testing.assert_array_equal(columns[name], column)
