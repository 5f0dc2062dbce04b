"""From `_target_` nodes to objects: what may be named, whether the arguments fit, and the call."""

import dataclasses
import importlib
import inspect
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from torch import nn

from mldec.config import moved
from mldec.config.schema import PARTS, Config
from mldec.data.base import Classes, DataModule
from mldec.data.source import FileSettings, Source, assemble
from mldec.data.view import View
from mldec.errors import ConfigError, UserError, suggest
from mldec.model import Classifier

# Where each part must be defined, whatever a file says; the user's own packages are added by plugins=[...].
HOMES = {
    "data": ("mldec.data.readers", "mldec.data.digits"),
    "backbone": ("mldec.backbones",),
    "head": ("mldec.heads",),
    "loss": ("mldec.losses",),
}
RUNTIME_ARGUMENTS = {"data": (), "backbone": (), "head": ("in_features", "num_classes"), "loss": ()}
# A class without a constructor of its own shows torch's (*args, **kwargs).
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# What every reader of image files takes beside its own arguments, as flat keys of its node: data.cutout=0.
SHARED = (View, FileSettings)
# What a function that builds data returns.
DATA = (Source, DataModule)
REQUIRED = inspect.Parameter.empty
LARGEST_WHOLE = 2**63  # torch takes no larger whole number, where it takes any number with a point


class Argument(NamedTuple):
    """An argument that a node may give: its annotation, and its default or `REQUIRED`."""

    hint: Any
    default: Any


# A setting of the program's own in the node of the data: other training data at a resume is refused, or allowed.
CHANGED = Argument(Literal["refuse", "allow"], "refuse")


@dataclass(frozen=True)
class Part:
    """A part of a run, checked: what its node names, and every argument with its value, defaults included."""

    kind: str  # data, backbone, head or loss
    target: Callable[..., Any]
    arguments: dict[str, Any]

    @property
    def node(self) -> dict[str, Any]:
        """The node that a config records: it says everything, whatever the defaults become."""
        return {
            "_target_": f"{self.target.__module__}.{self.target.__qualname__}",
            **self.arguments,
        }

    def call(self, **runtime: Any) -> Any:
        """Call the target with some of the arguments replaced.

        Raises:
            ConfigError: `<part>.<message>` for a `ValueError` of the target that begins with one of its arguments, and
                `<part>: <message>` for another one.
        """
        own = {
            name: value
            for name, value in self.arguments.items()
            if name in inspect.signature(self.target).parameters
        }
        return self._translated(self.target, {**own, **runtime})

    def shared(self, kind: type[Any]) -> Any:
        """Build a group of shared settings, such as `View`, from the arguments."""
        names = [field.name for field in dataclasses.fields(kind)]
        return self._translated(kind, {name: self.arguments[name] for name in names})

    def _translated(self, call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        try:
            return call(**arguments)
        except UserError:  # names its key itself
            raise
        except ValueError as error:
            # The user types `head.width`; the part knows only `width`.
            first_word = re.split(r"\W", str(error), maxsplit=1)[0]
            separator = "." if first_word in self.arguments else ": "
            raise ConfigError(f"{self.kind}{separator}{error}") from error


Parts = Mapping[str, Part]


def check(config: Config, kinds: Sequence[str] = PARTS) -> Parts:
    """Hold what the config names against what there is, before any file, download or device is touched.

    Args:
        config: the nodes of its parts may leave out arguments that have a default.
        kinds: the parts that are needed: naming a photo builds neither data nor loss.

    Raises:
        ConfigError: with every fault of every part, or for an unknown optimiser.
    """
    parts: dict[str, Part] = {}
    faults: list[str] = []
    for kind in kinds:
        try:
            parts[kind] = resolve(kind, getattr(config, kind), config.plugins)
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("; ".join(faults))

    if "loss" in kinds:  # a loss is for training
        from mldec.optim import (
            check_optimizer,
        )  # timm is slow to import, and check_data does without

        check_optimizer(config.optim.name)
    return parts


def resolve(kind: str, node: Mapping[str, Any], plugins: Sequence[str] = ()) -> Part:
    """Return the part that a node describes, with all its arguments.

    Raises:
        ConfigError: for its target, or with every unknown, missing and ill-typed argument.
    """
    node = moved.renamed(node)
    target = locate(kind, node.pop("_target_"), plugins)
    accepted = _accepted(kind, target)

    faults = []
    for key, value in node.items():
        if key not in accepted:
            faults.append(
                f"{kind}.{key}: {target.__name__} takes no such argument{suggest(key, list(accepted))}"
            )
        elif not matches(value, accepted[key].hint):
            faults.append(f"{kind}.{key}: {value!r} is not {describe(accepted[key].hint)}")
    for key, argument in accepted.items():
        if argument.default is REQUIRED and key not in node:
            faults.append(f"{kind}.{key} is missing: {target.__name__} needs it")
    if faults:
        raise ConfigError("; ".join(faults))

    defaults = {key: argument.default for key, argument in accepted.items()}
    return Part(kind, target, {**defaults, **node})


def recorded(config: Config, parts: Parts) -> Config:
    """Return the config with every argument of these parts in it, for config.yaml and checkpoints."""
    nodes: dict[str, Any] = {kind: part.node for kind, part in parts.items()}
    return dataclasses.replace(config, **nodes)


def data(parts: Parts) -> DataModule:
    """Build the dataset: the data module that its function returns, or the one that is made of its source.

    Raises:
        ConfigError: for a value out of its range.
        DataError: if its folder is missing.
    """
    part = parts["data"]
    if not _is_reader(part.target):
        module = part.call()
        assert isinstance(module, DataModule)
        return module

    # The settings first: a wrong one is refused before the data is looked for.
    view, files = part.shared(View), part.shared(FileSettings)
    return assemble(part.call(), view, files)


def loss(parts: Parts) -> nn.Module:
    """Build the loss."""
    module = parts["loss"].call()
    assert isinstance(module, nn.Module)
    return module


def model(parts: Parts, classes: Classes, *, pretrained: bool = True) -> Classifier:
    """Build the backbone and a head for these classes; without `pretrained` nothing is downloaded or read."""
    without_weights = (
        {"pretrained": False}
        if not pretrained and "pretrained" in parts["backbone"].arguments
        else {}
    )
    backbone = parts["backbone"].call(**without_weights)
    head = parts["head"].call(in_features=backbone.num_features, num_classes=len(classes))
    return Classifier(backbone, head)


def check_together(config: Config, data: DataModule, loss: nn.Module) -> None:
    """Hold the loss, the mixing, the head and the evaluator against the data, before anything is trained.

    Args:
        config: as the user gave it. A default such as 100 groups is clipped to the classes; what was asked for is not.
        data: the dataset.
        loss: the loss.

    Raises:
        ConfigError: with the first fault.
    """
    train, val, loss_name = data.train.classes, data.val.classes, type(loss).__name__
    wanted: bool | None = getattr(loss, "exclusive", None)
    if wanted is not None and wanted is not train.exclusive:
        kinds = {True: "one label per image", False: "several labels per image"}
        fix = (
            "loss=cross_entropy, asl_single_label or bce" if train.exclusive else "loss=asl or bce"
        )
        raise ConfigError(
            f"{loss_name} is for {kinds[wanted]}, the data has {kinds[train.exclusive]}: choose {fix}"
        )

    if config.mix.soft and not train.exclusive:
        raise ConfigError(
            "mix is for data with one label per image, the data has several: leave it out"
        )
    if config.mix.soft and not getattr(loss, "soft", False):
        raise ConfigError(
            f"mix makes soft labels, {loss_name} wants 0 and 1: choose loss=bce or cross_entropy"
        )
    if config.train.random_queries and train.exclusive:
        raise ConfigError(
            "train.random_queries adds a positive to each image, the data has one label: leave it out"
        )

    groups = config.head.get("num_groups")
    if groups is not None and groups > len(train):
        raise ConfigError(
            f"head.num_groups {groups} is above the {len(train)} classes: leave it out, for one per class"
        )
    data.make_evaluator(val)  # refuses settings that do not fit the classes, such as top-5 of three


def locate(kind: str, target: Any, plugins: Sequence[str] = ()) -> Callable[..., Any]:
    """Return the class or function a node names, if it is a public one defined where such parts live.

    Raises:
        ConfigError: for any other target.
    """
    if not isinstance(target, str):
        raise ConfigError(f"{kind}._target_ is missing: choose an option, such as {kind}=NAME")

    homes = [*HOMES[kind], *plugins]
    module_name, _, name = target.rpartition(".")
    is_public = not any(word.startswith("_") for word in target.split("."))
    if not is_public or not any(_inside(module_name, home) for home in homes):
        hint = "" if plugins else "; a part of your own needs plugins=[package]"
        raise ConfigError(
            f"{kind}._target_ '{target}' is refused: a {kind} is defined under {' or '.join(homes)}{hint}"
        )

    try:
        located = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{kind}._target_ '{target}' does not exist: {error}") from error

    # An imported name is not a definition: `mldec.heads.gap.nn` leads elsewhere.
    is_defined_there = any(_inside(getattr(located, "__module__", ""), home) for home in homes)
    if not is_defined_there or not _is_part(kind, located):
        what = (
            "function that returns a Source or a DataModule" if kind == "data" else "module class"
        )
        raise ConfigError(
            f"{kind}._target_ '{target}' is refused: it is not a {what} defined there"
        )
    assert callable(located)
    return located


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
    return (
        "a list" if (origin or hint) in (list, tuple, Sequence) else "a mapping, its numbers finite"
    )


def _accepted(kind: str, target: Callable[..., Any]) -> dict[str, Argument]:
    """Return what a node may give: the target's arguments, and for a reader of image files the shared settings."""
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    accepted = {
        name: Argument(hints.get(name, Any), parameter.default)
        for name, parameter in inspect.signature(target).parameters.items()
        if name not in RUNTIME_ARGUMENTS[kind] and parameter.kind not in VARIADIC
    }
    if kind == "data":
        accepted["changed"] = CHANGED
    if _is_reader(target):
        for shared in SHARED:
            hints = get_type_hints(shared)
            accepted |= {
                field.name: Argument(hints[field.name], field.default)
                for field in dataclasses.fields(shared)
            }
    return accepted


def _inside(module_name: str, home: str) -> bool:
    return module_name == home or module_name.startswith(home + ".")


def _is_reader(target: Callable[..., Any]) -> bool:
    """Tell whether a function returns a source, and so takes the shared settings of image files."""
    return inspect.isfunction(target) and get_type_hints(target).get("return") is Source


def _is_part(kind: str, located: Any) -> bool:
    if kind == "data":
        return inspect.isfunction(located) and get_type_hints(located).get("return") in DATA
    return inspect.isclass(located) and issubclass(located, nn.Module)
