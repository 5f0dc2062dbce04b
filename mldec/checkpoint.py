"""Checkpoints: enough by themselves to rebuild the model, its classes and its input transform."""

import logging
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import mldec
from mldec import build, distributed, released, zoo
from mldec.config import parse
from mldec.data.base import Classes
from mldec.data.transforms import EvalTransform
from mldec.errors import CheckpointError, ConfigError
from mldec.model import Classifier
from mldec.run_folder import find_checkpoint
from mldec.settings import Config
from mldec.storage import read_torch, versions
from mldec.untrusted import check_parts, check_sizes, limited

log = logging.getLogger("mldec")

FORMAT = 1
VERSIONS = 100  # more than a run keeps
_LOADING = threading.RLock()
COMPUTED = ("num_batches_tracked", "backbone.mean", "backbone.std")  # may be absent from a released file


@dataclass(frozen=True)
class Loaded:
    """A model ready for use, and what its checkpoint says of it."""

    model: Classifier  # in evaluation mode; images uint8 or float [B, 3, H, W] -> logits [B, K]
    config: Config
    classes: Classes
    transform: EvalTransform  # a PIL image -> the model's input
    metrics: dict[str, float]
    weights: str  # "ema" or "raw"


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint of a run of this program.

    Raises:
        CheckpointError: if it cannot be read, see `read_torch`, or is no such checkpoint.
    """
    return _checked(_read(path), path)


def _read(path: Path) -> dict[str, Any]:
    """Read a file of weights that may be a stranger's."""
    state = read_torch(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is no checkpoint: it holds a {type(state).__name__}")
    return state


def load_newest(path: Path) -> tuple[Path, dict[str, Any]]:
    """Read a checkpoint of a run, or the newest older version of it that is whole; a damaged one is named in the log.

    Raises:
        CheckpointError: if none can be read.
    """
    names = [name for name in versions(path, VERSIONS) if name.exists()]
    for name, older in zip(names, [*names[1:], None], strict=True):
        try:
            return name, load(name)
        except CheckpointError as error:
            if older is None:
                raise
            log.warning(f"{error}; going on from {older}")
    raise CheckpointError(f"no file at {path}: check the path")


def _checked(state: dict[str, Any], path: Path) -> dict[str, Any]:
    if "format" not in state:
        raise CheckpointError(
            f"{path} holds weights but is no checkpoint of mldec, which resume needs: pass init={path}"
        )
    if type(state["format"]) is not int or state["format"] != FORMAT:  # a tensor has no one answer
        raise CheckpointError(
            f"{path} has format {str(state['format'])[:40]}, this mldec reads {FORMAT}: use a newer mldec"
        )
    check_parts(state, path)
    return state


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
    """Rebuild the model of a file: the one door for evaluate, predict and notebooks.

    Args:
        path: a file written by `mldec.train` or the folder of its run (best.pt, else last.pt), a `.pth` file of the
            authors, or "zoo:NAME", which is downloaded once.
        weights: "ema", "raw", or None for those that scored best in the run; a file of the authors has one set only.
        image_size: pixels a side, instead of what the file or the table of known files says.
        device: to put the model on; a name as `distributed.pick_device` takes it, or torch's own.
        plugins: packages of the caller's that may hold its parts; the file itself cannot allow any.

    The model is float32 whatever the default type and device are, and no random numbers are drawn.

    Raises:
        CheckpointError: if the file cannot be used, see `read_torch`, or its tensors do not fit the model it describes.
        ConfigError: for an argument that is none of these, or a device that is not there.
    """
    if weights not in ("ema", "raw", None):
        raise ConfigError(f"weights is {weights!r}: choose 'ema', 'raw', or None for those that scored best")
    if isinstance(plugins, str):
        raise ConfigError(f"plugins is {plugins!r}: pass a list of packages, such as plugins=[{plugins!r}]")
    if image_size is not None:
        EvalTransform(image_size=image_size)  # holds it to its range
    if isinstance(device, str):
        device = distributed.pick_device(device)
    path = local(path)
    with _standard_torch():
        state = _read(path)
        if "format" in state:
            loaded = _ours(state, path, weights, plugins)
        else:
            loaded = _theirs(state, path, weights, image_size)
        if image_size is not None:
            if "image_size" in loaded.config.backbone:
                raise CheckpointError(f"--image-size {image_size}: {path} was trained for one size only; leave it out")
            loaded = replace(loaded, transform=replace(loaded.transform, image_size=image_size))
            loaded.config.data["image_size"] = image_size
        loaded.model.to(device).eval()
    return loaded


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


def _ours(state: dict[str, Any], path: Path, weights: str | None, plugins: Sequence[str]) -> Loaded:
    config = saved_config(_checked(state, path), path, plugins)
    classes, transform = saved_classes(state), saved_transform(state, path)
    tensors, chosen = _weights(state, weights, path)
    model = _build(config, classes, tensors, path)
    load_strict(model, tensors, path)
    return Loaded(model, config, classes, transform, state["metrics"], chosen)


def _theirs(state: dict[str, Any], path: Path, weights: str | None, image_size: int | None) -> Loaded:
    if weights == "ema":
        raise CheckpointError(f"{path} holds one set of weights: leave --weights out")
    found = released.convert(state, path, image_size=image_size)
    config = parse(found.config)
    model = _build(config, found.classes, found.tensors, path)
    # The files lack what we compute: batch counters, and the normalisation, which is a fact about the network.
    own = {key: value for key, value in model.state_dict().items() if key.endswith(COMPUTED)}
    load_strict(model, {**own, **found.tensors}, path)
    return Loaded(model, config, found.classes, found.transform, {}, "raw")


def saved_config(state: dict[str, Any], path: Path, plugins: Sequence[str] = ()) -> Config:
    """Return the config in a checkpoint as data: only the caller's plugins count.

    Raises:
        CheckpointError: if it is not a config that this version understands.
    """
    if "${" in repr(state["config"]):  # it is data: nothing in it may look up the reader's environment
        raise CheckpointError(f"the config in {path} is refused: it holds an interpolation, and a saved one never does")
    try:
        config = parse({**state["config"], "plugins": list(plugins), "resume": None, "init": None})
        build.check(config)
    except Exception as error:  # OmegaConf and signatures meet here what no YAML file could hold
        raise CheckpointError(f"the config in {path} cannot be used: {error}") from error
    return config


def saved_transform(state: dict[str, Any], path: Path) -> EvalTransform:
    """Return how an image becomes the input of a checkpoint's model."""
    try:
        return EvalTransform(**state["transform"])
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"the transform in {path} cannot be used: {error}") from error


def _weights(state: dict[str, Any], wanted: str | None, path: Path) -> tuple[dict[str, Tensor], str]:
    """Return one set of weights and its name: the wanted one, else the one that scored best."""
    chosen = state["best"]["weights"] if wanted is None else wanted
    tensors = state["model"] if chosen == "raw" else state["ema"]
    if tensors is None:
        raise CheckpointError(f"{path} holds no moving average: pass --weights raw")
    return tensors, chosen


def _build(config: Config, classes: Classes, tensors: dict[str, Tensor], path: Path) -> Classifier:
    """Build the model that a config describes, if it is not larger than the tensors that are to fill it.

    Raises:
        CheckpointError: if it is larger, or cannot be built.
    """
    check_sizes((config.backbone, config.head), tensors, path)
    try:
        # First without memory: a model that turns out to be too large has cost nothing. A caller's own parts, which no
        # file can ask for, need not know how to be built so.
        if not config.plugins:
            with limited(tensors, path), torch.device("meta"):
                build.model(config, classes, pretrained=False)
        with limited(tensors, path):
            return build.model(config, classes, pretrained=False)
    except CheckpointError:
        raise
    except Exception as error:  # a constructor may raise anything on numbers that its signature allows
        raise CheckpointError(f"the model in {path} cannot be built: {error or 'it is too large'}") from error


def saved_classes(state: dict[str, Any]) -> Classes:
    """Return the classes in a checkpoint."""
    saved = state["classes"]
    queries = saved["queries"]
    return Classes(
        names=tuple(saved["names"]),
        exclusive=saved["exclusive"],
        queries=None if queries is None else queries.float(),
    )


def load_strict(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Load tensors that must fit by name and shape.

    Raises:
        CheckpointError: with up to ten names that are missing, unexpected or of another shape.
    """
    wanted = model.state_dict()
    missing, unexpected = wanted.keys() - tensors.keys(), tensors.keys() - wanted.keys()
    other = {name for name in wanted.keys() & tensors.keys() if wanted[name].shape != tensors[name].shape}
    for what, names in (("misses", missing), ("has too many", unexpected), ("has other shapes for", other)):
        if names:
            some = ", ".join(name[:100] for name in sorted(names)[:10])
            raise CheckpointError(f"{path} does not fit the model: it {what} {len(names)} tensors ({some})")
    model.load_state_dict(tensors)


def initialise(model: nn.Module, path: str | Path) -> str:
    """Copy into the model every tensor of a file, ours or the authors', that fits by name and shape.

    Returns:
        A one-line report of what was loaded, what has another shape, and what is not in the file.

    Raises:
        CheckpointError: if the file cannot be read, or is of another backbone.
    """
    path = local(path)
    state = _read(path)
    tensors = _weights(_checked(state, path), None, path)[0] if "format" in state else released.tensors(state, path)
    wanted = {name: t for name, t in model.state_dict().items() if not name.endswith(COMPUTED)}
    fitting = {name: t for name, t in tensors.items() if name in wanted and wanted[name].shape == t.shape}
    # A head may differ, for another set of classes; half a backbone would be another network's.
    lacking = sorted(name for name in wanted if name.startswith("backbone.") and name not in fitting)
    if lacking or not fitting:
        raise CheckpointError(
            f"init={path} is of another backbone: {len(lacking)} of the model's tensors are absent or of another shape "
            f"({', '.join(lacking[:3])}); choose its backbone=NAME"
        )
    model.load_state_dict(fitting, strict=False)
    report = f"init from {path}: {len(fitting)} of {len(wanted)} tensors loaded"
    for what, names in (
        ("of another shape", [name for name in tensors if name in wanted and name not in fitting]),
        ("not in the file", [name for name in wanted if name not in tensors]),
        ("not in the model", [name for name in tensors if name not in wanted and not name.endswith(COMPUTED)]),
    ):
        if names:
            report += f"; {len(names)} {what} ({', '.join(sorted(names)[:5])}{', ...' if len(names) > 5 else ''})"
    return report


def installed() -> dict[str, str]:
    """Return what the run was made with."""
    return {"mldec": mldec.__version__, "torch": str(torch.__version__), "timm": timm.__version__}


def git_commit() -> str | None:
    """Return the commit of the checkout this package runs from, with "+dirty" if it was changed; else None."""
    folder = Path(mldec.__file__).parent
    try:
        asked = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+dirty"]
        tracked = subprocess.run([*asked[:3], "ls-files", "--error-unmatch", mldec.__file__], capture_output=True)
        found = subprocess.run(asked, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() if tracked.returncode == found.returncode == 0 else None
