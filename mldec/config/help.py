"""The text of `mldec train --help`, and of `mldec train +experiment=NAME --help`."""

import json
import textwrap
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from mldec.config.compose import compose_with_options, config_dir, flat, option, options, to_dict
from mldec.config.schema import PARTS, Config

WIDTH = 100

# Settings for a start, and their meaning. Defaults come from the schema.
SETTINGS = {
    "data": "form of the data; csv, folders and yolo are for your own photos",
    "data.root": "folder of the data",
    "data.image_size": "pixels per side; the default depends on data",
    "backbone": "network that maps images to tokens",
    "head": "module that maps tokens to logits",
    "loss": "default: bce for several labels per image, cross_entropy for one",
    "train.epochs": "epochs of the schedule",
    "train.batch_size": "images per step of all processes; auto: divide it if memory is short",
    "train.workers": "loader processes; null: one per processor",
    "train.precision": "fp32, fp16, bf16 or auto, which depends on the device",
    "train.patience": "evaluations without progress before an early stop",
    "train.ema_decay": "moving average of the weights; null: none",
    "optim.name": "optimizer of timm, such as adamw or sgd",
    "optim.lr": "maximum learning rate",
    "optim.weight_decay": "L2 regularization with adam, decoupled with adamw",
    "name": "name of the run; its folder is outputs/NAME",
    "seed": "seed of the weights, the image order and the augmentation",
    "device": "cpu, cuda, cuda:1, mps or auto",
    "resume": "auto: continue the run in outputs/NAME",
    "init": "checkpoint with initial weights",
}
# Values of settings without a default in the schema.
PLACEHOLDERS = dict.fromkeys(("name",) + PARTS, "NAME")
PLACEHOLDERS |= {"data.root": "FOLDER", "data.image_size": "N"}

USAGE = """\
Train an image classifier.

  mldec train +experiment=digits                  embedded data, no download
  mldec train +experiment=finetune_frozen data.root=/data/mine name=mine
  torchrun --nproc-per-node 8 -m mldec.train +experiment=coco_tresnet_l data.root=/data/coco

  mldec train +experiment=NAME --help             describe an experiment
  mldec train +experiment=NAME --cfg job          check the settings, and print all of them

Settings for a start, with the defaults of the schema. An experiment can have other values:
"""
PART_HELP = """\
Each part (data, backbone, head, loss) also accepts the arguments of its class, such as
head.num_groups=20. An unknown argument raises an error that lists the valid ones. The options:
"""


def help_text(words: Sequence[str]) -> str:
    """Return the help for a command line: of its experiments, or else of the command.

    Raises:
        ConfigError: If an experiment does not exist.
    """
    # `--config-dir` adds a folder of option files.
    folders = [config_dir()]
    for word, following in pairwise([*words, ""]):
        flag, _, value = word.partition("=")
        if flag in ("--config-dir", "-cd"):
            folders.append(str(Path(value or following).absolute()))

    for word in words:
        key, _, name = word.partition("=")
        if key.lstrip("+") == "experiment":
            return _experiment_help(name, folders)

    names: dict[str, list[str]] = {}
    for part in ("experiment",) + PARTS:
        names[part] = []
        for folder in folders:
            names[part] += options(part, folder)
    lines = [USAGE]
    for key, meaning in SETTINGS.items():
        value = PLACEHOLDERS.get(key) or show(default(key))
        lines.append(f"  {f'{key}={value}':<27} {meaning}")
    lines += ["", PART_HELP]
    for part, known in names.items():
        text = f"{part}: {', '.join(known)}"
        lines.append(textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


def default(key: str) -> Any:
    """Return the default of a setting in the schema, such as 40 for "train.epochs"."""
    section, _, name = key.rpartition(".")
    kind = get_type_hints(Config)[section] if section else Config
    return getattr(kind, name)


def show(value: Any) -> str:
    """Format a value as on the command line."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, list):
        return f"[{','.join(map(show, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def _experiment_help(name: str, folders: list[str]) -> str:
    words = [f"+experiment={name}"]
    if len(folders) > 1:
        paths = ",".join(f"file://{folder}" for folder in folders[1:])
        words.append(f"hydra.searchpath=[{paths}]")
    config, chosen = compose_with_options(words)

    lines = []
    for folder in folders:
        path = Path(folder, "experiment", f"{name}.yaml")
        if path.is_file():
            header = path.read_text(encoding="utf-8").partition("\ndefaults:")[0]
            for line in header.removeprefix("# @package _global_\n").splitlines():
                lines.append(line.removeprefix("#").removeprefix(" "))
            break

    # Compare with the schema and the option files. Interpolations in these do not count as changes.
    # Other defaults are in the signatures of the parts, whose import is slow.
    defaults = flat(to_dict(Config(name=name, data={}, backbone={}, head={})))
    lines += ["", "Settings of the experiment, with defaults of the schema in parentheses:", ""]
    for part in PARTS:
        if chosen.get(part) in options(part):
            lines.append(f"  {part}={chosen[part]}")
            defaults |= flat({part: option(part, chosen[part])})

    for key, value in flat(to_dict(config)).items():
        setting = f"  {key}={show(value)}"
        if key not in defaults:
            lines.append(setting)
            continue
        before = show(defaults[key]).replace("???", "required")
        if show(value) != before and "${" not in before:
            lines.append(f"{setting:<42} ({before})")
    return "\n".join(lines)
