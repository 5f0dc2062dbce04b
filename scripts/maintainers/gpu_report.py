#!/usr/bin/env python3
"""Measure this checkout on a machine with a CUDA device. Results are in one JSON file per command.

    python3 scripts/maintainers/gpu_report.py training|inference|tests [OUT.json [PART ...]]

A command takes at most eight minutes and runs its parts in order of importance. Each part is a
process with a time limit, after which it is killed with its child processes. OUT.json is updated
while a part runs, and contains the last lines of failed parts. Parts can be selected by name;
predict needs loader. Missing packages are reported before the first part.

    training: steps of TResNet-L at 448 pixels with its recipe (fp16, channels_last); a profile; the
        official step, as released and with equal settings; our head against global pooling and
        against the official head; torch.compile; larger batches.
    inference: training from generated JPEG files; the loader alone; predict; two processes with
        synchronized batch norms, on one GPU if there is only one; training and evaluation of
        digits; Query2Label.
    tests: tests with the marker gpu.

At the end the figures are compared with the goals. The exit status is 1 if a part failed. It is not
a failure if a batch does not fit the memory, or if NCCL does not support two processes on one GPU.

Environment: MINUTES (8) is the time limit of all parts. QUICK=1 tests the script with tiny models,
and DEVICE=cpu also without a GPU. The script has not been run on a CUDA device yet.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from mldec import triton_can_compile
from mldec.errors import ConfigError, one_line, say
from mldec.files.atomic import check_targets, to_json, write_json, write_result

# Modules with third-party imports are imported after `check_packages`.

TOP = Path(__file__).parents[2]
PYTHON = sys.executable
BENCHMARK = [PYTHON, str(TOP / "scripts" / "benchmark.py")]
TRAIN = [PYTHON, "-m", "mldec.train"]
OFFICIAL = [PYTHON, str(TOP / "scripts" / "maintainers" / "compare_with_official.py")]
LAST_LINES = 20  # lines of output that are kept of a failed part
# Columns of nvidia-smi, in MHz, degrees Celsius and watts.
OF_GPU = (
    "driver_version",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
    "power.limit",
)
POLL = 0.5  # seconds between two updates of the report
OUT_OF_MEMORY = re.compile(r"out of memory|_STATUS_ALLOC_FAILED", re.IGNORECASE)
# Messages of older and newer versions of NCCL for two processes on one device.
NCCL_REJECTION = re.compile(r"Duplicate GPU detected|Multiple Ranks are using the same GPU")

# Tiny models and data, to test the script.
TINY = ["backbone=tiny", "data.image_size=32", "train.batch_size=4"]
TINY_HEAD = ["head.embed_dim=16", "head.mlp_dim=16"]
TINY_Q2L = ["train.freeze=[]", "head.input_proj=true", "head.embed_dim=32"]
SHORT = ["data.train_images=64", "data.val_images=40", "train.epochs=1", "train.workers=0"]
# Batch sizes. Larger ones have fewer timed steps.
BATCHES = (128, 256, 64)
TIMED_IMAGES = 2800


class Goal(NamedTuple):
    """A goal for a figure of a part. Goals are ratios, which are similar on all devices."""

    part: str
    figure: str
    bound: str | None = None  # ">=" or "<="; None if the figure is only reported
    goal: float | None = None


GOALS = {
    # Speed-up over the official step.
    "times_official_step": Goal("official", "times_official_step", ">=", 1.5),
    "times_official_step_equal": Goal("official", "times_official_step_equal", ">=", 1.0),
    # Percentage of a step that the head takes, in excess of global pooling.
    "head_percent_80": Goal("head_80", "beyond_percent", "<=", 4),
    "head_percent_9605": Goal("head_9605", "beyond_percent", "<=", 20),
    # FLOP/s of a step as a percentage of a large matrix product.
    "product_percent": Goal("profile", "mfu_percent"),
    "times_eager": Goal("compile", "times_beside"),
    "data_wait_percent": Goal("loader", "data_wait_percent", "<=", 3),
    # Slow workers may lengthen the steps instead of the waiting time, so measure the loader alone.
    "loader_images_per_second": Goal("loader_alone", "images_per_second"),
}


@dataclass(frozen=True)
class Part:
    """A part of the report.

    Attributes:
        name: Name of the part.
        limit: Time limit in seconds.
        commands: Commands, run in order until one fails.
        result: File with their figures; None if the figures are parsed from their output.
        variables: Additional environment variables.
    """

    name: str
    limit: int
    commands: list[list[str]]
    result: Path | None = None
    variables: dict[str, str] = field(default_factory=dict)


class Setup(NamedTuple):
    """Folder for files of the parts, file of the report, and device."""

    folder: Path
    out: Path
    device: str
    quick: bool = False

    @property
    def is_test(self) -> bool:
        """Whether to test the script with tiny models and data."""
        return self.quick or self.device == "cpu"

    def settings(self, *of_test: str) -> list[str]:
        """Return the setting of the device, and the settings `of_test` in a test."""
        settings = [f"device={self.device}"]
        if self.is_test:
            settings += of_test
        return settings

    def number(self, measured: int, of_test: int) -> str:
        """Return the number for a measurement or a test."""
        return str(of_test if self.is_test else measured)

    def job(self, name: str, limit: int, command: list[str], *words: str) -> Part:
        """Return a part that is a command with the option --json."""
        file = self.folder / f"{name}.json"
        return Part(name, limit, [command + ["--json", str(file)] + list(words)], file)


# The parts of each command


def training(setup: Setup) -> list[Part]:
    """Return the parts that measure training steps on random images."""
    settings_without_head = setup.settings(*TINY)
    settings = setup.settings(*TINY, *TINY_HEAD)

    repeats = ["--repeats", setup.number(50, 2)]
    steps = BENCHMARK + ["throughput"] + repeats
    beside_gap = steps + ["--beside", "head=gap"]
    open_images = ["--experiment", "openimages_tresnet_m", "--classes", "9605"]
    beside_eager = steps + ["--beside", "train.compile=false"]
    step = OFFICIAL + ["step", "--experiment", "coco_tresnet_l"] + repeats
    head = ["--device", setup.device, "--precision", "bf16"]
    head += ["--batch-size", setup.number(64, 1)]
    parts = [
        setup.job("throughput", 75, steps, *settings),
        setup.job("profile", 75, BENCHMARK + ["profile"] + repeats, *settings),
        setup.job("official", 90, step, *settings),
        setup.job("head_80", 75, beside_gap, *settings_without_head),
        setup.job("head_9605", 75, beside_gap + open_images, *settings_without_head),
        setup.job("head", 45, OFFICIAL + ["head"], *head),
        setup.job("compile", 240, beside_eager, *settings, "train.compile=true"),
    ]
    for size in BATCHES:
        repeats = ["--repeats", setup.number(TIMED_IMAGES // size, 2)]
        batch = f"train.batch_size={setup.number(size, size // 16)}"
        command = BENCHMARK + ["throughput"] + repeats
        parts.append(setup.job(f"throughput_{size}", 60, command, *settings, batch))
    return parts


def inference(setup: Setup) -> list[Part]:
    """Return the parts that read image files, and parts of other models."""
    import torch

    data = setup.folder / "coco"

    # Multiples of the batch sizes of training (56) and evaluation (64). cuDNN would benchmark its
    # kernels again for a smaller last batch.
    _make_coco(data, train=int(setup.number(146 * 56, 32)), val=int(setup.number(14 * 64, 16)))
    runs = {name: setup.folder / name for name in ("loader", "two_ranks", "digits")}

    # The recipe, with random weights. Frequent reports synchronize host and GPU. Otherwise the host
    # would run ahead and wait for the loader while the GPU is busy.
    recipe = ["+experiment=coco_tresnet_l", "backbone.pretrained=false", "train.epochs=1"]
    recipe += [f"data.root={data}", f"data.cache_dir={setup.folder / 'cache'}"]
    train_command = TRAIN + recipe + setup.settings(*TINY, *TINY_HEAD)
    train_command += [
        f"train.log_every={setup.number(10, 2)}",
        f"train.workers={setup.number(16, 2)}",
    ]

    loader_out = setup.folder / "loader_alone.json"
    loader = [PYTHON, __file__, LOADER_ALONE, str(loader_out)] + train_command[len(TRAIN) :]

    # Both processes use the same GPU if there is only one. CPUs have no synchronized batch norm.
    ranks = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ranks += TRAIN[1:] + recipe + ["data.train=val2014", "train.log_every=2", "train.workers=2"]
    ranks += setup.settings(*TINY, *TINY_HEAD, "train.sync_batchnorm=false")
    if setup.device == "cuda" and torch.cuda.device_count() == 1:
        ranks.append("device=cuda:0")
    variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "WARN"}

    predict = BENCHMARK + ["predict", str(runs["loader"]), str(data / "train2014")]
    predict += ["--device", setup.device]
    predict += ["--count", setup.number(2048, 16), "--rounds", setup.number(2, 1)]
    digits = TRAIN + ["+experiment=digits"] + setup.settings(*SHORT)
    evaluate = [PYTHON, "-m", "mldec.evaluate", str(runs["digits"])]
    evaluated = setup.job("digits", 120, evaluate, *setup.settings())
    q2l = BENCHMARK + ["throughput", "--experiment", "q2l_coco_resnet101_448"]
    q2l += ["--repeats", setup.number(20, 1)]

    def into(command: list[str], name: str) -> list[list[str]]:
        return [command + [f"hydra.run.dir={runs[name]}"]]

    metrics = "metrics.jsonl"
    return [
        Part("loader", 120, into(train_command, "loader"), runs["loader"] / metrics),
        Part("loader_alone", 60, [loader], loader_out),
        setup.job("predict", 120, predict),
        Part("two_ranks", 120, into(ranks, "two_ranks"), runs["two_ranks"] / metrics, variables),
        replace(evaluated, commands=into(digits, "digits") + evaluated.commands),
        setup.job("query2label", 75, q2l, *setup.settings(*TINY, *TINY_Q2L)),
    ]


def tests(setup: Setup) -> list[Part]:
    """Return the part of the tests."""
    # The default of pyproject.toml would run all tests of a file in one process.
    pytest = [PYTHON, "-m", "pytest", "-vv", "-n", "8", "--dist", "load", "-m", "gpu"]
    return [Part("tests", 3600, [pytest + ["tests/gpu"]])]


COMMANDS = {"training": training, "inference": inference, "tests": tests}
LOADER_ALONE = "loader_alone"  # command of a part, with its file and settings as arguments


def measure_loader(out: Path, words: list[str]) -> None:
    """Write the images/s of a training loader without training to a file."""
    import torch

    from mldec import build
    from mldec.config.compose import compose
    from mldec.data.loader import TrainBatches, train_loader

    config = compose(words).for_world_size(processes=1)
    train = config.train
    data = build.data(build.check(config, ["data"]))
    batches = TrainBatches(len(data.train.dataset), batch_size=train.batch_size, seed=config.seed)
    workers = train.loader_workers("cuda")
    loader = train_loader(data, batches, workers=workers, pin=torch.cuda.is_available())

    # The first batches include the start of the workers.
    warm_up = 2 * workers
    images = 0
    start = time.perf_counter()
    for number, batch in enumerate(loader, start=1):
        if number > warm_up:
            images += len(batch.images)
        else:
            start = time.perf_counter()
    speed = images / (time.perf_counter() - start)
    figures = {"images": images, "workers": workers, "images_per_second": speed}
    write_json(str(out), {"figures": figures})


def _make_coco(root: Path, *, train: int, val: int) -> None:
    """Write both splits in the layout of COCO 2014, with links to at most 256 generated photos."""
    import numpy as np
    from PIL import Image

    different = min(train, 256)
    files = root / "photos"
    files.mkdir(parents=True)
    for number in range(different):
        # Coarse and fine structure, so that the file sizes are similar to photos.
        rng = np.random.default_rng(number)
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
        coarse = coarse.resize((640, 480), Image.Resampling.BICUBIC)
        fine = Image.fromarray(rng.integers(0, 256, (240, 320, 3), np.uint8))
        photo = Image.blend(coarse, fine.resize((640, 480)), 0.3)
        photo.save(files / f"{number}.jpg", quality=90)

    classes = range(1, 81)
    categories = [{"id": number, "name": f"class {number}"} for number in classes]
    (root / "annotations").mkdir()
    for split, count in (("train2014", train), ("val2014", val)):
        (root / split).mkdir()
        images = []
        annotations = []
        for number in range(count):
            name = f"{number}.jpg"
            os.link(files / f"{number % different}.jpg", root / split / name)
            images.append({"id": number, "file_name": name})
            category = classes[number % len(classes)]
            annotations.append({"id": number, "image_id": number, "category_id": category})
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


# Running a part


def run(part: Part, limit: float, output: Path, note: Callable[[], None]) -> str:
    """Run a part, and return its status: "done", or why it did not finish.

    Args:
        part: The part.
        limit: Time limit in seconds.
        output: File for its output.
        note: Function that is called repeatedly while the part runs.
    """
    end = time.monotonic() + limit
    status = "done"
    with output.open("wb") as file:
        for command in part.commands:
            status = _run_command(command, end, file, part.variables, note)
            if status != "done":
                break

    text = output.read_text(encoding="utf-8", errors="replace")
    rejection = NCCL_REJECTION.search(text)
    if status != "done" and rejection:
        return f"not possible here: NCCL reports {rejection[0]}"
    if status == "timed out":
        return f"timed out after {limit:.0f} s"
    if status != "done" and OUT_OF_MEMORY.search(text):
        return "out of memory"
    return status


def _run_command(
    command: list[str], end: float, output: Any, variables: dict[str, str], note: Callable[[], None]
) -> str:
    """Run a command. At the time limit it is killed with its child processes."""
    process = subprocess.Popen(
        command,
        cwd=TOP,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        while time.monotonic() < end:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(POLL)
                return "done" if status == 0 else f"failed with status {status}"
            note()
        return "timed out"
    finally:
        # Ctrl-C does not reach the new session.
        if process.poll() is None:
            others = _descendants(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
            for number in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            process.wait()


def _descendants(process: int) -> list[int]:
    """Return all descendants of a process. The group does not contain the ranks of torchrun."""
    found = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        # A thread may end in the meantime.
        with contextlib.suppress(OSError):
            for text in file.read_text().split():
                found.append(int(text))
                found += _descendants(int(text))
    return found


# Figures of a part


def figures(part: Part, output: Path) -> dict[str, Any]:
    """Return the present figures of a part."""
    if part.result is None:
        text = output.read_text(encoding="utf-8", errors="replace")
        found = re.findall(r"(PASSED|FAILED|SKIPPED|ERROR) (tests/\S+)", text)
        return {name: outcome.lower() for outcome, name in found}
    if not part.result.exists():
        return {}

    text = part.result.read_text(encoding="utf-8")
    if part.result.suffix == ".jsonl":
        return run_figures(text)
    content = json.loads(text)
    if "figures" in content:
        return content["figures"]
    return {"mAP": content["metrics"]["mAP"], "weights": content["weights"]}


def run_figures(metrics: str) -> dict[str, Any]:
    """Return the speed of a run from its metrics.jsonl. The first report is a warm-up."""
    # The last line may be incomplete.
    lines = [json.loads(line) for line in metrics.split("\n")[:-1]]
    reports = [line for line in lines if "train/loss" in line][1:]
    if not reports:
        return {}

    speeds = [line["train/images_per_second"] for line in reports]
    waits = [line["train/data_wait"] for line in reports]
    return {
        "reports": len(reports),
        "loss": reports[-1]["train/loss"],
        "images_per_second": statistics.median(speeds),
        "images_per_second_least": min(speeds),
        "images_per_second_most": max(speeds),
        "data_wait_percent": 100 * statistics.fmean(waits),
        "peak_gib": reports[-1].get("train/memory_gib"),
    }


def goals(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Compare the figures of a report with the goals.

    Returns:
        For each goal of a part in the report: `value` (None if not measured), `goal` as text, and
        whether it is `met` (None without a goal or a value).
    """
    compared = {}
    for name, (part, figure, bound, goal) in GOALS.items():
        if part not in parts:
            continue

        value = parts[part]["figures"].get(figure)
        met = None
        if value is not None and goal is not None:
            met = value >= goal if bound == ">=" else value <= goal
        wanted = f"{bound} {goal}" if bound else None
        compared[name] = {"value": value, "goal": wanted, "met": met}
    return compared


def goal_lines(compared: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line per goal."""
    verdicts = {True: "met: ", False: "missed: ", None: ""}
    lines = []
    for name, entry in compared.items():
        value = "not measured" if entry["value"] is None else f"{entry['value']:,.4g}"
        goal = f" (goal: {entry['goal']})" if entry["goal"] else ""
        lines.append(f"{verdicts[entry['met']]}{name} {value}{goal}")
    return lines


# The report


def measure(part: Part, report: dict[str, Any], setup: Setup, limit: float) -> None:
    """Run a part, and update the report after each new figure."""
    start = time.monotonic()
    output = setup.folder / f"{part.name}.log"
    output.touch()
    outcome: dict[str, Any] = {"status": "running", "figures": {}}
    report["parts"][part.name] = outcome

    def write() -> None:
        report["goals"] = goals(report["parts"])
        write_result(str(setup.out), to_json(report, indent=1) + "\n")

    def note() -> None:
        known = figures(part, output)
        if known != outcome["figures"]:
            outcome["figures"] = known
            write()

    write()
    if limit > 0:
        outcome["status"] = run(part, limit, output, note)
    else:
        outcome["status"] = "not run: time limit MINUTES"
    outcome["figures"] = figures(part, output)
    outcome["seconds"] = round(time.monotonic() - start, 1)
    if outcome["status"] != "done":
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        outcome["last_lines"] = lines[-LAST_LINES:]
    report["environment"]["gpus_after"] = gpu_state()
    write()
    say(f"{part.name}: {outcome['status']} ({outcome['seconds']} s)")


def gpu_state() -> list[dict[str, str]] | None:
    """Return driver, clocks, temperature and power of each GPU, or None without nvidia-smi."""
    query = f"--query-gpu={','.join(OF_GPU)}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    return [dict(zip(OF_GPU, row.split(", "), strict=False)) for row in done.stdout.splitlines()]


def check_packages(command: str) -> None:
    """Raise a ConfigError with all packages that are missing or too old, and the pip command."""
    if importlib.util.find_spec("packaging") is None:
        raise ConfigError(f"packages: packaging (missing); run {PYTHON} -m pip install packaging")
    from packaging.requirements import Requirement

    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # The last one is a dependency of hydra-core, which may be missing itself.
    needed = project["dependencies"] + ["antlr4-python3-runtime==4.9.*"]
    if command == "tests":
        needed += ["pytest", "pytest-xdist"]

    faults = []
    install = []
    for text in needed:
        requirement = Requirement(text)
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            faults.append(f"{text} (missing)")
            install.append(shlex.quote(text))
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            faults.append(f"{text} (installed: {version})")
            install.append(shlex.quote(text))
    if faults:
        raise ConfigError(
            f"packages: {', '.join(faults)}; run {PYTHON} -m pip install {' '.join(install)} "
            f"(without a network: pip wheel on another machine, because antlr4 has no wheel)"
        )


def main() -> None:
    """Run a command."""
    if sys.argv[1:2] == [LOADER_ALONE]:
        with one_line():
            measure_loader(Path(sys.argv[2]), sys.argv[3:])
        return

    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("command", choices=COMMANDS)
    arguments.add_argument("out", nargs="?", help="default: benchmarks/gpu_COMMAND.json")
    arguments.add_argument("parts", nargs="*", metavar="PART", help="run only these parts")
    args = arguments.parse_args()

    # Exit by an exception, so that the processes of a part are killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    end = time.monotonic() + 60 * float(os.environ.get("MINUTES", "8"))
    device = os.environ.get("DEVICE", "cuda")
    out = Path(args.out or f"benchmarks/gpu_{args.command}.json").absolute()
    with one_line(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        check_packages(args.command)
        from mldec.runtime.environment import environment

        if not triton_can_compile():
            # The tests and the official step import torch before mldec.
            os.environ.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")
        check_targets(str(out))
        setup = Setup(Path(folder), out, device, quick="QUICK" in os.environ)
        parts = {part.name: part for part in COMMANDS[args.command](setup)}
        for name in args.parts:
            if name not in parts:
                raise ConfigError(f"{name}: unknown part; choose from {', '.join(parts)}")

        where = environment() | {"gpus_before": gpu_state()}
        report: dict[str, Any] = {"command": args.command, "environment": where, "parts": {}}
        for name in args.parts or parts:
            # A CPU is slow even with a tiny model.
            limit = parts[name].limit * (5 if device == "cpu" else 1)
            measure(parts[name], report, setup, min(limit, end - time.monotonic()))

    say(*goal_lines(report["goals"]), f"written: {out}")
    statuses = [outcome["status"] for outcome in report["parts"].values()]
    sys.exit(any(status.startswith(("failed", "timed out")) for status in statuses))


if __name__ == "__main__":
    main()
