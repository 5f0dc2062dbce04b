"""What an evaluation shows, compared with numpy on all its logits at once."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from support import in_processes

from mldec.config.compose import compose
from mldec.config.schema import Config, Log
from mldec.data.base import Classes, DataModule, Split
from mldec.data.loader import Batch
from mldec.data.transforms import EvalTransform
from mldec.evaluation import Results
from mldec.evaluators import Evaluator
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.training import details as module
from mldec.training.details import Details, Observer
from mldec.training.gallery import Answer, Verdict

N, K = 60, 5
NAMES = ("cat", "dog", "traffic light", "a/b", "zoo")
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = 3 * torch.randn(N, K, generator=GENERATOR)
LABELS = torch.randint(-1, 2, (N, K), generator=GENERATOR).to(torch.int8)
LABELS[:, 3] = torch.where(LABELS[:, 3] > 0, 0, LABELS[:, 3])  # a class without a positive
IMAGES = torch.randint(255, (N, 3, 8, 6), dtype=torch.uint8, generator=GENERATOR)
CONFIG = compose(["+experiment=digits"])
AP = [10.0, 20.0, 100.0, float("nan"), 30.0]


class Images:
    def __len__(self) -> int:
        return N


def data(exclusive: bool = False) -> DataModule:
    def evaluator(classes: Classes) -> Evaluator:
        if exclusive:
            return SingleLabelEvaluator(len(classes))
        return MultiLabelEvaluator(len(classes), threshold=0.6)

    split: Any = Split(Images(), Classes(NAMES, exclusive=exclusive))  # type: ignore[arg-type]
    return DataModule(lambda: split, lambda: split, evaluator, EvalTransform(image_size=8))


def config(*, seed: int = 0, **shown: int) -> Config:
    """Return the settings of an evaluation, with those of what it shows."""
    return dataclasses.replace(CONFIG, seed=seed, log=Log(**shown))


def observe(
    observer: Observer,
    labels: torch.Tensor = LABELS,
    *,
    rank: int = 0,
    count: int = 1,
    images: torch.Tensor = IMAGES,
    column: str = "AP",
) -> Details | None:
    """Show batches of 7 images, as those that a process gets of an evaluation."""
    indices = torch.arange(N)
    batches = zip(*(part.split(7) for part in (images, labels, indices, LOGITS)), strict=True)
    for number, (pixels, targets, numbers, logits) in enumerate(batches):
        if number % count == rank:
            observer(Batch(pixels, targets, numbers), logits)
    return observer.details(Results({"mAP": 1.0}, {column: AP, "f1": AP}, N, [], None))


def shown(settings: Config = CONFIG, **named: Any) -> Details:
    details = observe(Observer(data(), settings), **named)
    assert details is not None
    return details


def expected_counts(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return TP, FP, TN and FN at each threshold by comparing every score: [4, 101]."""
    counts = []
    for threshold in np.arange(101) / 100:
        positive = probabilities >= threshold
        counts.append(
            [
                (positive & (labels == 1)).sum(),
                (positive & (labels == 0)).sum(),
                (~positive & (labels == 0)).sum(),
                (~positive & (labels == 1)).sum(),
            ]
        )
    return np.array(counts).T


def assert_curve(curve: module.Curve, probabilities: np.ndarray, labels: np.ndarray) -> None:
    counts = expected_counts(probabilities, labels)
    assert np.array_equal(np.stack(curve[:4]), counts)
    true_positives, false_positives, _, false_negatives = counts
    with np.errstate(invalid="ignore"):
        precision = true_positives / (true_positives + false_positives)
    assert np.allclose(curve.precision, np.nan_to_num(precision))
    assert np.allclose(curve.recall, true_positives / (true_positives + false_negatives))


def test_curves_are_those_of_every_score_compared_with_every_threshold() -> None:
    curves = shown().curves
    probabilities, labels = LOGITS.sigmoid().double().numpy(), LABELS.numpy()
    assert_curve(curves["val_pr/micro"], probabilities, labels)
    for index, name in enumerate(NAMES):
        if name == "a/b":
            assert f"val_pr_class/{name}" not in curves, "without a positive there is no curve"
        else:
            curve = curves[f"val_pr_class/{name}"]
            assert_curve(curve, probabilities[:, index], labels[:, index])


def test_the_macro_curve_is_the_mean_of_the_classes_that_have_a_positive() -> None:
    curves = shown().curves
    of_classes = [curve for tag, curve in curves.items() if tag.startswith("val_pr_class/")]
    assert len(of_classes) == 4
    macro = curves["val_pr/macro"]
    assert np.allclose(macro.precision, sum(curve.precision for curve in of_classes) / 4)
    assert np.allclose(macro.recall, sum(curve.recall for curve in of_classes) / 4)


def test_histograms_are_those_of_all_logits_of_a_sign() -> None:
    histograms = shown().histograms
    for sign, label in (("positives", 1), ("negatives", 0)):
        histogram = histograms[f"val_logits/{sign}"]
        values = LOGITS[label == LABELS].double().numpy()
        assert np.array_equal(histogram.counts, np.histogram(values, histogram.edges)[0])
        assert histogram.counts.sum() == len(values)
        assert histogram.counts[0] > 0 < histogram.counts[-1]
        moments = [values.min(), values.max(), values.sum(), (values**2).sum()]
        assert np.allclose(histogram[2:], moments)


def test_logits_beyond_the_bins_count_in_the_last_one_and_a_broken_one_does_no_harm() -> None:
    observer = Observer(data(), config())
    logits = torch.tensor([[1e9, -1e9, float("nan"), float("inf"), 24.99]])
    labels = torch.tensor([[1, 0, 0, 0, 1]], dtype=torch.int8)
    observer(Batch(IMAGES[:1], labels, torch.arange(1)), logits)
    details = observer.details(Results({}, {"AP": AP}, 1, [], None))
    assert details is not None
    positives = details.histograms["val_logits/positives"]
    assert (positives.counts.tolist(), positives.edges.tolist()) == ([2], [24.75, 25.0])
    assert positives.highest == pytest.approx(1e9)


def test_ap_is_a_number_per_frequent_class_and_a_histogram_of_all() -> None:
    details = shown(config(classes=2))
    order = sorted(range(K), key=lambda index: -int((LABELS[:, index] == 1).sum()))
    frequent = [NAMES[index] for index in order[:2]]
    assert details.scalars == {
        f"val_AP/{name}": AP[index] for name, index in zip(frequent, order, strict=False)
    }
    assert {tag for tag in details.curves if tag.startswith("val_pr_class/")} == {
        f"val_pr_class/{name}" for name in frequent
    }
    histogram = details.histograms["val_AP_of_classes"]
    assert (histogram.counts.sum(), histogram.lowest, histogram.highest) == (4, 10.0, 100.0)
    assert histogram.total == 160.0


def test_with_nothing_to_show_the_curves_over_all_classes_remain() -> None:
    details = shown(config(classes=0, images=0))
    assert (details.scalars, details.images) == ({}, {})
    assert list(details.curves) == ["val_pr/micro", "val_pr/macro"]


def test_exclusive_classes_have_the_scores_of_a_softmax_and_one_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examples: list[Any] = []
    monkeypatch.setattr(module, "draw", examples.extend)
    labels = torch.nn.functional.one_hot(torch.arange(N) % 3, K).to(torch.int8)
    details = observe(Observer(data(exclusive=True), config()), labels, column="accuracy")
    assert details is not None
    assert_curve(details.curves["val_pr/micro"], LOGITS.softmax(1).double().numpy(), labels.numpy())
    assert details.scalars["val_accuracy/cat"] == 10.0
    for example in examples:
        kinds = sorted(answer.verdict.value for answer in example.answers)
        assert kinds in (["right"], ["missed", "wrong"])


def test_the_images_are_fixed_by_the_seed_and_say_what_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examples: list[Any] = []
    monkeypatch.setattr(module, "draw", lambda drawn: examples.append(list(drawn)))
    state = torch.get_rng_state()
    chosen = []
    for seed in (3, 3, 4):
        observer = Observer(data(), config(seed=seed, images=6))
        observe(observer)
        chosen.append(observer.chosen)
    assert torch.equal(torch.get_rng_state(), state), "training draws from this generator"
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(set(chosen[0])) == len(examples[0]) == 6

    for index, example in zip(chosen[0], examples[0], strict=True):
        assert example.image.size == (168, 224), "8 x 6 pixels, enlarged"
        answers: list[Answer] = list(example.answers)
        for column, name in enumerate(NAMES):
            label = int(LABELS[index, column])
            probability = float(LOGITS[index, column].sigmoid())
            verdict = {
                (1, True): Verdict.right,
                (1, False): Verdict.missed,
                (0, True): Verdict.wrong,
                (-1, True): Verdict.unknown,
            }.get((label, probability > 0.6))
            found = [answer for answer in answers if answer.name == name]
            assert [answer.verdict for answer in found] == ([verdict] if verdict else [])
            assert all(answer.probability == pytest.approx(probability) for answer in found)

        # Labelled ones first, and in each half the surest first.
        keys = [
            (answer.verdict.value in ("right", "missed"), answer.probability) for answer in answers
        ]
        assert keys == sorted(keys, reverse=True)


def test_images_that_cannot_be_read_or_are_stored_as_tokens_are_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(module, "draw", lambda drawn: counts.append(len(drawn)))
    observer = Observer(data(), config(images=60))
    observer(Batch(IMAGES[:5], LABELS[:5], torch.arange(5), ["6.png is damaged"]), LOGITS[:5])
    observer.details(Results({}, {"AP": AP}, 5, [], None))
    assert counts == [5]

    assert shown(images=IMAGES.float().flatten(2)).images == {}


def _of_processes(rank: int, count: int) -> None:
    details = observe(Observer(data(), config()), rank=rank, count=count)
    if rank:
        assert details is None
        return

    alone = WHOLE
    assert details is not None
    assert details.scalars == alone.scalars
    assert details.curves.keys() == alone.curves.keys()
    for tag, curve in details.curves.items():
        assert np.array_equal(np.stack(curve), np.stack(alone.curves[tag]))
    for tag, histogram in details.histograms.items():
        assert np.array_equal(histogram.counts, alone.histograms[tag].counts)
        assert np.allclose(histogram[2:], alone.histograms[tag][2:])
    assert details.images["val_images"].tobytes() == alone.images["val_images"].tobytes()


def test_several_processes_show_the_same_as_one() -> None:
    global WHOLE
    WHOLE = shown()  # the processes are forked
    for count in (2, 10):
        in_processes(_of_processes, count)
