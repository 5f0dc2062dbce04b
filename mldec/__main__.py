"""Say which commands there are: `python -m mldec`."""

import sys

from mldec.cli import VERSION
from mldec.errors import suggest

COMMANDS = {
    "train": "train a model: +experiment=digits, or data, backbone, head and loss of your choice",
    "evaluate": "compute the metrics of a checkpoint on the validation images",
    "predict": "name what images show",
    "summary": "set out the runs of a folder in a table",
    "check_data": "count and check the images and labels of a dataset",
    "benchmark": "measure speed, memory and cost",
}


def overview() -> str:
    """Return the list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  python -m mldec.{name:<{width}}  {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join([VERSION, "", "Commands; each has --help:", "", *lines])


def main() -> None:
    """Print the list of commands, the version, or which command was meant."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(overview())
    elif words[0] == "--version":
        print(VERSION)
    elif words[0].replace("-", "_") in COMMANDS:
        name = words[0].replace("-", "_")
        print(
            f"mldec: '{words[0]}' is a command of its own: write python -m mldec.{name}",
            file=sys.stderr,
        )
        sys.exit(2)
    else:
        print(
            f"mldec: there is no command {words[0]!r}{suggest(words[0], list(COMMANDS))}",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
