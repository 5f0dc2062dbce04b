"""Which parameters decay, the optimiser, and the course of the learning rate."""

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from mldec.errors import CheckpointError, ConfigError, suggest

# The schedule counts steps, not updates: a resumed run goes straight to its step, and fp16 may skip the first update.
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters: biases and those of one dimension do not decay.

    Source: reference helper_functions.py, add_weight_decay. Frozen queries are in neither group.
    """
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (no_decay if parameter.ndim <= 1 or name.endswith(".bias") else decay).append(parameter)
    return [
        {"params": no_decay, "weight_decay": 0.0},
        {"params": decay, "weight_decay": weight_decay},
    ]


def check_optimizer(name: str) -> None:
    """Raise a `ConfigError` with the nearest name if timm has no such optimiser."""
    known = [str(entry) for entry in list_optimizers()]
    if name.lower() not in known:
        raise ConfigError(f"optim.name '{name}' is unknown{suggest(name, known)}")


def build_optimizer(
    model: nn.Module, *, name: str, lr: float, weight_decay: float, options: Mapping[str, Any]
) -> Optimizer:
    """Build an optimiser of timm's by name; "adam" is torch's, whose decay is L2, not decoupled (as officially).

    Raises:
        ConfigError: for an unknown name or option.
    """
    check_optimizer(name)
    try:
        return create_optimizer_v2(
            parameter_groups(model, weight_decay), opt=name, lr=lr, **options
        )
    except (
        TypeError,
        ValueError,
        AssertionError,
    ) as error:  # the last: an optimiser whose library is not installed
        raise ConfigError(
            f"optim.name={name} with optim.options {dict(options)} cannot be built: {error}"
        ) from error


def check_state(
    trial: Optimizer, state: dict[str, Any], groups: Sequence[Mapping[str, Any]], path: Any
) -> None:
    """Try a saved state of an optimiser: what it holds for each parameter, and one step.

    What an optimiser keeps is its own affair, so it is asked: what it holds after a step of its own is what the state
    must hold, in kind and shape, and it must be able to go on from there.

    Args:
        trial: a new optimiser of the same kind, on copies of the parameters, which it may change.
        state: the saved one, of plain containers and tensors.
        groups: the options of the optimiser that will take it over.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: if the state does not fit.
    """

    def misfit(what: str) -> CheckpointError:
        return CheckpointError(
            f"{path} does not fit the optimiser: {what}; use another copy, or init={path}"
        )

    parameters = [parameter for group in trial.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    trial.step()
    for number, parameter in enumerate(parameters):
        saved = state["state"].get(number, {})
        for name, own in trial.state[parameter].items():
            if name in saved and not _alike(own, saved[name]):
                raise misfit(f"the '{name}' of parameter {number} is of another shape or kind")
    try:
        trial.load_state_dict(copy.deepcopy(state))  # it would go on with the very tensors
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise misfit(_brief(error)) from error

    for number, (own, loaded) in enumerate(zip(groups, trial.param_groups, strict=True)):
        for name in own.keys() - {"params"}:
            if name not in loaded or not _alike(own[name], loaded[name]):
                raise misfit(f"the '{name}' of group {number} is missing or of another kind")
    try:
        trial.step()
    except Exception as error:  # arithmetic on what a stranger wrote ends in almost anything
        raise misfit(f"no step can be done from it ({_brief(error)})") from error


def _alike(own: Any, saved: Any) -> bool:
    """Tell whether a saved value is of the kind and shape of our own one; numbers must be finite."""
    if isinstance(own, Tensor):
        if not isinstance(saved, Tensor):
            return False
        return own.shape == saved.shape and own.dtype == saved.dtype
    if isinstance(own, list | tuple):
        if not isinstance(saved, list | tuple) or len(own) != len(saved):
            return False
        return all(map(_alike, own, saved))
    if isinstance(own, int | float) and not isinstance(own, bool):
        return type(saved) in (int, float) and math.isfinite(saved)
    return type(own) is type(saved)


def _brief(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def build_schedule(
    optimizer: Optimizer,
    *,
    name: str,
    lr: float,
    steps: int,
    pct_start: float = 0.2,
    warmup_steps: int = 0,
    min_lr: float = 0.0,
    warmup_lr: float = 1e-5,
    cooldown_steps: int = 0,
    epoch_steps: int = 1,
) -> LRScheduler:
    """Build the schedule of a run of `steps` optimiser steps; its only state is the number of steps done.

    Args:
        optimizer: its learning rates are set, and with "onecycle" its momentum (Adam's beta1: 0.95 to 0.85 and back).
        name: "onecycle" (reference train.py: from lr/25 up to lr, cosine down to lr/250,000); "cosine"; or
            "cosine_epochs", timm's, with one rate an epoch and a cosine whose first part the warm-up hides.
        lr: the highest rate.
        steps: length of the run.
        pct_start: "onecycle": share of the steps in which the rate rises.
        warmup_steps: "cosine": steps of linear rise from 0; "cosine_epochs": from `warmup_lr`.
        min_lr: "cosine", "cosine_epochs": the rate at the end.
        warmup_lr: "cosine_epochs": the rate at the start, if there is a warm-up.
        cooldown_steps: "cosine_epochs": steps of the run at `min_lr`, at its end.
        epoch_steps: "cosine_epochs": steps of an epoch.
    """
    if name == "onecycle":
        if pct_start * steps == 1:  # torch would divide by a rise of no length
            pct_start *= 1.5
        cycles = any(key in optimizer.defaults for key in ("betas", "momentum"))
        return OneCycleLR(
            optimizer, max_lr=lr, total_steps=steps, pct_start=pct_start, cycle_momentum=cycles
        )

    fall = partial(_cosine, lr=lr, min_lr=min_lr)

    def by_step(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return fall((step - warmup_steps) / max(1, steps - warmup_steps))

    def by_epoch(step: int) -> float:
        step -= step % epoch_steps
        if step < warmup_steps:
            return (warmup_lr + (lr - warmup_lr) * step / warmup_steps) / lr
        return fall(step / (steps - cooldown_steps))

    return LambdaLR(optimizer, by_epoch if name == "cosine_epochs" else by_step)


def _cosine(progress: float, *, lr: float, min_lr: float) -> float:
    """Return the rate at a share of the way down, as a share of the highest."""
    return (min_lr + (lr - min_lr) * (1 + math.cos(math.pi * min(1.0, progress))) / 2) / lr


def fast_forward(schedule: LRScheduler, step: int) -> None:
    """Put the schedule, and the optimiser's rates, where they are after `step` steps."""
    schedule.last_epoch = step - 1
    schedule.step()
