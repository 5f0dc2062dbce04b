"""The classes and functions of `_target_` nodes, and the arguments that the nodes can set.

The signature of a class or function is the only definition of its settings and their defaults.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

from torch import nn

from mldec.config.schema import check_retired
from mldec.data.observed import Observed
from mldec.data.sampling import Sampling
from mldec.data.source import FileSettings, Source
from mldec.data.transforms import View
from mldec.data.types import DataModule
from mldec.errors import ConfigError, naming_errors, raised

# Modules in which parts must be defined, so that a checkpoint cannot run arbitrary code.
# plugins=[...] adds third-party packages.
HOMES = {
    "data": ("mldec.data.readers", "mldec.data.digits"),
    "backbone": ("mldec.backbones",),
    "head": ("mldec.heads",),
    "loss": ("mldec.losses",),
}
# Arguments that `build` computes and passes to the target. Nodes cannot set them.
RUNTIME_ARGUMENTS = {
    "data": ("in_memory",),
    "backbone": ("blocks",),
    "head": ("in_features", "num_classes", "blocks"),
    "loss": ("label_counts", "train_labels", "all_reduce"),
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

    # Whether a run can be resumed on different training data: "refuse" raises an error.
    changed: Literal["refuse", "allow"] = "refuse"


def locate(kind: str, target: Any, plugins: Sequence[str] = ()) -> Callable[..., Any]:
    """Import the public class or function of a `_target_`.

    Args:
        kind: "data", "backbone", "head" or "loss".
        target: Full name, such as "mldec.heads.MLDecoder".
        plugins: Packages that the user has named, in which targets may also be defined.

    Raises:
        ConfigError: If it does not exist, or is not in a module of `HOMES[kind]` or in a plugin.
    """
    if not isinstance(target, str):
        raise ConfigError(f"{kind}._target_ is missing; pass {kind}=NAME")

    check_retired(target, f"{kind}._target_")
    # Check the name first, because the import executes the module.
    homes = HOMES[kind] + tuple(plugins)
    module_name, _, name = target.rpartition(".")
    # Checkpoints of earlier versions may have the name of a reader with its module, which has
    # another name today: mldec.data.readers.coco.coco. The package has all readers.
    if module_name.startswith("mldec.data.readers."):
        module_name = "mldec.data.readers"
    is_public = not any(word.startswith("_") for word in target.split("."))
    if not is_public or not any(_inside(module_name, home) for home in homes):
        raise ConfigError(
            f"{kind}._target_: '{target}' is not in {' or '.join(homes)}; "
            f"name your own package with plugins=[PACKAGE]"
        )

    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        # The code of a plugin may raise any error.
        fault = raised(error, target.partition(".")[0])
        raise ConfigError(f"{kind}._target_: '{target}' cannot be imported: {fault}") from error
    located = getattr(module, name, None)
    if located is None:
        fault = f"'{target}' does not exist, because {module_name} has no {name}"
        raise ConfigError(f"{kind}._target_: {fault}")

    # A module also has the names that it imports, such as `mldec.heads.gap.nn`. They are not parts.
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
    """Return the signature of a part. Annotations in quotes are evaluated.

    Raises:
        ConfigError: If an annotation contains an unknown name.
    """
    name = f"{target.__module__}.{target.__qualname__}"
    remedy = "define the names of its annotations in its module"
    with naming_errors(name, ConfigError, remedy=remedy):
        return inspect.signature(target, eval_str=True)


def arguments_of(kind: str, target: Callable[..., Any]) -> dict[str, Argument]:
    """Return the arguments that a node can set, by name, with their annotations and defaults.

    An argument that is a dataclass is replaced by its fields, so that the settings of a node are
    flat (data.val_fraction, not data.division.val_fraction).
    """
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
    """Return the names of the settings that all readers of image files have in common."""
    names: set[str] = set()
    for group in SHARED + (Resuming,):
        names.update(field.name for field in dataclasses.fields(group))
    return names


def _fields(group: Any, defaults: Any = None) -> dict[str, Argument]:
    """Return the fields of a dataclass `group`. An instance `defaults` replaces its defaults."""
    hints = get_type_hints(group)
    fields = {}
    for field in dataclasses.fields(group):
        fields[field.name] = (hints[field.name], getattr(defaults, field.name, field.default))
    return fields


def _inside(module_name: str, home: str) -> bool:
    return module_name == home or module_name.startswith(home + ".")


def is_reader(target: Callable[..., Any]) -> bool:
    """Return True if a function returns a `Source`, to which `assemble` applies the settings."""
    return inspect.isfunction(target) and signature(target).return_annotation is Source
