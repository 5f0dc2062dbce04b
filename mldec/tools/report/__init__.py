"""Write a report: `mldec report best.pt [data.root=...] [--compare OTHER] --out FILE`.

The report is one HTML file that needs no network; see docs/running.md. With --compare it tests
whether the checkpoint is better than another one on the same images.
"""

import argparse

from mldec.cli import (
    add_data_options,
    add_model_options,
    add_threshold_option,
    add_views_option,
    command,
    require,
    run_command,
)


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec report`."""
    arguments = command("report", str(__doc__))
    add_model_options(arguments)
    add_views_option(arguments)
    add_data_options(arguments)
    add_threshold_option(arguments)
    arguments.add_argument(
        "--compare",
        metavar="OTHER",
        help="another checkpoint with the same classes; the options apply to it too, and with "
        "--class-names both have their classes in this order",
    )
    arguments.add_argument("--out", metavar="FILE", required=True, help="the report, an HTML file")
    arguments.add_argument(
        "--json", metavar="FILE", help="write metrics and per-class values with their intervals"
    )
    return arguments


def report(args: argparse.Namespace) -> None:
    """Write the report that the command line asks for."""
    require("a report", "report", "plotly")

    # Imported late: --help and a wrong argument need not wait for torch.
    from mldec.tools.report.make import run

    run(args)


def main() -> None:
    """Run the command."""
    run_command(parser().parse_intermixed_args, report)
