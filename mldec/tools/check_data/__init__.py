"""Check a dataset: `mldec check-data data=coco data.root=/data/coco [--out DIR]`.

It counts images and labels, and finds invalid labels, unreadable images and duplicates. The exit
status is 1 for errors, and 3 for warnings if --strict is given. The data of an experiment can be
selected by +experiment=NAME. --checkpoint ranks the labels by the probability that they are wrong.
See docs/data.md.
"""

import argparse
import logging
import sys
from logging.handlers import BufferingHandler

from mldec import build
from mldec.cli import add_weights_options, command, require, run_command, whole
from mldec.errors import ConfigError, DataError, log, printable, say
from mldec.files.atomic import check_folder, check_targets, write_json
from mldec.tools.check_data import label_errors
from mldec.tools.check_data.clean import united, write_table
from mldec.tools.check_data.examine import SIMILAR, check, near_duplicates


def number_or_all(text: str) -> int | None:
    """Parse an integer, or "all", which is returned as None."""
    return None if text == "all" else whole(text)


def parser() -> argparse.ArgumentParser:
    """Return the parser of `mldec check-data`."""
    arguments = command("check-data", str(__doc__))
    add = arguments.add_argument
    add(
        "settings",
        nargs="*",
        metavar="key=value",
        help="such as data=coco data.root=/data/coco, or +experiment=NAME and training settings",
    )
    add("--strict", action="store_true", help="exit with status 3 on warnings")
    add(
        "--decode",
        type=number_or_all,
        metavar="N",
        help="images per split to read, hash and decode; default: all",
    )
    add(
        "--similar",
        action="store_true",
        help=f"compare all images to find near-duplicates, instead of {SIMILAR:,}",
    )
    add(
        "--write",
        metavar="FILE",
        help="write a CSV table for data=csv without unreadable images and copies; near-duplicates "
        "are groups",
    )
    add(
        "--out",
        metavar="DIR",
        help="write charts of training samples and class frequencies (needs matplotlib), or with "
        "--checkpoint an HTML page",
    )
    add("--json", metavar="FILE", help="write the full report")

    errors = arguments.add_argument_group("wrong labels")
    errors.add_argument("--checkpoint", metavar="FILE", help="its scores reveal wrong labels")
    errors.add_argument("--split", choices=("val", "train"), default="val", help="default: val")
    errors.add_argument("--errors", metavar="FILE", help="write the ranked labels as CSV")
    errors.add_argument(
        "--rows",
        type=number_or_all,
        default=10_000,
        metavar="N",
        help="number of ranked labels, or all; default: 10,000",
    )
    add_weights_options(errors)
    return arguments


def run(args: argparse.Namespace) -> int:
    """Check a dataset or find its wrong labels; return the exit status."""
    check_targets(json=args.json, csv=args.errors or args.write)
    if args.out:
        check_folder("--out", args.out)
    if args.checkpoint:
        for option in ("strict", "write"):
            if getattr(args, option):
                raise ConfigError(f"--{option}: not supported with --checkpoint; omit it")
        label_errors.run(args)
        return 0

    if args.errors:
        raise ConfigError("--errors: a model is needed to rank labels; pass --checkpoint FILE")
    if args.out:
        require("--out", "plot", "matplotlib")
    if args.write and args.decode is not None:
        raise ConfigError("--write: all images must be read; omit --decode")

    # The readers log warnings.
    collector = BufferingHandler(capacity=sys.maxsize)
    collector.setLevel(logging.WARNING)
    log.addHandler(collector)
    try:
        config, data, option = build.data_from_settings(args.settings)
        if args.write:
            united(data)  # raise its errors before all images are read
        report, images = check(data, option, config, decode=args.decode, folder=args.out)
        cache_dir = config.data.get("cache_dir")
        compared: int | None = SIMILAR
        if args.decode is not None:
            compared = min(SIMILAR, 2 * args.decode)
        if args.similar or args.write:
            compared = None
        hashes = near_duplicates(data, cache_dir, report, compared)
        if args.write:
            assert hashes is not None
            write_table(args.write, data, images, hashes)
    finally:
        log.removeHandler(collector)

    # Without duplicates.
    warnings = list(dict.fromkeys(record.getMessage() for record in collector.buffer))
    report["warnings"] = warnings
    if args.json:
        write_json(args.json, report)
    if warnings:
        say("warnings:")
        for message in warnings:
            say(f"  {printable(message)}")
    if report["faults"] and not args.write:
        raise DataError(f"data={option}: {'; '.join(report['faults'])}; see the lines above")
    errors = f"{args.write} without the errors above" if report["faults"] else "no errors"
    say(f"{len(warnings)} warnings, {errors}")
    return 3 if warnings and args.strict else 0


def main() -> None:
    """Run the command."""
    run_command(parser().parse_intermixed_args, run)
