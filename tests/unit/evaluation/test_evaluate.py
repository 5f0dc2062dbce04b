"""Evaluation compared with plain loops and scikit-learn, and its output."""

import csv
import io
import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, recall_score, roc_auc_score
from support import experiment
from torch import nn

from mldec import build
from mldec.config.compose import compose, override
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes, DataModule, Split, fixed_sample
from mldec.errors import ConfigError, DataError
from mldec.evaluation.open import EvaluationSetup
from mldec.evaluation.output import Results, report, same_scores, to_csv
from mldec.evaluation.run import (
    all_scores,
    evaluate,
    evaluate_all,
    metrics_by_frequency,
    score,
)
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.files.atomic import to_json

CPU = torch.device("cpu")
BAD = (1, *range(6, 12))
READABLE = [index for index in range(20) if index not in BAD]
read = []  # indices of the images that were loaded


class Shades:
    """Random images; some of them are unreadable."""

    def __init__(self, count, bad=()):
        self.count = count
        self.bad = bad

    def __len__(self):
        return self.count

    def load(self, index, rng):
        read.append(index)
        if index in self.bad:
            raise DataError(f"image {index} is broken")
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(256, (3, 4, 4), dtype=torch.uint8, generator=generator)
        return image, nn.functional.one_hot(torch.tensor(index % 3), 3).to(torch.int8)

    def name(self, index):
        return f"image {index}"


class Colors(nn.Module):
    """The mean of each channel as the logit of its class, times a factor."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = factor

    def forward(self, images, word_vectors):
        assert not self.training
        assert word_vectors is None or word_vectors.shape == (3, 5)
        return self.factor * (images.float().mean((2, 3)) / 64 - 2)


def data(count=20, bad=(), *, exclusive=False, words=False):
    word_vectors = torch.zeros(3, 5) if words else None
    split = Split(Shades(count, bad), Classes(("red", "green", "blue"), exclusive, word_vectors))

    def evaluator(classes):
        if exclusive:
            return SingleLabelEvaluator(len(classes), top_k=2)
        return MultiLabelEvaluator(len(classes))

    policy = "skip" if bad else "stop"
    return DataModule(lambda: split, lambda: split, evaluator, EvalTransform(image_size=4), policy)


def expected(indices):
    """Return logits and targets of some images."""
    shown = [fixed_sample(Shades(20), index) for index in indices]
    logits = torch.stack([image.float().mean((1, 2)) / 64 - 2 for image, _ in shown])
    return logits, torch.stack([target for _, target in shown])


@pytest.fixture(scope="module")
def config():
    return compose(["+experiment=digits", "train.workers=0", "train.eval_batch_size=6"])


def scores_of(model, data, config):
    return all_scores(model, data, config, device=CPU, path="x.pt")


@pytest.mark.parametrize(("bad", "words"), [((), True), (BAD, False)])
def test_each_readable_image_counts_once(config, bad, words):
    logits, targets = expected([index for index in range(20) if index not in bad])
    results = evaluate(Colors(), data(20, bad, words=words), config, device=CPU)
    per_class = [average_precision_score(targets[:, k], logits[:, k]) for k in range(3)]
    assert results.metrics["mAP"] == pytest.approx(100 * sum(per_class) / 3)
    assert results.images == len(targets)
    assert [message.partition(" is")[0] for message in results.bad] == [f"image {i}" for i in bad]
    assert results.confusions is None
    assert all(len(column) == 3 for column in results.per_class.values())


def test_scores_keep_their_image_indices(config):
    logits, targets = expected(READABLE)
    batches = list(score([Colors().eval()], data(20, BAD), config, device=CPU))
    assert [len(scores) for _, [scores] in batches] == [5, 0, 6, 2]
    assert [len(batch.bad) for batch, _ in batches] == [1, 6, 0, 0]

    scores = scores_of(Colors().train(), data(20, BAD), config)
    assert scores.indices.tolist() == READABLE
    assert len(scores.bad) == len(BAD)
    assert scores.logits.tolist() == logits.tolist()
    assert scores.labels.tolist() == targets.tolist()


def test_several_models_share_the_loaded_images(config):
    read.clear()
    models = [Colors().train(), Colors(-1).eval()]
    both = evaluate_all(models, data(20, (1,)), config, device=CPU)
    assert sorted(read) == list(range(20))
    assert [model.training for model in models] == [True, False]
    for model, results in zip(models, both, strict=True):
        assert results == evaluate(model, data(20, (1,)), config, device=CPU)
    assert both[0].metrics["mAP"] != both[1].metrics["mAP"]


def test_thresholds_override_the_data(config):
    thresholds = torch.tensor([-0.1, 0.0, 0.1], dtype=torch.float64)
    results = evaluate(Colors(), data(), config, device=CPU, logit_threshold=thresholds)
    logits, targets = expected(range(20))
    for k in range(3):
        recall = 100 * recall_score(targets[:, k], logits[:, k] > thresholds[k])
        assert results.per_class["recall"][k] == pytest.approx(recall)


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        (lambda c: evaluate(Colors(torch.nan), data(3), c, device=CPU), DataError, "finite"),
        (lambda c: scores_of(Colors(torch.inf), data(4), c), DataError, r"x\.pt"),
        (lambda c: scores_of(Colors(), data(2, (0, 1)), c), DataError, "image 0"),
        (
            lambda c: evaluate(Colors(), data(exclusive=True), c, device=CPU, logit_threshold=0.0),
            ConfigError,
            "data",
        ),
    ],
)
def test_unusable_scores_raise_an_error(config, call, error, name):
    with pytest.raises(error, match=name):
        call(config)


def test_all_metrics_are_added_on_request(config):
    usual = evaluate(Colors(), data(), config, device=CPU).metrics
    every = evaluate(Colors(), data(), config, device=CPU, all_metrics=True).metrics
    logits, targets = expected(range(20))
    assert every.keys() > usual.keys()
    assert usual.items() <= every.items()
    assert every["AUROC_macro"] == pytest.approx(100 * roc_auc_score(targets, logits))
    with pytest.raises(ConfigError, match="--metrics"):
        evaluate(Colors(), data(exclusive=True), config, device=CPU, all_metrics=True)


def test_groups_have_the_mean_of_their_classes():
    precisions = [90.0, math.nan, 50.0, 40.0, 30.0, math.nan]
    results = Results({}, {"AP": precisions}, 10, [], None)
    found = metrics_by_frequency(results, np.array([100, 500, 99, 20, 19, 0]), 20, 100)
    assert found == {
        "head_mAP": 90,
        "classes_head": 2,
        "medium_mAP": 45,
        "classes_medium": 2,
        "tail_mAP": 30,
        "classes_tail": 2,
    }
    assert math.isnan(metrics_by_frequency(results, np.full(6, 7), 1, 9)["tail_mAP"])


def test_confusions_of_single_label_data(config):
    results = evaluate(Colors(), data(exclusive=True), config, device=CPU)
    logits, targets = expected(range(20))
    pairs = list(zip(targets.argmax(1).tolist(), logits.argmax(1).tolist(), strict=True))
    assert {(label, guess): images for label, guess, images in results.confusions} == {
        pair: pairs.count(pair) for pair in pairs if pair[0] != pair[1]
    }
    content = report(results, "ema", "best.pt", ("r", "g", "b"))
    assert {entry["label"] for entry in content["confusions"]} <= {"r", "g", "b"}


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("fp16", torch.float32), ("bf16", torch.bfloat16)],
)
def test_precision_of_the_config_is_used(config, precision, dtype):
    seen = []

    class Matrix(Colors):
        def forward(self, images, word_vectors):
            scores = images.float().mean((2, 3)) @ torch.eye(3)
            seen.append(scores.dtype)
            return scores

    half = override(config, [f"train.precision={precision}"])
    evaluate(Matrix(), data(3), half, device=CPU)
    assert seen == [dtype]


def test_constant_classes_are_named(config):
    scores = scores_of(Colors(), data(2000), config)
    scores.logits[:, 1] += 30

    def named(data, *, ranks_only=False):
        setup = EvaluationSetup("x.pt", None, config, data, Colors(), CPU, None, ranks_only)
        return setup.constant_classes(scores)

    assert named(data()) == ("green",)
    assert named(data(exclusive=True)) == named(data(), ranks_only=True) == ()
    # A class whose images are ranked well was learned, even if its scores are all extreme.
    scores.labels[:, 1] = scores.logits[:, 1] > np.median(scores.logits[:, 1])
    assert named(data()) == ()


@pytest.mark.parametrize(
    ("loss", "advice"),
    [
        ("asl", ["loss=bce", "loss.clip=0"]),
        ("asl loss.clip=0", ["loss=bce"]),
        ("partial", ["loss=bce"]),
        ("partial loss.clip=0.05", ["loss=bce", "loss.clip=0"]),
        ("bce", []),
        ("zlpr", []),
        (None, []),
    ],
)
def test_warning_about_constant_scores_gives_advice_that_applies(loss, advice):
    settings = {}
    if loss is not None:
        config = override(experiment("digits"), f"loss={loss}".split())
        settings = build.recorded(config, build.check(config)).loss
    [line] = same_scores(["green"], "ema", settings)
    assert "green" in line
    assert "ema" in line
    assert [word for word in ("loss=bce", "loss.clip=0") if word in line] == advice
    assert same_scores([], "ema", settings) == []


def test_undefined_metrics_are_null():
    evaluator = MultiLabelEvaluator(2)
    names = ("\u65e5\u672c", "b")
    evaluator.update(torch.tensor([[1.0, 0], [0, 1], [2, 1]]), torch.zeros(3, 2))
    results = Results(evaluator.compute(), evaluator.per_class(), 3, [], None)
    text = to_json(report(results, "ema", "best.pt", names))
    content = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert content["metrics"]["mAP"] == 0
    assert content["metrics"]["mAP_skip_empty"] is None
    assert content["per_class"][names[0]]["AP"] is None
    assert "confusions" not in content
    rows = csv.DictReader(io.StringIO(to_csv(results, names)))
    assert [row["class"] for row in rows] == list(names)
