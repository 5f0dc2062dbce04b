"""The one training loop: epochs of steps, evaluations, checkpoints, and when to stop."""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from timm.utils import distribute_bn
from torch import nn

from mldec import build
from mldec.checkpoint.classes import check_classes
from mldec.checkpoint.loading import saved_config
from mldec.checkpoint.state import Best, Checkpoint, LogPosition
from mldec.config.compose import diff, to_dict
from mldec.config.schema import Config, Init, NonFinite, Train
from mldec.data.fingerprint import check_same, fingerprint
from mldec.data.loader import Batch, TrainBatches, end_workers, labels_of, train_loader
from mldec.data.types import DataModule
from mldec.errors import CheckpointError, DataError, Stopped, UserError
from mldec.evaluation.output import Results, left_out, same_scores
from mldec.evaluation.run import evaluate_all, memory_advice
from mldec.files import torch_files
from mldec.model import Classifier
from mldec.runtime import distributed
from mldec.runtime.devices import Precision
from mldec.runtime.environment import explain_out_of_memory, git_commit, installed
from mldec.runtime.signals import NothingCame, StopRequest
from mldec.training.log import Meter, RunLog, clock
from mldec.training.monitor import Observer
from mldec.training.step import Learner, Numbers, Outcome

log = logging.getLogger("mldec")


class Trainer:
    """Train and evaluate a model, and keep last.pt and best.pt in `folder`."""

    def __init__(
        self,
        config: Config,
        model: Classifier,
        loss: nn.Module,
        data: DataModule,
        *,
        folder: Path,
        device: torch.device,
        stop: StopRequest | None = None,
    ) -> None:
        train = config.train
        self.data, self.device = data, device
        self.stop = StopRequest() if stop is None else stop  # a new one is false for ever
        self.batches = TrainBatches(
            len(data.train.dataset),
            batch_size=train.batch_size,
            accumulate=train.accumulate,
            repeats=train.repeats,
            factors=data.sampling.factors(lambda: labels_of(data.train, config.seed)),
            seed=config.seed,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        train = train.lasting(self.batches.steps)
        self.config = config = dataclasses.replace(config, train=train)
        pin = device.type == "cuda"
        mixing = build.mixing(config.mix, data.train.classes)
        self.loader = train_loader(
            data, self.batches, workers=train.loader_workers, pin=pin, mixing=mixing
        )
        steps, queries = train.epochs * self.batches.steps, data.train.classes.queries
        self.learner = Learner(config, model, loss, device=device, steps=steps, queries=queries)

        # How far the run is, and its results so far.
        self.epoch = 0  # finished epochs
        self.bad_images = 0  # left out of training, over all processes
        self.outcomes: list[Outcome] = []  # of the steps that `bad_images` does not count yet
        self.metrics: dict[str, float] = {}  # of the last evaluation
        self.constant: list[str] = []  # classes with the same score for all of its images
        self.best = Best()
        self.meter = Meter()
        self.lines = 0  # in metrics.jsonl

        self.files = CheckpointFiles(folder, train)
        self.git = git_commit()
        # The fingerprints of the main process count: it alone writes checkpoints.
        self.fingerprint = distributed.on_main(partial(fingerprint, data.train))
        self.val_fingerprint = distributed.on_main(partial(fingerprint, data.val))
        trained = set(data.train.classes.names)
        self.unseen = tuple(name for name in data.val.classes.names if name not in trained)

    @property
    def position(self) -> int:
        """Return the number of finished steps of the current epoch."""
        return self.learner.step - self.epoch * self.batches.steps

    @property
    def ended(self) -> str | None:
        """Return why the run has ended, or None; a function of what a checkpoint holds."""
        train, best = self.config.train, self.best
        if self.epoch >= train.epochs:
            return f"train.epochs is {train.epochs}"
        if self.epoch >= train.last_epoch:
            return f"train.stop_epoch is {train.stop_epoch}, of {train.epochs} planned epochs"

        # While the moving average still improves, it may become the best.
        waited = train.patience is not None and best.evaluations_since >= train.patience
        if waited and best.falls:
            return (
                f"train.patience is {train.patience}, evaluations without progress: "
                f"{best.evaluations_since}, the best one was in epoch {best.epoch}"
            )
        return None

    def fit(self, runlog: RunLog) -> dict[str, float]:
        """Train until the run has ended, and return the metrics of its last evaluation.

        After a request to stop a checkpoint is written, and `Stopped` is raised.
        """
        train = self.config.train
        self.lines = runlog.lines  # fewer than in the checkpoint, if the file was damaged since

        try:
            with explain_out_of_memory(lambda: memory_advice(self.config, self.device)):
                while self.ended is None:
                    self.train_epoch(runlog)

                    is_last = self.epoch + 1 == train.last_epoch
                    if is_last or (self.epoch + 1) % train.eval_every == 0:
                        # Save first: a stop during a long evaluation then loses no step.
                        self.save()
                        self.metrics = self.evaluate(runlog)

                    self.epoch += 1
                    self.save(best=self.best.epoch == self.epoch)
            self._warn(*same_scores(self.constant))
        except (Stopped, KeyboardInterrupt):
            end_workers()
            raise
        finally:
            self.files.wait()
        return self.metrics

    def train_epoch(self, runlog: RunLog) -> None:
        """Do the optimiser steps of the current epoch that are not done yet."""
        train, total = self.config.train, self.batches.steps
        self.learner.train()

        # After a resume the sampler skips the images of the steps that are done.
        self.batches.epoch, self.batches.start = self.epoch, self.position
        description = f"epoch {self.epoch + 1}/{train.last_epoch}"
        self.meter.restart()
        batches = self._batches()
        steps = iter(lambda: list(islice(batches, train.accumulate)), [])
        for micro_batches in runlog.progress(
            steps, total=total, done=self.position, description=description
        ):
            self.meter.loaded()

            # The step changes the position and the learning rate: read both before it.
            images, lr = self.batches.images_in_step(self.position), self.learner.lr
            self.outcomes.append(self.learner.learn(micro_batches, images, stop=self.stop))
            self.meter.stepped(images)
            reporting = self.position % train.log_every == 0 or self.position == total
            stopping = self._hear(now=reporting)

            # Before anything is saved: each step begins with the statistics of the main process, so
            # that a checkpoint of the mean is all that a resumed run needs.
            world_size = distributed.world_size()
            if train.average_batchnorm and self.position == total and world_size > 1:
                distribute_bn(self.learner.model, world_size, reduce=True)

            if reporting:
                self._report(runlog, description, lr)
            if stopping:
                self.save()
                self._stop(f"after step {self.learner.step}", together=True)
            if self.files.is_due(self.learner.step):
                self.save()

    def _batches(self) -> Iterator[Batch]:
        """Load the micro-batches of an epoch; while it waits, the state can be saved."""
        try:
            for batch in self.stop.bounded(self.loader):
                if not len(batch.images):
                    raise DataError(f"no image of a micro-batch can be read: {batch.bad[0]}")
                yield batch
        except NothingCame:
            self.save()
            self._stop(f"after step {self.learner.step}, waiting for data")
        except DataError as error:
            # Before the first step there is nothing worth saving.
            if self.learner.step:
                self.save()
            raise self._with_checkpoint(error) from error

    def _with_checkpoint(self, error: DataError) -> DataError:
        """Add the path of the checkpoint to an error at which the whole state is saved."""
        if not self.learner.step or not distributed.is_main():
            return error

        self.files.wait()
        return DataError(f"{error}; saved in {self.files.last}: resume=auto goes on")

    def _hear(self, *, now: bool) -> bool:
        """Take in the outcomes of the last steps, and tell whether one of them ends the run.

        Several processes leave that of the newest step for the next call, unless it is needed
        `now`: the next step need not wait for it. All processes stop after the same step.
        """
        stopping = False
        kept = 0 if now or distributed.world_size() == 1 else 1
        while len(self.outcomes) > kept:
            outcome = self.outcomes.pop(0)
            if outcome.bad_images:
                self.bad_images += outcome.bad_images
                for messages in distributed.gather(outcome.messages):
                    self._warn(*(f"left out: {message}" for message in messages))
            if outcome.stopping:
                stopping, kept = True, 0
        return stopping

    def _read(self) -> None:
        """Read the numbers of the steps since the last reading from the device."""
        for numbers in self.learner.read():
            self.meter.add(numbers.loss)
            if numbers.fault:
                self._handle_fault(numbers)

    def _handle_fault(self, numbers: Numbers) -> None:
        """End the run for a step that changed no weights, or name it, as the config says."""
        names = ", ".join(map(self.data.train.dataset.name, numbers.indices))
        newest = "no checkpoint was written yet"
        if self.files.last.exists():
            newest = f"the last good checkpoint is {self.files.last}"
        moment = f"{numbers.fault} in step {numbers.step} (epoch {self.epoch + 1})"
        fix = f"{newest}; lower optim.lr, or look at these images and their labels: {names}"
        if self.config.train.nonfinite is NonFinite.stop:
            raise UserError(f"{moment}, the weights are those before it; {fix}")
        log.warning(f"{moment}, it is left out; {fix}")

    def _warn(self, *messages: str) -> None:
        """Log messages that every process has, on the main process only."""
        for message in messages if distributed.is_main() else ():
            log.warning(message)

    def _report(self, runlog: RunLog, description: str, lr: float) -> None:
        """Log the numbers since the last report, and start a new meter."""
        train, total = self.config.train, self.batches.steps
        self._read()
        values = {**self.meter.read(self.device), "train/lr": lr}

        # Counters appear only in runs that can have something to count.
        if self.learner.precision is Precision.fp16 or train.nonfinite is NonFinite.skip:
            values["train/skipped_steps"] = self.learner.skipped
        if self.data.bad_images == "skip":
            values["train/bad_images"] = self.bad_images
        self._scalars(runlog, self.epoch, values)

        remaining_steps = train.last_epoch * total - self.learner.step
        remaining = clock(remaining_steps * self.meter.seconds_per_step)
        runlog.status(
            f"{description} step {self.position}/{total}",
            f"loss {values['train/loss']:.4g} lr {lr:.3g} "
            f"{values['train/images_per_second']:.0f} images/s, the run ends in {remaining}",
        )
        self.meter = Meter()

    def _scalars(self, runlog: RunLog, epoch: int, values: dict[str, float]) -> None:
        runlog.scalars(self.learner.step, epoch, values)
        self.lines += 1

    def _stop(self, moment: str, *, together: bool = False) -> None:
        """End the run; if all processes end `together`, the main one alone reports it."""
        self.files.wait()

        message = f"stopped by {self.stop.name} {moment}"
        if distributed.is_main():
            message += f"; saved in {self.files.last}: resume=auto goes on"
        elif together:
            message = ""
        else:
            message += " on a process that saves nothing: resume=auto goes on from last.pt"
        raise Stopped(message, self.stop.status)

    def evaluate(self, runlog: RunLog) -> dict[str, float]:
        """Evaluate the moving average and the raw weights, log both, and update the best result.

        The metrics are "val/..." of the average if there is one, then "val_raw/..." of the weights.
        """
        models: dict[str, nn.Module] = {}
        if self.learner.average is not None:
            models["ema"] = self.learner.average
        models["raw"] = self.learner.model

        # Batch-norm statistics differ between processes; a checkpoint holds the main one's.
        for model in models.values():
            distributed.copy_buffers(model)

        observer = Observer(self.data, self.config)
        of_models = evaluate_all(
            list(models.values()),
            self.data,
            self.config,
            device=self.device,
            progress=partial(self._watched, runlog.evaluation()),
            observe=observer,
        )
        results = dict(zip(models, of_models, strict=True))
        main, *others = of_models
        self._warn(*left_out(main.bad, main.images))
        self.constant = observer.constant_classes()

        # The best checkpoint follows the first metric. A run that was started by a version with
        # another order keeps its metric, and has it first in the log.
        metric = next(iter(main.metrics))
        if self.best.metric in main.metrics:
            metric = self.best.metric
        self.best = update_best(self.best, metric, results, self.epoch + 1)

        values = {f"val/{metric}": main.metrics[metric]}
        values |= {f"val/{name}": value for name, value in main.metrics.items()}
        for raw in others:
            values |= {f"val_raw/{name}": value for name, value in raw.metrics.items()}
        self._scalars(runlog, self.epoch + 1, values)
        runlog.details(self.learner.step, observer.details(main))

        scores = ", ".join(
            f"{weights} {result.metrics[metric]:.2f}" for weights, result in results.items()
        )
        best = f"best {self.best.value:.2f} ({self.best.weights}, epoch {self.best.epoch})"
        epoch = f"epoch {self.epoch + 1}/{self.config.train.last_epoch}"
        log.info(f"{epoch}: val {metric} {scores} on {main.images:,} images; {best}")
        return values

    def _watched(self, bar: Any, batches: Any, *, total: int) -> Iterator[Batch]:
        """Iterate over the batches of an evaluation, and end the run when a stop was requested."""
        moment = f"in the evaluation after step {self.learner.step}"
        try:
            for batch in bar(self.stop.bounded(batches), total=total):
                if self.stop:
                    self._stop(moment)
                yield batch
        except NothingCame:
            self._stop(f"{moment}, waiting for data")
        except DataError as error:
            raise self._with_checkpoint(error) from error

    def save(self, *, best: bool = False) -> None:
        """Write last.pt in the background from a copy of the state; with `best` also best.pt."""
        # The main process alone writes, and goes by its own clock.
        if distributed.is_main():
            self._read()
        self.files.save(self.checkpoint, best=best)

    def checkpoint(self) -> Checkpoint:
        """Return the state of the run; its tensors are those that training goes on to change."""
        # Leave out how this process was started: from a checkpoint, or on data that changed.
        data = {key: value for key, value in self.config.data.items() if key != "changed"}
        config = dataclasses.replace(self.config, resume=None, data=data)

        return Checkpoint(
            config=to_dict(config),
            classes=self.data.val.classes,
            unseen=self.unseen,
            fingerprint=self.fingerprint,
            val_fingerprint=self.val_fingerprint,
            transform=self.data.transform,
            metrics=self.metrics,
            best=self.best,
            epoch=self.epoch,
            steps_per_epoch=self.batches.steps,
            log=LogPosition(
                lines=self.lines,
                loss=self.meter.loss,
                steps=self.meter.steps,
                skipped=self.learner.skipped,
                bad_images=self.bad_images + sum(step.bad_images for step in self.outcomes),
            ),
            versions=installed(),
            git=self.git,
            **self.learner.state(),
        )

    def resume(self, saved: Checkpoint, path: Path) -> None:
        """Go on from a checkpoint of the same run, read from a path."""
        self._check_same_run(saved, path)
        self.learner.load_state(saved, path)
        self.epoch, self.metrics, self.best = saved.epoch, saved.metrics, saved.best
        self.lines, self.bad_images = saved.log.lines, saved.log.bad_images
        self.learner.skipped = saved.log.skipped
        self.meter = Meter(loss=saved.log.loss, steps=saved.log.steps)

        # Which weights the run once started from stays in its record.
        init = saved.config.get("init")
        init = Init(**init) if isinstance(init, dict) else init
        self.config = dataclasses.replace(self.config, init=init)

        # The run may have been killed after it saved its best result and before it named it so.
        has_result = self.best.metric is not None
        if has_result and self.best.epoch == self.epoch and self.position == 0:
            self.files.restore_best(path)

    def _check_same_run(self, saved: Checkpoint, path: Path) -> None:
        """Raise CheckpointError for other settings, classes, steps or data."""
        changed = diff(saved_config(saved, path, self.config.plugins), self.config)
        if changed:
            raise CheckpointError(
                f"{path} is of a run with other settings ({'; '.join(changed)}): "
                f"put them back, or start a new run with name=... init={path}"
            )
        check_classes(saved.classes, self.data.val.classes, path)

        # A step in the middle of an epoch must stand for the same images as before.
        if saved.steps_per_epoch != self.batches.steps:
            raise CheckpointError(
                f"{path} has {saved.steps_per_epoch} steps per epoch, this run "
                f"{self.batches.steps}: use the same training images and processes"
            )
        allowed = self.config.data.get("changed") == "allow"
        warnings = (
            check_same(saved.fingerprint, self.fingerprint, path, allow=allowed),
            check_same(
                saved.val_fingerprint,
                self.val_fingerprint,
                path,
                allow=allowed,
                split="validation",
            ),
        )
        for warning in filter(None, warnings):
            self._warn(warning)


class CheckpointFiles:
    """Write last.pt and best.pt in the background; only the main process writes."""

    def __init__(self, folder: Path, train: Train) -> None:
        self.last, self.best = folder / "last.pt", folder / "best.pt"
        self._train = train
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._saved_at = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Tell whether to save after a step; each process goes by its own clock."""
        steps, minutes = self._train.save_every_steps, self._train.save_every_minutes
        if steps is not None and step % steps == 0:
            return True
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def save(self, checkpoint: Callable[[], Checkpoint], *, best: bool) -> None:
        """Write last.pt, with `best` also best.pt, in the background."""
        self._saved_at = time.monotonic()
        if not distributed.is_main():
            return

        # Training goes on to change the tensors while the file is written.
        state = torch_files.snapshot(checkpoint().to_state())

        def write() -> None:
            torch_files.save(self.last, state, keep=self._train.keep_last)
            if best:
                torch_files.duplicate(self.last, self.best)

        self.wait()
        self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until the last save is on the disk, or raise the error in it."""
        # Forget it first, so that its error is raised only once.
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def restore_best(self, path: Path) -> None:
        """Give the name best.pt to a checkpoint of this folder that holds the best result.

        A run that was killed between the save and the second name left an older best.pt behind.
        """
        if not distributed.is_main() or path.parent != self.last.parent:
            return

        if torch_files.known_hashes(self.best) != torch_files.known_hashes(path):
            torch_files.duplicate(path, self.best)


def update_best(best: Best, metric: str, results: Mapping[str, Results], epoch: int) -> Best:
    """Return the best result after one more evaluation; of equal ones the earliest.

    What ends a run with `train.patience` is Query2Label's rule (main_mlc.py of its code).
    """
    values = {weights: result.metrics[metric] for weights, result in results.items()}
    best = dataclasses.replace(best, evaluations_since=best.evaluations_since + 1)
    for weights, value in values.items():
        if value > best.value:
            best = dataclasses.replace(
                best, metric=metric, value=value, weights=weights, epoch=epoch, evaluations_since=0
            )

    best_raw = -math.inf if best.raw is None else best.raw
    if values["raw"] > best_raw:
        best = dataclasses.replace(best, raw=values["raw"], evaluations_since=0)

    average = values.get("ema", -math.inf)
    best_average = -math.inf if best.average is None else best.average
    if average > best_average:
        return dataclasses.replace(best, average=average, falls=False)
    return dataclasses.replace(best, falls=True)
