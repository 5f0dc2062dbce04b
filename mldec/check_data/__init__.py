"""Check a dataset: `python -m mldec.check_data data=coco data.root=/data/coco [--out DIR] [--decode all|N|0]`.

Counts beside the official ones, class frequencies, labels out of range, images that cannot be decoded, and images that
come twice or are in both splits, byte by byte. The status is 1 if something is wrong.
"""

import argparse

from mldec.cli import command, open_data
from mldec.errors import DataError, one_line, say
from mldec.files.results import check_targets, to_json, write_result


def decode_count(word: str) -> int | None:
    """Read `all` (as None) or a whole number."""
    if word != "all" and not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word} is neither all nor a whole number")
    return None if word == "all" else int(word)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    arguments = command("check_data", str(__doc__))
    arguments.add_argument(
        "settings", nargs="*", metavar="key=value", help="such as data=coco data.root=/data/coco"
    )
    arguments.add_argument(
        "--decode",
        type=decode_count,
        help="images of each split to read, hash and decode: all, N, 0",
    )
    arguments.add_argument(
        "--out", metavar="DIR", help="write pictures: augmented samples, frequencies, co-occurrence"
    )
    arguments.add_argument("--json", metavar="FILE", help="write everything that was found")
    return arguments


def main() -> None:
    """Run the command."""
    with one_line():
        run(parser().parse_intermixed_args())


def run(args: argparse.Namespace) -> None:
    """Examine, print, write.

    Raises:
        DataError: if something is wrong with the data.
    """
    check_targets(args.json)
    from mldec.check_data.examine import check  # it imports torch, which --help does without
    from mldec.runtime.console import to_console

    to_console()
    config, data = open_data(args.settings)
    option = next(
        word for word in reversed(args.settings) if word.startswith("data=")
    ).removeprefix("data=")
    report, faults = check(data, option, args, config.data, config.train.workers)
    if args.json:
        write_result(args.json, to_json(report, indent=1) + "\n")
    if faults:
        raise DataError(f"data={option} is not as it should be: {'; '.join(faults)}")
    say("nothing is wrong")


if __name__ == "__main__":
    main()
