import numpy as np
import pytest

from mldec.check_data.label_errors import rank
from mldec.report import examples as module
from mldec.report.answers import Answers
from mldec.report.examples import PER_KIND, classes_with_images, examples, suspected_labels


def made(images: int = 200, classes: int = 4) -> Answers:
    rng = np.random.default_rng(0)
    labels = rng.integers(-1, 2, (images, classes)).astype(np.int8)
    logits = (rng.normal(size=labels.shape) + 3 * labels).astype(np.float32)
    labels[:20] = np.where(labels[:20] >= 0, 1 - labels[:20], -1)  # wrong ones
    return Answers(logits=logits, labels=labels, exclusive=False, lowest=0.5)


def test_the_surest_images_of_each_kind_are_chosen() -> None:
    answers = made()
    picks = examples(answers, np.array([1, 3]))
    assert {pick.class_index for pick in picks} == {1, 3}
    for k in (1, 3):
        logits, labels = answers.logits[:, k], answers.labels[:, k]
        kinds = {
            "right": ((logits > 0.5) & (labels == 1), -logits),
            "wrong": ((logits > 0.5) & (labels == 0), -logits),
            "missed": ((logits <= 0.5) & (labels == 1), logits),
        }
        for kind, (chosen, order) in kinds.items():
            rows = [pick.row for pick in picks if (pick.class_index, pick.kind) == (k, kind)]
            best = sorted(np.flatnonzero(chosen), key=lambda row, order=order: order[row])
            assert rows == best[:PER_KIND]
    for pick in picks:
        score = answers.probabilities(answers.logits[pick.row, pick.class_index])
        assert pick.score == pytest.approx(float(score))


def test_of_many_classes_some_from_the_best_to_the_worst_are_chosen() -> None:
    precision = np.random.default_rng(0).permutation(np.linspace(0, 1, 1_000))
    precision[::10] = np.nan
    chosen = classes_with_images(precision, most=50)
    assert len(chosen) == 50 == len(set(chosen.tolist()))
    assert np.array_equal(chosen, np.sort(chosen))
    values = np.sort(precision[chosen])
    assert (values[0], values[-1]) == (np.nanmin(precision), np.nanmax(precision))
    assert np.diff(values) == pytest.approx(np.full(49, 1 / 49), abs=0.02)

    assert classes_with_images(np.array([np.nan, 0.2, np.nan]), most=2).tolist() == [1]
    assert classes_with_images(np.array([np.nan, 0.2]), most=2).tolist() == [0, 1]


def test_suspected_labels_are_those_of_the_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = made()
    classes = np.array([0, 2])
    ranking = rank(answers.logits[:, classes], answers.labels[:, classes], np.zeros(200))
    pairs = [
        (int(classes[k]), int(image), bool(present))
        for image, k, present, suspected in zip(
            ranking.images, ranking.classes, ranking.present, ranking.suspected, strict=True
        )
        if suspected
    ]

    found = suspected_labels(answers, classes)
    assert [(label.class_index, label.row, label.present) for label in found] == pairs
    assert len(pairs) > 8

    monkeypatch.setattr(module, "MOST_SUSPECTS", 8)
    fewer = suspected_labels(answers, classes)
    assert sum(label.present for label in fewer) == 4 == sum(not label.present for label in fewer)
