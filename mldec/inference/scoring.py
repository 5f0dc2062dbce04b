"""From the logits of a model to scores in [0, 1]."""

import torch
from torch import Tensor

from mldec.checkpoint import Loaded

DEFAULT_THRESHOLD = 0.5  # of a model without thresholds, as in mldec.evaluate


@torch.no_grad()
def scores(loaded: Loaded, images: Tensor) -> Tensor:
    """Return the scores of all classes in [0, 1]: softmax if an image has one label, else sigmoid.

    They are calibrated if the checkpoint is. Otherwise, after training with the asymmetric loss,
    they are not probabilities: those of absent classes are often above 0.5.

    Args:
        loaded: from `checkpoint.load_model`.
        images: [B, 3, S, S], uint8 or float in [0, 1], on the model's device.

    Returns:
        float32 [B, K].
    """
    queries = loaded.classes.queries
    if queries is not None:
        queries = queries.to(images.device)

    return probabilities(loaded, loaded.model(images, queries))


def probabilities(loaded: Loaded, logits: Tensor) -> Tensor:
    """Return the scores [B, K], float32, of the logits [B, K] of a model; see `scores`."""
    logits = logits.float()
    if loaded.calibration is not None:
        logits = loaded.calibration.scaled(logits)
    return logits.softmax(-1) if loaded.classes.exclusive else logits.sigmoid()


def decided(scores: Tensor, thresholds: Tensor | None) -> Tensor:
    """Return which classes are present.

    Args:
        scores: float32 [B, K].
        thresholds: the lowest score of a present class, float32 [K] or [1]; None if an image has
            one label: the most probable class, the first one of several, is present.

    Returns:
        bool [B, K].
    """
    if thresholds is not None:
        return scores >= thresholds

    classes = torch.arange(scores.shape[1], device=scores.device)
    return classes == scores.argmax(1, keepdim=True)
