"""Every metric has a meaning in plain English."""

import pytest
import torch

from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.evaluators.zero_shot import ZeroShotEvaluator
from mldec.report.meanings import is_count, meaning

CLASSES = 6


@pytest.mark.parametrize(
    "evaluator",
    [
        MultiLabelEvaluator(CLASSES),
        PartialLabelEvaluator(CLASSES),
        SingleLabelEvaluator(CLASSES, top_k=5),
        ZeroShotEvaluator(CLASSES, unseen=[4, 5], images="all"),
    ],
)
def test_every_metric_of_every_evaluator_has_a_meaning(evaluator) -> None:
    labels = torch.eye(CLASSES, dtype=torch.int64).repeat(5, 1)
    evaluator.update(torch.randn(len(labels), CLASSES), labels)
    names = evaluator.compute()
    assert not [name for name in names if not meaning(name)]

    # Another sentence for each metric that is a percentage.
    sentences = [meaning(name) for name in names if not is_count(name)]
    assert len(set(sentences)) == len(sentences)
    assert all(text.endswith(".") for text in sentences)


def test_meanings_are_put_together() -> None:
    assert meaning("gzsl_OF1@3") == (
        "Harmonic mean of OP and OR, among all classes, "
        "if the 3 highest scores of an image are predicted."
    )
    assert meaning("classes_valid") == "A number, not a percentage."
    assert meaning("of_a_plugin") == ""
