"""Signatures of the parts: the classes and functions of `_target_` nodes, and their arguments."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from torch import nn

from mldec.data.sampling import Sampling
from mldec.data.settings import FileSettings, Observed, Source
from mldec.data.transforms import View
from mldec.data.types import DataModule
from mldec.errors import ConfigError, naming_errors

# Modules in which parts must be defined. plugins=[...] adds third-party packages.
HOMES = {
    "data": ("mldec.data.readers", "mldec.data.digits"),
    "backbone": ("mldec.backbones",),
    "head": ("mldec.heads",),
    "loss": ("mldec.losses",),
}
# Arguments that `build` passes to the target. They are not allowed in a node.
RUNTIME_ARGUMENTS = {
    "data": ("annotations",),
    "backbone": ("blocks",),
    "head": ("in_features", "num_classes", "blocks"),
    "loss": ("label_counts", "train_images", "all_reduce"),
}
# nn.Module without an overridden __init__ has the signature (*args, **kwargs).
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# Additional settings of all readers of image files, as flat keys of the node (data.cutout=0).
SHARED = (View, FileSettings, Sampling, Observed)
REQUIRED = inspect.Parameter.empty

# Annotation of an argument, and its default or REQUIRED.
Argument = tuple[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Resuming:
    """Setting of all `data` nodes; see `start.check_same_run`."""

    changed: Literal["refuse", "allow"] = "refuse"  # resume a run on different training data


def locate(kind: str, target: Any, plugins: Sequence[str] = ()) -> Callable[..., Any]:
    """Import the public class or function of a `_target_`.

    Raises:
        ConfigError: If it does not exist, or is not in a module of `HOMES[kind]` or in a plugin.
    """
    if not isinstance(target, str):
        raise ConfigError(f"{kind}._target_ is missing; pass {kind}=NAME")

    # Check the name first, because the import executes the module.
    homes = HOMES[kind] + tuple(plugins)
    module_name, _, name = target.rpartition(".")
    is_public = not any(word.startswith("_") for word in target.split("."))
    if not is_public or not any(_inside(module_name, home) for home in homes):
        raise ConfigError(
            f"{kind}._target_: '{target}' is not in {' or '.join(homes)}; "
            f"name your own package with plugins=[PACKAGE]"
        )

    try:
        located = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{kind}._target_: '{target}' does not exist: {error}") from error

    # Names that are imported by the module, such as `mldec.heads.gap.nn`, are not allowed.
    is_defined_there = any(_inside(getattr(located, "__module__", ""), home) for home in homes)
    if kind == "data":
        expected = "function with the return annotation Source or DataModule"
        kinds = (Source, DataModule)
        is_part = inspect.isfunction(located) and signature(located).return_annotation in kinds
    else:
        expected = "nn.Module class"
        is_part = inspect.isclass(located) and issubclass(located, nn.Module)
    if not is_defined_there or not is_part:
        raise ConfigError(
            f"{kind}._target_: '{target}' must be a {expected}, defined in that module"
        )
    assert callable(located)
    return located


def signature(target: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a part. Annotations that are text are evaluated."""
    name = f"{target.__module__}.{target.__qualname__}"
    remedy = "define the names of its annotations in its module"
    with naming_errors(name, ConfigError, remedy=remedy):
        return inspect.signature(target, eval_str=True)


def arguments_of(kind: str, target: Callable[..., Any]) -> dict[str, Argument]:
    """Return the arguments of a part. A dataclass argument is replaced with its fields."""
    accepted: dict[str, Argument] = {}
    for name, parameter in signature(target).parameters.items():
        if dataclasses.is_dataclass(parameter.annotation):
            accepted |= _fields(parameter.annotation, parameter.default)
        elif name not in RUNTIME_ARGUMENTS[kind] and parameter.kind not in VARIADIC:
            hint = parameter.annotation
            accepted[name] = (Any if hint is REQUIRED else hint, parameter.default)

    if kind == "data":
        accepted |= _fields(Resuming)
    if is_reader(target):
        for shared in SHARED:
            accepted |= _fields(shared)
    return accepted


def shared_settings() -> set[str]:
    """Return the names of the settings of all readers of image files."""
    return {field.name for group in (*SHARED, Resuming) for field in dataclasses.fields(group)}


def _fields(group: Any, defaults: Any = None) -> dict[str, Argument]:
    """Return the fields of a dataclass, with defaults from an instance or the class."""
    hints = get_type_hints(group)
    fields = {}
    for field in dataclasses.fields(group):
        fields[field.name] = (hints[field.name], getattr(defaults, field.name, field.default))
    return fields


def _inside(module_name: str, home: str) -> bool:
    return module_name == home or module_name.startswith(home + ".")


def is_reader(target: Callable[..., Any]) -> bool:
    """Return True if a function returns a `Source`, which uses the shared settings."""
    return inspect.isfunction(target) and signature(target).return_annotation is Source
