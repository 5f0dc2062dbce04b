"""Measure the speed and memory of training and inference: `mldec benchmark JOB [--json FILE]`."""

import argparse
import importlib
import os
import platform
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from mldec.cli import command, positive, run_command
from mldec.errors import say
from mldec.files.atomic import check_targets, write_json
from mldec.runtime.devices import processors
from mldec.runtime.environment import git_commit, installed

# Each job is a module with a function of the same name, which yields dictionaries of figures.
JOBS = {
    "throughput": "images/s of training and inference of an experiment, on random images",
    "profile": "time of each part of a training step, and its speed relative to a matrix product",
    "data": "time of each part of the training transform, on one core and your photos",
    "predict": "images/s of mldec predict on your photos, and of decoding and the model alone",
}


def add_experiment(parser: argparse.ArgumentParser) -> None:
    """Add the options of jobs that train an experiment."""
    parser.add_argument("--experiment", default="coco_tresnet_l", help="default: coco_tresnet_l")
    parser.add_argument("--classes", type=positive, default=80, help="default: 80")
    parser.add_argument("--repeats", type=positive, default=20, help="timed steps (default: 20)")
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="such as train.precision=bf16"
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    arguments = command("benchmark", str(__doc__))
    commands = arguments.add_subparsers(required=True, dest="job", metavar="JOB", title="jobs")
    jobs = {}
    for name, purpose in JOBS.items():
        jobs[name] = commands.add_parser(name, help=purpose, description=f"Measure {purpose}.")
        jobs[name].add_argument(
            "--json", metavar="FILE", help="write figures, hardware, versions, date and commit"
        )

    add_experiment(jobs["throughput"])
    jobs["throughput"].add_argument(
        "--beside", metavar="KEY=VALUE", help="alternate with steps that have this setting changed"
    )
    add_experiment(jobs["profile"])
    jobs["data"].add_argument("folder", metavar="FOLDER", help="folder of photos")
    predict = jobs["predict"]
    predict.add_argument("checkpoint", help="as for mldec predict")
    predict.add_argument("images", metavar="FOLDER", help="folder of photos")
    predict.add_argument(
        "--count", type=positive, default=512, help="images per round (default: 512)"
    )
    predict.add_argument("--rounds", type=positive, default=5, help="timed rounds (default: 5)")
    predict.add_argument("--device", default="auto", help="auto, cpu, mps or cuda")
    return arguments


def run(args: argparse.Namespace) -> None:
    """Run a job, print its figures, and write them to the file of --json."""
    check_targets(json=args.json)
    module = importlib.import_module(f"mldec.tools.benchmark.{args.job}")
    record(args.job, getattr(module, args.job)(args), args.json)


def record(name: str, measured: Iterable[dict[str, Any]], file: str | None) -> None:
    """Print the figures of a benchmark, and write them with the environment to a JSON file.

    The file is written after each item, so that an interrupted job leaves its first figures.
    """
    figures: dict[str, Any] = {}
    machine = environment()
    for new_figures in measured:
        figures |= new_figures
        if file:
            write_json(file, {"benchmark": name, "figures": figures, "environment": machine})
    for key, value in figures.items():
        text = f"{value:,.4g}" if isinstance(value, float) else f"{value}"
        say(f"  {key:<36} {text}")


def environment() -> dict[str, Any]:
    """Return the hardware, versions, date and commit of a measurement."""
    gpu: dict[str, Any] = {"device": "none", "gpus": 0, "cuda": None, "cudnn": None, "nccl": None}
    if torch.cuda.is_available():
        gpu = {
            "device": torch.cuda.get_device_name(),
            "gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    names = re.findall(r"^model name\s*: (.+)$", text, re.MULTILINE)
    machine = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": git_commit(),
        "processor": platform.machine(),
        "cpu": names[0] if names else None,
        "cores": os.cpu_count(),
        "usable_cores": processors(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }
    return machine | gpu | installed()


def main() -> None:
    """Run the command."""
    run_command(parser().parse_args, run)
