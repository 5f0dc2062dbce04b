"""What trains and how fast: frozen parts, the optimiser and its groups, the learning rate."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from mldec.config.schema import Config, FreezeBatchNorm, Train
from mldec.data.settings import NO_AUGMENTATION
from mldec.errors import ConfigError, suggest

# The optimisers of torch that have a fused form, which can also leave a step out without a word to
# the host. SGD is not among them: leaving out its first step leaves its momentum uninitialised.
FUSED = (Adam, AdamW)

# How a step is computed, not what: it is a matter of the program, not of a checkpoint.
IMPLEMENTATION = ("fused", "foreach")

# torch expects an update of the weights before each step of the schedule. Ours counts the steps of
# the run: a resumed run goes straight to its step, and fp16 may skip the first update.
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")


def check_trainable(config: Config, make_backbone: Callable[[], nn.Module]) -> None:
    """Check the settings of this module before the data is read, as far as that is cheap.

    The names in `train.freeze` are looked for in a backbone without memory for its weights. Names
    in the head, and in parts of a user's own, are checked when the model has been built.

    Args:
        config: of the run, with all arguments of its parts.
        make_backbone: builds the backbone without its published weights.

    Raises:
        ConfigError: for an unknown optimiser or name, and if images whose tokens are computed once
            would be augmented.
    """
    check_optimizer(config.optim.name)
    if config.train.cache_features:
        _check_not_augmented(config.data)

    names = [name for name in config.train.freeze if name.split(".")[0] != "head"]
    if names and not config.plugins:
        with torch.device("meta"):
            _freeze_parameters(nn.ModuleDict({"backbone": make_backbone()}), names)


def freeze(model: nn.Module, train: Train) -> list[nn.Module]:
    """Freeze what the settings name, before the optimiser and the moving average are built.

    Args:
        model: its parameters that `train.freeze` names, and those of the batch norms that
            `train.freeze_batchnorm` is about, get no gradient from now on.
        train: for these two settings.

    Returns:
        The batch norms to keep in evaluation mode, in which they use and keep their statistics. As
        nothing of them changes, they compute the same as Query2Label's FrozenBatchNorm2d, but the
        tensors in a checkpoint keep their names.

    Raises:
        ConfigError: for a name that no parameter has, if nothing is left to train, or if there is
            no batch norm to freeze.
    """
    _freeze_parameters(model, train.freeze)
    norms = _freeze_batch_norms(model, train)

    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"train.freeze={train.freeze} leaves no parameter to train: name fewer parts"
        )
    return norms


def _check_not_augmented(data: Mapping[str, Any]) -> None:
    """Check that training images are the same in every epoch, so that their tokens are."""
    changing = [name for name, value in NO_AUGMENTATION.items() if data.get(name, value) != value]
    if changing:
        given = " ".join(f"data.{name}={data[name]}" for name in changing)
        wanted = " ".join(f"data.{name}={NO_AUGMENTATION[name]}" for name in changing)
        raise ConfigError(
            f"{given}: train.cache_features computes the tokens of each image once, and this would "
            f"change the images from epoch to epoch; pass {wanted}"
        )


def _freeze_parameters(model: nn.Module, names: Sequence[str]) -> None:
    parameters = dict(model.named_parameters())

    known = {beginning for name in parameters for beginning in _beginnings(name)}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"train.freeze: '{name}' is neither a parameter nor a module with parameters; "
                f"did you mean '{_nearest(name, known)}'?"
            )

    for name, parameter in parameters.items():
        if _is_named(name, names):
            parameter.requires_grad_(False)


def _freeze_batch_norms(model: nn.Module, train: Train) -> list[nn.Module]:
    """Freeze the parameters of the batch norms that the settings are about, and return these."""
    if train.freeze_batchnorm is None:
        return []

    norms: list[nn.Module] = [
        module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and (train.freeze_batchnorm is FreezeBatchNorm.all or _is_named(name, train.freeze))
    ]
    if not norms:
        where = "the model" if train.freeze_batchnorm is FreezeBatchNorm.all else "a frozen part"
        raise ConfigError(
            f"train.freeze_batchnorm={train.freeze_batchnorm.value}: "
            f"there is no batch norm in {where}; leave it out"
        )

    for norm in norms:
        norm.requires_grad_(False)
    return norms


def _is_named(name: str, names: Sequence[str]) -> bool:
    """Tell whether a parameter or a module is one of the names, or inside one."""
    return not set(names).isdisjoint(_beginnings(name))


def _beginnings(name: str) -> Iterator[str]:
    """Yield the name up to each dot, and the whole name: a, a.b, a.b.c."""
    words = name.split(".")
    for length in range(1, len(words) + 1):
        yield ".".join(words[:length])


def _nearest(name: str, known: set[str]) -> str:
    """Return the known name that was probably meant."""
    # A likely mistake: layer1 for backbone.network.layer1.
    inside = [candidate for candidate in known if candidate.endswith(f".{name}")]
    if inside:
        return min(inside, key=lambda candidate: (len(candidate), candidate))
    return get_close_matches(name, sorted(known), n=1, cutoff=0)[0]


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


def load_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Go on from a saved state.

    How a step is computed is no part of a run: a checkpoint may come from another device or another
    version, and its steps are computed here as those of a new run are.

    Raises:
        ValueError: if the state does not fit; torch may raise other errors, here or in the next
            step.
    """
    groups = [
        {**saved, **{key: own[key] for key in IMPLEMENTATION if key in own}}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False)
    ]
    groups += state["param_groups"][len(groups) :]
    optimizer.load_state_dict({**state, "param_groups": groups})

    # The fused kernels do not look at the shapes of what they are given.
    if isinstance(optimizer, FUSED):
        for parameter, averages in optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                if averages[name].shape != parameter.shape:
                    raise ValueError(f"an '{name}' has another shape than its parameter")


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
