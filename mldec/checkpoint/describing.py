"""What a file of weights says of its model: of a run, of the paper's authors, or of open_clip."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mldec import build
from mldec.checkpoint import portable, released, towers
from mldec.checkpoint.calibration import Calibration
from mldec.checkpoint.classes import check_count
from mldec.checkpoint.fitting import COMPUTED
from mldec.checkpoint.state import Checkpoint
from mldec.config.compose import parse
from mldec.config.schema import PARTS, Config
from mldec.data.base import Classes
from mldec.data.fingerprint import Fingerprint
from mldec.data.transforms import EvalTransform
from mldec.errors import CheckpointError, ConfigError, refusing
from mldec.files.safetensors_file import SUFFIX
from mldec.files.torch_files import read_torch

log = logging.getLogger("mldec")


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a file says of its model, and the tensors that fill it."""

    path: Path
    config: Config
    parts: build.Parts  # backbone and head
    classes: Classes
    transform: EvalTransform
    metrics: dict[str, float]
    weights: str  # "ema" or "raw"
    tensors: Mapping[str, Tensor]
    fingerprint: Fingerprint | None = None
    calibration: Calibration | None = None
    of_run: bool = False
    unseen: tuple[str, ...] | None = None
    optional: tuple[str, ...] = ()  # endings of the names of tensors that the file may lack


def describe_file(
    path: Path,
    weights: str | None,
    image_size: int | None,
    names: Sequence[str] | None,
    plugins: Sequence[str],
) -> Description:
    """Describe the model in a local file; the arguments are those of `load_model`."""
    state = read_weights(path)
    if "format" not in state:
        return _describe_released(state, path, weights, image_size, names)

    description = describe_run(Checkpoint.from_state(state, path), path, weights, plugins)
    if names is None:
        return description
    check_count(names, len(description.classes), path)
    return _renamed(description, names)


def describe_run(
    checkpoint: Checkpoint, path: Path, weights: str | None, plugins: Sequence[str]
) -> Description:
    """Describe the model in a checkpoint of a run."""
    # Inference needs the backbone and the head only: an argument of the data that was renamed since
    # must not make a checkpoint unusable.
    config, parts = _saved_parts(checkpoint, path, plugins, build.MODEL_PARTS)
    tensors, chosen = checkpoint.weights(weights, path)

    calibration = checkpoint.calibration
    if calibration is not None and calibration.weights != chosen:
        log.warning(
            f"{path} was calibrated with its {calibration.weights} weights: its thresholds are "
            f"not used with the {chosen} ones"
        )
        calibration = None
    return Description(
        path=path,
        of_run=True,
        config=config,
        parts=parts,
        classes=checkpoint.classes,
        transform=checkpoint.transform,
        metrics=checkpoint.metrics,
        weights=chosen,
        tensors=tensors,
        fingerprint=checkpoint.fingerprint,
        calibration=calibration,
        unseen=checkpoint.unseen,
    )


def describe_tower(source: str, weights: str | None, names: Sequence[str] | None) -> Description:
    """Describe a model of open_clip."""
    if weights is not None:
        raise CheckpointError(f"{source} has one set of weights: leave --weights out")
    if names is not None:
        raise ConfigError(
            f"--class-names has no effect: {source} has no classes of its own; leave it out"
        )

    tower = towers.convert(source)
    config = parse(tower.config)
    return Description(
        path=tower.path,
        config=config,
        parts=build.check(config, build.MODEL_PARTS),
        classes=tower.classes,
        transform=tower.transform,
        metrics={},
        weights="raw",
        tensors=tower.tensors,
        optional=COMPUTED,
    )


def saved_config(
    checkpoint: Checkpoint, path: Path, plugins: Sequence[str] = (), *, kinds: Sequence[str] = PARTS
) -> Config:
    """Return the config of a checkpoint, treated as untrusted data.

    Its own `plugins` are dropped, so that a file cannot choose which packages are imported.

    Args:
        checkpoint: of a run.
        path: of its file, for messages.
        plugins: packages of the caller that may hold parts of the model.
        kinds: the parts that are checked, and whose nodes then hold every argument.

    Raises:
        CheckpointError: if it is not a config that this version understands.
    """
    return _saved_parts(checkpoint, path, plugins, kinds)[0]


def read_weights(path: Path) -> dict[str, Any]:
    """Read an untrusted file of weights and check that its top level is a dictionary."""
    if path.suffix == SUFFIX:
        return portable.read(path)

    state = read_torch(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is no checkpoint: it holds a {type(state).__name__}")
    return state


def _renamed(description: Description, names: Sequence[str]) -> Description:
    """Return the description of a model whose classes have other names, in the same order."""
    unseen = description.unseen
    if unseen is not None:
        new_name = dict(zip(description.classes.names, names, strict=True))
        unseen = tuple(new_name[name] for name in unseen)

    classes = replace(description.classes, names=tuple(names))
    return replace(description, classes=classes, unseen=unseen)


def _saved_parts(
    checkpoint: Checkpoint, path: Path, plugins: Sequence[str], kinds: Sequence[str]
) -> tuple[Config, build.Parts]:
    """Return the config of a checkpoint, see `saved_config`, and the parts that it describes."""
    # OmegaConf would resolve an interpolation, which can read the environment of the user.
    if "${" in repr(checkpoint.config):
        raise CheckpointError(
            f"the config in {path} is refused: it holds an interpolation, and a saved one never "
            f"does"
        )

    with refusing(path):
        config = parse(
            {**checkpoint.config, "plugins": list(plugins), "resume": None, "init": None}
        )
        parts = build.check(config, kinds)
        return build.recorded(config, parts), parts


def _describe_released(
    state: dict[str, Any],
    path: Path,
    weights: str | None,
    image_size: int | None,
    names: Sequence[str] | None,
) -> Description:
    """Describe the model in a file of the paper's authors."""
    if weights == "ema":
        raise CheckpointError(f"{path} holds one set of weights: leave --weights out")

    converted = released.convert(state, path, image_size=image_size, names=names)
    config = parse(converted.config)
    return Description(
        path=path,
        config=config,
        parts=build.check(config, build.MODEL_PARTS),
        classes=converted.classes,
        transform=converted.transform,
        metrics={},
        weights="raw",
        tensors=converted.tensors,
        # The files lack the counters of batch norm, and the normalisation of the input, which timm
        # knows from the name of the network.
        optional=COMPUTED,
    )
