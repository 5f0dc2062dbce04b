"""From `_target_` nodes to objects: what may be named, whether the arguments fit, and the call."""

import importlib
import inspect
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn

from mldec.data.base import Classes, DataModule
from mldec.errors import ConfigError, UserError, suggest
from mldec.model import Classifier
from mldec.settings import PARTS, Config

# Where each part must be defined, whatever a file says; the user's own packages are added by plugins=[...].
HOMES = {"data": "mldec.data", "backbone": "mldec.backbones", "head": "mldec.heads", "loss": "mldec.losses"}
# A class without a constructor of its own shows torch's (*args, **kwargs).
VAR_POSITIONAL, VAR_KEYWORD = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
# Settings in the node of a part that are the program's, and that no function or class is given.
PROGRAM_SETTINGS: dict[str, dict[str, Any]] = {"data": {"changed": Literal["refuse", "allow"]}}
LARGEST_WHOLE = 2**63  # torch takes no larger one, where it takes any number with a point
RUNTIME_ARGUMENTS = {"data": (), "backbone": (), "head": ("in_features", "num_classes"), "loss": ()}


def check(config: Config) -> None:
    """Hold what the config names against what there is, before any file, download or device is touched.

    Raises:
        ConfigError: with every fault of every part, or for an unknown optimiser.
    """
    check_parts(config, PARTS)
    from mldec.optim import check_optimizer  # timm is slow to import, and check_data does without

    check_optimizer(config.optim.name)


def check_parts(config: Config, parts: Iterable[str]) -> None:
    """Hold the arguments of some parts against the signatures of what they name.

    Raises:
        ConfigError: with every fault of every one of them.
    """
    found = [fault for part in parts for fault in faults(part, getattr(config, part), config.plugins)]
    if found:
        raise ConfigError("; ".join(found))


def check_together(config: Config, data: DataModule, loss: nn.Module) -> None:
    """Hold the loss, the mixing, the head and the evaluator against the data, before anything is trained.

    Raises:
        ConfigError: with the first fault.
    """
    train, val, loss_name = data.train.classes, data.val.classes, type(loss).__name__
    wanted: bool | None = getattr(loss, "exclusive", None)
    if wanted is not None and wanted is not train.exclusive:
        kinds = {True: "one label an image", False: "several labels an image"}
        fix = "loss=cross_entropy, asl_single_label or bce" if train.exclusive else "loss=asl or bce"
        raise ConfigError(f"{loss_name} is for {kinds[wanted]}, the data has {kinds[train.exclusive]}: choose {fix}")
    if config.mix.soft and not train.exclusive:
        raise ConfigError("mix is for data with one label an image, the data has several: leave it out")
    if config.mix.soft and not getattr(loss, "soft", False):
        raise ConfigError(f"mix makes soft labels, {loss_name} wants 0 and 1: choose loss=bce or cross_entropy")
    if config.train.random_queries and train.exclusive:
        raise ConfigError("train.random_queries adds a positive to each image, the data has one label: leave it out")
    groups = config.head.get("num_groups")
    if groups is not None and groups > len(train):
        raise ConfigError(f"head.num_groups {groups} is above the {len(train)} classes: leave it out, for one a class")
    data.evaluator().update(torch.zeros(0, len(val)), torch.zeros(0, len(val)))  # such as top-5 of three classes


def data(config: Config) -> DataModule:
    """Build the dataset."""
    return _call("data", config)


def loss(config: Config) -> nn.Module:
    """Build the loss."""
    return _call("loss", config)


def model(config: Config, classes: Classes, *, pretrained: bool = True) -> Classifier:
    """Build the backbone and a head for these classes; without `pretrained` nothing is downloaded or read."""
    target = locate("backbone", config.backbone.get("_target_"), config.plugins)
    changed = {} if pretrained or "pretrained" not in inspect.signature(target).parameters else {"pretrained": False}
    backbone = _call("backbone", config, **changed)
    return Classifier(backbone, _call("head", config, in_features=backbone.num_features, num_classes=len(classes)))


def locate(part: str, target: Any, plugins: Sequence[str] = ()) -> Callable[..., Any]:
    """Return the class or function a node names, if it is a public one defined where such parts live.

    Raises:
        ConfigError: for any other target.
    """
    if not isinstance(target, str):
        raise ConfigError(f"{part}._target_ is missing: choose an option, such as {part}=NAME")
    homes = [HOMES[part], *plugins]
    module_name, _, name = target.rpartition(".")
    allowed = any(_inside(module_name, home) for home in homes)
    if not allowed or any(word.startswith("_") for word in target.split(".")):
        hint = "" if plugins else "; a part of your own needs plugins=[package]"
        raise ConfigError(
            f"{part}._target_ '{target}' is refused: a {part} is defined under {' or '.join(homes)}{hint}"
        )
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{part}._target_ '{target}' does not exist: {error}") from error
    right_kind = _returns_data(found) if part == "data" else inspect.isclass(found) and issubclass(found, nn.Module)
    if not right_kind or not any(_inside(found.__module__, home) for home in homes):
        what = "function that returns a DataModule" if part == "data" else "module class"
        raise ConfigError(f"{part}._target_ '{target}' is refused: it is not a {what} defined there")
    return found


def faults(part: str, node: Mapping[str, Any], plugins: Sequence[str] = ()) -> list[str]:
    """Return what is wrong with a node: its target, unknown, missing and ill-typed arguments."""
    try:
        target = locate(part, node.get("_target_"), plugins)
    except ConfigError as error:
        return [str(error)]
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(target).parameters.items()
        if name not in RUNTIME_ARGUMENTS[part] and parameter.kind not in (VAR_POSITIONAL, VAR_KEYWORD)
    }
    program_settings = PROGRAM_SETTINGS.get(part, {})
    hints = {**get_type_hints(target.__init__ if inspect.isclass(target) else target), **program_settings}
    found = []
    for key, value in node.items():
        if key == "_target_":
            continue
        if key not in parameters and key not in program_settings:
            known = suggest(key, [*parameters, *program_settings])
            found.append(f"{part}.{key}: {target.__name__} takes no such argument{known}")
        elif key in hints and not matches(value, hints[key]):
            found.append(f"{part}.{key}: {value!r} is not {describe(hints[key])}")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in node:
            found.append(f"{part}.{name} is missing: {target.__name__} needs it")
    return found


def matches(value: Any, hint: Any) -> bool:
    """Tell whether a value from YAML fits an annotation; a whole number fits `float`, true and false only `bool`.

    A number must be finite, wherever it is.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if hint is Any:
        items = list(value.values()) if isinstance(value, Mapping) else value
        return not isinstance(items, list | tuple) or all(matches(item, Any) for item in items)
    if origin in (Union, types.UnionType):
        return any(matches(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if hint in (None, type(None)):
        return value is None
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    if hint is float:
        return isinstance(value, float) or (isinstance(value, int) and abs(value) < LARGEST_WHOLE)
    kind = origin or hint
    if kind in (list, tuple, Sequence):
        items = arguments[0] if arguments else Any
        return isinstance(value, list | tuple) and all(matches(item, items) for item in value)
    if kind in (dict, Mapping):
        return isinstance(value, Mapping) and matches(value, Any)
    return isinstance(value, kind)


def describe(hint: Any) -> str:
    """Name an annotation in the words of YAML."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    names = {int: "a whole number", bool: "true or false", str: "text", type(None): "null"}
    names[float] = "a number (if whole, below 2**63)"
    if hint in names:
        return names[hint]
    return "a list" if (origin or hint) in (list, tuple, Sequence) else "a mapping, its numbers finite"


def _inside(module_name: str, home: str) -> bool:
    return module_name == home or module_name.startswith(home + ".")


def _returns_data(found: Any) -> bool:
    return inspect.isfunction(found) and inspect.signature(found).return_annotation in (DataModule, "DataModule")


def _call(part: str, config: Config, **runtime: Any) -> Any:
    """Check a node and call its target; a `ValueError` of the target becomes the user's.

    Raises:
        ConfigError: for a fault of the node, or `<part>.<message>` for a `ValueError` whose message begins with an
            argument of the target, `<part>: <message>` for another one.
    """
    node = getattr(config, part)
    check_parts(config, [part])
    not_arguments = {"_target_", *PROGRAM_SETTINGS.get(part, {})}
    arguments = {key: value for key, value in node.items() if key not in not_arguments}
    target = locate(part, node["_target_"], config.plugins)

    try:
        return target(**{**arguments, **runtime})
    except UserError:  # says its place itself
        raise
    except ValueError as error:
        # The user types `head.width`, the part knows only `width`.
        first_word = re.split(r"\W", str(error), maxsplit=1)[0]
        settable = inspect.signature(target).parameters.keys() - runtime.keys()
        separator = "." if first_word in settable else ": "
        raise ConfigError(f"{part}{separator}{error}") from error
