"""Measure speed, memory and cost of the parts: `mldec benchmark JOB [--json FILE]`."""

import argparse
import importlib
import os
import platform
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from mldec.cli import command, positive, run_command
from mldec.errors import ConfigError, say
from mldec.files.atomic import check_targets, write_json
from mldec.runtime import environment as facts
from mldec.runtime.devices import processors

# A job is the function of its name in the module of its name, which returns its figures, or yields
# them as they become known; a `table` in that module returns the lines that are printed instead of
# the plain figures.
JOBS = {
    "throughput": "images/s of training and inference for an experiment, with random images",
    "profile": "the parts of a training step, and its share of what the hardware can do",
    "data": "the training transform taken apart, on one core, beside the official one",
    "predict": "images/s of mldec predict on photos of yours, beside decoding and the model alone",
    "cost": "multiply-accumulates and parameters of tables 1 and 2, figures 5 and 6, beside the "
    "paper",
}
OF_EXPERIMENTS = ("throughput", "profile")  # these take settings, key=value, behind the options


def add_experiment(parser: argparse.ArgumentParser) -> None:
    """Add the options of what trains an experiment; settings may follow them."""
    parser.add_argument(
        "--experiment", default="coco_tresnet_l", help="its backbone, head, loss and sizes"
    )
    parser.add_argument(
        "--classes", type=positive, default=80, help="if the data is not read (default 80)"
    )
    parser.add_argument("--repeats", type=positive, default=20, help="timed steps (default 20)")
    parser.usage = "%(prog)s [options] [key=value ...], such as train.precision=bf16"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = command("benchmark", str(__doc__))
    commands = arguments.add_subparsers(required=True, dest="job", metavar="JOB", title="jobs")
    jobs = {}
    for name, measures in JOBS.items():
        job = commands.add_parser(name, help=measures, description=f"Measure {measures}.")
        job.add_argument(
            "--json", metavar="FILE", help="write figures, hardware, versions, date, commit"
        )
        if name in OF_EXPERIMENTS:
            add_experiment(job)
        jobs[name] = job

    jobs["throughput"].add_argument(
        "--beside", metavar="KEY=VALUE", help="time training in turns with this setting changed"
    )
    jobs["data"].add_argument(
        "folder", nargs="?", metavar="FOLDER", help="of photos, beside a made picture"
    )
    jobs["profile"].add_argument(
        "--trace", metavar="FILE", help="write a trace of three steps for chrome://tracing"
    )
    predict = jobs["predict"]
    predict.add_argument("checkpoint", help="as for mldec predict")
    predict.add_argument("images", metavar="FOLDER", help="of images")
    predict.add_argument(
        "--count", type=positive, default=512, help="images per round (default 512)"
    )
    predict.add_argument("--rounds", type=positive, default=5, help="timed (default 5)")
    predict.add_argument("--device", default="auto", help="auto, cpu, mps or cuda")
    return arguments


def parse() -> argparse.Namespace:
    """Return the options of the command line, and in `settings` what follows them."""
    args, settings = parser().parse_known_args()
    if settings and args.job not in OF_EXPERIMENTS:
        raise ConfigError(f"'{settings[0]}' is not understood: {args.job} takes no settings")

    args.settings = settings
    return args


def run(args: argparse.Namespace) -> None:
    """Run a job, print its figures, and write them if asked to."""
    # A file that cannot be written is refused now, not after minutes of measuring.
    check_targets(getattr(args, "trace", None), json=args.json)

    # As in training.
    module = importlib.import_module(f"mldec.tools.benchmark.{args.job}")
    measured = getattr(module, args.job)(args)
    report(args.job, measured, args.json, getattr(module, "table", listed))


def listed(figures: dict[str, Any]) -> str:
    """Return a line per figure."""
    lines = []
    for name, value in figures.items():
        text = f"{value:,.4g}" if isinstance(value, float) else f"{value}"
        lines.append(f"  {name:<36} {text}")
    return "\n".join(lines)


def report(
    name: str,
    measured: dict[str, Any] | Iterable[dict[str, Any]],
    file: str | None,
    table: Callable[[dict[str, Any]], str] = listed,
) -> None:
    """Write the figures of a benchmark as they become known, with the environment; print them.

    They are written if a file is given. What a job has measured before it fails stays there.
    """
    figures: dict[str, Any] = {}
    where = environment() if file else None
    for known in [measured] if isinstance(measured, dict) else measured:
        figures |= known
        if file:
            write_json(file, {"benchmark": name, "figures": figures, "environment": where})
    say(*table(figures).splitlines())


def environment() -> dict[str, Any]:
    """Return the hardware, versions, date and commit of a measurement."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": facts.git_commit(),
        "device": torch.cuda.get_device_name() if cuda else "none",
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "processor": platform.machine(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": processors(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **facts.installed(),
    }


def cpu_model() -> str | None:
    """Return the name of the processor, None where the system does not say it as Linux does."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    named = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return named[1] if named else None


def main() -> None:
    """Run the command."""
    run_command(parse, run)
