"""Checkpoints: written whole or not at all, checked when read, and enough by themselves to rebuild the model."""

import hashlib
import logging
import os
import pickle
import subprocess
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import mldec
from mldec import build
from mldec.config import Config, parse
from mldec.data.base import Classes
from mldec.data.transforms import EvalTransform
from mldec.errors import CheckpointError, ConfigError
from mldec.model import Classifier

FORMAT = 1
log = logging.getLogger("mldec")


@dataclass(frozen=True)
class Loaded:
    """A model ready for use, and what its checkpoint says of it."""

    model: Classifier  # in evaluation mode; images uint8 or float [B, 3, H, W] -> logits [B, K]
    config: Config
    classes: Classes
    transform: EvalTransform  # a PIL image -> the model's input
    metrics: dict[str, float]
    weights: str  # "ema" or "raw"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that a crash at any moment leaves a whole one under its name.

    The new file is written beside the old one, flushed to the disk and renamed. While the two exist, the checksum
    file holds the hashes of both.

    Raises:
        CheckpointError: if it cannot be written; what was there before stays.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        new = _sha256(temporary)
        old = [line for line in _known_hashes(path) if line != new]
        _write_hashes(path, [new, *old])
        temporary.replace(path)
        _sync_folder(path.parent)
        _write_hashes(path, [new])
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
        temporary.unlink(missing_ok=True)
        kept = f"; {path} is still the last good one" if path.exists() else ""
        raise CheckpointError(
            f"cannot save {path}: {_first_line(error)}{kept}; free space and pass resume=auto"
        ) from error


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint: checksum first, plain containers and tensors only, nothing in it is run.

    Raises:
        CheckpointError: if the file is missing, damaged, truncated, refused, or not a checkpoint of this program.
    """
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}: check the path")
    hashes = _known_hashes(path)
    if hashes and _sha256(path) not in hashes:
        raise CheckpointError(
            f"{path} is damaged: its sha256 is not the one in {_hash_file(path).name}; use another copy"
        )
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is no checkpoint, or only a part of one ({path.stat().st_size:,} bytes)")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: it holds more than tensors and plain values ({_named(error)})"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is no checkpoint, or a damaged one: {_first_line(error)}") from error
    if not isinstance(state, dict) or "format" not in state:
        raise CheckpointError(f"{path} holds weights but is no checkpoint of mldec: it has no 'format'")
    if state["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {state['format']}, this mldec reads {FORMAT}: use a newer mldec")
    return state


def load_model(
    path: str | Path, weights: str | None = None, *, device: str | torch.device = "cpu", plugins: Sequence[str] = ()
) -> Loaded:
    """Rebuild the model of a checkpoint, without any download: the one door for evaluate, predict and notebooks.

    Args:
        path: of a file written by `mldec.train`.
        weights: "ema", "raw", or None for those that scored best in the run.
        device: to put the model on.
        plugins: packages of the caller's that may hold its parts; the file itself cannot allow any.

    Raises:
        CheckpointError: if the file cannot be used, see `load`, or its tensors do not fit the model it describes.
    """
    path = Path(path)
    state = load(path)
    config = saved_config(state, path, plugins)
    classes, transform = saved_classes(state), EvalTransform(**state["transform"])
    weights = weights or state["best"]["weights"]
    tensors = state["model"] if weights == "raw" else state["ema"]
    if tensors is None:
        raise CheckpointError(f"{path} holds no moving average: pass --weights raw")
    model = build.model(config, classes, pretrained=False)
    load_strict(model, tensors, path)
    return Loaded(model.to(device).eval(), config, classes, transform, state["metrics"], weights)


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
    except ConfigError as error:
        raise CheckpointError(f"the config in {path} cannot be used: {error}") from error
    return config


def saved_classes(state: dict[str, Any]) -> Classes:
    """Return the classes in a checkpoint."""
    saved = state["classes"]
    return Classes(names=tuple(saved["names"]), exclusive=saved["exclusive"], queries=saved["queries"])


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
            some = ", ".join(sorted(names)[:10])
            raise CheckpointError(f"{path} does not fit the model: it {what} {len(names)} tensors ({some})")
    model.load_state_dict(tensors)


def initialise(model: nn.Module, path: Path) -> str:
    """Copy into the model every tensor of a checkpoint that fits by name and shape; return a one-line report.

    Raises:
        CheckpointError: if the file cannot be read, or nothing in it fits.
    """
    state = load(path)
    tensors = state["model"] if state["best"]["weights"] == "raw" else state["ema"]
    wanted = model.state_dict()
    fitting = {name: t for name, t in tensors.items() if name in wanted and wanted[name].shape == t.shape}
    if not fitting:
        raise CheckpointError(f"init={path}: not one of its {len(tensors)} tensors fits the model")
    model.load_state_dict(fitting, strict=False)
    other = sorted(name for name in tensors if name in wanted and name not in fitting)
    fresh = sorted(wanted.keys() - tensors.keys())
    report = f"init from {path}: {len(fitting)} of {len(wanted)} tensors loaded"
    for what, names in (("of another shape", other), ("not in the file", fresh)):
        if names:
            report += f"; {len(names)} {what} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
    return report


def versions() -> dict[str, str]:
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


def _hash_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _known_hashes(path: Path) -> list[str]:
    """Return the hashes in the file beside a checkpoint; none if there is no such file."""
    file = _hash_file(path)
    return [line.split()[0] for line in file.read_text().splitlines() if line.strip()] if file.is_file() else []


def _write_hashes(path: Path, hashes: list[str]) -> None:
    """Write lines as `sha256sum` does, in one atomic step."""
    temporary = _hash_file(path).with_name(path.name + ".sha256.tmp")
    with temporary.open("w") as file:
        file.writelines(f"{line}  {path.name}\n" for line in hashes)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(_hash_file(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    """Flush a rename to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def _named(error: BaseException) -> str:
    """Return the part of torch's refusal that names what the pickle asked for."""
    for line in str(error).splitlines():
        if "Unsupported" in line or "GLOBAL" in line:
            return line.strip().removeprefix("WeightsUnpickler error: ").split(" was not an allowed")[0]
    return _first_line(error)
