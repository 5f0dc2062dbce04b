"""Which parameters of a model train, and how fast: frozen parts, batch norms, the optimiser."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from mldec.config.schema import Config, FreezeBatchNorm, Optim, Train
from mldec.data.view import NO_AUGMENTATION
from mldec.errors import ConfigError
from mldec.optim import build_optimizer, check_optimizer


def check_trainable(config: Config, make_backbone: Callable[[], nn.Module]) -> None:
    """Check the settings of this module before the data is read.

    They are tried on the backbone without memory for its weights. The names in the head, and the
    parts of a user's own, which need not support that, are checked when the model has been built.

    Args:
        config: of the run, with all arguments of its parts.
        make_backbone: builds the backbone without its published weights.

    Raises:
        ConfigError: as `freeze` and `optimizer`, and if images whose tokens are computed once would
            be augmented.
    """
    check_optimizer(config.optim.name)
    if config.train.cache_features:
        _check_not_augmented(config.data)

    train, optim = config.train, config.optim
    given = train.freeze or train.freeze_batchnorm or optim.backbone_lr or optim.layer_decay
    if config.plugins or not given:
        return

    with torch.device("meta"):
        trial = nn.ModuleDict({"backbone": make_backbone(), "head": nn.Linear(1, 1)})

    _freeze_parameters(trial, [name for name in train.freeze if name.split(".")[0] != "head"])
    _freeze_batch_norms(trial, train)
    optimizer(trial, optim)


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


def optimizer(model: nn.Module, optim: Optim) -> Optimizer:
    """Build the optimiser of a model whose frozen parts are frozen.

    Raises:
        ConfigError: from `build_optimizer`.
    """
    return build_optimizer(model, **{**vars(optim), "decay": optim.decay.value})


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
