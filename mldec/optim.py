"""The optimiser, its parameter groups, and the schedule of the learning rate."""

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from mldec.errors import CheckpointError, ConfigError, suggest

# The optimisers of torch that have a fused form, which can also leave a step out without a word to
# the host. SGD is not among them: leaving out its first step leaves its momentum uninitialised.
FUSED = (Adam, AdamW)

# How a step is computed, not what: it is a matter of the program, not of a checkpoint.
IMPLEMENTATION = ("fused", "foreach")

# torch expects an update of the weights before each step of the schedule. Ours counts the steps of
# the run: a resumed run goes straight to its step, and fp16 may skip the first update.
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    decay: str = "weights",
    backbone_lr: float | None = None,
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Split the trainable parameters into groups of one learning rate and one weight decay.

    Frozen parameters are in no group. The first two groups have the rate `lr`, without and with
    weight decay; groups of other rates follow. Sources: add_weight_decay in helper_functions.py of
    the official code, and param_groups_layer_decay of timm.

    Args:
        model: its attribute `backbone` is needed only for the two last arguments.
        lr: of all parameters but those that the two last arguments are about.
        weight_decay: of the parameters that decay.
        decay: "weights": biases and one-dimensional parameters, such as those of norms, do not
            decay; "all": every parameter decays.
        backbone_lr: of the parameters of the backbone; None: `lr`.
        layer_decay: the rate of a layer of the backbone is multiplied by this for each layer
            between it and the head, and once more; None: 1.

    Raises:
        ConfigError: if the backbone has no layers for `layer_decay`, or nothing in it trains.
    """
    rates = _backbone_rates(model, lr if backbone_lr is None else backbone_lr, layer_decay)
    if (backbone_lr or layer_decay) and not rates:
        setting = "optim.backbone_lr" if backbone_lr else "optim.layer_decay"
        raise ConfigError(f"{setting} has no effect on a frozen backbone: leave it out")

    # The first two are always there, so that the groups of a checkpoint are those of its run.
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {(lr, False): [], (lr, True): []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = decay == "all" or (parameter.ndim > 1 and not name.endswith(".bias"))
        groups.setdefault((rates.get(name, lr), decays), []).append(parameter)

    return [
        {"params": parameters, "lr": rate, "weight_decay": weight_decay if decays else 0.0}
        for (rate, decays), parameters in groups.items()
    ]


def _backbone_rates(model: nn.Module, lr: float, layer_decay: float | None) -> dict[str, float]:
    """Return the learning rate of each trainable parameter of the backbone, by its full name."""
    backbone = getattr(model, "backbone", None)
    if backbone is None:
        return {}
    trainable = [name for name, value in backbone.named_parameters() if value.requires_grad]
    if layer_decay is None:
        return {f"backbone.{name}": lr for name in trainable}

    if not hasattr(backbone, "layers_below_head"):
        raise ConfigError(
            f"optim.layer_decay: {type(backbone).__name__} does not say which layers it has; "
            f"leave it out, or give the backbone a rate of its own with optim.backbone_lr"
        )
    depth = backbone.layers_below_head()
    return {f"backbone.{name}": lr * layer_decay ** depth[name] for name in trainable}


def check_optimizer(name: str) -> None:
    """Check that timm has an optimiser of this name.

    Raises:
        ConfigError: if it has none; the message suggests the nearest name.
    """
    known = [str(entry) for entry in list_optimizers()]
    if name.lower() not in known:
        raise ConfigError(f"optim.name '{name}' is unknown{suggest(name, known)}")


def build_optimizer(
    model: nn.Module,
    *,
    name: str,
    lr: float,
    options: Mapping[str, Any],
    **grouping: Any,
) -> Optimizer:
    """Build an optimiser by its name in timm.

    "adam" is torch's Adam, whose weight decay is L2 regularisation and not decoupled, as in the
    official code. It and "adamw" are fused, unless the options say how a step is computed.

    Args:
        model: its trainable parameters are optimised.
        name: of the optimiser in timm.
        lr: highest learning rate of the parameters that have no rate of their own.
        options: further keyword arguments of the optimiser.
        grouping: further arguments of `parameter_groups`, such as the weight decay.

    Raises:
        ConfigError: for an unknown name or option, or from `parameter_groups`.
    """
    check_optimizer(name)
    groups = parameter_groups(model, lr=lr, **grouping)

    try:
        chosen = {"fused", "foreach", "capturable", "differentiable"} & options.keys()
        kind = get_optimizer_class(name, bind_defaults=False)
        if kind in FUSED and not chosen and _has_fused_kernels(groups):
            options = {**options, "fused": True}
        return create_optimizer_v2(groups, opt=name, lr=lr, **options)
    except (TypeError, ValueError, AssertionError) as error:
        # timm asserts that the library of an optimiser is installed.
        raise ConfigError(
            f"optim.name={name} with optim.options {dict(options)} cannot be built: {error}"
        ) from error


def _has_fused_kernels(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether all parameters are where fused steps run; on the meta device none do."""
    return all(
        parameter.device.type in ("cpu", "cuda")
        for group in groups
        for parameter in group["params"]
    )


def step_if(go: Tensor, optimizer: Optimizer) -> None:
    """Do a step, or leave weights and state as they are, without waiting for the device.

    The learning rates are those of the host, and so are the counters of steps that some optimisers
    keep there: these count a step that is left out.

    Args:
        go: whether to do the step, bool [] on the device of the parameters.
        optimizer: whose gradients are set; they may have any value if `go` is false.
    """
    # The fused kernels know the condition, as GradScaler has it: they do nothing if it is 1.
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer.grad_scale, optimizer.found_inf = None, (~go).float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        return

    # All others do a step with gradients of 0, and what it changed is put back. A state that is new
    # has nothing to go back to: it stays that of a step without gradients.
    parameters = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    weights = [parameter.detach().clone() for parameter in parameters]
    states = [_cloned(optimizer.state[parameter], go.device) for parameter in parameters]
    for parameter in parameters:
        parameter.grad.masked_fill_(~go, 0)
    optimizer.step()

    with torch.no_grad():
        for parameter, weight, state in zip(parameters, weights, states, strict=True):
            parameter.copy_(torch.where(go, parameter, weight))
            for name, before in state.items():
                after = optimizer.state[parameter][name]
                after.copy_(torch.where(go, after, before))


def _cloned(state: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Return copies of the tensors on a device that an optimiser keeps of a parameter."""
    return {
        name: value.clone()
        for name, value in state.items()
        if isinstance(value, Tensor) and value.device == device
    }


def own_implementation(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return a saved state that goes on with the implementation of this optimiser.

    How a step is computed is no part of a run: a checkpoint may come from another device or another
    version, and its steps are computed here as those of a new run are.

    Args:
        state: the saved state; it is not changed.
        optimizer: that will load it.
    """
    groups = [
        {**saved, **{key: own[key] for key in IMPLEMENTATION if key in own}}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False)
    ]
    groups += state["param_groups"][len(groups) :]
    return {**state, "param_groups": groups}


def check_state(
    trial: Optimizer, state: dict[str, Any], groups: Sequence[Mapping[str, Any]], path: Any
) -> None:
    """Check that an optimiser can continue from a saved state, by trying it.

    Each optimiser has a state of its own form. So a trial optimiser does one step, and the saved
    values must be of the same kind and shape as those that it has then. Finally it loads the saved
    state and does another step.

    Args:
        trial: a new optimiser of the same kind, on copies of the parameters; it changes them.
        state: the saved state, of plain containers and tensors.
        groups: the parameter groups of the optimiser that will load the state.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: if the state does not fit.
    """

    def misfit(what: str) -> CheckpointError:
        return CheckpointError(
            f"{path} does not fit the optimiser: {what}; use another copy, or init={path}"
        )

    # 1. A step with zero gradients makes the optimiser create its state.
    parameters = [parameter for group in trial.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    trial.step()

    # 2. Compare that state with the saved one, parameter by parameter.
    for number, parameter in enumerate(parameters):
        saved = state["state"].get(number, {})
        for name, own in trial.state[parameter].items():
            if name in saved and not _alike(own, saved[name]):
                raise misfit(f"the '{name}' of parameter {number} is of another shape or kind")

    # 3. Load a copy of it: the optimiser would otherwise update the saved tensors themselves.
    try:
        trial.load_state_dict(copy.deepcopy(state))
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise misfit(_brief(error)) from error

    for number, (own, loaded) in enumerate(zip(groups, trial.param_groups, strict=True)):
        for name in own.keys() - {"params"}:
            if name not in loaded or not _alike(own[name], loaded[name]):
                raise misfit(f"the '{name}' of group {number} is missing or of another kind")

    # 4. Continue from it. Arithmetic on values from a stranger's file may raise almost anything.
    try:
        trial.step()
    except Exception as error:
        raise misfit(f"no step can be done from it ({_brief(error)})") from error


def _alike(own: Any, saved: Any) -> bool:
    """Tell whether a saved value has the kind and shape of our own one; numbers must be finite."""
    if isinstance(own, Tensor):
        if not isinstance(saved, Tensor):
            return False
        return own.shape == saved.shape and own.dtype == saved.dtype

    if isinstance(own, list | tuple):
        if not isinstance(saved, list | tuple) or len(own) != len(saved):
            return False
        return all(map(_alike, own, saved))

    # A bool is an int to Python, but here it is a kind of its own.
    if isinstance(own, int | float) and not isinstance(own, bool):
        return type(saved) in (int, float) and math.isfinite(saved)
    return type(own) is type(saved)


def _brief(error: BaseException) -> str:
    """Return the type and the message of an error, in one line of at most 160 characters."""
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
    """Build the learning-rate schedule of a run; its only state is the number of finished steps.

    There are three: "onecycle", as in the official train.py, rises from lr/25 to lr and falls to
    lr/250,000 on a cosine. "cosine" has a linear warm-up and then the whole cosine. "cosine_epochs"
    is timm's: one rate per epoch, and a warm-up that takes the place of the first part of the
    cosine.

    A group of parameters with another rate than `lr` has the same schedule in proportion.

    Args:
        optimizer: new, with the highest rate of each group; its learning rates are set, and with
            "onecycle" its momentum (for Adam beta1, from 0.95 to 0.85 and back).
        name: of the schedule.
        lr: the highest rate, to which `min_lr` and `warmup_lr` refer.
        steps: optimiser steps of the run.
        pct_start: "onecycle": fraction of the steps in which the rate rises, in (0, 1).
        warmup_steps: "cosine": steps of linear rise from 0; "cosine_epochs": from `warmup_lr`.
        min_lr: "cosine", "cosine_epochs": the rate at the end.
        warmup_lr: "cosine_epochs": the rate at the start, if there is a warm-up.
        cooldown_steps: "cosine_epochs": steps at `min_lr`, at the end of the run.
        epoch_steps: "cosine_epochs": optimiser steps per epoch.
    """
    if name == "onecycle":
        # A rise that ends at step 0 would make torch divide by zero.
        if pct_start * steps == 1:
            pct_start *= 1.5

        cycles = any(key in optimizer.defaults for key in ("betas", "momentum"))
        return OneCycleLR(
            optimizer,
            max_lr=[group["lr"] for group in optimizer.param_groups],
            total_steps=steps,
            pct_start=pct_start,
            cycle_momentum=cycles,
        )

    # LambdaLR multiplies the rate of each group by what these functions return.
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
    """Return the rate as a fraction of `lr`, for the finished fraction of the cosine."""
    return (min_lr + (lr - min_lr) * (1 + math.cos(math.pi * min(1.0, progress))) / 2) / lr


def fast_forward(schedule: LRScheduler, step: int) -> None:
    """Set the schedule and the optimiser's learning rates to where they are after `step` steps."""
    # Step from the step before: `step()` also sets the rates of the optimiser.
    schedule.last_epoch = step - 1
    schedule.step()
