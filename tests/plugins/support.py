"""What several tests need: a run of seconds, and a tiny COCO tree."""

import importlib
import inspect
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
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
from mldec.config.compose import config_dir
from mldec.data.types import DataModule

CONFIGS = Path(__file__).parent / "configs"

# A run of seconds: a network of one layer and few scenes.
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
    """What a command left behind."""

    status: int
    out: str
    err: str


class Cli:
    """Runs commands in this process, as their console scripts would."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, command: str, *words: str | Path) -> Outcome:
        """Run a command; return what a user sees."""
        self.monkeypatch.setattr(sys, "argv", [f"mldec {command}", *map(str, words)])
        self.capsys.readouterr()
        random_state, log = torch.get_rng_state(), logging.getLogger("mldec")
        handlers, level = list(log.handlers), log.level
        try:
            importlib.import_module(module_of(command)).main()
            status = 0
        except SystemExit as stop:
            status = int(stop.code or 0)
        torch.set_rng_state(random_state)
        log.handlers[:] = handlers
        log.setLevel(level)
        return Outcome(status, *self.capsys.readouterr())

    def out(self, command: str, *words: str | Path) -> str:
        """Run a command that must succeed; return what it prints."""
        status, out, err = self(command, *words)
        assert status == 0, err
        return out

    def fault(self, command: str, *words: str | Path) -> str:
        """Run a command that must be refused; return what it says."""
        status, _, err = self(command, *words)
        assert status == 1, err
        return err


def write_coco(root: Path, *, classes: int = 3, images: int = 12) -> None:
    """Write both splits of a COCO 2014 tree; image i shows class i % classes as its grey value."""
    categories = [{"id": 2 * number + 1, "name": f"thing {number}"} for number in range(classes)]
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for split in ("train2014", "val2014"):
        (root / split).mkdir(exist_ok=True)
        names = [f"COCO_{split}_{number:012}.jpg" for number in range(images)]
        for number, name in enumerate(names):
            value = 250 * (number % classes) // max(1, classes - 1)
            Image.fromarray(np.full((30, 40, 3), value, np.uint8)).save(root / split / name)
        content = {
            "images": [{"id": number, "file_name": name} for number, name in enumerate(names)],
            "annotations": [
                {
                    "id": number,
                    "image_id": number,
                    "category_id": categories[number % classes]["id"],
                }
                for number in range(images)
            ],
            "categories": categories,
        }
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def made(reader: Callable[..., Any], **settings: Any) -> DataModule:
    """Build a dataset with the first option file that names the reader, and these settings."""
    files = sorted(Path(config_dir(), "data").glob("*.yaml"))
    nodes = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]
    node = next(node for node in nodes if node["_target_"].endswith(f".{reader.__name__}"))
    return build.data({"data": build.resolve("data", {**node, **settings})})


def read_option(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return the class that an option file names, and the arguments it gives."""
    node = yaml.safe_load(path.read_text(encoding="utf-8"))
    module, _, name = node.pop("_target_").rpartition(".")
    return getattr(importlib.import_module(module), name), node


def loss_of_option(path: Path, classes: int = 5) -> nn.Module:
    """Build the loss of an option file, with the counts of a small data set if it wants them."""
    from mldec.losses.common import LabelCounts

    target, node = read_option(path)
    if "label_counts" in inspect.signature(target).parameters:
        positives = torch.arange(1, classes + 1)
        node["label_counts"] = lambda: LabelCounts(positives, 20 - positives)
    return target(**node)


def one_line(err: str, *parts: str) -> None:
    """Check that a user sees one line, and what it says."""
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("mldec: "), err
    for part in parts:
        assert part in lines[0], err


def decoder_macs(t: int, k: int, n: int, *, self_attention: bool = False) -> int:
    """Return the multiply-accumulates of a decoder head with the widths of the paper, by hand.

    Args:
        t: tokens.
        k: queries.
        n: classes.
        self_attention: whether the queries attend to one another first.
    """
    c, d, f, g = 2048, 768, 2048, -(-n // k)
    embedding, keys_and_values = t * c * d, 2 * t * d * d
    queries_and_output, attention, feed_forward, pooling = (
        2 * k * d * d,
        2 * k * t * d,
        2 * k * d * f,
        k * d * g,
    )
    among = 4 * k * d * d + 2 * k * k * d if self_attention else 0
    return (
        embedding
        + keys_and_values
        + queries_and_output
        + attention
        + feed_forward
        + pooling
        + among
    )


def wait_until(condition: Callable[[], Any], otherwise: Callable[[], str] = str) -> None:
    """Look again and again whether a condition holds; fail if it does not within two minutes.

    Args:
        condition: of what another process or thread does; a busy machine takes its time.
        otherwise: returns what a failure says.
    """
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"waited for two minutes in vain: {otherwise()}"
        time.sleep(0.01)


def process_state(number: int) -> str:
    """Return the kernel's letter for the state of a process: T if it is stopped, Z if it ended."""
    try:
        status = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return "Z"
    return status.rpartition(")")[2].split()[0]


def assert_same_rows(one: str | Path, other: str | Path) -> None:
    """Compare results of predict; in batches of other sizes last digits may be other ones."""
    tables: list[list[dict[str, Any]]] = []
    for path in (one, other):
        if str(path).endswith(".parquet"):
            parquet = importlib.import_module("pyarrow.parquet")
            tables.append(parquet.read_table(path).to_pylist())
        else:
            tables.append([json.loads(line) for line in Path(path).read_text().splitlines()])
    assert len(tables[0]) == len(tables[1])
    for row, expected in zip(*tables, strict=True):
        scores = [
            value.pop("scores", None)
            or [item.pop("score") for item in value.get("predictions", [])]
            for value in (row, expected)
        ]
        assert row == expected
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def in_processes(job: Callable[..., None], count: int, *arguments: Any) -> None:
    """Run job(rank, count, *arguments) in so many processes that know one another.

    They are forked: to start Python and import torch takes seconds in each of them.

    Args:
        job: it has a process group, with gloo.
        count: number of processes.
        arguments: of the job, behind its rank and the number of processes.
    """
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{folder}/meet"
        multiprocessing.start_processes(
            _joined, (count, meet, job, arguments), nprocs=count, start_method="fork"
        )


def _joined(
    rank: int, count: int, meet: str, job: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)  # those of the parent do not exist here
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=count)
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
    """Return metrics.jsonl without what the clock and the memory of the device say."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "train/images_per_second", "train/data_wait", "train/memory_gib")
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]
