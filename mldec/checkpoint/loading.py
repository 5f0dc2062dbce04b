"""Load a model: one of our checkpoints, a file of the paper's authors, or a model of open_clip.

Evaluation, prediction and notebooks all enter here.
"""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mldec import build
from mldec.checkpoint import hub, portable, released, towers, zoo
from mldec.checkpoint.classes import check_count, read_class_names
from mldec.checkpoint.state import Best, Calibration, Checkpoint, LogPosition
from mldec.config.compose import parse, to_dict
from mldec.config.schema import PARTS, Config
from mldec.data.fingerprint import Fingerprint
from mldec.data.transforms import EvalTransform
from mldec.data.types import Classes
from mldec.errors import CheckpointError, ConfigError, refusing
from mldec.files.run_folder import find_checkpoint
from mldec.files.torch_files import SUFFIX, read_torch, versions
from mldec.model import Classifier
from mldec.runtime import distributed, facts

log = logging.getLogger("mldec")

MOST_VERSIONS = 100  # versions of a checkpoint that are looked for: more than a run keeps
_LOADING = threading.RLock()
# Buffers that a released file may lack, because we compute them ourselves.
COMPUTED = (
    "num_batches_tracked",
    "backbone.mean",
    "backbone.std",
)
NAMED, LONGEST = 10, 100  # how many tensors a message names, and the characters of each name


@dataclass(frozen=True)
class Loaded:
    """A model ready for use, and the metadata of its checkpoint."""

    model: Classifier  # in evaluation mode; images uint8 or float [B, 3, H, W] -> logits [B, K]
    config: Config
    # None of them, with word vectors [0, D_w], for a zero-shot file of the official code, which
    # saves neither, and for a model of open_clip.
    classes: Classes
    transform: EvalTransform  # a PIL image -> the model's input
    metrics: dict[str, float]  # of the run's last evaluation; empty for a file of others
    weights: str  # "ema" or "raw"
    path: Path  # of the file of weights
    # Of the training data; None for a file of others.
    fingerprint: Fingerprint | None = None
    # Of these weights; None unless `mldec.calibrate` wrote the file.
    calibration: Calibration | None = None
    of_run: bool = False  # whether the file is one of ours, and not one of others
    # Names of the classes that training did not have; None if the file does not say.
    unseen: tuple[str, ...] | None = None


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


def load(path: Path) -> Checkpoint:
    """Read a checkpoint that `mldec.train` wrote.

    Raises:
        CheckpointError: if the file cannot be read, see `read_torch`, or is no such checkpoint.
    """
    return Checkpoint.from_state(read_weights(path), path)


def load_newest(path: Path) -> tuple[Path, Checkpoint]:
    """Read the newest version of a run's checkpoint that is intact.

    A damaged version is named in the log, and the next older one is tried.

    Args:
        path: of the newest version; the older ones are beside it, named as `versions` says.

    Returns:
        The path of the version that was read, and its checkpoint.

    Raises:
        CheckpointError: if none can be read.
    """
    paths = [version for version in versions(path, MOST_VERSIONS) if version.exists()]

    for candidate, older in zip(paths, [*paths[1:], None], strict=True):
        try:
            return candidate, load(candidate)
        except CheckpointError as error:
            if older is None:
                raise
            log.warning(f"{error}; going on from {older}")

    raise CheckpointError(f"no file at {path}: check the path")


def local(path: str | Path) -> Path:
    """Resolve what a user names to the path of a local file of weights.

    Args:
        path: a file; the folder of a run, which stands for its best checkpoint (else the last one);
            a folder that `mldec.publish` wrote; "zoo:NAME", a released file; or
            "hf:OWNER/NAME[@REVISION]", a published checkpoint. The last two are downloaded once.

    Raises:
        CheckpointError: if the folder holds no checkpoint, the download fails, or it is a model of
            open_clip, which only `load_model` takes.
    """
    text = str(path)
    if towers.is_tower(text):
        raise CheckpointError(f"{text}: this needs a checkpoint, not a model of open_clip")
    if text.startswith("zoo:"):
        return zoo.fetch(text.removeprefix("zoo:"))
    if text.startswith(hub.SCHEME):
        return hub.fetch(text.removeprefix(hub.SCHEME))

    if not Path(path).is_dir():
        return Path(path)
    published = Path(path) / portable.WEIGHTS
    return published if published.is_file() else find_checkpoint(Path(path))


def is_download(path: str) -> bool:
    """Tell whether what a user names is not in a folder of the user's, but in a cache."""
    return path.startswith(("zoo:", hub.SCHEME)) or towers.is_tower(path)


def load_model(
    path: str | Path,
    weights: str | None = None,
    *,
    image_size: int | None = None,
    class_names: str | Path | None = None,
    device: str | torch.device = "cpu",
    plugins: Sequence[str] = (),
) -> Loaded:
    """Rebuild the model that a file describes and load its weights.

    The model is float32 whatever torch's default type and device are, and the global random state
    is left as it was.

    Args:
        path: a file written by `mldec.train` or the folder of its run (best.pt, else last.pt), a
            `.pth` file of the authors, anything else that `local` takes, or "clip:MODEL[:WEIGHTS]",
            a model of open_clip.
        weights: "ema", "raw", or None for the set that scored best in the run; a file of others has
            one set only.
        image_size: pixels per side, instead of what the file or the table of known files says.
        class_names: a text file with one name per line, which replace the names of the classes, in
            the checkpoint's order.
        device: where to put the model; a name that `distributed.pick_device` takes, or a
            `torch.device`.
        plugins: packages of the caller that may hold parts of the model; the file itself cannot
            allow any.

    Raises:
        CheckpointError: if the file cannot be used, see `read_torch`, its tensors do not fit the
            model that it describes, or the names are not as many as its classes.
        ConfigError: if an argument is none of the above, the device is not available, or a model of
            open_clip cannot be had.
        DataError: if the class names cannot be read, see `read_class_names`.
    """
    # Refuse wrong arguments first: reading or downloading a large file takes a while.
    if weights not in ("ema", "raw", None):
        raise ConfigError(
            f"weights is {weights!r}: choose 'ema', 'raw', or None for those that scored best"
        )
    if isinstance(plugins, str):
        raise ConfigError(
            f"plugins is {plugins!r}: pass a list of packages, such as plugins=[{plugins!r}]"
        )
    if image_size is not None:
        EvalTransform(image_size=image_size)  # raises if the size is out of range
    if isinstance(device, str):
        device = distributed.pick_device(device)
    names = None if class_names is None else read_class_names(Path(class_names))

    with _standard_torch():
        if towers.is_tower(path):
            description = describe_tower(str(path), weights, names)
        else:
            description = describe_file(local(path), weights, image_size, names, plugins)

        model = _build(description)
        known = {
            field.name: getattr(description, field.name)
            for field in fields(Loaded)
            if field.name != "model"
        }
        loaded = Loaded(model.to(device).eval(), **known)

    return loaded if image_size is None else _at_size(loaded, image_size, path)


def to_store(loaded: Loaded) -> Checkpoint:
    """Return a checkpoint of a model that was loaded, to be written under another name.

    Args:
        loaded: from `load_model`.

    Returns:
        The content of a checkpoint of a run. A file of others becomes a checkpoint without a
        training state: of step 0, and with nothing that a run could go on from.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    if loaded.of_run:
        return load(loaded.path)

    return Checkpoint(
        config=to_dict(loaded.config),
        classes=loaded.classes,
        transform=loaded.transform,
        metrics={},
        best=Best(),
        epoch=0,
        step=0,
        steps_per_epoch=1,
        model=loaded.model.state_dict(),
        ema=None,
        optimizer={"state": {}, "param_groups": []},
        scaler={},
        loss={},
        log=LogPosition(),
        fingerprint=None,
        versions=facts.installed(),
        git=facts.git_commit(),
    )


def outline(path: Path, plugins: Sequence[str] = ()) -> tuple[Checkpoint, Config, Classifier]:
    """Read a checkpoint and build its model without memory for the weights.

    Args:
        path: of the file.
        plugins: packages of the caller that may hold parts of the model.

    Returns:
        The checkpoint, its config, and the model on the meta device.

    Raises:
        CheckpointError: if the file cannot be used, or the model cannot be built.
    """
    checkpoint = load(path)
    description = describe_run(checkpoint, path, "raw", plugins)
    with refusing(path), torch.device("meta"):
        model = build.model(description.parts, description.classes, pretrained=False)
    return checkpoint, description.config, model


def initialise(model: nn.Module, path: str | Path) -> str:
    """Start a model from a file of weights; see `copy_fitting`.

    Args:
        model: takes the tensors.
        path: as `local` takes it; a checkpoint of a run gives the set of weights that scored best.

    Returns:
        A one-line report.

    Raises:
        CheckpointError: if the file cannot be read, or is of another backbone.
    """
    path = local(path)
    with refusing(path):
        state = read_weights(path)
        if "format" in state:
            tensors, _ = Checkpoint.from_state(state, path).weights(None, path)
        else:
            tensors = released.tensors(state, path)
        return copy_fitting(model, tensors, path)


def _at_size(loaded: Loaded, image_size: int, path: str | Path) -> Loaded:
    """Change the input size, in pixels per side, of a model that takes images of any size."""
    if image_size == loaded.transform.image_size:
        return loaded

    # A network such as ViT fixes its input size when it is built.
    if loaded.config.backbone.get("image_size") is not None:
        raise CheckpointError(
            f"--image-size {image_size}: {path} was trained for one size only; leave it out"
        )

    loaded.config.data["image_size"] = image_size
    return replace(loaded, transform=replace(loaded.transform, image_size=image_size))


def _build(description: Description) -> Classifier:
    """Build a model and fill it; one whose tensors are not those of the file takes no memory.

    Raises:
        CheckpointError: if it cannot be built, or does not fit its file.
    """
    path, tensors, optional = description.path, description.tensors, description.optional

    with refusing(path):
        # Parts of the caller's own need not support the meta device.
        if not description.config.plugins:
            with torch.device("meta"):
                outlined = build.model(description.parts, description.classes, pretrained=False)
            check_fit(outlined, tensors, path, optional=optional)

        model = build.model(description.parts, description.classes, pretrained=False)
        load_strict(model, tensors, path, optional=optional)
        return model


@contextmanager
def _standard_torch() -> Iterator[None]:
    """Build on the CPU in float32, whatever the caller's defaults, and restore the random state.

    The default type and the random state belong to the whole process, so a lock lets only one
    thread at a time change them.
    """
    with _LOADING, torch.device("cpu"), torch.random.fork_rng(devices=[]):
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)

        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


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


class Match(NamedTuple):
    """How the tensors of a file fit a model: four sorted lists of names."""

    fitting: list[str]
    other_shape: list[str]  # in both, but of different shapes
    missing: list[str]  # in the model, not in the file
    unexpected: list[str]  # in the file, not in the model


def match_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> Match:
    """Compare tensors with the state dict of a model by name and shape."""
    wanted = model.state_dict()
    common = wanted.keys() & tensors.keys()
    fitting = {name for name in common if wanted[name].shape == tensors[name].shape}

    return Match(
        fitting=sorted(fitting),
        other_shape=sorted(common - fitting),
        missing=sorted(wanted.keys() - tensors.keys()),
        unexpected=sorted(tensors.keys() - wanted.keys()),
    )


def check_fit(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    path: Path,
    *,
    optional: tuple[str, ...] = (),
) -> None:
    """Check that tensors match the model's in name and shape, all of them.

    Args:
        model: that is to take the tensors; it may be on the meta device.
        tensors: by the names of the model's state dict.
        path: of their file, for messages.
        optional: endings of the names of tensors that may be missing, and stay as they are.

    Raises:
        CheckpointError: if tensors are missing, unexpected or of another shape; it names up to ten.
    """
    match = match_tensors(model, tensors)
    missing = [name for name in match.missing if not name.endswith(optional)]

    for what, names in (
        ("missing", missing),
        ("unexpected", match.unexpected),
        ("of another shape", match.other_shape),
    ):
        if names:
            # The names come from the file: cut long ones, so that the message stays readable.
            examples = ", ".join(name[:LONGEST] for name in names[:NAMED])
            plural = "tensor is" if len(names) == 1 else "tensors are"
            raise CheckpointError(
                f"{path} does not fit the model: {len(names)} {plural} {what} ({examples})"
            )


def load_strict(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    path: Path,
    *,
    optional: tuple[str, ...] = (),
) -> None:
    """Copy tensors to a model that they must fit; see `check_fit`."""
    check_fit(model, tensors, path, optional=optional)
    model.load_state_dict(dict(tensors), strict=not optional)


def copy_fitting(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> str:
    """Copy every tensor that fits by name and shape.

    The backbone must fit completely. The head may differ, since a new run may have other classes.

    Args:
        model: takes the tensors.
        tensors: by the names of the model's state dict.
        path: of their file, for messages.

    Returns:
        A one-line report of what was loaded, what has another shape, and what is not in the file.

    Raises:
        CheckpointError: if the tensors are of another backbone.
    """
    # Computed buffers are neither required from the file nor taken from it.
    match = match_tensors(model, tensors)
    fitting = {name: tensors[name] for name in match.fitting if not name.endswith(COMPUTED)}
    missing = [name for name in match.missing if not name.endswith(COMPUTED)]
    unexpected = [name for name in match.unexpected if not name.endswith(COMPUTED)]

    # A backbone that fits in part is another network, whose other layers would stay random.
    unfilled = [name for name in (*missing, *match.other_shape) if name.startswith("backbone.")]
    if unfilled or not match.fitting:
        raise CheckpointError(
            f"init={path} is of another backbone: {len(unfilled)} of the model's tensors are "
            f"absent or of another shape ({', '.join(sorted(unfilled)[:3])}); "
            f"choose its backbone=NAME"
        )

    model.load_state_dict(fitting, strict=False)

    wanted = len(fitting) + len(missing) + len(match.other_shape)
    report = f"init from {path}: {len(fitting)} of {wanted} tensors loaded"
    for what, names in (
        ("of another shape", match.other_shape),
        ("not in the file", missing),
        ("not in the model", unexpected),
    ):
        if names:
            more = ", ..." if len(names) > 5 else ""
            report += f"; {len(names)} {what} ({', '.join(names[:5])}{more})"
    return report
