"""Helpers of the tests: commands in this process, small runs and trees, and comparisons."""

import importlib
import inspect
import json
import logging
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed
import yaml
from PIL import Image
from torch import multiprocessing, nn

from mldec import build
from mldec.__main__ import module_of
from mldec.config.compose import compose, config_dir
from mldec.config.schema import Config
from mldec.data.types import DataModule

CONFIGS = Path(__file__).parent / "configs"
CUDA_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

# A run of seconds with a small network.
QUICK = [
    "+experiment=digits",
    "plugins=[patches]",
    "backbone=patches",
    f"--config-dir={CONFIGS}",
    "data.train_images=64",
    "data.val_images=40",
    "train.batch_size=16",
    "train.epochs=2",
    "train.workers=0",
    "train.log_every=2",
    "head.embed_dim=32",
    "head.mlp_dim=32",
    "device=cpu",
]


class Outcome(NamedTuple):
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


class Cli:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys = capsys
        self.monkeypatch = monkeypatch

    def __call__(self, command: str, *words: str | Path) -> Outcome:
        """Run a command of mldec, or the script `benchmark`; return its status and output."""
        self.monkeypatch.setattr(sys, "argv", [f"mldec {command}", *map(str, words)])
        self.capsys.readouterr()
        random_state = torch.get_rng_state()
        log = logging.getLogger("mldec")
        handlers = list(log.handlers)
        level = log.level

        status = 0
        try:
            module = command if command == "benchmark" else module_of(command)
            importlib.import_module(module).main()
        except SystemExit as stop:
            status = int(stop.code or 0)

        torch.set_rng_state(random_state)
        log.handlers[:] = handlers
        log.setLevel(level)
        return Outcome(status, *self.capsys.readouterr())

    def out(self, command: str, *words: str | Path) -> str:
        """Run a command that must succeed, and return its output."""
        status, out, err = self(command, *words)
        assert status == 0, err
        return out

    def fault(self, command: str, *words: str | Path) -> str:
        """Run a command that must fail with status 1, and return its error output."""
        status, _, err = self(command, *words)
        assert status == 1, err
        return err


def train_here(folder: Path, *words: str) -> Path:
    """Train in this process in a working folder, and return the folder of outputs."""
    from mldec import train

    log = logging.getLogger("mldec")
    handlers = list(log.handlers)
    state = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["mldec train", *words])
        train.main()
    torch.set_rng_state(state)
    log.handlers[:] = handlers
    return folder / "outputs"


@cache
def experiment(name: str) -> Config:
    """Return the config of an experiment. Tests must not change it."""
    return compose([f"+experiment={name}"])


def write_coco(root: Path, *, classes: int = 3, images: int = 12) -> None:
    """Write both splits of a COCO 2014 tree. Image i is uniformly gray, with class i % classes."""
    categories = [{"id": 2 * number + 1, "name": f"thing {number}"} for number in range(classes)]
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for split in ("train2014", "val2014"):
        (root / split).mkdir(exist_ok=True)
        names = [f"COCO_{split}_{number:012}.jpg" for number in range(images)]
        for number, name in enumerate(names):
            value = 250 * (number % classes) // max(1, classes - 1)
            Image.fromarray(np.full((30, 40, 3), value, np.uint8)).save(root / split / name)

        entries = [{"id": number, "file_name": name} for number, name in enumerate(names)]
        annotations = []
        for number in range(images):
            category = categories[number % classes]["id"]
            annotations.append({"id": number, "image_id": number, "category_id": category})
        content = {"images": entries, "annotations": annotations, "categories": categories}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def made(reader: Callable[..., Any], **settings: Any) -> DataModule:
    """Build the first data option of a reader with some settings."""
    for path in sorted(Path(config_dir(), "data").glob("*.yaml")):
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
        if node["_target_"].endswith(f".{reader.__name__}"):
            return build.data({"data": build.resolve("data", {**node, **settings})})
    raise AssertionError(f"no option of data uses {reader.__name__}")


def read_option(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return the class and the arguments in an option file."""
    node = yaml.safe_load(path.read_text(encoding="utf-8"))
    module, _, name = node.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), name), node


def loss_of_option(path: Path, classes: int = 5) -> nn.Module:
    """Build the loss of an option file, with label counts or labels if it needs them.

    A loss with a state per image has 8 images. Without indices, it takes them in order.
    """
    from mldec.losses.common import LabelCounts

    target, node = read_option(path)
    parameters = inspect.signature(target).parameters
    if "label_counts" in parameters:
        positives = torch.arange(1, classes + 1)
        node["label_counts"] = lambda: LabelCounts(positives, 20 - positives)
    if "train_labels" not in parameters:
        return target(**node)

    labels = torch.nn.functional.one_hot(torch.arange(8) % classes, classes)
    loss = target(**node, train_labels=labels)
    forward = loss.forward

    def in_order(logits: torch.Tensor, targets: torch.Tensor, index: Any = None) -> torch.Tensor:
        if index is None:
            index = torch.arange(len(logits), device=logits.device) % 8
        return forward(logits, targets, index)

    loss.forward = in_order
    return loss


def one_line(err: str, *parts: str) -> None:
    """Check that an error message is one line and contains some parts."""
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("mldec: "), err
    for part in parts:
        assert part in lines[0], err


def decoder_macs(t: int, k: int, n: int, *, self_attention: bool = False) -> int:
    """Return the multiply-accumulates of a decoder head with the widths of the paper.

    Args:
        t: Number of tokens.
        k: Number of queries.
        n: Number of classes.
        self_attention: Whether the decoder has self-attention.
    """
    c = 2048  # features of the backbone
    d = 768  # width of the decoder
    f = 2048  # width of the feed-forward layer
    macs = t * c * d + 2 * t * d * d  # embedding, keys and values
    macs += 2 * k * d * d + 2 * k * t * d  # queries and output, attention
    macs += 2 * k * d * f + k * d * -(-n // k)  # feed-forward, group pooling
    if self_attention:
        macs += 4 * k * d * d + 2 * k * k * d
    return macs


def wait_until(condition: Callable[[], Any], otherwise: Callable[[], str] = str) -> None:
    """Wait until a condition holds. Fail after two minutes, with the text of `otherwise`."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"timeout after two minutes: {otherwise()}"
        time.sleep(0.01)


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raise an error if the host waits for the CUDA device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def process_state(number: int) -> str:
    """Return the kernel's letter for the state of a process: T is stopped, Z is ended."""
    try:
        status = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return "Z"
    return status.rpartition(")")[2].split()[0]


def pop_scores(row: dict[str, Any]) -> Any:
    """Remove the scores from a row of predict, and return them."""
    if "scores" in row:
        return row.pop("scores") or []
    return [item.pop("score") for item in row.get("predictions", [])]


def assert_same_rows(one: str | Path, other: str | Path) -> None:
    """Compare two files of predict. The last digits of scores depend on the batch size."""
    tables: list[list[dict[str, Any]]] = []
    for path in (one, other):
        if str(path).endswith(".parquet"):
            parquet = importlib.import_module("pyarrow.parquet")
            tables.append(parquet.read_table(path).to_pylist())
        else:
            tables.append([json.loads(line) for line in Path(path).read_text().splitlines()])
    assert len(tables[0]) == len(tables[1])
    for row, expected in zip(*tables, strict=True):
        assert pop_scores(row) == pytest.approx(pop_scores(expected), abs=1e-5)
        assert row == expected


def in_processes(job: Callable[..., None], count: int, *arguments: Any) -> None:
    """Run job(rank, count, *arguments) in `count` processes of a gloo process group.

    The processes are forked, because each new Python process takes seconds to import torch.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/address"
        multiprocessing.start_processes(
            _run_job, (count, address, job, arguments), nprocs=count, start_method="fork"
        )


def _run_job(
    rank: int, count: int, address: str, job: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)  # the threads of the parent do not exist after a fork
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=count)
    job(rank, count, *arguments)
    torch.distributed.destroy_process_group()


def assert_equal(one: Any, other: Any, path: str = "") -> None:
    """Compare two checkpoints to the last bit."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{path}[{index}]")
    else:
        assert one == other, path


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without times and memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "train/images_per_second", "train/data_wait", "train/memory_gib")
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]


COMMAND = re.compile(r"(?:.*: | +)?(?:mldec |torchrun .* -m mldec\.)(train|evaluate) (.*)")
SETTING = re.compile(r"~[\w.]+|[\w.+']+=[^,]+(?:,[^,]+)*")


def leading_settings(words: Sequence[str]) -> list[str]:
    """Return the words before the first one that is not a setting."""
    settings = []
    for word in words:
        setting = word.rstrip(",.:")
        if not SETTING.fullmatch(setting):
            break
        settings.append(setting)
    return settings


def header_commands(experiment: str) -> list[list[str]]:
    """Return the commands and variants in the header of an experiment, as words without `mldec`.

    A variant is a line with an indentation that starts with settings. It is returned as a training
    with these settings.
    """
    text = Path(config_dir(), "experiment", f"{experiment}.yaml").read_text(encoding="utf-8")
    commands: list[list[str]] = []
    is_open = False  # whether the next line can continue a command
    for line in text.partition("\ndefaults:")[0].splitlines():
        line = line.removeprefix("# ")
        command = COMMAND.fullmatch(line)
        if command is not None:
            words = shlex.split(command[2].replace("$drop", "0.5"))
            commands.append([command[1]] + words)
            is_open = True
            continue

        settings = leading_settings(line.replace("'", "").split()) if line.startswith("  ") else []
        if settings and is_open:
            commands[-1] += settings
        elif settings:
            commands.append(["train", f"+experiment={experiment}"] + settings)
        is_open = is_open and bool(settings)
    return commands
