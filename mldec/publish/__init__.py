"""Publish a checkpoint on the Hugging Face Hub, where `hf:OWNER/NAME` names it ever after.

The repository gets three files: model.safetensors (one set of weights), config.json (classes, input
transform, thresholds, settings and the sha256 of the weights) and README.md, a model card of what
is known. Nothing of the training state is in them, and of paths of this machine the last part only.

Metrics with intervals and a table of classes come from --results, a file that
`mldec.report --json` wrote (without intervals also that of `mldec.evaluate --json`).

Log in first with `hf auth login`, or set HF_TOKEN. --dry-run FOLDER writes the files there, asks no
network, and the folder can be used as a checkpoint.
"""

import argparse

from mldec.cli import command, run_command


def parser() -> argparse.ArgumentParser:
    """Return the command line of `mldec.publish`."""
    arguments = command("publish", str(__doc__))
    arguments.add_argument(
        "checkpoint", help="a run's folder, such as outputs/digits, or any other checkpoint"
    )
    arguments.add_argument("repository", metavar="OWNER/NAME", help="made if it does not exist")
    arguments.add_argument(
        "--private", action="store_true", help="so that only its owner and guests see it"
    )
    arguments.add_argument(
        "--dry-run", metavar="FOLDER", help="write the files to a new folder, and upload nothing"
    )
    arguments.add_argument(
        "--weights", choices=("ema", "raw"), help="default: those that scored best in the run"
    )
    arguments.add_argument(
        "--results", metavar="FILE", help="the JSON of mldec.report or mldec.evaluate, for the card"
    )
    arguments.add_argument(
        "--license",
        metavar="ID",
        help="of the model, as the Hub writes it, such as apache-2.0; default: not stated",
    )
    arguments.add_argument(
        "--plugin", action="append", default=[], help="a package of yours that may hold its parts"
    )
    return arguments


def publish(args: argparse.Namespace) -> None:
    """Publish what the command line names."""
    # Imported late: --help and a wrong argument need not wait for torch.
    from mldec.publish.publishing import run

    run(args)


def main() -> None:
    """Run the command."""
    run_command(parser().parse_args, publish)


if __name__ == "__main__":
    main()
