"""Load a model: one of our checkpoints, a file of the paper's authors, or a model of open_clip.

Evaluation, prediction and notebooks all enter here.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from mldec import build
from mldec.checkpoint import hub, portable, released, towers, zoo
from mldec.checkpoint.calibration import Calibration
from mldec.checkpoint.classes import read_class_names
from mldec.checkpoint.describing import (
    Description,
    describe_file,
    describe_run,
    describe_tower,
    read_weights,
)
from mldec.checkpoint.fitting import check_fit, copy_fitting, load_strict
from mldec.checkpoint.state import Best, Checkpoint, LogPosition
from mldec.config.compose import to_dict
from mldec.config.schema import Config
from mldec.data.base import Classes
from mldec.data.fingerprint import Fingerprint
from mldec.data.transforms import EvalTransform
from mldec.errors import CheckpointError, ConfigError, refusing
from mldec.files.run_folder import find_checkpoint
from mldec.files.torch_files import versions
from mldec.model import Classifier
from mldec.runtime import distributed, provenance

log = logging.getLogger("mldec")

MOST_VERSIONS = 100  # versions of a checkpoint that are looked for: more than a run keeps
_LOADING = threading.RLock()


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
        loaded = Loaded(
            model.to(device).eval(),
            description.config,
            description.classes,
            description.transform,
            description.metrics,
            description.weights,
            description.path,
            description.fingerprint,
            description.calibration,
            description.of_run,
            description.unseen,
        )

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
        versions=provenance.installed(),
        git=provenance.git_commit(),
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
