"""Write a report: `mldec report best.pt [data.root=...] [--compare OTHER] --out FILE`.

The report is one HTML file that works offline; see docs/evaluating.md. With --compare, it tests
whether the checkpoint is better than another one on the same images.
"""

import argparse
import gc
import time
from dataclasses import dataclass
from pathlib import Path

from mldec import cli
from mldec.errors import say
from mldec.evaluation.options import EvalOptions, option


@dataclass(frozen=True, kw_only=True)
class ReportOptions(EvalOptions):
    """The options of the command."""

    compare: str | None = option(
        "another checkpoint with the same classes; the options apply to both checkpoints",
        metavar="OTHER",
    )
    out: str = option("the report, an HTML file", metavar="FILE", required=True)
    json: str | None = option(
        "write metrics and per-class values with their intervals", metavar="FILE"
    )

    @property
    def overrides(self) -> list[str]:
        """The settings of both checkpoints."""
        return ["train.fold_batchnorms=true", *super().overrides]


def parser() -> argparse.ArgumentParser:
    """Return the parser of `mldec report`."""
    arguments = cli.command("report", str(__doc__))
    cli.add_model_options(arguments)
    cli.add_settings(arguments)
    names = ("views", "precision", "threshold", "compare", "out", "json")
    cli.add_options(arguments, ReportOptions, *names)
    return arguments


def report(options: ReportOptions) -> None:
    """Write the report of a checkpoint."""
    cli.require("a report", "report", "plotly")

    # Import late, because --help and argument errors do not need torch.
    from mldec.files.atomic import check_targets, write_json, write_result
    from mldec.tools.report.content import build_content, open_checkpoint, open_other, report_json
    from mldec.tools.report.page import render_page

    started = time.monotonic()
    check_targets(html=options.out, json=options.json)
    setup = open_checkpoint(options)
    other = open_other(options, options.compare, setup) if options.compare else None
    content = build_content(setup, other)

    write_result(options.out, render_page(content, Path(options.out).absolute().parent))
    if options.json:
        write_json(options.json, report_json(content, setup))
    size = Path(options.out).stat().st_size / 1e6
    seconds = time.monotonic() - started
    say(f"{options.out}: a report on {options.checkpoint}, {size:.1f} MB, made in {seconds:.0f} s")


def main() -> None:
    """Run the command."""
    # The imports make a million objects that stay. The default of 700 new objects per collection
    # searches them for cycles again and again, in a tenth of the time of a report.
    gc.set_threshold(100_000)
    cli.run_command(parser().parse_intermixed_args, report, ReportOptions)
