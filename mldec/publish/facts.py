"""What is known of a model beside its metrics: its start, licences and cost, without paths."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from timm.models import get_pretrained_cfg

from mldec.backbones import TimmBackbone
from mldec.checkpoint import Checkpoint, Loaded
from mldec.clip import PREFIX
from mldec.data.vector_origin import VectorOrigin
from mldec.files.run_folder import LOG_FILE, read_facts
from mldec.report.training import folder_of_run
from mldec.runtime.facts import count_parameters, multiply_accumulates
from mldec.training.log import clock, read_progress

UNKNOWN = "unknown"
_IN_LIST = re.compile(r"""(?<=[\[,'" ])[/~][^,\]'"]*""")  # a path in a list
# The names of timm's networks in a config.
_TIMM = ("mldec.backbones.TimmBackbone", f"{TimmBackbone.__module__}.{TimmBackbone.__qualname__}")


class Start(NamedTuple):
    """The weights that a run started from, and their licence, as parts of sentences."""

    weights: str
    licence: str
    base_model: str | None  # of the hub


def without_folders(text: str) -> str:
    """Replace the folders of an absolute path by `...`: they tell of a machine and a user.

    Args:
        text: a setting or a word of a command; anything but an absolute path stays as it is.
    """
    # A list of paths is one word of a command.
    if text.startswith("["):
        return _IN_LIST.sub(lambda path: without_folders(path[0]), text)
    # A text encoder is a name, a folder, or a name and a file.
    if text.startswith(PREFIX):
        return ":".join(without_folders(part) for part in text.split(":"))

    name = Path(text).name
    return f".../{name}" if text.startswith(("/", "~")) and name else text


def published_config(value: Any) -> Any:
    """Return a tree of settings without the folders of absolute paths; see `without_folders`."""
    if isinstance(value, Mapping):
        # Names of classes may begin as they like.
        return {
            key: item if isinstance(item, list) and key == "classes" else published_config(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [published_config(item) for item in value]
    return without_folders(value) if isinstance(value, str) else value


def published_origin(origin: VectorOrigin | None) -> VectorOrigin | None:
    """Return how word vectors were made, without the folders of a text encoder's files."""
    return None if origin is None else replace(origin, source=without_folders(origin.source))


def start_of(checkpoint: Checkpoint, loaded: Loaded) -> Start:
    """Return what a run started from.

    Args:
        checkpoint: of the run.
        loaded: the same, whose config has every argument of the backbone.
    """
    backbone, init = loaded.config.backbone, checkpoint.config.get("init")
    name, pretrained = backbone.get("name"), backbone.get("pretrained")

    # A file of the authors, which says nothing of its training.
    if not checkpoint.step:
        return Start(UNKNOWN, f"{UNKNOWN}: the weights are not those of a run of mldec", None)
    if init:
        return Start(f"init={without_folders(str(init))}", f"{UNKNOWN}: see these weights", None)
    if "pretrained" not in backbone:
        built = f"those that {backbone.get('_target_')} is built with"
        return Start(built, f"{UNKNOWN}: the backbone is not from timm", None)
    if pretrained is False:
        return Start("random weights", "none: no weights of others were used", None)
    if backbone.get("_target_") not in _TIMM:
        weights = f"published weights of {without_folders(str(name))}"
        return Start(weights, f"{UNKNOWN}: they are not from timm", None)

    try:
        published = get_pretrained_cfg(str(name))
    except RuntimeError:
        # timm knows the network, and no weights of that name.
        published = None
    licence = None if published is None else published.license
    if isinstance(pretrained, str):
        of_name = f"; timm states {licence} for the weights of that name" if licence else ""
        return Start(
            f"the file {without_folders(pretrained)} in {name}",
            f"{UNKNOWN}: they were read from a file{of_name}",
            None,
        )
    base_model = None if published is None else published.hf_hub_id
    return Start(f"timm's weights of {name}", licence or f"{UNKNOWN} to timm", base_model)


def cost_of(loaded: Loaded, path: Path) -> list[tuple[str, str]]:
    """Return what a model costs per image, and what its training has cost, as headings and texts.

    Args:
        loaded: the checkpoint.
        path: of its file; run.json and metrics.jsonl are looked for in its run.

    Raises:
        CheckpointError: if they are not what a run writes.
    """
    classes, size = loaded.classes, loaded.transform.image_size
    queries = None if classes.queries is None else (len(classes), classes.queries.shape[1])
    try:
        macs = f"{multiply_accumulates(loaded.model, size, queries) / 1e9:,.3f} billion per image"
    except Exception:
        # A part of the user's own may fail on tensors without values.
        macs = UNKNOWN

    folder = folder_of_run(path)
    seconds = 0.0 if folder is None else read_progress(folder / LOG_FILE).seconds
    time = f"{clock(seconds)} (hours:minutes:seconds)" if seconds else UNKNOWN
    return [
        ("Parameters", f"{count_parameters(loaded.model)[1]:,}"),
        ("Multiply-accumulates", f"{macs}, at {size} x {size} pixels"),
        ("Training time", f"{time}; the device is not recorded"),
    ]


def command_of(path: Path) -> str | None:
    """Return the command that trained a checkpoint; None if its run does not lie around its file.

    Raises:
        CheckpointError: if run.json is not what a run writes.
    """
    folder = folder_of_run(path)
    facts = None if folder is None else read_facts(folder)
    if facts is None:
        return None

    words = []
    for word in shlex.split(facts.command):
        key, sign, value = word.partition("=")
        words.append(f"{key}={without_folders(value)}" if sign else without_folders(key))
    return shlex.join(words)
