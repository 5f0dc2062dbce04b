"""Evaluate a checkpoint: `python -m mldec.evaluate best.pt [data.root=...] [--json FILE]`."""

import argparse

from mldec.runtime.cli import add_model_options, command, fraction, run_command


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec.evaluate`."""
    arguments = command(
        "evaluate",
        "Evaluate a checkpoint on the validation data of its config; "
        "settings are changed with key=value.",
    )
    add_model_options(arguments)

    arguments.add_argument(
        "settings", nargs="*", metavar="key=value", help="such as data.root=/data/coco"
    )
    arguments.add_argument(
        "--threshold",
        type=fraction,
        help="score from 0 to 1 above which a class counts as present; default: the thresholds "
        "that mldec.calibrate stored, else data.threshold",
    )
    arguments.add_argument(
        "--class-list",
        metavar="FILE",
        help="of a zero-shot checkpoint: evaluate these classes of the data, one per line, its "
        "name in the data first, then synonyms with semicolons between; a class has the score of "
        "its best name (see docs/zero_shot.md)",
    )
    arguments.add_argument(
        "--vectors",
        metavar="FILE",
        help="word vectors of the names in --class-list, or clip:MODEL:WEIGHTS; default: those of "
        "the data and of the checkpoint",
    )
    arguments.add_argument(
        "--seen",
        metavar="FILE",
        help="with --class-list: names of the classes that the model was trained on, one per line; "
        "default: as the checkpoint says",
    )
    arguments.add_argument("--json", metavar="FILE", help="write metrics and per-class values")
    arguments.add_argument("--csv", metavar="FILE", help="write one row per class")
    arguments.add_argument(
        "--write-classes",
        metavar="FILE",
        help="write the names of the checkpoint's classes, one per line, and evaluate nothing",
    )
    return arguments


def evaluate(args: argparse.Namespace) -> None:
    """Evaluate what the command line names."""
    # Imported late: --help and a wrong argument need not wait for torch.
    from mldec.evaluation import run

    run(args)


def main() -> None:
    """Run the command."""
    run_command(parser().parse_intermixed_args, evaluate)


if __name__ == "__main__":
    main()
