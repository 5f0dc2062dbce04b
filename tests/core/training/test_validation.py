"""Which weights are evaluated, and which result is the best."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mldec.checkpoint import Best
from mldec.config.compose import compose
from mldec.evaluation import Results
from mldec.training import trainer
from mldec.training.trainer import evaluate_weights, update_best


def results(**metrics: float) -> Results:
    return Results(metrics, {}, 3, [], None)


@pytest.mark.parametrize(
    ("before", "scores", "after"),
    [
        (Best(), {"ema": 5.0, "raw": 4.0}, Best("mAP", 5.0, "ema", 7)),
        (Best(), {"ema": 4.0, "raw": 5.0}, Best("mAP", 5.0, "raw", 7)),
        (Best(), {"raw": 0.0}, Best("mAP", 0.0, "raw", 7)),
        (Best(), {"ema": 5.0, "raw": 5.0}, Best("mAP", 5.0, "ema", 7)),
        (Best("mAP", 5.0, "raw", 3), {"ema": 5.0, "raw": 5.0}, Best("mAP", 5.0, "raw", 3, 1)),
        (Best("mAP", 5.0, "raw", 3, 2), {"ema": 4.9}, Best("mAP", 5.0, "raw", 3, 3)),
        (Best("mAP", 5.0, "raw", 3, 2), {"ema": 5.1}, Best("mAP", 5.1, "ema", 7)),
        (Best(), {"ema": math.nan, "raw": 1.0}, Best("mAP", 1.0, "raw", 7)),
        (Best(), {"ema": math.nan}, Best(evaluations_since=1)),
    ],
)
def test_the_highest_and_of_equal_ones_the_earliest(
    before: Best, scores: dict[str, float], after: Best
) -> None:
    found = {weights: results(mAP=value, CF1=99.0) for weights, value in scores.items()}
    assert update_best(before, "mAP", found, 7) == after


@pytest.mark.parametrize("averaged", [True, False])
def test_the_moving_average_comes_first_and_both_are_evaluated_alike(
    averaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, average = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    learner: Any = SimpleNamespace(model=raw, average=average if averaged else None)
    calls: list[Any] = []
    copied: list[Any] = []

    def evaluate_all(models: Any, data: Any, config: Any, **named: Any) -> list[Results]:
        assert copied == models, "their buffers become those of the main process first"
        calls.append((models, data, config, named))
        return [results(mAP=float(number)) for number, _ in enumerate(models)]

    monkeypatch.setattr(trainer, "evaluate_all", evaluate_all)
    monkeypatch.setattr(trainer.distributed, "copy_buffers", copied.append)
    config, device = compose(["+experiment=digits"]), torch.device("cpu")
    named: dict[str, Any] = {"device": device, "progress": object(), "observe": object()}
    data: Any = object()
    found = evaluate_weights(learner, data, config, **named)

    # In one go, so that each image is loaded once.
    models = [average, raw] if averaged else [raw]
    assert calls == [(models, data, config, named)]
    assert list(found) == (["ema", "raw"] if averaged else ["raw"])
    assert [result.metrics["mAP"] for result in found.values()] == [0.0, 1.0][: len(models)]
