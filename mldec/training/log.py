"""The log of a run on the main rank (train.log, metrics.jsonl, TensorBoard), and its reader."""

import json
import logging
import math
import textwrap
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from mldec.checkpoint.state import Best
from mldec.config.compose import flat, to_dict, to_yaml
from mldec.config.schema import Config
from mldec.errors import CheckpointError, DataError, brief, log, naming_errors, writing
from mldec.files import torch_files
from mldec.files.atomic import replacing
from mldec.files.run_folder import LOG_FILE, RESTORE, read_log
from mldec.runtime import distributed
from mldec.runtime.console import in_notebook, on_terminal, progress_bar

T = TypeVar("T")
Result = TypeVar("Result", bound="Evaluation | Best")

PICTURE_SECONDS = 60  # between the pictures of two evaluations

WANDB_ID = "tracker_id.txt"  # in the folder of a run

# Numbers of the group "main", the first group in TensorBoard, in addition to the first metric.
MAIN = ("train/loss", "train/lr", "train/images_per_second", "val/loss")


class RunLog:
    """The log of one run: train.log, metrics.jsonl and tensorboard/ in its directory.

    The existing files are continued after `step` finished steps, with this number of `lines` of
    metrics.jsonl, if it is above 0. `started` is `time.monotonic()` at the start of the command, or
    None for now. The config is for TensorBoard and `log.wandb`. `earlier` are messages that were
    logged before, and are written to train.log first.
    """

    def __init__(
        self,
        directory: Path,
        *,
        step: int = 0,
        lines: int = 0,
        started: float | None = None,
        config: Config | None = None,
        earlier: Iterable[logging.LogRecord] = (),
    ) -> None:
        # The methods write nothing on other ranks, so that callers need not ask for the rank.
        self.main = distributed.is_main()
        self.started = time.monotonic() if started is None else started
        self._bar: tqdm[Any] | None = None
        self._jsonl = directory / LOG_FILE
        self._folder = directory / "tensorboard"
        self._tensorboard: Any = None  # on the main rank
        self._pictures: Callable[[Any], None] | None = None  # that are not written yet
        self._pictures_at = -math.inf  # time of the last pictures
        self._wandb: Any = None
        self._handler: logging.Handler | None = None
        self.lines = distributed.on_main(
            lambda: self._open(directory, step, lines, config, earlier)
        )

    def _open(
        self,
        directory: Path,
        step: int,
        lines: int,
        config: Config | None,
        earlier: Iterable[logging.LogRecord],
    ) -> int:
        """Create or continue the files; return the number of lines of metrics.jsonl."""
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

        # wandb must be initialized before TensorBoard, whose numbers it copies.
        if config is not None and config.log.wandb:
            try:
                self._wandb = start_wandb(config, directory)
            except Exception as error:
                log.warning(f"log.wandb: {brief(error)}; training continues without wandb")
        with writing(self._folder, of_run=True):
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            # TensorBoard ignores the events of earlier files from `purge_step` on.
            self._tensorboard = SummaryWriter(str(self._folder), purge_step=step + 1)
            if config is not None:
                self._write_settings(config, step)
        lines = cut_back(self._jsonl, lines)
        # Continue the clock of a resumed run. A damaged log does not prevent a resume.
        with suppress(CheckpointError):
            self.started -= read_progress(self._jsonl).seconds
        return lines

    @property
    def seconds(self) -> float:
        """Time of the run so far, without interruptions."""
        return time.monotonic() - self.started

    def scalars(
        self, step: int, epoch: int, values: dict[str, float], source: str | None = None
    ) -> None:
        """Write the numbers of a step to metrics.jsonl and TensorBoard.

        `source` describes the origin of the metrics, such as "leave-one-out".
        """
        if not self.main:
            return

        line: dict[str, float | str | None] = {
            "step": step,
            "epoch": epoch,
            "time": round(self.seconds, 3),
        }
        if source is not None:
            line["source"] = source
        # JSON has no NaN and no infinity.
        for key, value in values.items():
            line[key] = value if math.isfinite(value) else None

        with writing(self._jsonl, of_run=True), self._jsonl.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        with writing(self._folder, of_run=True):
            for tag, value in tagged(values).items():
                self._tensorboard.add_scalar(tag, value, step)
            # TensorBoard buffers events, which a killed run would lose.
            self._tensorboard.flush()

    def _write_settings(self, config: Config, step: int) -> None:
        """Write the config to TensorBoard, as text and for the tab HPARAMS."""
        from torch.utils.tensorboard.summary import hparams

        # Indented text is a code block in Markdown.
        self._tensorboard.add_text("config", textwrap.indent(to_yaml(config), "    "), step)
        settings = {}
        for key, value in flat(to_dict(config)).items():
            is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
            settings[key] = value if is_plain else json.dumps(value)
        # The first summary declares which settings exist. It is not written, so that TensorBoard
        # collects the settings of all runs and lists the differing ones first.
        _, session, _ = hparams(settings, {})
        self._tensorboard.file_writer.add_summary(session)

    def best(self, step: int, best: Best, write_pictures: Callable[[Any], None]) -> None:
        """Write a new best value to TensorBoard, with pictures of its evaluation.

        `write_pictures` is called with the SummaryWriter, at most once per `PICTURE_SECONDS` and at
        the end of the run, so that pictures do not slow down short epochs.
        """
        if not self.main:
            return
        with writing(self._folder, of_run=True):
            # The first metric in the alphabetical order, and so of the tab HPARAMS.
            self._tensorboard.add_scalar(f"main/best_{best.metric}", best.value, step)
        self._pictures = write_pictures
        if time.monotonic() - self._pictures_at >= PICTURE_SECONDS:
            self._flush_pictures()

    def _flush_pictures(self) -> None:
        """Write the pictures of the newest best evaluation, if they are not written yet."""
        if self._pictures is None:
            return
        with writing(self._folder, of_run=True):
            self._pictures(self._tensorboard)
            self._tensorboard.flush()
        self._pictures = None
        self._pictures_at = time.monotonic()

    def progress(
        self, items: Iterable[T], *, total: int, done: int, description: str
    ) -> Iterator[T]:
        """Iterate over the remaining steps of an epoch; a terminal shows a progress bar."""
        options: dict[str, Any] = {"total": total, "initial": done, "desc": description}
        # `status` logs the steps without a bar.
        hidden = not self.main or not (in_notebook() or on_terminal())
        with progress_bar(items, hidden=hidden, **options) as bar:
            self._bar = bar  # for `status`
            yield from bar
        self._bar = None

    def evaluation(self) -> "Callable[..., tqdm[Any]]":
        """Return a function that adds a progress bar to the batches of an evaluation."""
        return partial(progress_bar, desc="evaluate", hidden=not self.main)

    def status(self, position: str, text: str) -> None:
        """Show the text to the right of the progress bar, or log it if there is no bar."""
        if self._bar is not None and not self._bar.disable:
            self._bar.set_postfix_str(text)
        elif self.main:
            log.info(f"{position} {text}")

    def close(self) -> None:
        """Close train.log, TensorBoard and wandb."""
        if self._handler is None:
            return

        log.removeHandler(self._handler)
        # A full disk was already reported.
        with suppress(DataError):
            self._flush_pictures()
        for file in (self._handler, self._tensorboard):
            with suppress(OSError):
                file.close()
        if self._wandb is not None:
            self._wandb.finish()


def tagged(values: dict[str, float]) -> dict[str, float]:
    """Rename keys of metrics.jsonl to tags of TensorBoard, such as "main/val_mAP"."""
    first_metric = next((key for key in values if key.startswith("val/")), None)
    tags = {}
    for key, value in values.items():
        is_main = key in MAIN or key == first_metric
        tag = f"main/{key.replace('/', '_')}" if is_main else key
        tags[tag] = value
    return tags


def start_wandb(config: Config, directory: Path) -> Any:
    """Start or continue a run of wandb, which copies the numbers that TensorBoard gets."""
    import wandb

    # A resumed run continues the page of its first start.
    path = directory / WANDB_ID
    if not path.exists():
        torch_files.write_text(path, f"{uuid.uuid4().hex[:16]}\n")
    return wandb.init(
        project=config.log.project or "mldec",
        name=config.name,
        id=path.read_text(encoding="utf-8").strip(),
        dir=directory,
        config=to_dict(config),
        resume="allow",
        sync_tensorboard=True,
        # Do not upload code, console output and facts about the machine.
        settings=wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            quiet=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
        ),
    )


class TextFile(logging.FileHandler):
    """Write messages to a file. Unlike logging.FileHandler, this raises the errors of writes."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Raise a DataError that names the file."""
        with writing(self.baseFilename, of_run=True):
            raise


class Meter:
    """Mean loss, speed and data-loading time since the last report.

    If a resume interrupted the meter, it starts with the sum of the losses since this report, and
    their number. Their steps are not included in the speed.
    """

    def __init__(self, *, loss: float = 0.0, steps: int = 0) -> None:
        self.loss = loss
        self.steps = steps
        self.restart()

    def restart(self) -> None:
        """Restart the clock."""
        self.start = time.perf_counter()
        self.step_start = self.start
        self.waited = 0.0
        self.images = 0
        self.timed_steps = 0

    def loaded(self) -> None:
        """Record that the batch of the next step is loaded."""
        self.waited += time.perf_counter() - self.step_start

    def stepped(self, images: int) -> None:
        """Record a step and its number of images."""
        self.images += images
        self.timed_steps += 1
        self.step_start = time.perf_counter()

    def add(self, loss: float) -> None:
        """Add the loss of a step."""
        self.loss += loss
        self.steps += 1

    @property
    def seconds_per_step(self) -> float:
        """Mean duration of a step since the last `restart`."""
        return (self.step_start - self.start) / max(1, self.timed_steps)

    def read(self, device: torch.device) -> dict[str, float]:
        """Return the numbers of a report. `data_wait` is a fraction of the time since `restart`."""
        # Two reports may have the same time on a clock with a low resolution.
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
    """Format a duration as hours:minutes:seconds, rounded down."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def cut_back(path: Path, lines: int) -> int:
    """Truncate metrics.jsonl to the lines of a checkpoint; return the number of lines."""
    # A killed run may have written lines after its checkpoint, which a resumed run writes again.
    content = path.read_bytes() if path.exists() else b""

    # Text after the last newline is an incomplete line.
    remaining = [line + b"\n" for line in content.split(b"\n")[:-1][:lines]]
    if len(remaining) < lines:
        missing = lines - len(remaining)
        log.warning(f"{path}: {missing} of {lines} lines are missing")
    with replacing(path, durable=True, of_run=True) as file:
        file.writelines(remaining)
    return len(remaining)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a run, with the better of raw and averaged weights."""

    epoch: int  # number of finished epochs
    seconds: float  # time of the run so far, without interruptions
    metric: str  # name of the first metric, which selects the best checkpoint
    value: float  # its value; NaN if undefined
    weights: str  # the better weights: "raw" or "ema"
    metrics: dict[str, float | None] = field(default_factory=dict, compare=False)  # all metrics

    @property
    def loss(self) -> float | None:
        """Mean validation loss, or None if it was not measured."""
        return self.metrics.get("loss")


def best_of(results: Iterable[Result]) -> Result | None:
    """Return the best of several results, from early to late; None if no value is defined.

    Small validation splits often reach the same value several times, and then the result with the
    lower loss is better. Unless both losses are known, the later result is better, because it was
    trained for longer.
    """
    best = None
    for new in results:
        if best is None or new.value > best.value:
            best = None if math.isnan(new.value) else new
        elif new.value == best.value and (
            new.loss is None or best.loss is None or new.loss <= best.loss
        ):
            best = new
    return best


@dataclass
class Progress:
    """Time and evaluations of a run, from its metrics.jsonl."""

    seconds: float = 0.0  # time without interruptions, including tokens and evaluations
    evaluations: list[Evaluation] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        """Last epoch with an evaluation, or 0."""
        return self.evaluations[-1].epoch if self.evaluations else 0

    @property
    def best(self) -> "Evaluation | None":
        """The best evaluation, as in `update_best`; None without a defined value."""
        return best_of(self.evaluations)


def read_progress(path: Path) -> Progress:
    """Read metrics.jsonl. Without the file, the progress is empty."""
    lines = read_log(path)
    progress = Progress()
    with naming_errors(path, remedy=RESTORE):
        for line in lines:
            progress.seconds = line["time"]
            if any(key.startswith("val/") for key in line):
                progress.evaluations.append(_evaluation(line, progress.seconds))
    return progress


def _evaluation(line: dict[str, Any], seconds: float) -> Evaluation:
    """Parse a line of metrics.jsonl with an evaluation.

    val/... are the metrics of the moving average and val_raw/... the metrics of the raw weights,
    which are in val/... if there is no moving average.
    """
    metric = next(key for key in line if key.startswith("val/")).removeprefix("val/")
    prefixes = {"raw": "val/"}
    if f"val_raw/{metric}" in line:
        prefixes = {"raw": "val_raw/", "ema": "val/"}

    # Damaged lines raise KeyError or ValueError, which `read_progress` converts.
    results = []
    for weights, prefix in prefixes.items():
        # NaN is null in JSON.
        value = math.nan if line[prefix + metric] is None else float(line[prefix + metric])
        metrics = {key.removeprefix(prefix): line[key] for key in line if key.startswith(prefix)}
        results.append(Evaluation(int(line["epoch"]), seconds, metric, value, weights, metrics))

    return best_of(results) or results[0]
