"""Fit thresholds: `python -m mldec.calibrate best.pt [data.root=...] [--objective f1]`.

Thresholds and calibrated scores are fitted to the validation images, and stored in a copy of the
checkpoint, where `predict` and `evaluate` find them. The printed precision, recall and F1 are those
of images that were not used for the fit: it is repeated without the images of each fold in turn.

Objectives: f1; precision:0.9, the highest recall with at least this precision; recall:0.8, the
highest threshold with at least this recall; cost:FP,FN, the lowest sum of the costs of a false
positive and a false negative.
"""

import argparse

from mldec.calibration import MIN_POSITIVES
from mldec.runtime.cli import (
    add_model_options,
    add_precision_option,
    command,
    positive,
    run_command,
)

FOLDS = 5


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec.calibrate`."""
    arguments = command("calibrate", str(__doc__))
    add_model_options(arguments)

    arguments.add_argument(
        "settings", nargs="*", metavar="key=value", help="such as data.root=/data/coco"
    )
    add_precision_option(arguments, "that of the training; fp32 on a CPU")
    arguments.add_argument("--objective", help="f1 (default), precision:P, recall:R or cost:FP,FN")
    arguments.add_argument(
        "--scope", help="class: a threshold per class (default); global: one for all of them"
    )
    arguments.add_argument(
        "--platt",
        action="store_true",
        help="scale the scores by a slope and an offset, per class or, of a zero-shot model, for "
        "all classes; default: by one temperature",
    )
    arguments.add_argument(
        "--min-positives",
        type=positive,
        metavar="N",
        help=f"classes with fewer share a threshold; default: {MIN_POSITIVES}",
    )
    arguments.add_argument(
        "--folds",
        type=positive,
        default=FOLDS,
        metavar="N",
        help=f"of the images, to judge the thresholds; default: {FOLDS}",
    )
    arguments.add_argument(
        "--out", metavar="FILE", help="the calibrated copy; default: best.calibrated.pt for best.pt"
    )
    arguments.add_argument("--json", metavar="FILE", help="write all numbers and values per class")
    arguments.add_argument("--csv", metavar="FILE", help="write one row per class")
    return arguments


def calibrate(args: argparse.Namespace) -> None:
    """Calibrate the checkpoint that the command line names."""
    # Imported late: --help and a wrong argument need not wait for torch.
    from mldec.calibration import run

    run(args)


def main() -> None:
    """Run the command."""
    run_command(parser().parse_intermixed_args, calibrate)


if __name__ == "__main__":
    main()
