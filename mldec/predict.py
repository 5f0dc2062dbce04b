"""Name what images show: `python -m mldec.predict best.pt image.jpg folder/ [--top 10] [--threshold 0.5]`.

A zero-shot checkpoint answers for other classes too: `--classes "zebra,umbrella" --vectors glove.txt`.
"""

import argparse
import sys

from mldec.errors import one_line
from mldec.options import add_model_options, command, positive


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec.predict`."""
    arguments = command("predict", "Name what images show.")
    add_model_options(arguments)
    arguments.add_argument("images", nargs="+", help="image files, or folders to search for them")
    arguments.add_argument("--top", type=positive, default=10, help="classes an image at most (default 10)")
    arguments.add_argument("--threshold", type=float, default=0.0, help="lowest score, 0 to 1 (default 0)")
    arguments.add_argument("--classes", metavar="NAMES", help="other classes, with commas between; needs --vectors")
    arguments.add_argument("--vectors", metavar="FILE", help="word vectors of --classes; see DATASETS.md, Word vectors")
    arguments.add_argument("--json", metavar="FILE", help="write the predictions to a file, or to - for the console")
    arguments.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<number>")
    arguments.add_argument("--batch-size", type=positive, default=16, help="images at a time (default 16)")
    return arguments


def main() -> None:
    """Run the command."""
    with one_line():
        args = parser().parse_args()

        from mldec.prediction import run  # it imports torch, which --help does without
        from mldec.runlog import to_console

        to_console()
        sys.exit(run(args))


if __name__ == "__main__":
    main()
