"""Write a report: `mldec report best.pt [data.root=...] [--compare OTHER] --out FILE`.

The report is one HTML file that works offline; see docs/evaluating.md. With --compare, it tests
whether the checkpoint is better than another one on the same images.
"""

import argparse
import gc
import time
from pathlib import Path

from mldec import cli
from mldec.errors import say


def parser() -> argparse.ArgumentParser:
    """Return the parser of `mldec report`."""
    arguments = cli.command("report", str(__doc__))
    cli.add_model_options(arguments)
    cli.add_views_option(arguments)
    cli.add_data_options(arguments)
    cli.add_threshold_option(arguments)
    add = arguments.add_argument
    add(
        "--compare",
        metavar="OTHER",
        help="another checkpoint with the same classes; the options apply to both checkpoints",
    )
    add("--out", metavar="FILE", required=True, help="the report, an HTML file")
    add("--json", metavar="FILE", help="write metrics and per-class values with their intervals")
    return arguments


def report(args: argparse.Namespace) -> None:
    """Write the report of a checkpoint."""
    cli.require("a report", "report", "plotly")

    # Import late, because --help and argument errors do not need torch.
    from mldec.files.atomic import check_targets, write_json, write_result
    from mldec.tools.report.content import build_content, open_checkpoint, open_other, report_json
    from mldec.tools.report.page import render_page

    started = time.monotonic()
    check_targets(html=args.out, json=args.json)
    setup = open_checkpoint(args)
    other = open_other(args, setup) if args.compare else None
    content = build_content(setup, other)

    write_result(args.out, render_page(content, Path(args.out).absolute().parent))
    if args.json:
        write_json(args.json, report_json(content, setup))
    size = Path(args.out).stat().st_size / 1e6
    seconds = time.monotonic() - started
    say(f"{args.out}: a report on {args.checkpoint}, {size:.1f} MB, made in {seconds:.0f} s")


def main() -> None:
    """Run the command."""
    # The imports make a million objects that stay. The default of 700 new objects per collection
    # searches them for cycles again and again, in a tenth of the time of a report.
    gc.set_threshold(100_000)
    cli.run_command(parser().parse_intermixed_args, report)
