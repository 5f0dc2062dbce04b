"""Classes with constant scores: small versions of measured cases."""

import numpy as np
import pytest
import torch
from scipy.special import expit, logit
from sklearn.metrics import log_loss

from mldec.evaluators.constant import ConstantScores

RNG = np.random.default_rng(0)
MANY = RNG.random(200) < 0.6
FEW = np.arange(200) < 10
SPREAD = RNG.normal(size=200)


@pytest.mark.parametrize(
    ("logits", "present", "is_constant"),
    [
        (21 + SPREAD, MANY, True),  # a frequent class after training with ASL
        (21 + SPREAD, ~FEW, True),  # a class of nearly all images
        (8.5 + 0.3 * SPREAD, MANY, True),
        (np.where(FEW[::-1], 2.0, 21 + SPREAD), MANY, False),  # 5 % differ
        (np.where(np.arange(200) == 7, -3.0, 21 + SPREAD), MANY, True),  # one image differs
        (-11 + SPREAD, FEW, False),  # a rare class after training with BCE
        (9.4 + 0.1 * SPREAD, ~FEW, False),
        (-21 + SPREAD, MANY, True),
        (21 + SPREAD, MANY | True, False),  # only one label value
        (logit(0.8) + 0.3 * SPREAD, MANY, False),  # 0.72 to 0.90 for all images, but not constant
        (np.full(200, 0.3), MANY, True),
        (12 * MANY - 6 + SPREAD, MANY, False),
    ],
)
def test_class_is_constant_if_scores_are_equal_or_extreme_and_wrong(logits, present, is_constant):
    constant = ConstantScores(2)
    # Two batches with another class, and an unannotated label.
    both = torch.from_numpy(np.stack([12 * MANY - 6 + SPREAD, logits], 1)).float()
    labels = torch.from_numpy(np.stack([MANY, present], 1)).to(torch.int8)
    for rows in (slice(0, 70), slice(70, 200)):
        constant.update(both[rows], labels[rows])
    constant.update(torch.tensor([[0.0, -50]]), torch.tensor([[1, -1]]))
    assert constant.classes() == [1] * is_constant
    assert constant.sums[2, 1] / 200 == pytest.approx(
        log_loss(present, expit(np.float32(logits).astype(float)), labels=[False, True]), abs=1e-5
    )
