"""Build the parts of a run from `_target_` nodes, after validating their arguments."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mldec.config.compose import compose, compose_with_options, option, override
from mldec.config.schema import PARTS, Config, Mix, describe, matches
from mldec.config.signatures import REQUIRED, arguments_of, is_reader, locate, signature
from mldec.data.labels import Labels
from mldec.data.mixing import Mixing
from mldec.data.observed import Observed
from mldec.data.readers import docs_of
from mldec.data.sampling import Sampling
from mldec.data.source import FileSettings, assemble
from mldec.data.splits import HELD_OUT_FRACTION
from mldec.data.transforms import View
from mldec.data.types import Classes, DataModule, Split, StoredImages
from mldec.errors import ConfigError, UserError, documented, raised, suggest
from mldec.files.class_prior import read_prior
from mldec.losses.base import Loss, as_loss
from mldec.losses.common import LabelCounts
from mldec.model import Classifier
from mldec.runtime import distributed

# Parts that are needed for evaluation and prediction.
MODEL_PARTS = ("backbone", "head")


@dataclass(frozen=True)
class Part:
    """A validated part of a run with all its arguments, including defaults."""

    kind: str  # "data", "backbone", "head" or "loss"
    name: str  # `_target_`, which may be the name of a reexport
    target: Callable[..., Any]
    arguments: dict[str, Any]

    @property
    def node(self) -> dict[str, Any]:
        """Config node with all arguments, so that later changes of defaults have no effect."""
        return {"_target_": self.name, **self.arguments}

    def call(self, **runtime: Any) -> Any:
        """Call the target. `runtime` adds or overrides arguments."""
        arguments: dict[str, Any] = {}
        for name, parameter in signature(self.target).parameters.items():
            if dataclasses.is_dataclass(parameter.annotation):
                arguments[name] = self.shared(parameter.annotation)
            elif name in self.arguments:
                arguments[name] = self.arguments[name]
        return self._create(self.target, arguments | runtime)

    def shared(self, kind: Any) -> Any:
        """Build a dataclass, such as `View`, from the arguments."""
        fields = dataclasses.fields(kind)
        return self._create(kind, {field.name: self.arguments[field.name] for field in fields})

    def _create(self, target: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Call a target. A ValueError becomes a ConfigError with the name of the part."""
        try:
            return target(**arguments)
        except UserError:
            raise
        except ValueError as error:
            # The user sets `head.width`, but the message of the part contains only `width`.
            first_word = re.split(r"\W", str(error), maxsplit=1)[0]
            separator = "." if first_word in self.arguments else ": "
            raise ConfigError(f"{self.kind}{separator}{error}") from error
        except Exception as error:
            # An error of mldec's own part is a bug of mldec, whose traceback is needed.
            package = target.__module__.partition(".")[0]
            if package == "mldec":
                raise
            fault = raised(error, package)
            raise ConfigError(f"{self.kind}: {target.__name__} raised {fault}") from error


Parts = Mapping[str, Part]


def check(config: Config, kinds: Sequence[str] = PARTS) -> Parts:
    """Validate the parts of a config before any file, download or device is used.

    Raises:
        ConfigError: If a part is invalid. The message lists the errors of all parts.
    """
    parts: dict[str, Part] = {}
    faults: list[str] = []
    for kind in kinds:
        node = getattr(config, kind)
        if kind == "loss" and "_target_" not in node:
            is_exclusive = "data" in parts and parts["data"].arguments.get("exclusive") is True
            node = {**option("loss", "cross_entropy" if is_exclusive else "bce"), **node}
        try:
            parts[kind] = resolve(kind, node, config.plugins)
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("; ".join(faults))
    if "data" in parts and "head" in parts:
        parts["data"] = _with_val_fraction(parts["data"], is_fitted=is_fitted(parts))
    return parts


def is_fitted(parts: Parts) -> bool:
    """Return True if the head is fitted in closed form; see `mldec.heads`."""
    return hasattr(parts["head"].target, "fit")


def _with_val_fraction(part: Part, *, is_fitted: bool) -> Part:
    """Return the data part with the default of `HoldOut.val_fraction` for a kind of head."""
    fraction = part.arguments.get("val_fraction", HELD_OUT_FRACTION)
    if fraction == 0 and not is_fitted:
        raise ConfigError(
            "data.val_fraction=0: only heads that are fitted in closed form need no validation "
            "images; pass head=ridge, or a fraction in (0, 1)"
        )
    if fraction is not None:
        return part
    fraction = 0.0 if is_fitted else HELD_OUT_FRACTION
    return dataclasses.replace(part, arguments={**part.arguments, "val_fraction": fraction})


def resolve(kind: str, node: Mapping[str, Any], plugins: Sequence[str] = ()) -> Part:
    """Validate a node and return its part with all arguments.

    Raises:
        ConfigError: If the target is not allowed, or an argument is unknown, missing or invalid.
    """
    node = dict(node)
    name = node.pop("_target_", None)
    target = locate(kind, name, plugins)
    accepted = arguments_of(kind, target)

    faults = []
    for key, value in node.items():
        if key not in accepted:
            # The own settings of a reader are first. About thirty follow that all readers share.
            hint = suggest(key, list(accepted), most=15)
            faults.append(f"{kind}.{key}: {target.__name__} has no such argument{hint}")
        elif not matches(value, accepted[key][0]):
            faults.append(f"{kind}.{key}: {value!r} is not {describe(accepted[key][0])}")

    arguments = {}
    for key, (_, default) in accepted.items():
        arguments[key] = node.get(key, default)
        if arguments[key] is REQUIRED:
            faults.append(f"{kind}.{key}: {target.__name__} requires a value")
    if faults:
        raise ConfigError("; ".join(faults))

    return Part(kind, name, target, arguments)


def recorded(config: Config, parts: Parts) -> Config:
    """Return the config with all arguments of the parts, for config.yaml and checkpoints."""
    nodes: dict[str, Any] = {kind: part.node for kind, part in parts.items()}
    return dataclasses.replace(config, **nodes)


def data(parts: Parts, in_memory: Any = None) -> DataModule:
    """Build the data module from the data part.

    `in_memory` is the argument of this name of a reader: the parsed table of `csv_table`, or the
    data set of `dataset`.
    """
    part = parts["data"]
    if not is_reader(part.target):
        module: DataModule = part.call()
        return module

    # Validate the shared settings before the data is read.
    view = part.shared(View)
    files = part.shared(FileSettings)
    sampling = part.shared(Sampling)
    observed = part.shared(Observed)
    docs = docs_of(part.target)
    with documented(docs):
        source = part.call(**({} if in_memory is None else {"in_memory": in_memory}))
    return assemble(source, view, files, sampling, observed, docs)


def data_from_settings(settings: list[str]) -> tuple[Config, DataModule, str]:
    """Build the data of a command without a model.

    The settings contain "+experiment=NAME", as for a training, or "data=NAME".

    Returns:
        The config with all arguments of the data, the data module, and the option file of the data.
    """
    if any(setting.startswith("+experiment=") for setting in settings):
        config, options = compose_with_options(settings)
        parts = check(config)
        return recorded(config, parts), data(parts), options["data"]

    # The last data=NAME has precedence.
    chosen = [setting for setting in settings if setting.startswith("data=")]
    if not chosen:
        raise ConfigError("no data given; pass data=NAME or +experiment=NAME")
    option = chosen[-1].removeprefix("data=")

    # A config requires all parts, so use an experiment for the parts that are not needed.
    config = override(compose(["+experiment=digits"]), settings)

    # Also validate unused parts that have a setting, to find misspelled settings.
    named = {setting.partition("=")[0].partition(".")[0] for setting in settings}
    parts = check(config, [kind for kind in PARTS if kind in named])
    return recorded(config, parts), data(parts), option


def loss(
    parts: Parts, labels: Callable[[], Labels] | None = None, split: Split | None = None
) -> Loss:
    """Build the loss. A module that does not inherit from `Loss` is wrapped.

    `labels` returns the training labels, for losses that count them. `split` is the training split,
    for losses that keep a state per image.

    Raises:
        ConfigError: If the loss keeps a state per image, and there is no split with image files, or
            there are several processes. Or if it has no valid `reduction`.
        DataError: If the file of `class_prior` is invalid.
    """
    part = parts["loss"]
    runtime: dict[str, Any] = {}
    parameters = signature(part.target).parameters
    if "all_reduce" in parameters:
        runtime["all_reduce"] = distributed.total

    if labels is not None and "label_counts" in parameters:
        runtime["label_counts"] = lambda: label_counts(labels())
    if "train_labels" in parameters:
        dataset = split.dataset if split is not None else None
        reason = f"loss: {part.target.__name__} keeps a state per training image"
        if distributed.world_size() > 1:
            raise ConfigError(f"{reason}, which needs one process; start the run without torchrun")
        if labels is None or split is None or not isinstance(dataset, StoredImages):
            raise ConfigError(f"{reason}, which needs a training on image files; pass another loss")
        runtime["train_labels"] = torch.from_numpy(labels().dense())
    # Losses read no files, so they get the numbers of this one. The argument of this name of a
    # plugin's loss may have another meaning.
    prior = part.arguments.get("class_prior")
    is_own = part.target.__module__.startswith("mldec.")
    if is_own and isinstance(prior, str) and prior != "estimate":
        runtime["class_prior"] = read_prior(prior)

    return as_loss(part.call(**runtime))


def label_counts(labels: Labels) -> LabelCounts:
    """Count the positives and negatives of each class."""
    positives = torch.from_numpy(labels.all_counts(1))
    negatives = torch.from_numpy(labels.all_counts(0))
    return LabelCounts(positives, negatives)


def mixing(mix: Mix, classes: Classes) -> Mixing | None:
    """Build mixup, cutmix and label smoothing. Returns None if all of them are off."""
    if not mix.enabled and not mix.soft:
        return None
    options = {**vars(mix), "mode": mix.mode.value, "labels": mix.labels.value}
    return Mixing(classes, **options)


def backbone(parts: Parts, *, pretrained: bool = True) -> nn.Module:
    """Build the backbone. Weights are never downloaded if `pretrained` is False."""
    part = parts["backbone"]
    replaced = {}
    # Backbones without blocks of features return tokens, which the head averages.
    if needs_blocks(parts) and "blocks" in signature(part.target).parameters:
        replaced["blocks"] = True
    if not pretrained and "pretrained" in part.arguments:
        replaced["pretrained"] = False
    module: nn.Module = part.call(**replaced)
    return module


def model(parts: Parts, classes: Classes, *, pretrained: bool = True) -> Classifier:
    """Build a classifier: the backbone, and a head for these classes."""
    network = backbone(parts, pretrained=pretrained)
    runtime: dict[str, Any] = {"in_features": network.num_features, "num_classes": len(classes)}
    if needs_blocks(parts):
        runtime["blocks"] = getattr(network, "block_sizes", None)
    return Classifier(network, parts["head"].call(**runtime))


def needs_blocks(parts: Parts) -> bool:
    """Return True if the head takes blocks of features, and not tokens; see `mldec.heads`."""
    head = parts.get("head")
    return head is not None and getattr(head.target, "features", None) == "blocks"
