"""Measure speed, memory and cost of the parts: `python -m mldec.benchmark JOB [--json FILE]`."""

import argparse
import importlib
import os
import platform
from datetime import UTC, datetime
from typing import Any

from mldec.cli import command, positive, run_command
from mldec.errors import ConfigError, say
from mldec.files.results import check_targets, to_json, write_result

# Per job: the module with the function of its name, imported when it runs, and what it measures.
JOBS = {
    "head": (
        "model",
        "group projection, forward and backward, against the official loop over groups",
    ),
    "metric": ("model", "mAP at COCO's size, and time and memory at 9,605 classes"),
    "labels": ("data", "first and second start of a COCO split of full size"),
    "data": (
        "data",
        "the training transform taken apart, on one core, beside those of others",
    ),
    "throughput": (
        "model",
        "images/s of training and inference for a multi-label experiment, with random images",
    ),
    "predict": (
        "predict",
        "images/s of mldec.predict on photos of yours, beside decoding and the model alone",
    ),
    "queries": ("queries", "time and work of a zero-shot model by the number of its word queries"),
    "cost": (
        "paper",
        "multiply-accumulates and parameters of tables 1 and 2, figures 5 and 6, beside the paper",
    ),
}


def environment() -> dict[str, Any]:
    """Return the hardware, versions, date and commit of a measurement."""
    # These take seconds to import, which --help does without.
    import torch

    from mldec.runtime import provenance

    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": provenance.git_commit(),
        "device": torch.cuda.get_device_name() if cuda else "none",
        "cuda": torch.version.cuda if cuda else None,
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **provenance.installed(),
    }


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = command("benchmark", str(__doc__))
    commands = arguments.add_subparsers(required=True, dest="job", metavar="JOB", title="jobs")
    for job, (_, measures) in JOBS.items():
        one = commands.add_parser(job, help=measures, description=f"Measure {measures}.")
        one.add_argument(
            "--json", metavar="FILE", help="write figures, hardware, versions, date, commit"
        )

        if job == "queries":
            one.add_argument(
                "--batch-size", type=int, default=8, help="images per batch (default 8)"
            )
            one.add_argument(
                "--seconds", type=float, default=5.0, help="of timing per number of queries"
            )
        if job == "data":
            one.add_argument(
                "folder", nargs="?", metavar="FOLDER", help="of photos, beside a made picture"
            )
        if job == "predict":
            one.add_argument("checkpoint", help="as for mldec.predict")
            one.add_argument("images", metavar="FOLDER", help="of images")
            one.add_argument(
                "--count", type=positive, default=512, help="images per round (default 512)"
            )
            one.add_argument("--rounds", type=positive, default=5, help="timed (default 5)")
        if job in ("head", "predict", "queries"):
            one.add_argument("--device", default="auto", help="auto, cpu or cuda")
        if job == "throughput":
            one.add_argument(
                "--experiment", default="coco_tresnet_l", help="its backbone, head, loss and sizes"
            )
            one.add_argument("--classes", type=int, default=80)
            one.add_argument(
                "--repeats", type=int, default=20, help="timed steps, whose median is reported"
            )
            one.usage = "%(prog)s [options] [key=value ...], such as train.precision=bf16"
    return arguments


def parse() -> argparse.Namespace:
    """Return the options of the command line, and in `settings` what follows them.

    Raises:
        ConfigError: for settings that the job does not take.
    """
    args, settings = parser().parse_known_args()
    if settings and args.job != "throughput":
        raise ConfigError(f"'{settings[0]}' is not understood: {args.job} takes no settings")

    args.settings = settings
    return args


def run(args: argparse.Namespace) -> None:
    """Run a job, print its figures, and write them if asked to."""
    # A file that cannot be written is refused now, not after minutes of measuring.
    check_targets(args.json)

    module = importlib.import_module(f"mldec.benchmark.{JOBS[args.job][0]}")
    figures = getattr(module, args.job)(args)

    if args.job in ("cost", "data"):
        say(*module.table(figures).splitlines())
    else:
        for name, value in figures.items():
            text = f"{value:,.4g}" if isinstance(value, float) else f"{value}"
            say(f"  {name:<26} {text}")

    if args.json:
        content = {"benchmark": args.job, "figures": figures, "environment": environment()}
        write_result(args.json, to_json(content, indent=1) + "\n")


def main() -> None:
    """Run the command."""
    run_command(parse, run)


if __name__ == "__main__":
    main()
