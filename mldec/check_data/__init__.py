"""Check a dataset: `python -m mldec.check_data data=coco data.root=/data/coco [--out DIR]`.

It prints the sizes beside the published ones and the class frequencies, and looks for labels that
are out of range, images that cannot be decoded, and images that are repeated or in both splits,
byte by byte. The status is 1 if something is wrong.
"""

import argparse

from mldec.check_data.charts import require_matplotlib
from mldec.cli import command, run_command
from mldec.errors import DataError, say
from mldec.files.results import check_targets, to_json, write_result


def decode_count(word: str) -> int | None:
    """Read the value of --decode: a whole number, or `all`, which is returned as None."""
    if word != "all" and not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word} is neither all nor a whole number")
    return None if word == "all" else int(word)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = command("check_data", str(__doc__))
    arguments.add_argument(
        "settings", nargs="*", metavar="key=value", help="such as data=coco data.root=/data/coco"
    )
    arguments.add_argument(
        "--decode",
        type=decode_count,
        help="images per split to read, hash and decode: all, N, 0",
    )
    arguments.add_argument(
        "--out",
        metavar="DIR",
        help="write charts (needs matplotlib): augmented samples, frequencies, co-occurrence",
    )
    arguments.add_argument("--json", metavar="FILE", help="write the full report")
    return arguments


def main() -> None:
    """Run the command."""
    run_command(parser().parse_intermixed_args, run)


def run(args: argparse.Namespace) -> None:
    """Check the dataset of a command line, and print and write what was found.

    Raises:
        DataError: if something is wrong with the data.
        ConfigError: if the results or the charts could not be written.
    """
    # What cannot be written is refused now, not after hours of reading.
    check_targets(args.json)
    if args.out:
        require_matplotlib("--out")

    # These import torch, which --help does without.
    from mldec import build
    from mldec.check_data.examine import check

    config, data = build.chosen_data(args.settings)

    # The last choice on the command line counts.
    options = [setting for setting in args.settings if setting.startswith("data=")]
    option = options[-1].removeprefix("data=")

    report = check(
        data,
        option,
        config.data,
        decode=args.decode,
        chart_folder=args.out,
        workers=config.train.workers,
    )
    if args.json:
        write_result(args.json, to_json(report, indent=1) + "\n")
    if report["faults"]:
        raise DataError(f"data={option} is not as it should be: {'; '.join(report['faults'])}")
    say("nothing is wrong")


if __name__ == "__main__":
    main()
