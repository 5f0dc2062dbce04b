"""What a run tells: the console, train.log, metrics.jsonl and TensorBoard. It does nothing on other ranks."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from mldec import distributed
from mldec.errors import DataError, printable, writing

T = TypeVar("T")
log = logging.getLogger("mldec")


class RunLog:
    """The log of one run.

    Args:
        directory: of the run; gets train.log, metrics.jsonl and tensorboard/.
        step: the step the run goes on from; 0: a new run.
        lines: how many lines of metrics.jsonl it had written by then; what it wrote after them is dropped.
    """

    def __init__(self, directory: Path, *, step: int = 0, lines: int = 0) -> None:
        self.main = distributed.is_main()
        self.started = time.monotonic()
        self._bar: tqdm[Any] | None = None
        if not self.main:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and not needed on other ranks

        self._handler = logging.FileHandler(directory / "train.log", mode="a" if step else "w")
        self._handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S"))
        log.addHandler(self._handler)
        self._jsonl = directory / "metrics.jsonl"
        self._jsonl.write_text("".join(_lines(self._jsonl)[:lines]))
        self._events = directory / "tensorboard"
        self._tensorboard = SummaryWriter(str(self._events), purge_step=step + 1)

    def scalars(self, step: int, epoch: int, values: dict[str, float]) -> None:
        """Write one line of numbers to metrics.jsonl, and to TensorBoard; numbers that are not finite become null."""
        if not self.main:
            return
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        line = {"step": step, "epoch": epoch, "time": round(time.monotonic() - self.started, 3), **finite}
        self._events.mkdir(parents=True, exist_ok=True)  # if it was deleted meanwhile, the run goes on
        try:
            with self._jsonl.open("a") as file:
                file.write(json.dumps(line) + "\n")
            for key, value in values.items():
                self._tensorboard.add_scalar(key, value, step)
        except OSError as error:  # it names no file when the disk is full
            raise DataError(f"cannot write {self._jsonl}: {error.strerror}; free space, pass resume=auto") from error

    def progress(self, items: Iterable[T], *, total: int, done: int, description: str) -> Iterator[T]:
        """Iterate under a progress bar: on a terminal only."""
        hidden = not (self.main and on_terminal())
        with tqdm(items, total=total, initial=done, desc=description, leave=False, disable=hidden) as bar:
            self._bar = bar
            yield from bar
        self._bar = None

    def evaluation(self, description: str) -> "Callable[..., tqdm[Any]]":
        """Return what wraps the batches of an evaluation in a progress bar: on a terminal only."""
        return partial(tqdm, desc=description, leave=False, disable=not (self.main and on_terminal()))

    def status(self, place: str, text: str) -> None:
        """Show the state of the loop: beside the bar, which knows the place, or else as a line of its own."""
        if self._bar is not None and not self._bar.disable:
            self._bar.set_postfix_str(text)
        elif self.main:
            log.info(f"{place} {text}")

    def close(self) -> None:
        """Flush and close the files."""
        if self.main:
            self._tensorboard.close()
            log.removeHandler(self._handler)
            self._handler.close()


class Meter:
    """Mean loss, speed and waiting time since the last report.

    Args:
        loss: sum of the losses of the steps before a run was interrupted.
        steps: how many those were.
    """

    def __init__(self, *, loss: float = 0.0, steps: int = 0) -> None:
        self.loss, self.steps = loss, steps
        self.restart()

    def restart(self) -> None:
        """Measure the time from now on."""
        self.start = self.step_start = time.perf_counter()
        self.waited = 0.0
        self.images = self.timed_steps = 0

    def loaded(self) -> None:
        """Note that the batch of the next step is there."""
        self.waited += time.perf_counter() - self.step_start

    def add(self, loss: float, images: int) -> None:
        """Note a finished step."""
        self.loss += loss
        self.images += images
        self.steps += 1
        self.timed_steps += 1
        self.step_start = time.perf_counter()

    @property
    def seconds_a_step(self) -> float:
        """Return the mean duration of a step."""
        return (self.step_start - self.start) / max(1, self.timed_steps)

    def read(self, device: torch.device) -> dict[str, float]:
        """Return the mean loss of a step, images/s, the share of time spent waiting for data, and GiB used on CUDA."""
        seconds = max(1e-9, self.step_start - self.start)
        values = {
            "train/loss": self.loss / self.steps,
            "train/images_per_second": self.images / seconds,
            "train/data_wait": self.waited / seconds,
        }
        if device.type == "cuda":
            values["train/memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        return values


def to_console() -> None:
    """Send the package's messages to standard output, above a progress bar; warnings only on other ranks."""
    log.setLevel(logging.INFO if distributed.is_main() else logging.WARNING)
    if not log.handlers:
        log.addHandler(_Console())


class _Console(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with writing("standard output"):
            tqdm.write(printable(self.format(record)), file=sys.stdout)
            sys.stdout.flush()


def on_terminal() -> bool:
    """Tell whether a person is watching."""
    return sys.stderr.isatty()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.exists() else []
