"""What trains and how fast: frozen parts, the optimiser and its groups, the learning rate."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers, muon
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


def check_trainable(config: Config) -> None:
    """Check optimiser and augmentation of a complete config, before the data is read."""
    check_optimizer(config.optim.name)
    if not config.train.cache_features:
        return

    # Images whose tokens are computed once must be the same in every epoch.
    data = config.data
    changing = [name for name, value in NO_AUGMENTATION.items() if data.get(name, value) != value]
    if changing:
        given = " ".join(f"data.{name}={data[name]}" for name in changing)
        wanted = " ".join(f"data.{name}={NO_AUGMENTATION[name]}" for name in changing)
        raise ConfigError(
            f"{given}: train.cache_features needs the same images in every epoch; pass {wanted}"
        )


def freeze(model: nn.Module, train: Train) -> list[nn.Module]:
    """Freeze what the settings name; return the batch norms to keep in evaluation mode.

    They compute the same as Query2Label's FrozenBatchNorm2d, with the names of batch norms.
    """
    parameters = dict(model.named_parameters())
    with_parameters = {name for name, part in model.named_modules() if [*part.parameters()]}
    known = {*parameters, *with_parameters} - {""}
    for name in train.freeze:
        if name not in known:
            # A likely mistake: layer1 for backbone.network.layer1.
            inside = [candidate for candidate in known if candidate.endswith(f".{name}")]
            near = min(inside, key=lambda candidate: (len(candidate), candidate), default=None)
            near = near or get_close_matches(name, sorted(known), n=1, cutoff=0)[0]
            raise ConfigError(
                f"train.freeze: '{name}' is neither a parameter nor a module with parameters; "
                f"did you mean '{near}'?"
            )
    for name, parameter in parameters.items():
        if _is_named(name, train.freeze):
            parameter.requires_grad_(False)

    norms: list[nn.Module] = []
    if train.freeze_batchnorm is not None:
        every = train.freeze_batchnorm is FreezeBatchNorm.all
        norms = [
            module
            for name, module in model.named_modules()
            if isinstance(module, _BatchNorm) and (every or _is_named(name, train.freeze))
        ]
        if not norms:
            where = "the model" if every else "a frozen part"
            raise ConfigError(f"train.freeze_batchnorm: no batch norm is in {where}; leave it out")
    for norm in norms:
        norm.requires_grad_(False)

    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"train.freeze={train.freeze} leaves nothing to train: name fewer parts")
    return norms


def _is_named(name: str, names: Sequence[str]) -> bool:
    """Tell whether a parameter or a module is one of the names, or inside one."""
    return any(f"{name}.".startswith(f"{beginning}.") for beginning in names)


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

    The first two groups have the rate `lr`, without and with weight decay; groups of other rates
    follow. Biases and one-dimensional parameters decay with `decay="all"` only. Sources:
    add_weight_decay of the official code, and param_groups_layer_decay of timm.
    """
    rates = _backbone_rates(model, lr if backbone_lr is None else backbone_lr, layer_decay)

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
            f"use optim.backbone_lr"
        )
    depth = backbone.layers_below_head()
    return {f"backbone.{name}": lr * layer_decay ** depth[name] for name in trainable}


def check_optimizer(name: str) -> None:
    """Check that timm has an optimiser of this name."""
    known = [str(entry) for entry in list_optimizers()]
    if name.lower() not in known:
        raise ConfigError(f"optim.name '{name}' is unknown{suggest(name, known)}")


def build_optimizer(
    model: nn.Module, *, name: str, lr: float, options: Mapping[str, Any], **grouping: Any
) -> Optimizer:
    """Build an optimiser by its name in timm; `grouping` is for `parameter_groups`.

    "adam" is torch's Adam, whose weight decay is L2 regularisation and not decoupled, as in the
    official code. It and "adamw" are fused, unless the options say how a step is computed.
    """
    check_optimizer(name)
    groups = parameter_groups(model, lr=lr, **grouping)

    try:
        chosen = {"fused", "foreach", "capturable", "differentiable"} & options.keys()
        kind = get_optimizer_class(name, bind_defaults=False)
        # On the meta device there are no fused kernels.
        devices = {parameter.device.type for parameter in model.parameters()}
        if kind in FUSED and not chosen and devices <= {"cpu", "cuda"}:
            options = {**options, "fused": True}
        return create_optimizer_v2(groups, opt=name, lr=lr, **options)
    except (TypeError, ValueError, AssertionError) as error:
        # timm asserts that the library of an optimiser is installed.
        raise ConfigError(
            f"optim.name={name} with optim.options {dict(options)} cannot be built: {error}"
        ) from error


def step_if(condition: Tensor, optimizer: Optimizer) -> None:
    """Do an optimizer step if `condition` is True; otherwise change nothing.

    Fused optimizers skip the step on the device through `found_inf`, without a host sync. For all
    other optimizers the host waits for the condition.

    Args:
        condition: bool [], on the device of the parameters.
        optimizer: The optimizer, with its gradients set.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        # GradScaler sets the same two attributes.
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = (~condition).float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale  # type: ignore[attr-defined]
        del optimizer.found_inf  # type: ignore[attr-defined]
        return

    if not condition:
        return
    if isinstance(optimizer, muon.Muon) and condition.device.type == "cpu":
        with _muon_in_float32():
            optimizer.step()
    else:
        optimizer.step()


@contextmanager
def _muon_in_float32() -> Iterator[None]:
    """Run timm's Muon in float32 instead of bfloat16, which timm has no setting for.

    On a CPU without bfloat16 instructions, a step of `digits` is ten times as fast in float32.
    """
    orthogonalize: Any = muon.zeropower_via_newtonschulz
    muon.zeropower_via_newtonschulz = partial(orthogonalize, dtype=torch.float32)
    try:
        yield
    finally:
        muon.zeropower_via_newtonschulz = orthogonalize


def load_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Go on from a saved state; how a step is computed is no part of a run, and stays as it is."""
    groups = []
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        implementation = {key: own[key] for key in IMPLEMENTATION if key in own}
        groups.append({**saved, **implementation})
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

    "onecycle", as in the official train.py, rises from lr/25 to lr and falls to lr/250,000 on a
    cosine, and Adam's beta1 goes from 0.95 to 0.85 and back. "cosine" has a linear warm-up from 0
    and then the whole cosine to `min_lr`. "cosine_epochs" is timm's: one rate per epoch, and a
    warm-up from `warmup_lr` that takes the place of the first part of the cosine. A group of
    parameters with another rate than `lr` has the same schedule in proportion.
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

    return LambdaLR(optimizer, by_epoch if name == "cosine_epochs" else by_step)


def fast_forward(schedule: LRScheduler, step: int) -> None:
    """Set the schedule and the optimiser's learning rates to where they are after `step` steps."""
    # Step from the step before: `step()` also sets the rates of the optimiser.
    schedule.last_epoch = step - 1
    schedule.step()
