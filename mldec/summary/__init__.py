"""Compare the runs in a folder: `python -m mldec.summary outputs/ [--csv FILE] [--plot FILE]`."""

import argparse
from pathlib import Path

from mldec.cli import command, run_command
from mldec.errors import ConfigError, say
from mldec.figures import check_format, require_matplotlib, save
from mldec.files.results import check_targets, write_result
from mldec.summary.plot import COSTS, draw
from mldec.summary.runs import gather
from mldec.summary.table import table, to_csv


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = command(
        "summary", "Print a table of the runs in a folder, the best one of each metric first."
    )
    arguments.add_argument("folder", nargs="?", default="outputs", help="default: outputs")
    arguments.add_argument("--csv", metavar="FILE", help="write the table there too")
    arguments.add_argument(
        "--plot",
        metavar="FILE",
        help="draw learning curves, and the metric against its cost: .png, .svg or .pdf "
        "(needs matplotlib)",
    )
    arguments.add_argument(
        "--cost",
        choices=COSTS,
        help="of the plot: hours of training (the default), or gmacs, billions of "
        "multiply-accumulates per image",
    )
    arguments.add_argument(
        "--plugin", action="append", default=[], help="a package of yours that may hold parts"
    )
    return arguments


def run(args: argparse.Namespace) -> None:
    """Print the table, and write it and the plot if asked to."""
    check_targets(args.csv, args.plot)
    if args.plot:
        check_format("--plot", args.plot)
        require_matplotlib("--plot")
    elif args.cost:
        raise ConfigError("--cost has no effect without --plot FILE: leave it out")

    runs = gather(Path(args.folder), args.plugin)
    say(*table(runs).splitlines())
    if args.csv:
        write_result(args.csv, to_csv(runs))
    if args.plot:
        figure, left_out = draw(runs, cost=args.cost or "hours")
        say(*left_out)
        save(figure, Path(args.plot))


def main() -> None:
    """Run the command."""
    run_command(parser().parse_args, run)
