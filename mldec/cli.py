"""The command-line words that choose a model or a dataset: the same for every command that uses one."""

import argparse
import math
import os
import platform
from typing import TYPE_CHECKING

import mldec
from mldec.config.compose import compose, override
from mldec.config.schema import MAX_IMAGE_SIZE, PARTS, Config
from mldec.errors import ConfigError

# Everything heavy is imported when it is used, so that --help and a wrong argument answer at once.
if TYPE_CHECKING:
    import torch

    from mldec.checkpoint import Loaded
    from mldec.data.base import DataModule

VERSION = f"mldec {mldec.__version__} (Python {platform.python_version()})"


def command(name: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of `python -m mldec.NAME`, with --version.

    Args:
        name: of the command.
        description: for --help, its line breaks kept.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m mldec.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=VERSION)
    return parser


def said_once(message: str) -> str:
    """Return what this process should print of a fault: under torchrun the same is printed once."""
    if "RANK" not in os.environ:
        return message
    from mldec.runtime import distributed

    return distributed.said_once(message)


def add_model_options(arguments: argparse.ArgumentParser) -> None:
    """Add the checkpoint and what changes how it is used."""
    arguments.add_argument(
        "checkpoint",
        help="a run's folder, such as outputs/digits, a checkpoint in it, a released .pth file, or zoo:NAME "
        "(see MODEL_ZOO.md)",
    )
    arguments.add_argument(
        "--weights", choices=("ema", "raw"), help="default: those that scored best in the run"
    )
    arguments.add_argument(
        "--image-size",
        type=image_side,
        metavar="S",
        help="pixels per side; default: as the checkpoint says",
    )
    arguments.add_argument(
        "--plugin", action="append", default=[], help="a package of yours that may hold its parts"
    )


def open_model(words: argparse.Namespace, device: "torch.device") -> "Loaded":
    """Load the chosen model."""
    from mldec.checkpoint import load_model

    return load_model(
        words.checkpoint,
        words.weights,
        image_size=words.image_size,
        device=device,
        plugins=words.plugin,
    )


def open_data(settings: list[str]) -> "tuple[Config, DataModule]":
    """Build the dataset of words such as `data=coco data.root=/data/coco`, where no model is needed.

    Raises:
        ConfigError: if no dataset is chosen, or a word is wrong.
    """
    from mldec import build

    if not any(word.startswith("data=") for word in settings):
        raise ConfigError(
            "no dataset is chosen: pass data=NAME, such as data=coco data.root=/data/coco"
        )
    config = override(
        compose(["+experiment=digits"]), settings
    )  # the other parts of it are not used
    # Of the parts that are not used only those count that a word names: a misspelt one must not pass in silence.
    named = {word.partition("=")[0].partition(".")[0] for word in settings}
    parts = build.check(config, [kind for kind in PARTS if kind in named])
    return build.recorded(config, parts), build.data(parts)


def positive(word: str) -> int:
    """Read a whole number from 1 on."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word} is not a whole number from 1 on")
    return int(word)


def image_side(word: str) -> int:
    """Read a number of pixels per side."""
    side = positive(word)
    if side > MAX_IMAGE_SIZE:
        raise argparse.ArgumentTypeError(f"{word} is above {MAX_IMAGE_SIZE} pixels")
    return side


def fraction(word: str) -> float:
    """Read a number from 0 to 1."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{word} is not a number from 0 to 1")
    return value
