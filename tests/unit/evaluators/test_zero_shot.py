"""Zero-shot metrics against scikit-learn and against going through the images."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, precision_recall_fscore_support
from support import in_processes

from mldec.errors import ConfigError
from mldec.evaluators.zero_shot import ZeroShotEvaluator

ROWS, CLASSES, UNSEEN = 150, 14, (3, 4, 7, 9, 10, 12)
SEEN = [place for place in range(CLASSES) if place not in UNSEEN]


def predictions(empty=()):
    generator = torch.Generator().manual_seed(0)
    targets = (torch.rand(ROWS, CLASSES, generator=generator) < 0.12).to(torch.int8)
    targets[:, list(empty)] = 0
    return torch.randn(ROWS, CLASSES, generator=generator) + targets, targets


def evaluated(logits, targets, size=40, **options):
    evaluator = ZeroShotEvaluator(CLASSES, unseen=UNSEEN, **options)
    for pair in zip(logits.split(size), targets.split(size), strict=True):
        evaluator.update(*pair)
    return evaluator, evaluator.compute()


def precisions(logits, targets):
    return [
        average_precision_score(targets[:, c], logits[:, c]) if targets[:, c].any() else 0.0
        for c in range(targets.shape[1])
    ]


def at_k(logits, targets, k):
    """P, R and F1 by going through the images, in percent."""
    hits = sum(
        targets[image, place].item()
        for image, row in enumerate(logits.tolist())
        for place in sorted(range(len(row)), key=row.__getitem__)[-k:]
    )
    precision, recall = hits / (len(logits) * k), hits / targets.sum().item()
    return [
        100 * value for value in (precision, recall, 2 * precision * recall / (precision + recall))
    ]


def check(found, kind, logits, targets):
    """The numbers of a kind are those of these logits and targets alone."""
    precision = precisions(logits, targets)
    positive = targets.any(0).tolist()
    assert found[f"{kind}_mAP"] == pytest.approx(100 * np.mean(precision), abs=1e-9)
    skipped = np.mean([value for value, some in zip(precision, positive, strict=True) if some])
    assert found[f"{kind}_mAP_skip_empty"] == pytest.approx(100 * skipped, abs=1e-9)
    for k in (3, 5):
        assert [found[f"{kind}_{name}@{k}"] for name in ("P", "R", "F1")] == pytest.approx(
            at_k(logits, targets, k)
        )


@pytest.mark.parametrize("empty", [(), (4, 8)])
def test_over_images_with_an_unseen_label(empty):
    logits, targets = predictions(empty)
    evaluator, found = evaluated(logits, targets)
    rows = targets[:, UNSEEN].any(1)
    assert 0 < rows.sum() < ROWS
    logits, targets = logits[rows], targets[rows]
    check(found, "zsl", logits[:, UNSEEN], targets[:, UNSEEN])
    check(found, "gzsl", logits, targets)
    seen = 100 * np.mean(precisions(logits[:, SEEN], targets[:, SEEN]))
    assert found["seen_mAP"] == pytest.approx(seen)
    assert found["harmonic_mAP"] == pytest.approx(
        2 * seen * found["zsl_mAP"] / (seen + found["zsl_mAP"])
    )
    columns = evaluator.per_class()
    assert columns["positives"] == targets.sum(0).tolist()
    assert [place for place, value in enumerate(columns["unseen"]) if value] == list(UNSEEN)
    assert np.nan_to_num(columns["AP"]) == pytest.approx(
        [100 * value for value in precisions(logits, targets)]
    )


@pytest.mark.parametrize("empty", [(), (4, 8)])
def test_over_all_images(empty):
    logits, targets = predictions(empty)
    evaluator, found = evaluated(logits, targets, images="all")
    rows = targets[:, UNSEEN].any(1)
    check(found, "zsl", logits[rows][:, UNSEEN], targets[rows][:, UNSEEN])
    check(found, "zsl_all", logits[:, UNSEEN], targets[:, UNSEEN])
    check(found, "gzsl", logits, targets)
    assert found["zsl_mAP"] > found["zsl_all_mAP"]  # fewer negatives
    seen, unseen = found["seen_mAP"], found["zsl_all_mAP"]
    assert seen == pytest.approx(100 * np.mean(precisions(logits[:, SEEN], targets[:, SEEN])))
    assert found["harmonic_mAP"] == pytest.approx(2 * seen * unseen / (seen + unseen))
    columns = evaluator.per_class()
    assert columns["positives"] == targets.sum(0).tolist()
    assert np.isnan(np.array(columns["AP_zsl"])[SEEN]).all()
    assert np.nan_to_num(np.array(columns["AP_zsl"])[list(UNSEEN)]).mean() == pytest.approx(
        found["zsl_mAP"]
    )


def test_both_protocols_agree_on_the_same_images():
    _, every = evaluated(*predictions(), images="all")
    _, some = evaluated(*predictions())
    assert next(iter(some)) == next(iter(every)) == "zsl_mAP"  # the number to follow
    json.dumps(every, allow_nan=False)
    same = [name for name in some if name.startswith("zsl_")]
    assert len(same) == 15
    assert {name: every[name] for name in same} == {name: some[name] for name in same}


def test_metrics_at_the_threshold_are_those_of_sklearn():
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


def test_fewer_classes_than_k():
    evaluator = ZeroShotEvaluator(4, unseen=[1, 3])
    evaluator.update(torch.randn(6, 4), torch.ones(6, 4))
    found = evaluator.compute()
    assert [found[f"zsl_{name}@{k}"] for name in ("P", "R", "F1") for k in (3, 5)] == [100] * 6


@pytest.mark.parametrize("images", ["unseen", "all"])
def test_without_seen_classes_their_numbers_are_absent(images):
    logits, targets = predictions()
    evaluator = ZeroShotEvaluator(CLASSES, unseen=range(CLASSES), images=images)
    evaluator.update(logits, targets)
    metrics = evaluator.compute()
    assert next(iter(metrics)) == "zsl_mAP"
    assert not {"seen_mAP", "harmonic_mAP"} & metrics.keys()
    rows = targets.any(1)
    check(metrics, "zsl", logits[rows], targets[rows])
    expected = (logits, targets) if images == "all" else (logits[rows], targets[rows])
    check(metrics, "gzsl", *expected)


def test_without_unseen_classes_their_numbers_are_absent():
    logits, targets = predictions((4, 8))
    evaluator = ZeroShotEvaluator(CLASSES, unseen=[], images="all")
    evaluator.update(logits, targets)
    metrics = evaluator.compute()
    assert next(iter(metrics)) == "gzsl_mAP"
    assert not [name for name in metrics if name.startswith(("zsl", "harmonic"))]
    check(metrics, "gzsl", logits, targets)
    assert metrics["seen_mAP"] == metrics["gzsl_mAP"]
    assert evaluator.per_class()["unseen"] == [0] * CLASSES


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"unseen": []}, "images is 'unseen', and no class is unseen: choose all"),
        ({"unseen": [1], "threshold": 1.5}, r"data.threshold 1.5 is not in \(0, 1\)"),
    ],
)
def test_what_cannot_be(options, part):
    with pytest.raises(ConfigError, match=part):
        ZeroShotEvaluator(5, **options)


def in_a_process(rank, world_size, folder):
    logits, targets = predictions((4, 8))
    first, last = [0, 0, 50, ROWS][rank : rank + 2]  # the first process has no image
    for images in ("unseen", "all"):
        evaluator = ZeroShotEvaluator(CLASSES, unseen=UNSEEN, images=images)
        evaluator.update(logits[first:last], targets[first:last])
        torch.save((evaluator.compute(), evaluator.per_class()), f"{folder}/{images}-{rank}.pt")


def test_several_processes_find_the_same_to_the_bit(tmp_path):
    in_processes(in_a_process, 3, str(tmp_path))
    for images in ("unseen", "all"):
        evaluator, alone = evaluated(*predictions((4, 8)), images=images)
        for rank in range(3):
            metrics, columns = torch.load(tmp_path / f"{images}-{rank}.pt")
            assert metrics == alone
            assert columns.keys() == evaluator.per_class().keys()
            for name, column in evaluator.per_class().items():
                np.testing.assert_array_equal(columns[name], column)
