"""Shared parts of the commands: the parser, common options and types of arguments."""

import argparse
import importlib.util
import platform
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import mldec
from mldec.errors import ConfigError, OptionError, one_line, print_error, suggest
from mldec.evaluation import options
from mldec.evaluation.options import ModelOptions, Options, option_of
from mldec.files.run_folder import check_source
from mldec.runtime.console import to_console

VERSION = f"mldec {mldec.__version__} (Python {platform.python_version()})"


class _Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors and suggestions for unknown options."""

    def error(self, message: str) -> NoReturn:
        """Print the error without the usage, and exit with status 2."""
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        if unknown:
            # Import it late, because it imports omegaconf.
            from mldec.config.schema import RETIRED

            name = unknown.partition("=")[0]
            message = f"{unknown}: unknown option{suggest(name, list(self._option_string_actions))}"
            if f"{self.prog} {name}" in RETIRED:
                message = f"{name} was removed; {RETIRED[f'{self.prog} {name}']}"
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


def checked(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `type` of an argument that a function of `evaluation.options` converts."""

    def convert(text: str, **limits: int) -> Any:
        try:
            return check(text, **limits)
        except ValueError as error:
            # argparse would replace the text of a ValueError.
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


whole = checked(options.whole)
positive = checked(options.positive)


def add_options(
    arguments: argparse._ActionsContainer, kind: type[Options], *names: str, **changes: Any
) -> None:
    """Add the options of some fields. `changes` replace arguments of `add_argument`."""
    for name in names:
        each = kind.__dataclass_fields__[name]
        argument = {"type": checked(each.metadata["check"]), **each.metadata["argument"], **changes}
        if each.default is False:
            argument["action"] = "store_true"
            del argument["type"]
        if "choices" in argument:
            del argument["type"]
        default = [] if argument.get("action") == "append" else each.default
        arguments.add_argument(option_of(name), default=default, **argument)


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
    add_options(arguments, ModelOptions, "image_size", "class_names", "thresholds")


def add_weights_options(arguments: argparse._ActionsContainer) -> None:
    """Add the options --weights and --plugin."""
    add_options(arguments, ModelOptions, "weights", "plugin")


def add_settings(arguments: argparse.ArgumentParser) -> None:
    """Add the settings of a command that scores the data of a checkpoint."""
    arguments.add_argument(
        "settings", nargs="*", metavar="key=value", help="such as data.root=/data/coco"
    )


def run_command(
    parse: Callable[[], argparse.Namespace],
    work: Callable[[Any], object],
    kind: type[Options] | None = None,
) -> None:
    """Parse the command line and run a command. Errors are printed as one line.

    `kind` is the class of the options that `work` accepts; None passes the parsed arguments. If
    `work` returns an integer, it is the exit status.
    """
    with one_line():
        args = parse()
        checkpoint = getattr(args, "checkpoint", None)
        # Only --xmp-undo needs no checkpoint.
        if checkpoint is not None and not getattr(args, "xmp_undo", False):
            check_source(checkpoint)  # before the slow imports of a command
        to_console()
        try:
            result = work(args if kind is None else kind.of(vars(args)))
        except OptionError as error:
            name, fault = error.args
            raise ConfigError(f"{option_of(name)}: {fault}") from error
        sys.exit(result if isinstance(result, int) else 0)


def require(feature: str, extra: str, *packages: str) -> None:
    """Raise ConfigError if a package of an extra is missing. `feature` starts the message."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{feature}: {package} is missing; run pip install -e '.[{extra}]'")
