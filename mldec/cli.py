"""Shared parts of the commands: the parser, common options and types of arguments."""

import argparse
import importlib.util
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import mldec
from mldec.errors import ConfigError, one_line, print_error, suggest
from mldec.files.run_folder import check_source
from mldec.runtime.console import to_console
from mldec.runtime.devices import MAX_IMAGE_SIZE, EngineName, Precision

VERSION = f"mldec {mldec.__version__} (Python {platform.python_version()})"


class _Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors and suggestions for unknown options."""

    def error(self, message: str) -> NoReturn:
        """Print the error without the usage, and exit with status 2."""
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        if unknown:
            hint = suggest(unknown.partition("=")[0], list(self._option_string_actions))
            message = f"{unknown}: unknown option{hint}"
        print_error(f"{message}; see {self.prog} --help")
        sys.exit(2)


def command(name: str, description: str) -> argparse.ArgumentParser:
    """Create the parser of `mldec NAME`, with --version."""
    parser = _Parser(
        prog=f"mldec {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=VERSION)
    return parser


def add_model_options(arguments: argparse.ArgumentParser, *, exported: bool = False) -> None:
    """Add the checkpoint argument and the options of a model. `exported` adds .onnx files."""
    files = ", an .onnx file of mldec export" if exported else ""
    arguments.add_argument(
        "checkpoint",
        help="a checkpoint, a released .pth file, zoo:NAME or hf:OWNER/NAME[@REVISION] (see "
        f"MODEL_ZOO.md), clip:MODEL[:WEIGHTS] of open_clip (see docs/zero_shot.md){files}, or the "
        "folder of a run: its calibrated.pt if made from the current best.pt, else best.pt",
    )
    add_weights_options(arguments)
    arguments.add_argument(
        "--image-size",
        type=image_side,
        metavar="S",
        help="pixels per side; default: the size in the checkpoint",
    )
    arguments.add_argument(
        "--class-names",
        metavar="FILE",
        help="file with other class names, one per line, in the order of the checkpoint",
    )
    arguments.add_argument(
        "--thresholds",
        metavar="FILE",
        help="file with one threshold per class: one number per line in the order of the "
        "checkpoint, or a .csv file with the columns class and threshold",
    )


def add_views_option(arguments: argparse._ActionsContainer) -> None:
    """Add --views to a command that scores images."""
    arguments.add_argument(
        "--views",
        choices=("flip", "scales"),
        help="average the logits of two views of each image: mirrored (flip) or at two sizes",
    )


def add_threshold_option(arguments: argparse._ActionsContainer) -> None:
    """Add --threshold to a command that uses the threshold of the data by default."""
    arguments.add_argument(
        "--threshold",
        type=fraction,
        help="score in [0, 1] above which a class is predicted; default: the calibrated "
        "thresholds of the checkpoint, else data.threshold",
    )


def add_weights_options(arguments: argparse._ActionsContainer) -> None:
    """Add the options --weights and --plugin."""
    arguments.add_argument(
        "--weights",
        choices=("ema", "raw"),
        help="averaged or raw weights of best.pt; default: the better ones",
    )
    arguments.add_argument(
        "--plugin", action="append", default=[], help="third-party package that defines parts"
    )


def add_data_options(arguments: argparse.ArgumentParser) -> None:
    """Add settings and --precision to a command that scores the data of a checkpoint."""
    arguments.add_argument(
        "settings", nargs="*", metavar="key=value", help="such as data.root=/data/coco"
    )
    add_precision_option(arguments, "that of the training; on a CPU fp32")


def add_class_options(arguments: argparse._ActionsContainer) -> None:
    """Add the options --classes and --vectors for zero-shot models."""
    arguments.add_argument(
        "--classes",
        metavar="NAMES",
        help="other classes of a zero-shot model, separated by commas",
    )
    arguments.add_argument(
        "--vectors",
        metavar="FILE|clip:MODEL",
        help="word vectors of --classes, or a text encoder; default: the text encoder of the "
        "training; see DATASETS.md, Word vectors",
    )


def add_precision_option(arguments: argparse._ActionsContainer, default: str) -> None:
    """Add --precision; `default` describes its default in --help."""
    arguments.add_argument(
        "--precision",
        choices=[precision.value for precision in Precision],
        help="number format; auto: bf16 if the GPU supports it, else fp16, and fp32 on a CPU; "
        f"default: {default}",
    )


def add_compile_option(arguments: argparse._ActionsContainer) -> None:
    """Add --compile to a command that scores images."""
    arguments.add_argument(
        "--compile",
        action="store_true",
        help="compile the network with torch.compile: takes minutes, and is faster for many images",
    )


def add_engine_option(arguments: argparse._ActionsContainer) -> None:
    """Add --engine to a command that scores images."""
    arguments.add_argument(
        "--engine",
        choices=[engine.value for engine in EngineName],
        default=EngineName.auto.value,
        help="program that computes the backbone on a CPU; auto: openvino if it is installed, and "
        "for head=ridge the engine of the training",
    )


def precision_setting(args: argparse.Namespace) -> list[str]:
    """Return --precision as a list of settings of the run, empty without the option."""
    if args.precision is None:
        return []
    return [f"train.precision={args.precision}"]


def chosen_model(args: argparse.Namespace) -> dict[str, Any]:
    """Convert the options of `add_model_options` to the arguments of `load_model`."""
    return {
        "path": args.checkpoint,
        "weights": args.weights,
        "image_size": args.image_size,
        "class_names": args.class_names,
        "thresholds": args.thresholds,
        "plugins": args.plugin,
        "views": getattr(args, "views", None),  # not an option of every command
    }


def run_command(
    parse: Callable[[], argparse.Namespace], work: Callable[[argparse.Namespace], object]
) -> None:
    """Parse the command line and run a command. Errors are printed as one line.

    If `work` returns an integer, it is the exit status.
    """
    with one_line():
        args = parse()
        checkpoint = getattr(args, "checkpoint", None)
        # Only --xmp-undo needs no checkpoint.
        if checkpoint is not None and not getattr(args, "xmp_undo", False):
            check_source(checkpoint)  # before the slow imports of a command
        to_console()
        result = work(args)
        sys.exit(result if isinstance(result, int) else 0)


def parse_options(
    arguments: argparse.ArgumentParser, words: Sequence[str], options: Mapping[str, Any]
) -> argparse.Namespace:
    """Parse the options of a command that are given in Python.

    Args:
        arguments: Parser of the command.
        words: Positional arguments.
        options: Values by the name of the option, such as {"batch_size": 4}. None and False omit
            the option, True gives it without a value, and a list gives it once per item.

    Raises:
        ConfigError: If an option is unknown or has an invalid value.
    """
    line = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if option not in arguments._option_string_actions:
            known = [text[2:].replace("-", "_") for text in arguments._option_string_actions]
            raise ConfigError(f"{name}: unknown option{suggest(name, known)}")

        if value is True:
            line.append(option)
            continue
        values = value if isinstance(value, list | tuple) else [value]
        for each in values:
            if each is not None and each is not False:
                line.append(f"{option}={each}")

    arguments.exit_on_error = False
    try:
        return arguments.parse_args(line + ["--", *words])
    except argparse.ArgumentError as error:
        name = str(error.argument_name).removeprefix("--").replace("-", "_")
        raise ConfigError(f"{name}: {error.message}") from error


def require(feature: str, extra: str, *packages: str) -> None:
    """Raise ConfigError if a package of an extra is missing. `feature` starts the message."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{feature}: {package} is missing; run pip install -e '.[{extra}]'")


def whole(text: str, *, smallest: int = 0) -> int:
    """Parse an integer that is at least `smallest`."""
    if not text.isdecimal() or int(text) < smallest:
        raise argparse.ArgumentTypeError(f"{text} is not an integer of at least {smallest}")
    return int(text)


def positive(text: str) -> int:
    """Parse an integer that is at least 1."""
    return whole(text, smallest=1)


def image_side(text: str) -> int:
    """Parse an image size in pixels, from 1 to `MAX_IMAGE_SIZE`."""
    side = positive(text)
    if side > MAX_IMAGE_SIZE:
        raise argparse.ArgumentTypeError(f"{text} is above {MAX_IMAGE_SIZE} pixels")
    return side


def fraction(text: str) -> float:
    """Parse a number in [0, 1]."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1]")
    return value
