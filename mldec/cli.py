"""The command-line arguments that choose a model or a dataset, shared by all commands."""

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
    """Return what this process should print of an error, so that torchrun shows it once."""
    if "RANK" not in os.environ:
        return message

    from mldec.runtime import distributed

    return distributed.said_once(message)


def add_model_options(arguments: argparse.ArgumentParser) -> None:
    """Add the checkpoint, and the options that change how it is used."""
    arguments.add_argument(
        "checkpoint",
        help="a run's folder, such as outputs/digits, a checkpoint in it, a released .pth file, "
        "or zoo:NAME (see MODEL_ZOO.md)",
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


def open_model(args: argparse.Namespace, device: "torch.device") -> "Loaded":
    """Load the model that the options of `add_model_options` choose.

    Raises:
        CheckpointError: if the checkpoint cannot be used.
    """
    from mldec.checkpoint import load_model

    return load_model(
        args.checkpoint,
        args.weights,
        image_size=args.image_size,
        device=device,
        plugins=args.plugin,
    )


def open_data(settings: list[str]) -> "tuple[Config, DataModule]":
    """Build the dataset that settings choose, for commands that need no model.

    Args:
        settings: such as `data=coco` and `data.root=/data/coco`.

    Returns:
        The config with all arguments of the dataset, and the dataset.

    Raises:
        ConfigError: if no dataset is chosen, or a setting is wrong.
    """
    from mldec import build

    if not any(setting.startswith("data=") for setting in settings):
        raise ConfigError(
            "no dataset is chosen: pass data=NAME, such as data=coco data.root=/data/coco"
        )

    # A config needs all parts: those that the settings leave out are of this experiment, unused.
    config = override(compose(["+experiment=digits"]), settings)

    # Unused parts are checked only if a setting names them, so that a misspelt setting is refused.
    named = {setting.partition("=")[0].partition(".")[0] for setting in settings}
    parts = build.check(config, [kind for kind in PARTS if kind in named])
    return build.recorded(config, parts), build.data(parts)


def positive(text: str) -> int:
    """Read a whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 on")
    return int(text)


def image_side(text: str) -> int:
    """Read a number of pixels per side."""
    side = positive(text)
    if side > MAX_IMAGE_SIZE:
        raise argparse.ArgumentTypeError(f"{text} is above {MAX_IMAGE_SIZE} pixels")
    return side


def fraction(text: str) -> float:
    """Read a number from 0 to 1."""
    # What is no number becomes NaN, which is outside the range too.
    try:
        value = float(text)
    except ValueError:
        value = math.nan

    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")
    return value
