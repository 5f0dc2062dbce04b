"""Values and gradients of the official losses; mAP of three other implementations."""

import numpy as np
import official
import pytest
import torch

from mldec import losses
from mldec.evaluators.average_precision import average_precision
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.zero_shot import ZeroShotEvaluator
from mldec.losses.asymmetric import AsymmetricLoss, AsymmetricLossSingleLabel
from mldec.losses.partial import PartialAsymmetricLoss

LOSSES = official.read("losses")
PARTIAL = official.read("partial_labels")
MISSING = official.read("missing_labels")


@pytest.mark.parametrize(
    "case", LOSSES["cases"], ids=lambda case: f"{case['kind']}-{case['gamma_neg']}"
)
def test_loss(case: dict) -> None:
    logits = torch.tensor(LOSSES["logits"], requires_grad=True)
    gammas = {"gamma_neg": case["gamma_neg"], "gamma_pos": case["gamma_pos"]}
    if case["kind"] == "multi_label":
        loss = AsymmetricLoss(
            **gammas, clip=case["clip"], focal_grad=case["focal_weight_has_gradient"]
        )
        targets = torch.tensor(LOSSES["targets"])
    else:
        loss = AsymmetricLossSingleLabel(**gammas, smoothing=case["label_smoothing"])
        targets = torch.nn.functional.one_hot(torch.tensor(LOSSES["class_index"]), logits.shape[1])
    value = loss(logits, targets)
    assert value.item() == pytest.approx(case["loss"], rel=1e-5)
    value.backward()
    np.testing.assert_allclose(logits.grad[0], case["grad_row0"], rtol=1e-5, atol=1e-6)


MODES = {"ignore_normalize_classes": "ignore_normalized"}
ARGUMENTS = {
    "likelihood_topk": "likelihood_top_k",
    "gamma_unann": "gamma_unannotated",
    "alpha_unann": "alpha_unannotated",
}


@pytest.mark.parametrize("case", PARTIAL["loss"]["cases"], ids=lambda case: case["mode"])
def test_partial_loss(case: dict) -> None:
    facts = PARTIAL["loss"]
    arguments = {
        ARGUMENTS.get(key, key): value
        for key, value in case.items()
        if key not in ("loss", "grad_row0")
    }
    arguments["mode"] = MODES.get(case["mode"], case["mode"])
    if "prior_threshold" in case:
        arguments["class_prior"] = facts["class_prior"]
    logits = torch.tensor(facts["logits"], requires_grad=True)
    value = PartialAsymmetricLoss(**arguments)(logits, torch.tensor(facts["targets"]))
    assert value.item() == pytest.approx(case["loss"], rel=1e-5)
    value.backward()
    np.testing.assert_allclose(logits.grad[0], case["grad_row0"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "case", MISSING["cases"], ids=lambda case: f"{case['target']}-{case['progress']}"
)
def test_loss_for_missing_labels(case: dict) -> None:
    loss = getattr(losses, case["target"])(**case["arguments"])
    loss.progress = case["progress"]
    logits = torch.tensor(MISSING["logits"], dtype=torch.float64, requires_grad=True)
    value = loss(logits, torch.tensor(MISSING["targets"]))
    assert value.item() == pytest.approx(case["value"], rel=1e-7)
    value.backward()
    np.testing.assert_allclose(logits.grad, case["gradient"], rtol=1e-5, atol=1e-8)


def test_average_precision_of_partial_labels() -> None:
    expected = PARTIAL["average_precision"]
    random = np.random.RandomState(42)
    scores = random.uniform(size=(300, 15)).astype(np.float32)
    drawn = random.uniform(size=(300, 15))
    targets = np.where(drawn < 0.1, 1, np.where(drawn < 0.4, 0, -1))
    targets[:, 3] = -1
    targets[:, 5] = np.where(targets[:, 5] == 1, 0, targets[:, 5])
    targets[:, 7] = np.where(targets[:, 7] == 0, -1, targets[:, 7])
    scores += np.float32(0.3) * (targets == 1).astype(np.float32)
    found = 100 * average_precision(torch.from_numpy(scores), torch.from_numpy(targets))["none"]
    for value, percent in zip(found.tolist(), expected["ap_percent"], strict=True):
        assert percent is None or value == pytest.approx(percent, abs=1e-5)
    evaluator = PartialLabelEvaluator(scores.shape[1])
    evaluator.update(torch.from_numpy(scores), torch.from_numpy(targets))
    metrics = evaluator.compute()
    assert metrics["mAP_partial"] == pytest.approx(expected["mAP_percent"], abs=1e-5)
    assert metrics["mAP_weighted"] == pytest.approx(
        expected["positives_weighted_percent"], abs=1e-5
    )
    for kind in ("labels", "positives", "negatives"):
        assert metrics[f"classes_without_{kind}"] == expected[f"classes_without_{kind}"]


def test_zero_shot_metrics() -> None:
    expected = official.read("zero_shot")["percent"]
    random = np.random.RandomState(61)
    scores = random.uniform(size=(200, 30)).astype(np.float32)
    positive = random.uniform(size=(200, 30)) < 0.08
    positive[:, 2] = False
    scores = scores + np.float32(0.3) * positive.astype(np.float32)
    evaluator = ZeroShotEvaluator(30, unseen=range(22, 30), images="all")
    evaluator.update(torch.from_numpy(scores), torch.from_numpy(positive.astype(np.int8)))
    found = evaluator.compute()
    assert len(expected) == 16
    for name, percent in expected.items():
        # Theirs are over all images, which is zsl_all here.
        ours = name.replace("zsl_", "zsl_all_", name.startswith("zsl_")).removesuffix(
            "_empty_as_zero"
        )
        assert found[ours] == pytest.approx(percent, abs=1e-5), name


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
    assert 100 * found["none"].mean().item() == pytest.approx(
        expected["official_mAP_percent"], abs=1e-5
    )
    assert 100 * found["none"].mean().item() == pytest.approx(
        expected["sklearn_macro_percent"], abs=1e-5
    )
    assert 100 * found["envelope"].mean().item() == pytest.approx(
        expected["query2label_interpolated_mAP_percent"], abs=1e-5
    )
    targets[:, 3] = 0
    emptied = average_precision(scores, targets)["none"].nan_to_num(0).mean().item()
    assert 100 * emptied == pytest.approx(expected["official_mAP_with_class_3_emptied"], abs=1e-5)
