"""The base class of losses, and the adapter for other modules and functions."""

import inspect
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn

from mldec.errors import ConfigError


class Loss(nn.Module):
    """Base class of losses. The attributes describe to the trainer how a loss is used.

    Attributes:
        reduction: "sum" or "mean" over the batch. The learner rescales the loss accordingly, so
            that the gradient of a batch does not depend on the number of ranks and micro-batches.
        exclusive: True for single-label losses and False for multi-label losses. None allows both.
        soft: Whether targets between 0 and 1 are allowed (`mix.labels=weighted`, `mix.smoothing`).
        per_image: Whether the loss keeps a state per training image in its `state_dict`. Only then
            `forward` receives the dataset indices of the images.
        lr_factor: Learning rate of the parameters of the loss, if any, relative to `optim.lr`.
        progress: Finished fraction of the run, in [0, 1), which the learner sets before each step.
            A loss must not use any other state of the run, because only the step is restored on
            resume.
        logit_adjustment: Tensor [K] that the loss adds to the logits, or None.
            `train.start_at_frequency` subtracts it from the initial biases.
        all_reduces: Whether the loss may exchange data between ranks, which is so if its
            constructor has the argument `all_reduce`.
        name: Name of the class, for messages.
    """

    reduction: Literal["sum", "mean"] = "mean"
    exclusive: bool | None = None
    soft: bool = False
    per_image: bool = False
    lr_factor: float = 1.0
    progress: float = 0.0
    logit_adjustment: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        # A buffer, which moves to the device with the loss.
        self.register_buffer("logit_adjustment", None)
        self.all_reduces = _has_all_reduce(type(self))
        self.name = type(self).__name__

    def forward(self, logits: Tensor, targets: Tensor, index: Tensor | None = None) -> Tensor:
        """Compute the scalar loss of a batch.

        Args:
            logits: Logits [B, K], in float32 or float64 during training.
            targets: Targets [B, K]: 1, 0, -1 (not annotated), or values between 0 and 1.
            index: Dataset indices [B] of the images, if `per_image` is set.
        """
        raise NotImplementedError

    def start_epoch(self, epoch: int, epochs: int, predict: Callable[[], Tensor]) -> None:
        """Prepare for an epoch. It is called before the first step of each epoch.

        Args:
            epoch: Number of the epoch, counted from 0.
            epochs: Number of epochs of the run.
            predict: Returns logits [N, K] of all training images, NaN for unreadable images.
        """

    def estimated_prior(self) -> Tensor | None:
        """Return the class priors [K] that the loss has estimated, for class_prior.csv, or None."""
        return None

    def reduce(self, losses: Tensor) -> Tensor:
        """Return the sum or the mean of the losses [B, K], according to `reduction`."""
        if self.reduction == "sum":
            return losses.sum()
        return losses.mean()


def _has_all_reduce(kind: type[nn.Module]) -> bool:
    return "all_reduce" in inspect.signature(kind).parameters


def as_loss(loss: Callable[..., Tensor]) -> Loss:
    """Return a loss of any origin as a `Loss`.

    Args:
        loss: A `Loss`, or another module or function of logits and targets [B, K], such as
            `nn.BCEWithLogitsLoss()`. It needs the attribute `reduction`, and may have the other
            attributes of `Loss`.

    Raises:
        ConfigError: If `reduction` is missing or invalid.
    """
    adapted = loss if isinstance(loss, Loss) else _Adapted(loss)
    # The learning rate depends on it, so third-party losses have no default.
    declares = adapted is loss or hasattr(loss, "reduction")
    if not declares or adapted.reduction not in ("sum", "mean"):
        raise ConfigError(
            f'loss: {adapted.name} needs an attribute reduction, "sum" or "mean"; see '
            f"docs/extending.md"
        )
    return adapted


class _Adapted(Loss):
    """A module or function that does not inherit from `Loss`."""

    ADOPTED = (
        "reduction",
        "exclusive",
        "soft",
        "per_image",
        "lr_factor",
        "logit_adjustment",
        "start_epoch",
    )

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.loss = loss
        # A function has no state.
        self.module = loss if isinstance(loss, nn.Module) else nn.Module()
        self.all_reduces = _has_all_reduce(type(self.module))
        self.name = getattr(loss, "__name__", type(loss).__name__)
        for name in self.ADOPTED:
            if hasattr(loss, name):
                setattr(self, name, getattr(loss, name))

    def forward(self, logits: Tensor, targets: Tensor, index: Tensor | None = None) -> Tensor:
        self.module.progress = self.progress  # type: ignore[assignment]
        if self.per_image:
            return self.loss(logits, targets, index)
        return self.loss(logits, targets)

    # Checkpoints contain the tensors under the names that the module itself gives them.
    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.state_dict(*args, **options)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return self.module.load_state_dict(*args, **options)
