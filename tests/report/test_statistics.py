"""Resampled metrics against the evaluators on repeated images."""

import numpy as np
import pytest
import torch

from mldec.evaluators import Evaluator
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.evaluators.zero_shot import ZeroShotEvaluator
from mldec.report.answers import Answers, lowest_logit, metrics, normalise
from mldec.report.content import Interval
from mldec.report.histograms import bin_edges, histograms
from mldec.report.resampling import draw
from mldec.report.statistics import Numbers, Resampled, class_table, precision_of, resample

IMAGES, CLASSES = 80, 7


def data(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits, labels, and targets as the evaluator takes them."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(IMAGES, CLASSES)).astype(np.float32)
    if kind == "single":
        labels = np.eye(CLASSES, dtype=np.int8)[rng.integers(CLASSES, size=IMAGES)]
        labels[:3] = 0
    else:
        labels = (rng.random(logits.shape) < 0.4).astype(np.int8)
    targets = labels
    if kind == "partial":
        targets = np.where(rng.random(labels.shape) < 0.3, -1, labels).astype(np.int8)
        targets[:, 2] = -1
        labels = targets
    return (logits + labels).astype(np.float32), labels, targets


def evaluator(kind: str) -> Evaluator:
    """Return a new evaluator."""
    if kind == "several":
        made: Evaluator = MultiLabelEvaluator(CLASSES, top_k=2)
    elif kind == "partial":
        made = PartialLabelEvaluator(CLASSES)
    elif kind == "single":
        return SingleLabelEvaluator(CLASSES, top_k=3, suffix="_real")
    else:
        made = ZeroShotEvaluator(CLASSES, unseen=[1, 4], images=kind)
        made.logit_threshold = 0.4
        return made
    made.logit_threshold = torch.linspace(-0.5, 1, CLASSES, dtype=torch.float64)
    return made


def answers_of(kind: str) -> tuple[Answers, np.ndarray]:
    logits, labels, targets = data(kind)
    lowest = lowest_logit(evaluator(kind))
    return (
        Answers(logits=logits, labels=labels, exclusive=kind == "single", lowest=lowest),
        targets,
    )


@pytest.mark.parametrize("kind", ["several", "partial", "unseen", "all", "single"])
def test_whole_weights_give_the_metrics_of_repeated_images(kind: str) -> None:
    answers, targets = answers_of(kind)
    weights = np.random.default_rng(0).integers(1, 4, (1, IMAGES, 3)).astype(np.float32)
    weights[0, :, 0] = 1  # each image once
    used = evaluator(kind)
    values = metrics(used, answers.logits, targets)
    resampled = resample(used, answers, weights)
    assert list(resampled.metrics) == list(values)

    for number in range(3):
        rows = np.repeat(np.arange(IMAGES), weights[0, :, number].astype(int))
        expected = metrics(evaluator(kind), answers.logits[rows], targets[rows])
        actual = {name: column[number] for name, column in resampled.metrics.items()}
        assert actual == pytest.approx(expected, abs=2e-5, nan_ok=True)


def test_an_unknown_evaluator_has_no_intervals() -> None:
    class Own:
        def update(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
            self.images = len(logits)

        def compute(self) -> dict[str, float]:
            return {"images seen": float(self.images)}

        def per_class(self) -> dict[str, list[float]]:
            return {}

    answers, targets = answers_of("several")
    own = Own()
    values = metrics(own, answers.logits, targets)
    resampled = resample(own, answers, draw(IMAGES, CLASSES)[:1])
    assert resampled.metrics == {}
    assert resampled.precision.shape == (100, CLASSES)

    [shown] = Numbers(values, precision_of(answers), resampled).with_intervals().values()
    assert shown.value == IMAGES
    assert np.isnan([shown.low, shown.high]).all()


def test_numbers_of_classes_have_no_interval() -> None:
    columns = {"mAP": np.linspace(0, 100, 101), "classes_valid": np.full(101, 4.0)}
    resampled = Resampled(columns, np.zeros((101, 1)))
    numbers = Numbers({"mAP": 50.0, "classes_valid": 4.0}, np.zeros(1), resampled)
    shown = numbers.with_intervals()
    assert shown["mAP"] == Interval(50.0, 2.5, 97.5)
    assert np.isnan(shown["classes_valid"].low)


@pytest.mark.parametrize("kind", ["several", "single"])
def test_the_table_of_classes_has_the_values_of_the_evaluator(kind: str) -> None:
    answers, targets = answers_of(kind)
    used = evaluator(kind)
    values = metrics(used, answers.logits, targets)
    expected = used.per_class()
    if kind == "single":
        normalise(answers.logits)

    weights = draw(IMAGES, CLASSES)[:1]
    numbers = Numbers(values, precision_of(answers), resample(used, answers, weights))
    counted = histograms(answers, bin_edges(CLASSES, answers.thresholds()))
    names = tuple(map(str, range(CLASSES)))
    table = class_table(names, answers, counted, numbers)

    columns = table.columns
    if kind == "single":
        assert columns["recall"] == pytest.approx(expected["accuracy"])
        assert columns["positives"] == expected["images"]
        assert "threshold" not in columns
    else:
        for name, own in (("AP", "AP"), ("precision",) * 2, ("recall",) * 2, ("F1", "f1")):
            assert columns[name] == pytest.approx(expected[own])
        assert columns["positives"] == expected["positives"]
        lowest = torch.linspace(-0.5, 1, CLASSES, dtype=torch.float64)
        assert columns["threshold"] == pytest.approx(lowest.sigmoid().tolist())

    assert table.intervals is not None
    for value, low, high in zip(columns["AP"], *table.intervals, strict=True):
        assert low <= value <= high
