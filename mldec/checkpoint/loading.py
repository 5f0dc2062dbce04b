"""From a file of weights, ours or the authors', to a model: the one door for evaluate, predict and notebooks."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mldec import build
from mldec.checkpoint import released, zoo
from mldec.checkpoint.limits import check_sizes, limited
from mldec.checkpoint.state import Checkpoint
from mldec.config.compose import parse
from mldec.config.schema import PARTS, Config
from mldec.data.base import Classes
from mldec.data.transforms import EvalTransform
from mldec.errors import CheckpointError, ConfigError
from mldec.files.run_folder import find_checkpoint
from mldec.files.torch_files import read_torch, versions
from mldec.model import Classifier
from mldec.runtime import distributed

log = logging.getLogger("mldec")

MOST_VERSIONS = 100  # of a checkpoint: more than a run keeps
MODEL_PARTS = ("backbone", "head")
_LOADING = threading.RLock()
COMPUTED = (
    "num_batches_tracked",
    "backbone.mean",
    "backbone.std",
)  # may be absent from a released file
NAMED, LONGEST = 10, 100  # tensors in a message, and the characters of each


@dataclass(frozen=True)
class Loaded:
    """A model ready for use, and what its checkpoint says of it."""

    model: Classifier  # in evaluation mode; images uint8 or float [B, 3, H, W] -> logits [B, K]
    config: Config
    classes: Classes
    transform: EvalTransform  # a PIL image -> the model's input
    metrics: dict[str, float]
    weights: str  # "ema" or "raw"


def load(path: Path) -> Checkpoint:
    """Read a checkpoint of a run of this program.

    Raises:
        CheckpointError: if it cannot be read, see `read_torch`, or is no such checkpoint.
    """
    return Checkpoint.from_state(_read(path), path)


def load_newest(path: Path) -> tuple[Path, Checkpoint]:
    """Read a checkpoint of a run, or the newest older version of it that is whole; a damaged one is named in the log.

    Raises:
        CheckpointError: if none can be read.
    """
    names = [name for name in versions(path, MOST_VERSIONS) if name.exists()]
    for name, older in zip(names, [*names[1:], None], strict=True):
        try:
            return name, load(name)
        except CheckpointError as error:
            if older is None:
                raise
            log.warning(f"{error}; going on from {older}")
    raise CheckpointError(f"no file at {path}: check the path")


def local(path: str | Path) -> Path:
    """Return the path of a file: of the best checkpoint in the folder of a run, or a download of "zoo:NAME"."""
    text = str(path)
    if text.startswith("zoo:"):
        return zoo.fetch(text.removeprefix("zoo:"))
    return find_checkpoint(Path(path)) if Path(path).is_dir() else Path(path)


def load_model(
    path: str | Path,
    weights: str | None = None,
    *,
    image_size: int | None = None,
    device: str | torch.device = "cpu",
    plugins: Sequence[str] = (),
) -> Loaded:
    """Rebuild the model of a file.

    The model is float32 whatever the default type and device are, and no random numbers are drawn.

    Args:
        path: a file written by `mldec.train` or the folder of its run (best.pt, else last.pt), a `.pth` file of the
            authors, or "zoo:NAME", which is downloaded once.
        weights: "ema", "raw", or None for those that scored best in the run; a file of the authors has one set only.
        image_size: pixels per side, instead of what the file or the table of known files says.
        device: to put the model on; a name as `distributed.pick_device` takes it, or torch's own.
        plugins: packages of the caller's that may hold its parts; the file itself cannot allow any.

    Raises:
        CheckpointError: if the file cannot be used, see `read_torch`, or its tensors do not fit the model it describes.
        ConfigError: for an argument that is none of these, or a device that is not there.
    """
    if weights not in ("ema", "raw", None):
        raise ConfigError(
            f"weights is {weights!r}: choose 'ema', 'raw', or None for those that scored best"
        )
    if isinstance(plugins, str):
        raise ConfigError(
            f"plugins is {plugins!r}: pass a list of packages, such as plugins=[{plugins!r}]"
        )
    if image_size is not None:
        EvalTransform(image_size=image_size)  # refuses one out of its range
    if isinstance(device, str):
        device = distributed.pick_device(device)

    path = local(path)
    with _standard_torch():
        state = _read(path)
        if "format" in state:
            loaded = _from_run(Checkpoint.from_state(state, path), path, weights, plugins)
        else:
            loaded = _from_authors(state, path, weights, image_size)
        loaded.model.to(device).eval()
    return loaded if image_size is None else _at_size(loaded, image_size, path)


def saved_config(
    checkpoint: Checkpoint, path: Path, plugins: Sequence[str] = (), *, kinds: Sequence[str] = PARTS
) -> Config:
    """Return the config in a checkpoint as data: only the caller's plugins count.

    Args:
        checkpoint: of a run.
        path: of its file, for messages.
        plugins: packages of the caller's that may hold its parts.
        kinds: the parts that are checked, and whose nodes then hold every argument.

    Raises:
        CheckpointError: if it is not a config that this version understands.
    """
    if "${" in repr(
        checkpoint.config
    ):  # it is data: nothing in it may look up the reader's environment
        raise CheckpointError(
            f"the config in {path} is refused: it holds an interpolation, and a saved one never does"
        )
    try:
        config = parse(
            {**checkpoint.config, "plugins": list(plugins), "resume": None, "init": None}
        )
        return build.recorded(config, build.check(config, kinds))
    except Exception as error:  # OmegaConf and signatures meet here what no YAML file could hold
        raise CheckpointError(f"the config in {path} cannot be used: {error}") from error


def load_strict(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Load tensors that must fit by name and shape.

    Raises:
        CheckpointError: with up to ten names that are missing, unexpected or of another shape.
    """
    match = match_tensors(model, tensors)
    for what, names in (
        ("missing", match.missing),
        ("unexpected", match.unexpected),
        ("of another shape", match.other_shape),
    ):
        if names:
            some = ", ".join(name[:LONGEST] for name in names[:NAMED])
            plural = "tensor is" if len(names) == 1 else "tensors are"
            raise CheckpointError(
                f"{path} does not fit the model: {len(names)} {plural} {what} ({some})"
            )
    model.load_state_dict(dict(tensors))


def initialise(model: nn.Module, path: str | Path) -> str:
    """Copy into the model every tensor of a file, ours or the authors', that fits by name and shape.

    Returns:
        A one-line report of what was loaded, what has another shape, and what is not in the file.

    Raises:
        CheckpointError: if the file cannot be read, or is of another backbone.
    """
    path = local(path)
    state = _read(path)
    if "format" in state:
        tensors, _ = Checkpoint.from_state(state, path).weights(None, path)
    else:
        tensors = released.tensors(state, path)

    # What is computed need not be in a file. A head may differ, for another set of classes; half a backbone would be
    # another network's.
    match = match_tensors(model, tensors)
    missing = [name for name in match.missing if not name.endswith(COMPUTED)]
    lacking = [name for name in (*missing, *match.other_shape) if name.startswith("backbone.")]
    if lacking or not match.fitting:
        raise CheckpointError(
            f"init={path} is of another backbone: {len(lacking)} of the model's tensors are absent or of another shape "
            f"({', '.join(sorted(lacking)[:3])}); choose its backbone=NAME"
        )

    fitting = {name: tensors[name] for name in match.fitting if not name.endswith(COMPUTED)}
    model.load_state_dict(fitting, strict=False)
    wanted = len(fitting) + len(missing) + len(match.other_shape)
    unexpected = [name for name in match.unexpected if not name.endswith(COMPUTED)]
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


class Match(NamedTuple):
    """How the tensors of a file fit a model: sorted names."""

    fitting: list[str]
    other_shape: list[str]
    missing: list[str]  # in the model, not in the file
    unexpected: list[str]  # in the file, not in the model


def match_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> Match:
    """Compare tensors with those of a model by name and shape."""
    wanted = model.state_dict()
    common = wanted.keys() & tensors.keys()
    fitting = {name for name in common if wanted[name].shape == tensors[name].shape}
    return Match(
        fitting=sorted(fitting),
        other_shape=sorted(common - fitting),
        missing=sorted(wanted.keys() - tensors.keys()),
        unexpected=sorted(tensors.keys() - wanted.keys()),
    )


def _read(path: Path) -> dict[str, Any]:
    """Read a file of weights that may be a stranger's."""
    state = read_torch(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is no checkpoint: it holds a {type(state).__name__}")
    return state


def _from_run(
    checkpoint: Checkpoint, path: Path, weights: str | None, plugins: Sequence[str]
) -> Loaded:
    # Naming a photo needs backbone and head only: a renamed argument of the data must not make a checkpoint unusable.
    config = saved_config(checkpoint, path, plugins, kinds=MODEL_PARTS)
    tensors, chosen = checkpoint.weights(weights, path)
    model = _build(config, checkpoint.classes, tensors, path)
    load_strict(model, tensors, path)
    return Loaded(
        model, config, checkpoint.classes, checkpoint.transform, checkpoint.metrics, chosen
    )


def _from_authors(
    state: dict[str, Any], path: Path, weights: str | None, image_size: int | None
) -> Loaded:
    if weights == "ema":
        raise CheckpointError(f"{path} holds one set of weights: leave --weights out")
    converted = released.convert(state, path, image_size=image_size)
    config = parse(converted.config)
    model = _build(config, converted.classes, converted.tensors, path)
    # The files lack what we compute: batch counters, and the normalisation, which is a fact about the network.
    computed = {key: value for key, value in model.state_dict().items() if key.endswith(COMPUTED)}
    load_strict(model, {**computed, **converted.tensors}, path)
    return Loaded(model, config, converted.classes, converted.transform, {}, "raw")


def _at_size(loaded: Loaded, image_size: int, path: Path) -> Loaded:
    if loaded.config.backbone.get("image_size") is not None:
        raise CheckpointError(
            f"--image-size {image_size}: {path} was trained for one size only; leave it out"
        )
    loaded.config.data["image_size"] = image_size
    return replace(loaded, transform=replace(loaded.transform, image_size=image_size))


def _build(
    config: Config, classes: Classes, tensors: Mapping[str, Tensor], path: Path
) -> Classifier:
    """Build the model that a config describes, if it is not larger than the tensors that are to fill it.

    Raises:
        CheckpointError: if it is larger, or cannot be built.
    """
    check_sizes((config.backbone, config.head), tensors, path)
    try:
        parts = build.check(config, MODEL_PARTS)
        # First without memory: a model that turns out to be too large has cost nothing. A caller's own parts, which no
        # file can ask for, need not know how to be built so.
        if not config.plugins:
            with limited(tensors, path), torch.device("meta"):
                build.model(parts, classes, pretrained=False)
        with limited(tensors, path):
            return build.model(parts, classes, pretrained=False)
    except CheckpointError:
        raise
    except (
        Exception
    ) as error:  # a constructor may raise anything on numbers that its signature allows
        raise CheckpointError(
            f"the model in {path} cannot be built: {error or 'it is too large'}"
        ) from error


@contextmanager
def _standard_torch() -> Iterator[None]:
    """Build on the CPU and in float32, whatever the caller's defaults are, and leave the global random state alone.

    Both are the whole process's, so that one thread at a time changes them.
    """
    with _LOADING, torch.device("cpu"), torch.random.fork_rng(devices=[]):
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)

        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
