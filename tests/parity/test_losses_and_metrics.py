"""Values and gradients of the official losses, and mAP of the official code, of Query2Label and of scikit-learn."""

import numpy as np
import official
import pytest
import torch

from mldec.evaluators.average_precision import average_precision
from mldec.losses.asymmetric import AsymmetricLoss, AsymmetricLossSingleLabel

LOSSES = official.read("losses")


@pytest.mark.parametrize("case", LOSSES["cases"], ids=lambda case: f"{case['kind']}-{case['gamma_neg']}")
def test_loss(case: dict) -> None:
    logits = torch.tensor(LOSSES["logits"], requires_grad=True)
    gammas = {"gamma_neg": case["gamma_neg"], "gamma_pos": case["gamma_pos"]}
    if case["kind"] == "multi_label":
        loss = AsymmetricLoss(**gammas, clip=case["clip"], focal_grad=case["focal_weight_has_gradient"])
        targets = torch.tensor(LOSSES["targets"])
    else:
        loss = AsymmetricLossSingleLabel(**gammas, smoothing=case["label_smoothing"])
        targets = torch.nn.functional.one_hot(torch.tensor(LOSSES["class_index"]), logits.shape[1])
    value = loss(logits, targets)
    assert value.item() == pytest.approx(case["loss"], rel=1e-5)
    value.backward()
    np.testing.assert_allclose(logits.grad[0], case["grad_row0"], rtol=1e-5, atol=1e-6)


def scores_and_targets() -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.RandomState(5)
    scores = random.uniform(size=(500, 12)).astype(np.float32)
    positive = random.uniform(size=(500, 12)) < np.linspace(0.01, 0.5, 12)
    scores = scores + np.float32(0.35) * positive.astype(np.float32)
    return torch.from_numpy(scores), torch.from_numpy(positive.astype(np.int8))


def test_average_precision() -> None:
    expected = official.read("average_precision")
    scores, targets = scores_and_targets()
    found = average_precision(scores, targets, interpolations=("none", "envelope"))
    assert 100 * found["none"].mean().item() == pytest.approx(expected["official_mAP_percent"], abs=1e-5)
    assert 100 * found["none"].mean().item() == pytest.approx(expected["sklearn_macro_percent"], abs=1e-5)
    assert 100 * found["envelope"].mean().item() == pytest.approx(
        expected["query2label_interpolated_mAP_percent"], abs=1e-5
    )
    targets[:, 3] = 0
    emptied = average_precision(scores, targets)["none"].nan_to_num(0).mean().item()
    assert 100 * emptied == pytest.approx(expected["official_mAP_with_class_3_emptied"], abs=1e-5)
