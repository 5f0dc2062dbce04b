"""The log of a run, on the main rank: train.log, metrics.jsonl, TensorBoard; and who reads it."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from mldec.config.schema import Config
from mldec.errors import refusing, writing
from mldec.files.atomic import replacing
from mldec.files.run_folder import LOG_FILE, NOT_OURS, read_log
from mldec.runtime import distributed
from mldec.training.monitor import Details, TensorBoard

T = TypeVar("T")
log = logging.getLogger("mldec")


class RunLog:
    """The log of one run: train.log, metrics.jsonl and tensorboard/ in its directory.

    A resumed run goes on from `step`, by which it had written `lines` lines of metrics.jsonl. With
    the config `tracked` its numbers go to the trackers that it chooses. Messages from before the
    log was open, `earlier`, come first in train.log.
    """

    def __init__(
        self,
        directory: Path,
        *,
        step: int = 0,
        lines: int = 0,
        tracked: Config | None = None,
        earlier: Iterable[logging.LogRecord] = (),
    ) -> None:
        self.main = distributed.is_main()
        self._is_hidden = not self.main or None  # bars; None: where there is no terminal
        self.started = time.monotonic()
        self._bar: tqdm[Any] | None = None
        self._jsonl = directory / LOG_FILE
        self._monitors: list[Any] = []  # TensorBoard and trackers, on the main process
        self._handler: logging.Handler | None = None
        opening = partial(self._open, directory, step, lines, tracked, earlier)
        self.lines = distributed.on_main(opening)

    def _open(
        self,
        directory: Path,
        step: int,
        lines: int,
        tracked: Config | None,
        earlier: Iterable[logging.LogRecord],
    ) -> int:
        """Start the files or go on with them, and return the number of lines of metrics.jsonl."""
        text = directory / "train.log"
        with writing(text, of_run=True):
            mode = "a" if step else "w"
            self._handler = TextFile(text, mode, encoding="utf-8", errors="backslashreplace")
        self._handler.setFormatter(
            logging.Formatter("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S")
        )
        log.addHandler(self._handler)
        for record in earlier:
            self._handler.handle(record)

        self._monitors.append(TensorBoard(directory / "tensorboard", purge_step=step + 1))
        if tracked is not None and tracked.log.trackers:
            from mldec.training.trackers import start_trackers

            self._monitors += start_trackers(tracked, directory)
        return cut_back(self._jsonl, lines)

    def scalars(self, step: int, epoch: int, values: dict[str, float]) -> None:
        """Write the numbers after a step to metrics.jsonl, as a line, TensorBoard and trackers."""
        if not self._monitors:
            return

        # JSON has no NaN and no infinity.
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        line = {
            "step": step,
            "epoch": epoch,
            "time": round(time.monotonic() - self.started, 3),
            **finite,
        }

        with writing(self._jsonl, of_run=True), self._jsonl.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.details(step, Details(scalars=values))

    def details(self, step: int, details: Details | None) -> None:
        """Show what is known after a step, in TensorBoard and trackers; None on other ranks."""
        if details is not None:
            for monitor in self._monitors:
                monitor.add(step, details)

    def progress(
        self, items: Iterable[T], *, total: int, done: int, description: str
    ) -> Iterator[T]:
        """Iterate over the steps of an epoch that are not done yet, with a bar on a terminal."""
        options: dict[str, Any] = {"total": total, "initial": done, "desc": description}
        with tqdm(items, leave=False, disable=self._is_hidden, **options) as bar:
            # `status` writes beside the bar while there is one.
            self._bar = bar
            yield from bar
        self._bar = None

    def evaluation(self) -> "Callable[..., tqdm[Any]]":
        """Return a function that shows a bar over the batches of an evaluation, on a terminal."""
        return partial(tqdm, desc="evaluate", leave=False, disable=self._is_hidden)

    def status(self, position: str, text: str) -> None:
        """Show the state of the loop beside the progress bar, or without one as a line."""
        if self._bar is not None and not self._bar.disable:
            self._bar.set_postfix_str(text)
        elif self.main:
            log.info(f"{position} {text}")

    def close(self) -> None:
        """End the records of the trackers, and stop copying messages to train.log."""
        for monitor in self._monitors:
            monitor.close()
        if self._handler is not None:
            log.removeHandler(self._handler)
            # What a full disk did not take was reported already.
            with suppress(OSError):
                self._handler.close()


class TextFile(logging.FileHandler):
    """Write messages to a file; a full disk ends the run, unlike with logging.FileHandler."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Raise the error of a write, as a `DataError` that names the file."""
        with writing(self.baseFilename, of_run=True):
            raise


class Meter:
    """Mean loss, speed and waiting time since the last report.

    `loss` and `steps` are those before an interruption; they do not count for the speed.
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
        """Note that the batch of the next step has been loaded."""
        self.waited += time.perf_counter() - self.step_start

    def stepped(self, images: int) -> None:
        """Note that a step has been done, with this number of images."""
        self.images += images
        self.timed_steps += 1
        self.step_start = time.perf_counter()

    def add(self, loss: float) -> None:
        """Note the loss of a step."""
        self.loss += loss
        self.steps += 1

    @property
    def seconds_per_step(self) -> float:
        """Return the mean duration of a step since the last `restart`."""
        return (self.step_start - self.start) / max(1, self.timed_steps)

    def read(self, device: torch.device) -> dict[str, float]:
        """Return the numbers of a report; `data_wait` is a share of the time, in [0, 1]."""
        self.step_start = time.perf_counter()
        seconds = max(1e-9, self.step_start - self.start)
        values = {
            "train/loss": self.loss / self.steps,
            "train/images_per_second": self.images / seconds,
            "train/data_wait": self.waited / seconds,
        }

        if device.type == "cuda":
            values["train/memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        return values


def clock(seconds: float) -> str:
    """Return a duration as hours:minutes:seconds, rounded down."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def cut_back(path: Path, lines: int) -> int:
    """Cut metrics.jsonl back to the lines of a checkpoint; return how many there are."""
    content = path.read_bytes() if path.exists() else b""

    # What follows the last newline was cut off while it was written.
    remaining = [line + b"\n" for line in content.split(b"\n")[:-1][:lines]]
    if len(remaining) < lines:
        missing = lines - len(remaining)
        log.warning(f"{path}: {missing} of the {lines} lines that the run had written are missing")
    with replacing(path, durable=True, of_run=True) as file:
        file.writelines(remaining)
    return len(remaining)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a run, of the weights that reached the better value."""

    epoch: int  # finished ones
    seconds: float  # of training until then, the sum over interruptions
    metric: str  # the first one, which decides which checkpoint is the best
    value: float  # NaN if it is undefined
    weights: str  # raw or ema
    metrics: dict[str, float | None] = field(default_factory=dict, compare=False)  # of the weights


@dataclass
class Progress:
    """How far a run is, according to its metrics.jsonl."""

    seconds: float = 0.0  # of training, the sum over interruptions
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        """Return the last epoch with an evaluation, or 0."""
        return self.evaluations[-1].epoch if self.evaluations else 0

    @property
    def best(self) -> dict[str, Any]:
        """Return metric, value and weights of the best evaluation, by the rule of `update_best`."""
        best: dict[str, Any] = {}
        for done in self.evaluations:
            if done.value > best.get("value", -math.inf):
                best = {"metric": done.metric, "value": done.value, "weights": done.weights}
        return best


def read_progress(path: Path) -> Progress:
    """Read metrics.jsonl; a run without the file has no progress."""
    lines = read_log(path)
    progress, previous_time = Progress(), 0.0
    with refusing(path, remedy=NOT_OURS):
        for line in lines:
            # Each process counts from its own start, so a resumed run begins at 0 again.
            time = line["time"]
            is_resumed = time < previous_time
            progress.seconds += time if is_resumed else time - previous_time
            previous_time = time

            if any(key.startswith("val/") for key in line):
                progress.evaluations.append(_evaluation(line, progress.seconds))
    return progress


def _evaluation(line: dict[str, Any], seconds: float) -> Evaluation:
    """Return the evaluation of a line with keys val/... and, with an average, val_raw/..."""
    metric = next(key for key in line if key.startswith("val/")).removeprefix("val/")
    has_average = f"val_raw/{metric}" in line
    scores = {"ema" if has_average else "raw": line[f"val/{metric}"]}
    if has_average:
        scores["raw"] = line[f"val_raw/{metric}"]

    # Of equal values that of the moving average counts. JSON has no NaN: it is null there.
    value, weights = math.nan, "raw"
    for name, score in scores.items():
        if score is not None and (math.isnan(value) or float(score) > value):
            value, weights = float(score), name

    prefix = "val_raw/" if has_average and weights == "raw" else "val/"
    metrics = {key.removeprefix(prefix): line[key] for key in line if key.startswith(prefix)}
    return Evaluation(int(line["epoch"]), seconds, metric, value, weights, metrics)
