"""Frozen parts, parameter groups, optimizers and learning-rate schedules."""

import math
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers, muon
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from mldec.config.schema import Config, FreezeBatchNorm, Schedule, ScheduleName, Train
from mldec.data.transforms import NO_AUGMENTATION
from mldec.errors import ConfigError, suggest
from mldec.losses.base import Loss

# Optimizers of torch that can skip a step on the device if they are fused.
FUSED = (Adam, AdamW, SGD)

# Implementation options are not restored from checkpoints.
IMPLEMENTATION = ("fused", "foreach")

# torch expects an optimizer step before each step of the schedule. We set the schedule to its step
# after a resume, and fp16 may skip the first step.
warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")


def check_trainable(config: Config) -> None:
    """Check the optimizer and `cache_features` of a complete config before the data is read."""
    check_optimizer(config.optim.name)
    if not config.train.cache_features:
        return

    # Cached tokens require the same images in every epoch.
    data = config.data
    given = []
    wanted = []
    for name, value in NO_AUGMENTATION.items():
        if data.get(name, value) != value:
            given.append(f"data.{name}={data[name]}")
            wanted.append(f"data.{name}={value}")
    if given:
        raise ConfigError(
            f"{' '.join(given)}: train.cache_features excludes augmentation; "
            f"pass {' '.join(wanted)}"
        )


def freeze(model: nn.Module, train: Train) -> list[nn.Module]:
    """Freeze parts of a model in place, and return the batch norms to keep in evaluation mode.

    Frozen batch norms compute the same as Query2Label's FrozenBatchNorm2d. Raises ConfigError for
    unknown names, or if all parameters are frozen.
    """
    # A misspelled name would leave a part trainable without notice.
    _check_names(model, train.freeze)
    for name, parameter in model.named_parameters():
        if _is_named(name, train.freeze):
            parameter.requires_grad_(False)

    norms: list[nn.Module] = []
    if train.freeze_batchnorm is not None:
        freeze_all = train.freeze_batchnorm is FreezeBatchNorm.all
        for name, module in model.named_modules():
            is_selected = freeze_all or _is_named(name, train.freeze)
            if isinstance(module, _BatchNorm) and is_selected:
                norms.append(module)
        if not norms:
            where = "the model" if freeze_all else "a frozen part"
            raise ConfigError(f"train.freeze_batchnorm: no batch norm is in {where}; remove it")
    # The statistics are frozen by the evaluation mode, and scale and shift as parameters.
    for norm in norms:
        norm.requires_grad_(False)

    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"train.freeze={train.freeze}: all parameters are frozen; freeze fewer")
    return norms


def _check_names(model: nn.Module, names: Sequence[str]) -> None:
    """Raise ConfigError for a name that is neither a parameter nor a module with parameters."""
    known = {name for name, _ in model.named_parameters()}
    for name, module in model.named_modules():
        if name and next(module.parameters(), None) is not None:
            known.add(name)

    for name in names:
        if name in known:
            continue
        # Suggest backbone.network.layer1 for layer1, or else the name with the closest spelling.
        inside = [candidate for candidate in known if candidate.endswith(f".{name}")]
        if inside:
            near = min(inside, key=lambda candidate: (len(candidate), candidate))
        else:
            near = get_close_matches(name, sorted(known), n=1, cutoff=0)[0]
        raise ConfigError(
            f"train.freeze: '{name}' is neither a parameter nor a module with parameters; "
            f"did you mean '{near}'?"
        )


def _is_named(name: str, names: Sequence[str]) -> bool:
    """Return True if a parameter or module is in `names`, or inside a module in `names`."""
    return any(f"{name}.".startswith(f"{prefix}.") for prefix in names)


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    decay: str = "weights",
    backbone_lr: float | None = None,
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Split the trainable parameters into groups with equal learning rate and weight decay.

    Biases and one-dimensional parameters have no weight decay, as in add_weight_decay of the
    official code. Layer-wise rates follow timm's param_groups_layer_decay.

    Args:
        model: The model.
        lr: Base learning rate.
        weight_decay: Weight decay.
        decay: With "all", biases and one-dimensional parameters also have weight decay.
        backbone_lr: Learning rate of the backbone. Default: `lr`.
        layer_decay: Factor between the learning rates of a backbone layer and of the layer above.

    Returns:
        Parameter groups. The first two have the rate `lr`: one without and one with weight decay.
    """
    if backbone_lr is None:
        backbone_lr = lr
    rates = _backbone_rates(model, backbone_lr, layer_decay)

    # The first two groups may be empty, so that their position in a checkpoint is fixed.
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {(lr, False): [], (lr, True): []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = decay == "all" or (parameter.ndim > 1 and not name.endswith(".bias"))
        groups.setdefault((rates.get(name, lr), decays), []).append(parameter)

    result = []
    for (rate, decays), parameters in groups.items():
        group: dict[str, Any] = {"params": parameters, "lr": rate, "weight_decay": 0.0}
        if decays:
            group["weight_decay"] = weight_decay
        result.append(group)
    return result


def _backbone_rates(model: nn.Module, lr: float, layer_decay: float | None) -> dict[str, float]:
    """Map the full name of each trainable backbone parameter to its learning rate."""
    backbone = getattr(model, "backbone", None)
    if backbone is None:
        return {}
    trainable = [name for name, value in backbone.named_parameters() if value.requires_grad]
    if layer_decay is None:
        return {f"backbone.{name}": lr for name in trainable}

    if not hasattr(backbone, "layers_below_head"):
        raise ConfigError(
            f"optim.layer_decay: {type(backbone).__name__} has no method layers_below_head; "
            f"use optim.backbone_lr"
        )
    depth = backbone.layers_below_head()
    return {f"backbone.{name}": lr * layer_decay ** depth[name] for name in trainable}


def check_optimizer(name: str) -> None:
    """Raise ConfigError if timm has no optimizer of this name."""
    known = [str(entry) for entry in list_optimizers()]
    if name.lower() not in known:
        raise ConfigError(f"optim.name={name}: unknown optimizer{suggest(name, known)}")


def build_optimizer(
    model: nn.Module,
    *,
    name: str,
    lr: float,
    options: Mapping[str, Any],
    loss: Loss | None = None,
    **grouping: Any,
) -> Optimizer:
    """Build an optimizer by its name in timm.

    "adam" is torch's Adam with L2 regularization instead of decoupled weight decay, as in the
    official code. "adam" and "adamw" are fused, and on CUDA also "sgd" and "momentum", unless
    `options` select an implementation. `options` are passed to the optimizer, `grouping` to
    `parameter_groups`. The parameters of the loss, if any, are the last group.

    Raises:
        ConfigError: If the optimizer cannot be built.
    """
    check_optimizer(name)
    groups = parameter_groups(model, lr=lr, **grouping)
    if loss is not None and next(loss.parameters(), None) is not None:
        rate = lr * loss.lr_factor
        groups.append({"params": list(loss.parameters()), "lr": rate, "weight_decay": 0.0})

    try:
        kind = get_optimizer_class(name, bind_defaults=False)
        # The meta device has no fused kernels. SGD on a CPU gains nothing from them.
        devices = {parameter.device.type for parameter in model.parameters()}
        supported = {"cuda"} if kind is SGD else {"cuda", "cpu"}
        chosen = options.keys() & {"fused", "foreach", "capturable", "differentiable", "dampening"}
        if kind in FUSED and devices <= supported and not chosen:
            options = {**options, "fused": True}
        # The groups already have their rates and weight decay, so timm must not group them again.
        optimizer = create_optimizer_v2(groups, opt=name, lr=lr, **options)
        if kind is not SGD or not options.get("fused"):
            return optimizer
        # torch creates the momentum of SGD in the first step, also in a skipped one. Momentum of 0
        # gives the same first step without dampening, which is 0 by default.
        for group in optimizer.param_groups:
            if group["momentum"]:
                for parameter in group["params"]:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer
    except (TypeError, ValueError, AssertionError) as error:
        # timm raises AssertionError if the library of an optimizer is not installed.
        raise ConfigError(f"optim.name={name} optim.options={dict(options)}: {error}") from error


def step_if(condition: Tensor, optimizer: Optimizer) -> None:
    """Do an optimizer step if `condition` is True.

    Fused optimizers skip the step on the device through `found_inf`, without a host sync. For all
    other optimizers the host waits for the condition, a bool [] on the device: timm's LAMB and Muon
    count their steps on the host.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        # GradScaler sets the same two attributes.
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = (~condition).float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale  # type: ignore[attr-defined]
        del optimizer.found_inf  # type: ignore[attr-defined]
        return

    # This reads the condition from the device.
    if not condition:
        return
    if isinstance(optimizer, muon.Muon) and condition.device.type == "cpu":
        with _muon_in_float32():
            optimizer.step()
    else:
        optimizer.step()


@contextmanager
def _muon_in_float32() -> Iterator[None]:
    """Run timm's Muon in float32. timm has no setting for it, and uses bfloat16.

    float32 is ten times as fast on a CPU without bfloat16 instructions.
    """
    orthogonalize: Any = muon.zeropower_via_newtonschulz
    muon.zeropower_via_newtonschulz = partial(orthogonalize, dtype=torch.float32)
    try:
        yield
    finally:
        muon.zeropower_via_newtonschulz = orthogonalize


def load_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load the state of an optimizer, except for its implementation options."""
    groups = []
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        implementation = {key: own[key] for key in IMPLEMENTATION if key in own}
        groups.append({**saved, **implementation})
    optimizer.load_state_dict({**state, "param_groups": groups})

    # Fused kernels do not check shapes.
    if isinstance(optimizer, FUSED):
        for parameter, averages in optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                if name in averages and averages[name].shape != parameter.shape:
                    raise ValueError(f"'{name}' has another shape than its parameter")


def build_schedule(
    optimizer: Optimizer, schedule: Schedule, *, lr: float, steps: int, epochs: int
) -> LRScheduler:
    """Build a learning-rate schedule. Its only state is the number of finished steps.

    - "onecycle", as in the official train.py: the rate rises from lr/25 to lr and falls to
      lr/250,000 on a cosine. Adam's beta1 goes from 0.95 to 0.85 and back.
    - "cosine": a linear warmup of n steps from lr/(n + 1), followed by a half cosine from `lr` to
      `min_lr`.
    - "cosine_epochs", as in timm: one rate per epoch. The warmup from `warmup_lr` replaces the
      first part of the half cosine.
    - "step", as torch's MultiStepLR: `gamma` multiplies the rate at each milestone. A linear
      warmup starts at 0 in the first step and reaches `lr` after the warmup epochs.

    The rates of parameter groups with another rate than `lr` are scaled in proportion.

    Args:
        optimizer: The optimizer.
        schedule: Settings, whose epochs are converted to steps.
        lr: Maximum learning rate.
        steps: Number of optimizer steps of the run.
        epochs: Number of epochs of the run.
    """
    if schedule.name is ScheduleName.onecycle:
        pct_start = 0.2 if schedule.pct_start is None else schedule.pct_start
        # torch divides by zero if the rise ends at step 0.
        if pct_start * steps == 1:
            pct_start *= 1.5
        return OneCycleLR(
            optimizer,
            max_lr=[group["lr"] for group in optimizer.param_groups],
            total_steps=steps,
            pct_start=pct_start,
            cycle_momentum="betas" in optimizer.defaults or "momentum" in optimizer.defaults,
        )

    steps_per_epoch = steps / epochs
    epoch_steps = round(steps_per_epoch)
    warmup_steps = round((schedule.warmup_epochs or 0) * steps_per_epoch)
    milestones = [round(epoch * steps_per_epoch) for epoch in schedule.milestones]
    # A short trial of a long recipe still needs epochs before the cooldown.
    cooldown_epochs = min(schedule.cooldown_epochs or 0, epochs // 2)
    cooldown_steps = round(cooldown_epochs * steps_per_epoch)
    min_lr = schedule.min_lr or 0.0
    warmup_lr = 1e-5 if schedule.warmup_lr is None else schedule.warmup_lr
    gamma = 0.1 if schedule.gamma is None else schedule.gamma

    # LambdaLR multiplies the rate of each group by the return value of `by_step`, `by_epoch` or
    # `by_milestone`. MultiStepLR depends on the previous rate, so `fast_forward` cannot set it.
    def cosine(progress: float) -> float:
        return (min_lr + (lr - min_lr) * (1 + math.cos(math.pi * min(1.0, progress))) / 2) / lr

    def by_step(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        return cosine((step - warmup_steps) / max(1, steps - warmup_steps))

    def by_epoch(step: int) -> float:
        step -= step % epoch_steps
        if step < warmup_steps:
            return (warmup_lr + (lr - warmup_lr) * step / warmup_steps) / lr
        return cosine(step / (steps - cooldown_steps))

    def by_milestone(step: int) -> float:
        factor = gamma ** bisect_right(milestones, step)
        if step < warmup_steps:
            factor *= step / warmup_steps
        return factor

    if schedule.name is ScheduleName.step:
        return LambdaLR(optimizer, by_milestone)
    if schedule.name is ScheduleName.cosine_epochs:
        return LambdaLR(optimizer, by_epoch)
    return LambdaLR(optimizer, by_step)


def fast_forward(schedule: LRScheduler, step: int) -> None:
    """Set the schedule and the rates of its optimizer to their state after `step` steps."""
    # Start one step before: `step()` also sets the rates of the optimizer.
    schedule.last_epoch = step - 1
    schedule.step()
