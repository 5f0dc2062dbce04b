"""Build the parts of a run from `_target_` nodes: check the target and its arguments, call it."""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_type_hints

import torch
from torch import nn

from mldec.config.compose import compose, compose_with_options, option, override
from mldec.config.schema import PARTS, Config, Mix, describe, matches
from mldec.data.labels import Labels
from mldec.data.mixing import Mixing
from mldec.data.sampling import Sampling
from mldec.data.settings import FileSettings, Observed, Source, assemble
from mldec.data.transforms import View
from mldec.data.types import Classes, DataModule
from mldec.errors import ConfigError, UserError, suggest
from mldec.losses.common import LabelCounts
from mldec.model import Classifier
from mldec.runtime import distributed

# The modules in which a part must be defined; plugins=[...] adds packages of the user's own.
HOMES = {
    "data": ("mldec.data.readers", "mldec.data.digits"),
    "backbone": ("mldec.backbones",),
    "head": ("mldec.heads",),
    "loss": ("mldec.losses",),
}
# The arguments that the caller passes, and that a node must not give.
RUNTIME_ARGUMENTS = {
    "data": (),
    "backbone": (),
    "head": ("in_features", "num_classes"),
    "loss": ("label_counts", "all_reduce"),
}
# A class without a constructor of its own shows torch's (*args, **kwargs).
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# The settings that every reader of image files takes beside its own arguments, as flat keys of its
# node, such as data.cutout=0.
SHARED = (View, FileSettings, Sampling, Observed)
# The types that a function for data may return.
DATA = (Source, DataModule)
REQUIRED = inspect.Parameter.empty
# The parts of a model: evaluation and prediction need no others.
MODEL_PARTS = ("backbone", "head")


class Argument(NamedTuple):
    """An argument that a node may give: its annotation, and its default or `REQUIRED`."""

    hint: Any
    default: Any


# A setting of the trainer in the node of the data: whether a run may resume on other training data.
CHANGED = Argument(Literal["refuse", "allow"], "refuse")


@dataclass(frozen=True)
class Part:
    """A checked part of a run: the target of its node, and all arguments, defaults included."""

    kind: str  # data, backbone, head or loss
    name: str  # `_target_`, which may be that of a package that exports the target
    target: Callable[..., Any]
    arguments: dict[str, Any]

    @property
    def node(self) -> dict[str, Any]:
        """The node that a config records: complete, so that later defaults do not change it."""
        return {"_target_": self.name, **self.arguments}

    def call(self, **runtime: Any) -> Any:
        """Call the target; runtime arguments are added, or replace those of the node.

        A `ValueError` that begins with the name of an argument becomes `<part>.<message>`, and any
        other one `<part>: <message>`.
        """
        # The shared settings of readers are in the node too, and not for the target.
        parameters = inspect.signature(self.target).parameters
        own = {name: value for name, value in self.arguments.items() if name in parameters}
        groups = {name: self.shared(kind) for name, kind in _groups(self.target).items()}
        return self._translated(self.target, {**own, **groups, **runtime})

    def shared(self, kind: type[Any]) -> Any:
        """Build a group of settings, such as `View`, from the arguments."""
        names = [field.name for field in dataclasses.fields(kind)]
        return self._translated(kind, {name: self.arguments[name] for name in names})

    def _translated(self, call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        try:
            return call(**arguments)
        except UserError:
            # Its message names the full key already.
            raise
        except ValueError as error:
            # The user types `head.width`; the part knows only `width`.
            first_word = re.split(r"\W", str(error), maxsplit=1)[0]
            separator = "." if first_word in self.arguments else ": "
            raise ConfigError(f"{self.kind}{separator}{error}") from error


Parts = Mapping[str, Part]


def check(config: Config, kinds: Sequence[str] = PARTS) -> Parts:
    """Check the parts of a config before any file, download or device is touched.

    All errors of all parts come in one message. Only the parts of these kinds are needed.
    """
    parts: dict[str, Part] = {}
    faults: list[str] = []
    for kind in kinds:
        node = getattr(config, kind)
        if kind == "loss" and "_target_" not in node:
            node = {**default_loss(parts.get("data")), **node}
        try:
            parts[kind] = resolve(kind, node, config.plugins)
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("; ".join(faults))
    return parts


def default_loss(data: Part | None) -> dict[str, Any]:
    """Return the node of the loss where none is chosen, as in the recipes for own photos."""
    has_one_label = data is not None and data.arguments.get("exclusive") is True
    return option("loss", "cross_entropy" if has_one_label else "bce")


def resolve(kind: str, node: Mapping[str, Any], plugins: Sequence[str] = ()) -> Part:
    """Return the part that a node describes, with all its arguments."""
    node = dict(node)
    name = node.pop("_target_", None)
    target = locate(kind, name, plugins)
    accepted = _accepted(kind, target)

    faults = []
    for key, value in node.items():
        if key not in accepted:
            hint = suggest(key, list(accepted))
            faults.append(f"{kind}.{key}: {target.__name__} takes no such argument{hint}")
        elif not matches(value, accepted[key].hint):
            faults.append(f"{kind}.{key}: {value!r} is not {describe(accepted[key].hint)}")
    for key, argument in accepted.items():
        if argument.default is REQUIRED and key not in node:
            faults.append(f"{kind}.{key} is missing: {target.__name__} needs it")
    if faults:
        raise ConfigError("; ".join(faults))

    defaults = {key: argument.default for key, argument in accepted.items()}
    return Part(kind, name, target, {**defaults, **node})


def complete(parts: Parts) -> Parts:
    """Fill in what a user leaves to a file or the hub, by the function `complete` of a class.

    It is called for what a user asks for, never for what a checkpoint says.
    """
    completed = dict(parts)
    for kind, part in parts.items():
        if fill_in := getattr(part.target, "complete", None):
            completed[kind] = dataclasses.replace(part, arguments=fill_in(part.arguments))
    return completed


def recorded(config: Config, parts: Parts) -> Config:
    """Return the config with all arguments of these parts, for config.yaml and checkpoints."""
    nodes: dict[str, Any] = {kind: part.node for kind, part in parts.items()}
    return dataclasses.replace(config, **nodes)


def data(parts: Parts) -> DataModule:
    """Build the dataset: its function returns a data module, or a source to make one of."""
    part = parts["data"]
    if not _is_reader(part.target):
        module = part.call()
        assert isinstance(module, DataModule)
        return module

    # The settings first: an error in them is found before the data is searched.
    view, files, sampling, observed = (part.shared(kind) for kind in SHARED)
    return assemble(part.call(), view, files, sampling, observed)


def chosen_data(settings: list[str]) -> tuple[Config, DataModule]:
    """Build the dataset that settings choose, for commands without a model.

    The settings are those of training, with `+experiment=NAME`, or of the data alone, with
    `data=NAME`.
    """
    config, data, _ = chosen_data_option(settings)
    return config, data


def chosen_data_option(settings: list[str]) -> tuple[Config, DataModule, str]:
    """Build the dataset as `chosen_data`, and return the name of its option too."""
    if any(setting.startswith("+experiment=") for setting in settings):
        config, options = compose_with_options(settings)
        parts = check(config)
        return recorded(config, parts), data(parts), options["data"]

    # The last choice on the command line counts.
    chosen = [setting for setting in settings if setting.startswith("data=")]
    if not chosen:
        raise ConfigError(
            "no dataset is chosen: pass data=NAME, such as data=coco data.root=/data/coco, "
            "or +experiment=NAME as for training"
        )
    option = chosen[-1].removeprefix("data=")

    # A config needs all parts: those that the settings leave out are of this experiment, unused.
    config = override(compose(["+experiment=digits"]), settings)

    # Unused parts are checked only if a setting names them, so that a misspelt setting is refused.
    named = {setting.partition("=")[0].partition(".")[0] for setting in settings}
    parts = check(config, [kind for kind in PARTS if kind in named])
    return recorded(config, parts), data(parts), option


def loss(parts: Parts, labels: Callable[[], Labels] | None = None) -> nn.Module:
    """Build the loss; `labels` returns the training labels, for a loss that counts them."""
    part = parts["loss"]
    runtime: dict[str, Any] = {}
    parameters = inspect.signature(part.target).parameters
    if "all_reduce" in parameters:
        runtime["all_reduce"] = distributed.total

    if labels is not None and "label_counts" in parameters:

        def count_labels() -> LabelCounts:
            table = labels()
            positives, negatives = table.all_counts(1), table.all_counts(0)
            return LabelCounts(torch.from_numpy(positives), torch.from_numpy(negatives))

        runtime["label_counts"] = count_labels
    module: nn.Module = part.call(**runtime)
    return module


def mixing(mix: Mix, classes: Classes) -> Mixing | None:
    """Build mixup, cutmix and label smoothing, or return None if all of them are off."""
    if not mix.on and not mix.soft:
        return None

    return Mixing(
        classes,
        mixup=mix.mixup,
        cutmix=mix.cutmix,
        prob=mix.prob,
        switch_prob=mix.switch_prob,
        mode=mix.mode.value,
        labels=mix.labels.value,
        smoothing=mix.smoothing,
    )


def backbone(parts: Parts, *, pretrained: bool = True) -> nn.Module:
    """Build the backbone; without `pretrained` nothing is downloaded."""
    part = parts["backbone"]
    without_weights = not pretrained and "pretrained" in part.arguments
    module: nn.Module = part.call(pretrained=False) if without_weights else part.call()
    return module


def model(parts: Parts, classes: Classes, *, pretrained: bool = True) -> Classifier:
    """Build the backbone, and a head for these classes."""
    network = backbone(parts, pretrained=pretrained)
    head = parts["head"].call(in_features=network.num_features, num_classes=len(classes))
    return Classifier(network, head)


def locate(kind: str, target: Any, plugins: Sequence[str] = ()) -> Callable[..., Any]:
    """Return the public class or function that the `_target_` of a node names.

    It must be defined in a module for such parts or in a package of the user's own.
    """
    if not isinstance(target, str):
        raise ConfigError(f"{kind}._target_ is missing: choose an option, such as {kind}=NAME")

    # Checked before the import, which runs the code of the module.
    homes = [*HOMES[kind], *plugins]
    module_name, _, name = target.rpartition(".")
    is_public = not any(word.startswith("_") for word in target.split("."))
    if not is_public or not any(_inside(module_name, home) for home in homes):
        hint = "" if plugins else "; a part of your own needs plugins=[package]"
        raise ConfigError(
            f"{kind}._target_ '{target}' is refused: "
            f"a {kind} is defined under {' or '.join(homes)}{hint}"
        )

    try:
        located = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{kind}._target_ '{target}' does not exist: {error}") from error

    # An imported name is not a definition: `mldec.heads.gap.nn` leads elsewhere.
    is_defined_there = any(_inside(getattr(located, "__module__", ""), home) for home in homes)
    is_part = inspect.isclass(located) and issubclass(located, nn.Module)
    expected = "module class"
    if kind == "data":
        is_part = inspect.isfunction(located) and get_type_hints(located).get("return") in DATA
        expected = "function that returns a Source or a DataModule"
    if not is_defined_there or not is_part:
        raise ConfigError(
            f"{kind}._target_ '{target}' is refused: it is not a {expected} defined there"
        )
    assert callable(located)
    return located


def _accepted(kind: str, target: Callable[..., Any]) -> dict[str, Argument]:
    """Return the arguments that a node may give; a group of settings stands for its fields."""
    hints, groups = _hints(target), _groups(target)
    accepted: dict[str, Argument] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if name in groups:
            accepted |= _fields(groups[name], parameter.default)
        elif name not in RUNTIME_ARGUMENTS[kind] and parameter.kind not in VARIADIC:
            accepted[name] = Argument(hints.get(name, Any), parameter.default)

    if kind == "data":
        accepted["changed"] = CHANGED
    if _is_reader(target):
        for shared in SHARED:
            accepted |= _fields(shared)
    return accepted


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(target.__init__ if inspect.isclass(target) else target)


def _groups(target: Callable[..., Any]) -> dict[str, type[Any]]:
    """Return the parameters that are groups of settings: dataclasses, filled from flat keys."""
    parameters = inspect.signature(target).parameters
    return {
        name: hint
        for name, hint in _hints(target).items()
        if name in parameters and isinstance(hint, type) and dataclasses.is_dataclass(hint)
    }


def _fields(group: type[Any], defaults: Any = None) -> dict[str, Argument]:
    """Return the settings of a group; the defaults are those of an instance, or of its class."""
    hints = get_type_hints(group)
    return {
        field.name: Argument(hints[field.name], getattr(defaults, field.name, field.default))
        for field in dataclasses.fields(group)
    }


def _inside(module_name: str, home: str) -> bool:
    return module_name == home or module_name.startswith(home + ".")


def _is_reader(target: Callable[..., Any]) -> bool:
    """Tell whether a function returns a source, for which the shared settings hold."""
    return inspect.isfunction(target) and get_type_hints(target).get("return") is Source
