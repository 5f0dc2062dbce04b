"""Evaluation during training: which weights are evaluated, and which result is the best so far."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mldec.checkpoint import Best
from mldec.config.schema import Config
from mldec.data.base import DataModule
from mldec.data.loader import Batch
from mldec.evaluation import Results, evaluate_all
from mldec.runtime import distributed
from mldec.training.step import Learner


def evaluate_weights(
    learner: Learner,
    data: DataModule,
    config: Config,
    *,
    device: torch.device,
    progress: Any,
    observe: Callable[[Batch, Tensor], None] | None = None,
) -> dict[str, Results]:
    """Evaluate the moving average, if it has begun, and the raw weights.

    Args:
        learner: the model in training; its buffers become those of the main process.
        data: the dataset.
        config: for the batch size, workers and precision.
        device: of the model.
        progress: wraps the batches; see `evaluate_all`.
        observe: called with the batches and logits of the first weights; see `evaluate_all`.

    Returns:
        The results of "ema", if the moving average has begun, and then of "raw".
    """
    models: dict[str, nn.Module] = {}
    if learner.average is not None:
        models["ema"] = learner.average
    models["raw"] = learner.model

    # Batch-norm statistics differ between processes; a checkpoint holds the main one's.
    for model in models.values():
        distributed.copy_buffers(model)

    results = evaluate_all(
        list(models.values()), data, config, device=device, progress=progress, observe=observe
    )
    return dict(zip(models, results, strict=True))


def update_best(best: Best, metric: str, results: Mapping[str, Results], epoch: int) -> Best:
    """Return the best result after one more evaluation; of equal ones the earliest.

    Args:
        best: the best result before.
        metric: that decides; higher is better.
        results: by the name of the weights; of equal ones the first counts.
        epoch: that the evaluation followed, from 1.
    """
    best = dataclasses.replace(best, evaluations_since=best.evaluations_since + 1)
    for weights, result in results.items():
        value = result.metrics[metric]
        if value > best.value:
            best = Best(metric, value, weights, epoch)
    return best
