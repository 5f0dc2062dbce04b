import numpy as np
import pytest
import torch
from scipy.special import expit, softmax

from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.report import answers as module
from mldec.report.answers import Answers, lowest_logit, metrics, normalise

LOGITS = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
LABELS = (LOGITS > 0.3).astype(np.int8)


def test_several_labels_are_decided_by_the_threshold_of_each_class() -> None:
    lowest = torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    answers = Answers(logits=LOGITS, labels=LABELS, exclusive=False, lowest=lowest)
    every = lowest.numpy() < LOGITS
    assert np.array_equal(answers.decided(slice(1, 3), LOGITS[:, 1:3].T), every[:, 1:3].T)
    chosen = np.array([3, 0])
    assert np.array_equal(answers.decided(chosen, LOGITS[:, chosen].T.copy()), every[:, chosen].T)
    assert answers.thresholds() == pytest.approx(expit(lowest.numpy()))
    assert answers.probabilities(LOGITS) == pytest.approx(expit(LOGITS.astype(float)))

    # One threshold for all classes, as of an evaluator or of a calibration of all classes.
    for one in (0.5, torch.tensor([0.5], dtype=torch.float64)):
        answers = Answers(logits=LOGITS, labels=LABELS, exclusive=False, lowest=one)
        assert np.array_equal(answers.decided(slice(0, 4), LOGITS.T.copy()), LOGITS.T > 0.5)
        assert answers.thresholds() == pytest.approx(np.full(4, expit(0.5)))


def test_one_label_is_the_highest_score() -> None:
    logits = LOGITS.copy()
    normalise(logits)
    answers = Answers(logits=logits, labels=LABELS, exclusive=True, lowest=None)
    decided = answers.decided(slice(0, 4), logits.T)
    assert np.array_equal(decided.T, np.eye(4, dtype=bool)[LOGITS.argmax(1)])
    assert answers.probabilities(logits) == pytest.approx(softmax(LOGITS.astype(float), 1), 1e-5)
    assert answers.thresholds() is None
    assert np.array_equal(answers.has_label(), (LABELS == 1).any(1))


def test_metrics_do_not_depend_on_how_many_images_are_read_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = metrics(MultiLabelEvaluator(4), LOGITS, LABELS)
    monkeypatch.setattr(module, "ROWS", 2)
    assert metrics(MultiLabelEvaluator(4), LOGITS, LABELS) == whole

    parts = LOGITS.copy()
    normalise(parts)
    assert np.exp(parts).sum(1) == pytest.approx(np.ones(9))


def test_only_evaluators_with_a_threshold_have_one() -> None:
    assert lowest_logit(MultiLabelEvaluator(4, threshold=0.75)) == pytest.approx(np.log(3))
    assert lowest_logit(SingleLabelEvaluator(4)) is None
