"""What labels mean: each task's classes, its evaluator, and settings that it refuses at once."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mldec.data.table import encode_paths, from_dense
from mldec.data.tasks import MultiLabel, PartialLabels, SingleLabel, Task
from mldec.data.types import Classes, ImageFiles, LabelledImages
from mldec.errors import ConfigError
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator

THREE = Classes(("cat", "dog", "eel"))
LOGITS = torch.tensor([[1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])  # sigmoid 0.73
TARGETS = torch.eye(3, dtype=torch.int8)


def images() -> LabelledImages:
    storage = ImageFiles(Path("/images"), encode_paths(["a", "b", "c"]), "")
    return LabelledImages(storage, from_dense(np.eye(3, dtype=np.int8)), THREE.names)


@pytest.mark.parametrize(
    ("task", "exclusive", "evaluator", "metric"),
    [
        (MultiLabel(), False, MultiLabelEvaluator, "mAP"),
        (PartialLabels(), False, PartialLabelEvaluator, "mAP_partial"),
        (SingleLabel(), True, SingleLabelEvaluator, "top1"),
        (SingleLabel(suffix="_real"), True, SingleLabelEvaluator, "top1_real"),
    ],
    ids=str,
)
def test_every_image_is_used_and_the_evaluator_is_right(
    task: Task, exclusive: bool, evaluator: type, metric: str
) -> None:
    for part in (task.training, task.validation):
        used, classes = part(images())
        assert used.storage.name(2) == "/images/c"
        assert np.array_equal(used.labels.dense(), TARGETS.numpy())
        assert classes == Classes(THREE.names, exclusive=exclusive)

    made = task.evaluator(classes)
    assert type(made) is evaluator
    made.update(LOGITS, TARGETS)
    assert next(iter(made.compute())) == metric
    again = task.evaluator(classes)  # a new one: nothing is left of what the first was told
    again.update(-LOGITS, TARGETS)
    assert again.compute()[metric] < 100


@pytest.mark.parametrize(("threshold", "recall"), [(0.7, 100), (0.75, 0)])
def test_the_threshold_is_a_probability(threshold: float, recall: float) -> None:
    evaluator = MultiLabel(threshold).evaluator(THREE)
    evaluator.update(LOGITS, TARGETS)
    assert evaluator.compute()["OR"] == recall


def test_top_k() -> None:
    def metrics(task: SingleLabel) -> dict[str, float]:
        evaluator = task.evaluator(THREE)
        evaluator.update(LOGITS, TARGETS)
        return evaluator.compute()

    assert "top2" in metrics(SingleLabel(top_k=2))
    assert "top5" not in metrics(SingleLabel())  # of three classes


def test_partial_labels_have_a_threshold_too() -> None:
    low, high = (PartialLabels(threshold).evaluator(THREE) for threshold in (0.7, 0.75))
    for evaluator in (low, high):
        evaluator.update(LOGITS, TARGETS)
    assert (low.compute()["OR"], high.compute()["OR"]) == (100, 0)


@pytest.mark.parametrize("threshold", [0.0, 1.0, -1.0, 1.5])
@pytest.mark.parametrize("task", [MultiLabel, PartialLabels])
def test_a_wrong_threshold_is_refused_with_the_task(
    task: type[MultiLabel | PartialLabels], threshold: float
) -> None:
    with pytest.raises(ConfigError, match=f"threshold.*{threshold}"):
        task(threshold)


def test_a_wrong_top_k_is_refused_with_the_task_or_the_classes() -> None:
    for top_k in (1, 0, -1):
        with pytest.raises(ConfigError, match=f"top_k.*{top_k}"):
            SingleLabel(top_k)
    task = SingleLabel(top_k=4)
    with pytest.raises(ConfigError, match="top_k 4 needs as many classes; there are 3"):
        task.evaluator(THREE)
