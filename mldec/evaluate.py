"""Evaluate a checkpoint: `python -m mldec.evaluate best.pt [data.root=...] [--json FILE]`."""

import argparse

from mldec.cli import add_model_options, command, said_once
from mldec.errors import one_line


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec.evaluate`."""
    arguments = command(
        "evaluate",
        "Evaluate a checkpoint on the validation data of its config; "
        "settings are changed with key=value.",
    )
    add_model_options(arguments)

    arguments.add_argument(
        "settings", nargs="*", metavar="key=value", help="such as data.root=/data/coco"
    )
    arguments.add_argument("--json", metavar="FILE", help="write metrics and per-class values")
    arguments.add_argument("--csv", metavar="FILE", help="write one row per class")
    return arguments


def main() -> None:
    """Run the command."""
    with one_line(said_once):
        args = parser().parse_intermixed_args()

        # Imported late: --help and a wrong argument need not wait for torch.
        from mldec.evaluation import run
        from mldec.runtime.console import to_console

        to_console()
        run(args)


if __name__ == "__main__":
    main()
