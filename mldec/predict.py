"""Name what images show: `python -m mldec.predict best.pt image.jpg folder/ [--jsonl FILE]`.

`--jsonl` writes a line per image as soon as its scores are known, `--json` a list of the same
entries at the end, also after Ctrl-C or SIGTERM. An entry is
`{"image": PATH, "predictions": [{"name": ..., "score": ...}, ...]}`, or
`{"image": PATH, "error": ...}` for an image without scores. With the thresholds of
`mldec.calibrate` each prediction also has `threshold`, the lowest score of its class.

In a path that is not UTF-8 the invalid bytes are written as backslash escapes, and the entry also
has `image_bytes`: all bytes of the path in hexadecimal, for `bytes.fromhex`.

`--pictures` draws each image beside a heat map per class that it prints: where the model looked.
The entry then has `picture`, the path of that JPEG file.

A zero-shot checkpoint scores other classes too: `--classes "zebra,umbrella" --vectors glove.txt`.
"""

import argparse

from mldec.cli import add_model_options, command, fraction, positive, run_command


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec.predict`."""
    arguments = command("predict", "Name what images show.")
    add_model_options(arguments)

    arguments.add_argument("images", nargs="+", help="image files, or folders to search for them")
    arguments.add_argument(
        "--top", type=positive, default=10, help="classes per image at most (default 10)"
    )
    arguments.add_argument(
        "--threshold",
        type=fraction,
        help="lowest score, 0 to 1; default: the thresholds that mldec.calibrate stored, else 0; "
        "without calibration, scores after ASL are not probabilities",
    )

    arguments.add_argument(
        "--classes", metavar="NAMES", help="other classes, with commas between; needs --vectors"
    )
    arguments.add_argument(
        "--vectors", metavar="FILE", help="word vectors of --classes; see DATASETS.md, Word vectors"
    )

    arguments.add_argument(
        "--jsonl",
        metavar="FILE",
        help="write a line of JSON per image at once; - is standard output",
    )
    arguments.add_argument(
        "--json",
        metavar="FILE",
        help="write a JSON list of the same rows at the end, also after Ctrl-C; or -",
    )

    arguments.add_argument(
        "--pictures",
        metavar="FOLDER",
        help="draw each image and a heat map per class, in a JPEG file of this folder",
    )
    arguments.add_argument(
        "--font",
        metavar="FILE",
        help="TrueType font of --pictures, for names of classes in other letters than English",
    )

    arguments.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<number>")
    arguments.add_argument(
        "--batch-size", type=positive, default=16, help="images at a time (default 16)"
    )
    return arguments


def predict(args: argparse.Namespace) -> int:
    """Name what the images of the command line show, and return the exit status."""
    # Imported late: --help and a wrong argument need not wait for torch.
    from mldec.prediction import run

    return run(args)


def main() -> None:
    """Run the command."""
    run_command(parser().parse_args, predict)


if __name__ == "__main__":
    main()
