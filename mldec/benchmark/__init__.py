"""Measure speed, memory and cost of the parts: `python -m mldec.benchmark JOB [--json FILE]`."""

import argparse
import importlib
import os
import platform
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from mldec.benchmark import options
from mldec.cli import command, run_command
from mldec.errors import ConfigError, say
from mldec.files.results import check_targets, to_json, write_result
from mldec.runtime.memory import keep_freed_memory


class Job(NamedTuple):
    """A job: the module with the function of its name is imported when it runs.

    A `table` in that module returns the lines that are printed instead of the plain figures.
    """

    module: str
    measures: str
    add_options: Callable[[argparse.ArgumentParser], None] | None = None
    takes_settings: bool = False  # key=value behind the options


JOBS = {
    "head": Job(
        "head",
        "the head against the official one, its matrix products alone, and global pooling",
        options.head,
    ),
    "metric": Job("metric", "mAP at COCO's size, and time and memory at 9,605 classes"),
    "labels": Job("labels", "first and second start of a COCO split of full size"),
    "data": Job(
        "data",
        "the training transform taken apart, on one core, beside those of others",
        options.data,
    ),
    "throughput": Job(
        "throughput",
        "images/s of training and inference for an experiment, with random images",
        options.experiment,
        takes_settings=True,
    ),
    "profile": Job(
        "profile",
        "the parts of a training step, and its share of what the hardware can do",
        options.profile,
        takes_settings=True,
    ),
    "official": Job(
        "official",
        "a training step of an experiment beside that of the official code",
        options.experiment,
        takes_settings=True,
    ),
    "predict": Job(
        "predict",
        "images/s of mldec.predict on photos of yours, beside decoding and the model alone",
        options.predict,
    ),
    "queries": Job(
        "queries",
        "time and work of a zero-shot model by the number of its word queries",
        options.queries,
    ),
    "cost": Job(
        "paper",
        "multiply-accumulates and parameters of tables 1 and 2, figures 5 and 6, beside the paper",
    ),
}


def environment() -> dict[str, Any]:
    """Return the hardware, versions, date and commit of a measurement."""
    # These take seconds to import, which --help does without.
    import torch

    from mldec.runtime import facts

    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": facts.git_commit(),
        "device": torch.cuda.get_device_name() if cuda else "none",
        "cuda": torch.version.cuda if cuda else None,
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **facts.installed(),
    }


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = command("benchmark", str(__doc__))
    commands = arguments.add_subparsers(required=True, dest="job", metavar="JOB", title="jobs")
    for name, job in JOBS.items():
        one = commands.add_parser(name, help=job.measures, description=f"Measure {job.measures}.")
        one.add_argument(
            "--json", metavar="FILE", help="write figures, hardware, versions, date, commit"
        )
        if job.add_options:
            job.add_options(one)
    return arguments


def parse() -> argparse.Namespace:
    """Return the options of the command line, and in `settings` what follows them.

    Raises:
        ConfigError: for settings that the job does not take.
    """
    args, settings = parser().parse_known_args()
    if settings and not JOBS[args.job].takes_settings:
        raise ConfigError(f"'{settings[0]}' is not understood: {args.job} takes no settings")

    args.settings = settings
    return args


def run(args: argparse.Namespace) -> None:
    """Run a job, print its figures, and write them if asked to."""
    # A file that cannot be written is refused now, not after minutes of measuring.
    check_targets(args.json, getattr(args, "trace", None))

    # As in training.
    keep_freed_memory()
    module = importlib.import_module(f"mldec.benchmark.{JOBS[args.job].module}")
    figures = getattr(module, args.job)(args)
    say(*getattr(module, "table", _listed)(figures).splitlines())

    if args.json:
        content = {"benchmark": args.job, "figures": figures, "environment": environment()}
        write_result(args.json, to_json(content, indent=1) + "\n")


def _listed(figures: dict[str, Any]) -> str:
    """Return a line per figure."""
    lines = []
    for name, value in figures.items():
        text = f"{value:,.4g}" if isinstance(value, float) else f"{value}"
        lines.append(f"  {name:<26} {text}")
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    run_command(parse, run)


if __name__ == "__main__":
    main()
