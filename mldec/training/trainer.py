"""The one training loop: epochs of steps, evaluations, checkpoints, and when to stop."""

import dataclasses
import logging
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mldec.checkpoint import Best, Checkpoint, LogPosition
from mldec.config.compose import to_dict
from mldec.config.schema import Config, NonFinite
from mldec.data.base import DataModule
from mldec.data.fingerprint import fingerprint
from mldec.data.loader import Batch, TrainBatches, train_loader
from mldec.data.split_labels import training_labels
from mldec.data.workers import end_workers, unwrap
from mldec.errors import DataError, NonFiniteError, Stopped
from mldec.evaluation import left_out, memory_advice
from mldec.model import Classifier
from mldec.runtime import distributed, out_of_memory, provenance
from mldec.runtime.devices import Precision
from mldec.runtime.signals import NothingCame, StopRequest
from mldec.training.checkpoint_files import CheckpointFiles
from mldec.training.monitor import Observer
from mldec.training.runlog import Meter, RunLog, clock
from mldec.training.same_run import check_same_run
from mldec.training.step import Learner, Numbers
from mldec.training.validation import evaluate_weights, update_best

log = logging.getLogger("mldec")


class Trainer:
    """Train a model, evaluate it after each epoch, and keep the last and the best checkpoint.

    Args:
        config: of the run; only its fixed sections are read.
        model: on its device.
        loss: see `Learner`.
        data: the dataset.
        folder: for last.pt and best.pt.
        device: of the model.
        stop: turns true when the run should end after the step it is in.

    Raises:
        ConfigError: if there are too few images for a batch, or from `Learner`.
    """

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
        self.config, self.data, self.device = config, data, device
        self.stop = StopRequest() if stop is None else stop  # a new one is false for ever
        self.batches = TrainBatches(
            len(data.train.dataset),
            batch_size=train.batch_size,
            accumulate=train.accumulate,
            repeats=train.repeats,
            factors=data.sampling.factors(partial(training_labels, data, config.seed)),
            seed=config.seed,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        pin = device.type == "cuda"
        self.loader = train_loader(
            data, self.batches, workers=train.loader_workers, pin=pin, mix=config.mix
        )
        steps, queries = train.epochs * self.batches.steps, data.train.classes.queries
        self.learner = Learner(config, model, loss, device=device, steps=steps, queries=queries)

        # How far the run is, and its results so far.
        self.epoch = 0  # finished epochs
        self.bad_images = 0  # left out of training, over all processes
        self.metrics: dict[str, float] = {}  # of the last evaluation
        self.best = Best()
        self.meter = Meter()
        self.lines = 0  # in metrics.jsonl

        self.files = CheckpointFiles(folder, train)
        self.git = provenance.git_commit()
        # The fingerprint of the main process counts: it alone writes checkpoints.
        self.fingerprint = distributed.on_main(partial(fingerprint, data.train))
        trained = set(data.train.classes.names)
        self.unseen = tuple(name for name in data.val.classes.names if name not in trained)

    @property
    def position(self) -> int:
        """Return the number of finished steps of the current epoch."""
        return self.learner.step - self.epoch * self.batches.steps

    @property
    def ended(self) -> str | None:
        """Return why the run has ended, or None as long as it goes on.

        It is a function of what a checkpoint holds, so a resumed run ends where it would have.
        """
        train, best = self.config.train, self.best
        if self.epoch >= train.epochs:
            return f"train.epochs is {train.epochs}"
        if self.epoch >= train.last_epoch:
            return f"train.stop_epoch is {train.stop_epoch}, of {train.epochs} planned epochs"

        if train.patience is not None and best.evaluations_since >= train.patience:
            return (
                f"train.patience is {train.patience}, "
                f"evaluations since the best one in epoch {best.epoch}: {best.evaluations_since}"
            )
        return None

    def fit(self, runlog: RunLog) -> dict[str, float]:
        """Train until the run has ended, and return the metrics of its last epoch.

        Returns:
            "val/..." and, with a moving average of the weights, "val_raw/...".

        Raises:
            Stopped: if a stop was requested; a checkpoint was written before.
            UserError: for a fault of the data, the numbers, the memory or the disk.
        """
        train = self.config.train
        self.lines = runlog.lines  # fewer than in the checkpoint, if the file was damaged since

        try:
            with out_of_memory.explained(lambda: memory_advice(self.config, self.device)):
                while self.ended is None:
                    self.train_epoch(runlog)

                    is_last = self.epoch + 1 == train.last_epoch
                    if is_last or (self.epoch + 1) % train.eval_every == 0:
                        # Save first: a stop during a long evaluation then loses no step.
                        self.save()
                        self.metrics = self.evaluate(runlog)

                    self.epoch += 1
                    self.save(best=self.best.epoch == self.epoch)
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
        steps = _grouped(self._batches(), train.accumulate)

        description = f"epoch {self.epoch + 1}/{train.last_epoch}"
        self.meter.restart()
        for micro_batches in runlog.progress(
            steps, total=total, done=self.position, description=description
        ):
            self.meter.loaded()

            # The step changes the position and the learning rate: read both before it.
            images, lr = self.batches.images_in_step(self.position), self.learner.lr
            outcome = self.learner.learn(micro_batches, images, stop=self.stop)
            if outcome.bad_images:
                self._name_left_out(outcome.bad_images, micro_batches)
            self.meter.stepped(images)

            # Before anything is saved: each step begins with the statistics of the main process, so
            # that a checkpoint of the mean is all that a resumed run needs.
            if train.average_batchnorm and self.position == total:
                distributed.average_batch_norm(self.learner.model)

            if self.position % train.log_every == 0 or self.position == total:
                self._report(runlog, description, lr)
            if outcome.stopping:
                self.save()
                self._stop(f"after step {self.learner.step}", together=True)
            if self.files.is_due(self.learner.step):
                self.save()

    def _batches(self) -> Iterator[Batch]:
        """Load the micro-batches of an epoch.

        While the loader is waited for, training is between two steps: the state can be saved if no
        batch comes.

        Raises:
            Stopped: if a stop was requested and the next micro-batch does not come.
            DataError: if no image of a micro-batch can be read, or from the dataset.
        """
        try:
            for batch in self.stop.bounded(unwrap(self.loader)):
                if not len(batch.images):
                    raise DataError(
                        f"no image of a micro-batch can be read; the first: {batch.bad[0]}"
                    )
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

    def _name_left_out(self, count: int, micro_batches: list[Batch]) -> None:
        """Count and name the images that a step left out, on any process."""
        self.bad_images += count
        own_messages = [message for batch in micro_batches for message in batch.bad]
        for messages in distributed.gather(own_messages):
            self._warn(*(f"left out: {message}" for message in messages))

    def _read(self) -> None:
        """Read the numbers of the steps since the last reading from the device.

        Raises:
            NonFiniteError: if a loss or gradients were not finite, and the config says stop.
        """
        for numbers in self.learner.read():
            self.meter.add(numbers.loss)
            if numbers.fault:
                self._handle_fault(numbers.fault, numbers)

    def _handle_fault(self, fault: str, numbers: Numbers) -> None:
        """End the run for a step that changed no weights, or name it; see `_read`."""
        dataset = self.data.train.dataset
        names = ", ".join(dataset.name(index) for index in numbers.indices)
        if self.files.last.exists():
            newest = f"the last good checkpoint is {self.files.last}"
        else:
            newest = "no checkpoint was written yet"

        moment = f"{fault} in step {numbers.step} (epoch {self.epoch + 1})"
        fix = f"{newest}; lower optim.lr, or look at these images and their labels: {names}"
        if self.config.train.nonfinite is NonFinite.stop:
            raise NonFiniteError(f"{moment}, the weights are those before it; {fix}")
        log.warning(f"{moment}, it is left out; {fix}")

    def _warn(self, *messages: str) -> None:
        """Log messages that every process has, on the main process only."""
        if not distributed.is_main():
            return

        for message in messages:
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
            f"{values['train/images_per_second']:.0f} images/s {remaining} left",
        )
        self.meter = Meter()

    def _scalars(self, runlog: RunLog, epoch: int, values: dict[str, float]) -> None:
        runlog.scalars(self.learner.step, epoch, values)
        self.lines += 1

    def _stop(self, moment: str, *, together: bool = False) -> None:
        """End the run; the main process names the checkpoint.

        Args:
            moment: at which the run ends, for the message.
            together: all processes end at this moment, so that only the main one reports it.

        Raises:
            Stopped: always.
        """
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

        Returns:
            The metrics "val/..." of the moving average, or before its start and without one of the
            raw weights; with a moving average also "val_raw/...".
        """
        observer = Observer(self.data, self.config)
        results = evaluate_weights(
            self.learner,
            self.data,
            self.config,
            device=self.device,
            observe=observer,
            progress=partial(self._watched, runlog.evaluation()),
        )
        main, *others = results.values()
        self._warn(*left_out(main))

        # The first metric is the one that the best checkpoint follows.
        metric = next(iter(main.metrics))
        self.best = update_best(self.best, metric, results, self.epoch + 1)

        values = {f"val/{name}": value for name, value in main.metrics.items()}
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
        """Iterate over the batches of an evaluation, and end the run when a stop was requested.

        An evaluation is not saved, so a process need not wait for the others before it ends.
        """
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
        """Write last.pt in the background from a copy of the state; with `best` also best.pt.

        Raises:
            NonFiniteError: see `_read`.
        """
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
                bad_images=self.bad_images,
            ),
            versions=provenance.installed(),
            git=self.git,
            **self.learner.state(),
        )

    def resume(self, saved: Checkpoint, path: Path) -> None:
        """Go on from a checkpoint of the same run, read from a path.

        Raises:
            CheckpointError: if it is of another run or other data, or its epochs have another
                number of steps.
        """
        warning = check_same_run(
            saved,
            path,
            config=self.config,
            classes=self.data.val.classes,
            steps_per_epoch=self.batches.steps,
            fingerprint=self.fingerprint,
        )
        if warning:
            self._warn(warning)

        self.learner.load_state(saved, path)
        self.epoch, self.metrics, self.best = saved.epoch, saved.metrics, saved.best
        self.lines, self.bad_images = saved.log.lines, saved.log.bad_images
        self.learner.skipped = saved.log.skipped
        self.meter = Meter(loss=saved.log.loss, steps=saved.log.steps)

        # Which weights the run once started from stays in its record.
        self.config = dataclasses.replace(self.config, init=saved.config.get("init"))

        # The run may have been killed after it saved its best result and before it named it so.
        has_result = self.best.metric is not None
        if has_result and self.best.epoch == self.epoch and self.position == 0:
            self.files.restore_best(path)


def _grouped(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Gather the micro-batches of each optimiser step."""
    while group := list(islice(batches, size)):
        yield group
