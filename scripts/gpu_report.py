#!/usr/bin/env python
"""Measure this checkout on a machine with a CUDA device, in one JSON file; see gpu_report.sh.

    python scripts/gpu_report.py [benchmarks/gpu.json]

The parts run in the order of their value: images/s of TResNet-L at 448 pixels, with and without
torch.compile and channels_last, and with global pooling in place of the head; the parts of a step;
a step and the head beside the official ones; two processes with NCCL; digits, trained and
evaluated; the tests marked gpu. Each has a time limit, at which its processes are killed. Its
result is in the file as soon as it is there; of one that fails or takes too long the last lines
are, and the next one begins. At the end the figures are compared with the goals. The exit status is
1 if a part failed.

Environment: MINUTES (10) that all parts may take together; PRECISION (bf16), BATCH_SIZE, REPEATS
(20); TESTS=0 leaves out the tests; DEVICE=cpu tries the script without a GPU, with tiny models
whose figures say nothing about one.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mldec.benchmark import environment
from mldec.errors import one_line, say
from mldec.runtime.results import check_targets, to_json, write_result

TOP = Path(__file__).parents[1]
PYTHON = sys.executable
BENCHMARK = [PYTHON, "-m", "mldec.benchmark"]
OFFICIAL = [PYTHON, str(TOP / "scripts" / "compare_with_official.py")]
LAST_LINES = 20  # of the output of a part that failed
# The variants of the training step, by their settings.
VARIANTS = {
    "eager": [],
    "channels_last": ["train.channels_last=true"],
    "compile": ["train.compile=true"],
    "compile_channels_last": ["train.compile=true", "train.channels_last=true"],
    "gap": ["head=gap"],
}
# Models and data of seconds, for a machine without a GPU.
TINY_HEAD = ["head.embed_dim=16", "head.mlp_dim=16"]
TINY = ["backbone=tiny", "data.image_size=32", "train.batch_size=4"]
TINY_RUN = ["data.train_images=64", "data.val_images=40", "train.epochs=1", "train.workers=0"]

# Images/s on an H200; an H100 has to reach nine tenths of them.
TRAIN_GOAL, INFER_GOAL = 1820, 5460
SHARE_OF_GOAL = {"H200": 1.0, "H100": 0.9}
HEAD_PERCENT_GOAL, COMPILE_GOAL = 4, 1.15


@dataclass(frozen=True)
class Part:
    """A part of the report.

    Attributes:
        name: its path in the report, such as `throughput.eager`.
        limit: seconds that it may take.
        commands: run one after the other, until one fails.
        result: the file of `--json` that they leave; None if only their output counts.
        absent: why it cannot be run on this machine; None if it can.
    """

    name: str
    limit: int
    commands: list[list[str]]
    result: Path | None = None
    absent: str | None = None


def parts(folder: Path, options: Mapping[str, str]) -> list[Part]:
    """Return the parts of the report, in the order of their value.

    Args:
        folder: for their files.
        options: the environment variables.
    """
    device = options.get("DEVICE", "cuda")
    on_cpu = device == "cpu"
    precision = options.get("PRECISION", "fp32" if on_cpu else "bf16")
    repeats = ["--repeats", options.get("REPEATS", "1" if on_cpu else "20")]

    settings = [f"device={device}", f"train.precision={precision}"]
    if on_cpu:
        settings += TINY
    if "BATCH_SIZE" in options:
        settings.append(f"train.batch_size={options['BATCH_SIZE']}")
    decoder = TINY_HEAD if on_cpu else []

    def job(name: str, limit: int, *words: str) -> Part:
        """Return a part that is a job of mldec.benchmark, or of compare_with_official.py.

        Its name begins with that of the job, or is `official.` and the name of the job.
        """
        file = folder / f"{name}.json"
        first, _, second = name.partition(".")
        job = [*OFFICIAL, second] if first == "official" else [*BENCHMARK, first]
        return Part(name, limit, [[*job, "--json", str(file), *words]], file)

    listed = []
    for name, variant in VARIANTS.items():
        limit = 120 if "compile" in name else 45
        sizes = [] if name == "gap" else decoder
        listed.append(job(f"throughput.{name}", limit, *repeats, *settings, *sizes, *variant))

    head = ["--device", device, *(["--batch-size", "1"] if on_cpu else [])]
    listed += [
        job("profile", 60, *repeats, *settings, *decoder),
        job("official.step", 60, *repeats, *settings, *decoder),
        job("official.head", 60, *head),
        _two_processes(folder, device),
        _digits(folder, device),
    ]
    if options.get("TESTS") != "0":
        # By default (pyproject.toml) all tests of a file would run in one process.
        pytest = [PYTHON, "-m", "pytest", "-vv", "-n", "8", "--dist", "load", "-m", "gpu"]
        listed.append(Part("tests", 300, [[*pytest, "tests/gpu"]]))

    # A CPU takes its time to compile a model, however small.
    return [replace(part, limit=3 * part.limit) for part in listed] if on_cpu else listed


def _two_processes(folder: Path, device: str) -> Part:
    """Return the part that trains with two processes, each on a device of its own."""
    absent = None
    if device != "cpu" and torch.cuda.device_count() < 2:
        absent = f"there are {torch.cuda.device_count()} CUDA devices, NCCL needs one per process"

    launch = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train = ["-m", "mldec.train", "+experiment=digits", f"device={device}", *TINY_RUN]
    run = f"hydra.run.dir={folder / 'processes'}"
    return Part("processes", 90, [[*launch, *train, run]], absent=absent)


def _digits(folder: Path, device: str) -> Part:
    """Return the part that trains the experiment digits and evaluates it."""
    run, file = folder / "digits", folder / "digits.json"
    settings = TINY_RUN if device == "cpu" else []
    train = [PYTHON, "-m", "mldec.train", "+experiment=digits", f"device={device}", *settings]
    evaluate = [PYTHON, "-m", "mldec.evaluate", str(run), f"device={device}", "--json", str(file)]
    return Part("digits", 150, [[*train, f"hydra.run.dir={run}"], evaluate], file)


def run(part: Part, limit: float) -> dict[str, Any]:
    """Run a part and return how it ended.

    Args:
        part: to run.
        limit: seconds that it may take.

    Returns:
        `status`: "done", or why not; `seconds`; and `last_lines` of the output if it is not done.
    """
    if part.absent:
        return {"status": f"not run: {part.absent}"}
    if limit <= 0:
        return {"status": "not run: MINUTES are over"}

    start = time.monotonic()
    status = "done"
    with tempfile.TemporaryFile() as output:
        for command in part.commands:
            remaining = limit - (time.monotonic() - start)
            status = _run_command(command, remaining, output)
            if status != "done":
                break

        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()

    outcome: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - start, 1)}
    if status != "done":
        outcome["last_lines"] = lines[-LAST_LINES:]
    if part.name == "tests":
        outcome["outcomes"] = test_outcomes(lines)
    return outcome


def _run_command(command: list[str], limit: float, output: Any) -> str:
    """Run a command; when its time is over, kill it with the processes that it has started."""
    process = subprocess.Popen(
        command, cwd=TOP, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        status = process.wait(max(0, limit))
    except subprocess.TimeoutExpired:
        return f"timed out after {limit:.0f} s"
    finally:
        # Also after Ctrl-C: it does not reach the group.
        if process.poll() is None:
            others = _descendants(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
            for number in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            process.wait()
    return "done" if status == 0 else f"failed with status {status}"


def _descendants(process: int) -> list[int]:
    """Return the processes that one has started, and theirs: those of torchrun leave its group."""
    found = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            for number in map(int, file.read_text().split()):
                found += [number, *_descendants(number)]
    return found


def test_outcomes(lines: list[str]) -> dict[str, str]:
    """Return the outcome of each test by its name, from the output of pytest with -vv -n."""
    found = re.findall(r"(PASSED|FAILED|SKIPPED|ERROR) (tests/\S+)", "\n".join(lines))
    return {name: outcome.lower() for outcome, name in found}


def result(part: Part) -> Any:
    """Return what a finished part has measured: the figures of a benchmark, or an evaluation."""
    assert part.result
    content = json.loads(part.result.read_text(encoding="utf-8"))
    if "figures" in content:
        return content["figures"]
    return {"mAP": content["metrics"]["mAP"], "weights": content["weights"]}


def merge(report: dict[str, Any], part: Part, outcome: dict[str, Any]) -> None:
    """Put the outcome of a part and what it has measured into the report."""
    if part.name == "tests":
        report["tests"] = outcome.pop("outcomes", {})
    report["parts"][part.name] = outcome

    if outcome["status"] == "done" and part.result:
        section, _, variant = part.name.partition(".")
        if variant:
            report.setdefault(section, {})[variant] = result(part)
        else:
            report[section] = result(part)


def goals(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Compare the figures of a report with the goals.

    Returns:
        By name: `value`, `goal`, and whether it is `met`. The value is None if it was not measured,
        and the goal if there is none for this device.
    """
    throughput = report.get("throughput", {})

    def best(figure: str, names: list[str]) -> float | None:
        """Return the highest rate of some variants."""
        rates = [throughput[name][figure] for name in names if name in throughput]
        return max(rates, default=None)

    train, infer = "train_images_per_second", "infer_images_per_second"
    with_head = [name for name in VARIANTS if name != "gap"]
    compiled = best(train, ["compile", "compile_channels_last"])
    eager = best(train, ["eager", "channels_last"])
    gap, decoder = best(train, ["gap"]), best(train, ["eager"])

    device = report["environment"]["device"]
    share = next((value for name, value in SHARE_OF_GOAL.items() if name in device), None)
    values = {
        train: (best(train, with_head), share and share * TRAIN_GOAL),
        infer: (best(infer, with_head), share and share * INFER_GOAL),
        # The time of a step beyond that with global pooling.
        "head_percent": (
            100 * (1 - decoder / gap) if gap and decoder else None,
            HEAD_PERCENT_GOAL,
        ),
        "times_eager": (compiled / eager if compiled and eager else None, COMPILE_GOAL),
    }

    compared = {}
    for name, (value, goal) in values.items():
        met = None
        if value is not None and goal is not None:
            met = value <= goal if name == "head_percent" else value >= goal
        compared[name] = {"value": value, "goal": goal, "met": met}
    return compared


def goal_lines(compared: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line per goal."""
    meanings = {
        "train_images_per_second": ("images/s in training", "at least"),
        "infer_images_per_second": ("images/s in inference", "at least"),
        "head_percent": ("percent of the step for the head", "at most"),
        "times_eager": ("times the speed with torch.compile", "at least"),
    }
    verdicts = {True: "met", False: "missed", None: "open"}
    lines = []
    for name, entry in compared.items():
        meaning, bound = meanings[name]
        value = "not measured" if entry["value"] is None else f"{entry['value']:,.4g}"
        goal = "no goal for this device"
        if entry["goal"] is not None:
            goal = f"goal: {bound} {entry['goal']:,.4g}"
        lines.append(f"{verdicts[entry['met']]}: {meaning}: {value} ({goal})")
    return lines


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("out", nargs="?", default="benchmarks/gpu.json", help="(%(default)s)")
    with one_line():
        out = arguments.parse_args().out
        check_targets(out)
        report: dict[str, Any] = {"environment": environment(), "parts": {}}
        end = time.monotonic() + 60 * float(os.environ.get("MINUTES", "10"))

        with tempfile.TemporaryDirectory() as folder:
            for part in parts(Path(folder), os.environ):
                outcome = run(part, min(part.limit, end - time.monotonic()))
                merge(report, part, outcome)
                report["goals"] = goals(report)
                write_result(out, to_json(report, indent=1) + "\n")
                say(f"{part.name}: {outcome['status']} ({outcome.get('seconds', 0)} s)")

        say(*goal_lines(report["goals"]), f"written: {out}")
        statuses = [outcome["status"] for outcome in report["parts"].values()]
        sys.exit(any(status.startswith(("failed", "timed out")) for status in statuses))


if __name__ == "__main__":
    main()
