"""Errors of all evaluators: their type, and the name of the setting or metric."""

import math

import pytest
import torch

from mldec.errors import ConfigError, DataError
from mldec.evaluators.average_precision import average_precision
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.evaluators.zero_shot import ZeroShotEvaluator

TARGETS = torch.eye(4)


def logits(value=math.nan):
    return torch.eye(4).index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(value))


def evaluate(evaluator, logits, targets=TARGETS):
    evaluator.update(logits, targets)
    return evaluator.compute()


ERRORS = [
    (lambda: MultiLabelEvaluator(5, threshold=0.0), ConfigError, r"data\.threshold"),
    (lambda: MultiLabelEvaluator(5, top_k=6), ConfigError, r"data\.top_k"),
    (lambda: PartialLabelEvaluator(5, top_k=0), ConfigError, r"data\.top_k"),
    (lambda: ZeroShotEvaluator(5, unseen=[]), ConfigError, "unseen"),
    (lambda: SingleLabelEvaluator(3, top_k=5), ConfigError, r"data\.top_k"),
    (lambda: average_precision(logits(), TARGETS), DataError, "average precision"),
    (lambda: evaluate(MultiLabelEvaluator(4), logits()), DataError, "average precision"),
    (lambda: evaluate(SingleLabelEvaluator(4), logits()), DataError, "top1"),
    (lambda: SingleLabelEvaluator(6).compute(), DataError, "top1"),
    (
        lambda: evaluate(PartialLabelEvaluator(4), TARGETS, TARGETS * 2 - 1),
        DataError,
        "mAP_partial",
    ),
]


@pytest.mark.parametrize(("call", "error", "name"), ERRORS)
def test_errors_name_the_setting_or_the_metric(call, error, name):
    with pytest.raises(error, match=name):
        call()
