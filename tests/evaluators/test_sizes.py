import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from mldec.errors import ConfigError
from mldec.evaluators import Thresholded
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.sizes import SizesEvaluator

GENERATOR = torch.Generator().manual_seed(3)
LOGITS = torch.randn(90, 5, generator=GENERATOR)
TARGETS = torch.randint(0, 8, (90, 5), generator=GENERATOR).to(torch.int8)
TARGETS *= torch.rand(90, 5, generator=GENERATOR) < 0.4
TARGETS[:, 4] &= 6  # no small object of this class


def evaluated(targets):
    evaluator = SizesEvaluator(5, threshold=0.6)
    for block, labels in zip(LOGITS.split(25), targets.split(25), strict=True):
        evaluator.update(block, labels)
    return evaluator, evaluator.compute()


def test_each_size_by_itself_as_scikit_learn():
    evaluator, metrics = evaluated(TARGETS)
    per_class = evaluator.per_class()
    for name, bit in (("small", 1), ("medium", 2), ("large", 4)):
        shown = (TARGETS.numpy() & bit) > 0
        expected = [
            100 * average_precision_score(y, s)
            for y, s in zip(shown.T, LOGITS.numpy().T, strict=True)
            if y.any()
        ]
        assert metrics[f"mAP_{name}"] == pytest.approx(np.mean(expected))
        assert [value for value in per_class[f"AP_{name}"] if value == value] == pytest.approx(
            expected
        )
    assert len(per_class["AP_small"]) == 5
    assert np.isnan(per_class["AP_small"][4])


def test_everything_else_is_as_without_sizes():
    plain = MultiLabelEvaluator(5, threshold=0.6)
    plain.update(LOGITS, TARGETS.clamp(max=1))
    expected = plain.compute()
    evaluator, metrics = evaluated(TARGETS)
    assert next(iter(metrics)) == "mAP"
    assert {name: metrics[name] for name in expected} == expected
    assert metrics.keys() - expected.keys() == {"mAP_small", "mAP_medium", "mAP_large"}
    assert evaluator.per_class()["positives"] == plain.per_class()["positives"]


def test_labels_that_are_not_annotated_are_left_out_of_every_size():
    partly = TARGETS.clone()
    partly[::3] = -1
    known = torch.arange(90) % 3 != 0
    whole = SizesEvaluator(5, threshold=0.6)
    whole.update(LOGITS[known], TARGETS[known])
    expected = whole.compute()
    found = evaluated(partly)[1]
    for name in ("mAP", "mAP_small", "mAP_medium", "mAP_large", "OF1"):
        assert found[name] == pytest.approx(expected[name])


def test_no_object_of_a_size_is_not_a_number():
    assert np.isnan(evaluated(TARGETS & 6)[1]["mAP_small"])


def test_a_wrong_threshold_is_refused():
    with pytest.raises(ConfigError, match="threshold"):
        SizesEvaluator(5, threshold=1.0)


def test_a_threshold_of_a_checkpoint_is_that_of_the_usual_metrics():
    evaluator = SizesEvaluator(5)
    plain = MultiLabelEvaluator(5)
    assert isinstance(evaluator, Thresholded)
    evaluator.logit_threshold = plain.logit_threshold = torch.linspace(-1, 1, 5).double()
    assert evaluator.logit_threshold is plain.logit_threshold
    evaluator.update(LOGITS, TARGETS)
    plain.update(LOGITS, TARGETS.clamp(max=1))
    assert evaluator.compute()["OF1"] == plain.compute()["OF1"]
