"""Check a dataset: `mldec check-data data=coco data.root=/data/coco [--out DIR]`.

It counts images and labels, and looks for what is out of range, cannot be decoded, or is repeated;
the status is 1 if something is wrong, and with --strict 3 if there are warnings. With
+experiment=NAME it takes the settings of mldec train. With --checkpoint it looks for wrong labels
instead: pairs of an image and a class whose label a model finds unlikely, ranked. docs/data.md
describes both.
"""

import argparse
import logging

from mldec import build
from mldec.cli import add_weights_options, command, require, run_command, whole
from mldec.errors import ConfigError, DataError, printable, say
from mldec.files.atomic import check_folder, check_targets, write_json
from mldec.tools.check_data import label_errors
from mldec.tools.check_data.examine import check

log = logging.getLogger("mldec")

ROWS = 10_000  # of --errors: more than a person looks at


def number_or_all(word: str) -> int | None:
    """Read a whole number, or `all`, which is returned as None."""
    return None if word == "all" else whole(word)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = command("check-data", str(__doc__))
    arguments.add_argument(
        "settings",
        nargs="*",
        metavar="key=value",
        help="such as data=coco data.root=/data/coco, or +experiment=NAME and settings of train",
    )
    arguments.add_argument(
        "--strict", action="store_true", help="return status 3 if there are warnings"
    )
    arguments.add_argument(
        "--decode",
        type=number_or_all,
        help="images per split to read, hash and decode: all, N, 0",
    )
    arguments.add_argument(
        "--out",
        metavar="DIR",
        help="write charts (needs matplotlib): training samples and frequencies; with "
        "--checkpoint a page of pictures",
    )
    arguments.add_argument("--json", metavar="FILE", help="write the full report")

    errors = arguments.add_argument_group("wrong labels")
    errors.add_argument(
        "--checkpoint", metavar="FILE", help="of a run on this data; key=value changes its settings"
    )
    errors.add_argument(
        "--split", choices=("val", "train"), default="val", help="to judge; default: val"
    )
    errors.add_argument("--errors", metavar="FILE", help="write the ranked pairs as CSV")
    errors.add_argument(
        "--rows", type=number_or_all, default=ROWS, help=f"all pairs, or N; default: {ROWS:,}"
    )
    add_weights_options(errors)
    # What a checkpoint can be evaluated with, and is not judged with.
    return arguments


def main() -> None:
    """Run the command."""
    run_command(parser().parse_intermixed_args, run)


class WarningCollector(logging.Handler):
    """Keeps the text of each warning once, in order."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning."""
        message = record.getMessage()
        if message not in self.messages:
            self.messages.append(message)


def run(args: argparse.Namespace) -> int:
    """Check a dataset, or look for its wrong labels, as the command line says."""
    # What cannot be written is refused now, not after hours of reading.
    check_targets(json=args.json, csv=args.errors)
    if args.out:
        check_folder("--out", args.out)
    if args.checkpoint:
        if args.strict:
            raise ConfigError("--strict is for the check of a data set: leave out --checkpoint")
        label_errors.run(args)
        return 0

    if args.errors:
        raise ConfigError("--errors lists what a model finds: pass --checkpoint FILE too")
    if args.out:
        require("--out: a chart", "plot", "matplotlib")

    # The readers log warnings while they read.
    collector = WarningCollector()
    log.addHandler(collector)
    try:
        config, data, option = build.data_from_settings(args.settings)
        report = check(data, option, config, decode=args.decode, folder=args.out)
    finally:
        log.removeHandler(collector)

    warnings = collector.messages
    report["warnings"] = warnings
    if args.json:
        write_json(args.json, report)
    if warnings:
        say("warnings:", *(f"  {printable(message)}" for message in warnings))
    if report["faults"]:
        raise DataError(f"data={option} is not as it should be: {'; '.join(report['faults'])}")
    if not warnings:
        say("nothing is wrong")
        return 0
    say(f"{len(warnings)} warning{'s' if len(warnings) > 1 else ''}, no errors")
    return 3 if args.strict else 0
