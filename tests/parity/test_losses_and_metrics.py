"""Values and gradients of losses, and metrics, against the official code."""

from functools import partial

import numpy as np
import official
import pytest
import torch

from mldec import losses
from mldec.evaluators.average_precision import average_precision
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.zero_shot import ZeroShotEvaluator
from mldec.heads import GAP
from mldec.losses.asymmetric import AsymmetricLoss, AsymmetricLossSingleLabel
from mldec.losses.partial import PartialAsymmetricLoss

LOSSES = official.read("losses")
PARTIAL = official.read("partial_labels")
MISSING = official.read("missing_labels")
SINGLE = official.read("single_positive")


def check(loss, facts, targets, case, dtype=torch.float32):
    """Compare the value and the gradient of a loss, of which some files have only the first row."""
    logits = torch.tensor(facts["logits"], dtype=dtype, requires_grad=True)
    value = loss(logits, targets)
    value.backward()
    if dtype == torch.float64:
        assert value.item() == pytest.approx(case["value"], rel=1e-7)
        np.testing.assert_allclose(logits.grad, case["gradient"], rtol=1e-5, atol=1e-8)
    else:
        assert value.item() == pytest.approx(case["loss"], rel=1e-5)
        np.testing.assert_allclose(logits.grad[0], case["grad_row0"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "case", LOSSES["cases"], ids=lambda case: f"{case['kind']}-{case['gamma_neg']}"
)
def test_asymmetric_loss(case):
    options = {"gamma_neg": case["gamma_neg"], "gamma_pos": case["gamma_pos"]}
    if case["kind"] == "multi_label":
        options |= {"clip": case["clip"], "focal_grad": case["focal_weight_has_gradient"]}
        check(AsymmetricLoss(**options), LOSSES, torch.tensor(LOSSES["targets"]), case)
    else:
        loss = AsymmetricLossSingleLabel(**options, smoothing=case["label_smoothing"])
        classes = len(LOSSES["logits"][0])
        labels = torch.tensor(LOSSES["class_index"])
        check(loss, LOSSES, torch.nn.functional.one_hot(labels, classes), case)


# Our names of official arguments and values.
RENAMED = {
    "ignore_normalize_classes": "ignore_normalized",
    "likelihood_topk": "likelihood_top_k",
    "gamma_unann": "gamma_unannotated",
    "alpha_unann": "alpha_unannotated",
}


@pytest.mark.parametrize("case", PARTIAL["loss"]["cases"], ids=lambda case: case["mode"])
def test_partial_loss(case):
    facts = PARTIAL["loss"]
    arguments = {RENAMED.get(key, key): value for key, value in case.items()}
    del arguments["loss"], arguments["grad_row0"]
    arguments["mode"] = RENAMED.get(case["mode"], case["mode"])
    if "prior_threshold" in case:
        arguments["class_prior"] = facts["class_prior"]
    check(PartialAsymmetricLoss(**arguments), facts, torch.tensor(facts["targets"]), case)


@pytest.mark.parametrize(
    "case", MISSING["cases"], ids=lambda case: f"{case['target']}-{case['progress']}"
)
def test_loss_for_missing_labels(case):
    loss = getattr(losses, case["target"])(**case["arguments"])
    loss.progress = case["progress"]
    check(loss, MISSING, torch.tensor(MISSING["targets"]), case, torch.float64)


def single_positive(kind, name):
    """Build a loss with a state for the images of the official numbers."""
    labels = torch.tensor(SINGLE["observed"], dtype=torch.int8)
    return kind(**SINGLE[name].get("arguments", {}), train_labels=labels)


def check_images(loss, case, images, epoch):
    """Compare a loss on some images, whose logits differ between epochs."""
    facts = {"logits": [SINGLE["logits"][epoch][image] for image in images]}
    targets = torch.tensor(SINGLE["observed"])[images]
    index = torch.tensor(images)
    check(lambda *both: loss(*both, index), facts, targets, case, torch.float64)


def test_role():
    expected = SINGLE["role"]
    loss = single_positive(partial(losses.ROLE, expected_positives=1.5), "role").double()
    loss.estimator.data.copy_(torch.tensor(expected["estimator"]))
    for images, case in zip(SINGLE["batches"], expected["cases"], strict=True):
        loss.zero_grad()
        check_images(loss, case, images, 0)
        gradient = loss.estimator.grad
        np.testing.assert_allclose(gradient[images], case["estimator_gradient"], rtol=1e-5)
        assert gradient.count_nonzero() == len(images) * gradient.shape[1]


def test_pseudo_negatives():
    expected = SINGLE["em_apl"]
    loss = single_positive(losses.PseudoNegatives, "em_apl").double()
    for case in expected["cases"]:
        epoch = case["epoch"]
        # The official code scores the images at the end of the previous epoch.
        logits = torch.tensor(SINGLE["logits"][epoch], dtype=torch.float64)
        for _ in range(2):
            loss.start_epoch(epoch, expected["epochs"], lambda logits=logits: logits)
        check_images(loss, case, SINGLE["batches"][(epoch + 1) % 2], epoch + 1)
    assert (loss.pseudo >= 0).any()


def test_permanent_correction():
    expected = SINGLE["ll_cp"]
    loss = single_positive(losses.PermanentCorrection, "ll_cp")
    for number, case in enumerate(expected["cases"]):
        epoch = case["epoch"]
        loss.progress = epoch / expected["arguments"]["stages"]
        check_images(loss, case, SINGLE["batches"][number % 2], epoch + 1)


@pytest.mark.parametrize("case", SINGLE["gr"]["cases"], ids=lambda case: case["epoch"])
def test_generalized_robust_loss_with_epochs(case):
    arguments = SINGLE["gr"]["arguments"]
    loss = losses.GeneralizedRobustLoss(**arguments)
    # In the middle of the epoch.
    loss.progress = (case["epoch"] + 0.5) / arguments["stages"]
    images = SINGLE["batches"][0]
    check_images(lambda logits, targets, index: loss(logits, targets), case, images, 1)


def test_boosted_scores_of_tokens():
    expected = SINGLE["boostlu"]
    features = torch.tensor(expected["features"], dtype=torch.float64, requires_grad=True)
    head = GAP(6, 5, boost=expected["boost"]).double()
    head.fc.weight.data.copy_(torch.tensor(expected["weight"]))
    head.fc.bias.data.copy_(torch.tensor(expected["bias"]))
    logits = head(features.flatten(2).transpose(1, 2))
    np.testing.assert_allclose(logits.detach(), expected["logits"], rtol=1e-5)
    (logits * torch.arange(10).view(2, 5) / 10).sum().backward()
    np.testing.assert_allclose(features.grad, expected["features_gradient"], rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(head.fc.weight.grad, expected["weight_gradient"], rtol=1e-5)


def test_average_precision_of_partial_labels():
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
    weighted = expected["positives_weighted_percent"]
    assert metrics["mAP_weighted"] == pytest.approx(weighted, abs=1e-5)
    for kind in ("labels", "positives", "negatives"):
        assert metrics[f"classes_without_{kind}"] == expected[f"classes_without_{kind}"]


def test_zero_shot_metrics():
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
        # The official metrics use all images, as zsl_all.
        ours = name.removesuffix("_empty_as_zero")
        if ours.startswith("zsl_"):
            ours = ours.replace("zsl_", "zsl_all_")
        assert found[ours] == pytest.approx(percent, abs=1e-5), name


def test_average_precision():
    expected = official.read("average_precision")
    random = np.random.RandomState(5)
    scores = random.uniform(size=(500, 12)).astype(np.float32)
    positive = random.uniform(size=(500, 12)) < np.linspace(0.01, 0.5, 12)
    scores = scores + np.float32(0.35) * positive.astype(np.float32)
    scores = torch.from_numpy(scores)
    targets = torch.from_numpy(positive.astype(np.int8))
    found = average_precision(scores, targets, interpolations=("none", "envelope"))
    targets[:, 3] = 0
    emptied = average_precision(scores, targets)["none"].nan_to_num(0)
    for name, values in (
        ("official_mAP_percent", found["none"]),
        ("sklearn_macro_percent", found["none"]),
        ("query2label_interpolated_mAP_percent", found["envelope"]),
        ("official_mAP_with_class_3_emptied", emptied),
    ):
        assert 100 * values.mean().item() == pytest.approx(expected[name], abs=1e-5)
