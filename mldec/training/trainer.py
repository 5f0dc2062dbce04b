"""The one training loop: epochs of steps, evaluations, checkpoints, and when to stop."""

import dataclasses
import logging
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mldec import checkpoint
from mldec.checkpoint import Best, Checkpoint, LogPosition
from mldec.config.compose import diff, to_dict
from mldec.config.schema import Config, NonFinite, Precision
from mldec.data.base import DataModule
from mldec.data.fingerprint import check_same, fingerprint
from mldec.data.loader import Batch, TrainBatches, end_workers, train_loader, unwrap
from mldec.errors import CheckpointError, DataError, NonFiniteError, Stopped
from mldec.evaluation import Results, check_classes, evaluate, left_out
from mldec.files import torch_files
from mldec.model import Classifier
from mldec.runtime import distributed, out_of_memory
from mldec.runtime.signals import NothingCame, StopRequest
from mldec.training.runlog import Meter, RunLog
from mldec.training.step import Learner, Outcome

log = logging.getLogger("mldec")


class Trainer:
    """Train a model on a dataset, evaluate it after each epoch, and keep the last and the best checkpoint.

    Args:
        config: of the run; only its fixed sections are read.
        model: on its device.
        loss: logits float32 [B, K], targets [B, K] -> []; summed or averaged over the batch, as `loss.reduction` says.
        data: the dataset.
        folder: for last.pt and best.pt.
        device: of the model.
        stop: turns true when the run should end after the step it is in.

    Raises:
        ConfigError: if the batch size cannot be divided, or from `Learner`.
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
        self.config, self.data, self.folder, self.device = config, data, folder, device
        self.stop = StopRequest() if stop is None else stop  # which is false until a signal comes
        self.batches = TrainBatches(
            len(data.train.dataset),
            batch_size=train.batch_size,
            accumulate=train.accumulate,
            repeats=train.repeats,
            seed=config.seed,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        pin = device.type == "cuda"
        self.loader = train_loader(
            data, self.batches, workers=train.workers, pin=pin, mix=config.mix
        )
        steps, queries = train.epochs * self.batches.steps, data.train.classes.queries
        self.learner = Learner(config, model, loss, device=device, steps=steps, queries=queries)
        self.epoch = 0  # finished
        self.bad_images = 0  # left out of training, over all processes
        self.metrics: dict[str, float] = {}  # of the last evaluation
        self.best = Best()
        self.meter = Meter()
        self.lines = 0  # in metrics.jsonl
        self.writer = torch_files.Writer()
        self.saved_at = time.monotonic()
        self.git = checkpoint.git_commit()
        # The main process's table counts: it alone writes checkpoints.
        self.fingerprint = distributed.on_main(partial(fingerprint, data.train))

    @property
    def position(self) -> int:
        """Return the steps done of the current epoch."""
        return self.learner.step - self.epoch * self.batches.steps

    def fit(self, runlog: RunLog) -> dict[str, float]:
        """Train to the last epoch and return its metrics: "val/..." and, with a moving average, "val_raw/...".

        Raises:
            Stopped: if it was asked to; a checkpoint was written.
            UserError: at a fault of the data, the numbers, the memory or the disk.
        """
        train = self.config.train
        self.lines = runlog.lines  # fewer than the checkpoint said, if the file was damaged since
        try:
            with out_of_memory.explained(self.config, self.device):
                while self.epoch < train.epochs:
                    self.train_epoch(runlog)
                    if (self.epoch + 1) % train.eval_every == 0 or self.epoch + 1 == train.epochs:
                        self.save()  # a stop during a long evaluation loses nothing
                        self.metrics = self.evaluate(runlog)
                    self.epoch += 1
                    self.save(best=self.best.epoch == self.epoch)
        except (Stopped, KeyboardInterrupt):
            end_workers()
            raise
        finally:
            self.writer.wait()
        return self.metrics

    def summary(self) -> str:
        """Return what is about to be trained, on what, and where it starts."""
        millions = sum(p.numel() for p in self.learner.model.parameters() if p.requires_grad) / 1e6
        train, val = self.data.train, self.data.val
        precision = self.learner.precision.value
        if self.config.train.precision is Precision.auto:
            precision += " (auto)"
        return (
            f"{self.config.name}: {millions:.2f} M trainable parameters, {len(val.classes)} classes, "
            f"{len(train.dataset):,} training and {len(val.dataset):,} validation images, "
            f"{precision} on {self.device} x {distributed.world_size()}, "
            f"epoch {self.epoch + 1} of {self.config.train.epochs}, {self.position} of {self.batches.steps} steps done"
        )

    def train_epoch(self, runlog: RunLog) -> None:
        """Do the optimiser steps of one epoch that are not done yet."""
        train, total = self.config.train, self.batches.steps
        self.learner.net.train()
        self.batches.epoch, self.batches.start = self.epoch, self.position
        groups = _grouped(self._batches(), train.accumulate)
        description = f"epoch {self.epoch + 1}/{train.epochs}"
        self.meter.restart()
        for batches in runlog.progress(
            groups, total=total, done=self.position, description=description
        ):
            self.meter.loaded()
            images, lr = self.batches.images_in_step(self.position), self.learner.lr
            outcome = self.learner.learn(batches, images, stop=self.stop)
            self._check(outcome, batches)
            self.meter.add(outcome.loss, images)
            if self.position % train.log_every == 0 or self.position == total:
                self._report(runlog, description, lr)
            if outcome.stopping:
                self.save()
                self._stop(f"after step {self.learner.step}", together=True)
            if self._due():
                self.save()

    def _batches(self) -> Iterator[Batch]:
        """Load the micro-batches of an epoch.

        While one is waited for, training is between two steps: where none comes, it is saved.
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
            if self.learner.step:
                self.save()
            raise self._with_checkpoint(error) from error

    def _with_checkpoint(self, error: DataError) -> DataError:
        """Return an error of a moment at which all is saved, with the place of the checkpoint."""
        if not self.learner.step or not distributed.is_main():
            return error
        self.writer.wait()
        return DataError(f"{error}; saved in {self.folder / 'last.pt'}: resume=auto goes on")

    def _check(self, outcome: Outcome, batches: list[Batch]) -> None:
        """Name the images left out in a step, wherever they were met; end the run, or go on, if it was not finite."""
        if outcome.bad_images:
            self.bad_images += outcome.bad_images
            for messages in distributed.gather(
                [message for batch in batches for message in batch.bad]
            ):
                self._warn(*(f"left out: {message}" for message in messages))
        if outcome.fault:
            dataset, last = self.data.train.dataset, self.folder / "last.pt"
            names = ", ".join(
                dataset.name(int(index)) for batch in batches for index in batch.indices
            )
            where = f"{outcome.fault} in step {self.learner.step} (epoch {self.epoch + 1})"
            kept = (
                f"the last good checkpoint is {last}"
                if last.exists()
                else "no checkpoint was written yet"
            )
            fix = f"{kept}; lower optim.lr, or look at the images {names}"
            if self.config.train.nonfinite is NonFinite.stop:
                raise NonFiniteError(f"{where}, the weights are those before it; {fix}")
            log.warning(f"{where}, it is left out; {fix}")

    def _warn(self, *messages: str) -> None:
        """Log what every process knows, once."""
        for message in messages if distributed.is_main() else ():
            log.warning(message)

    def _report(self, runlog: RunLog, description: str, lr: float) -> None:
        train, total = self.config.train, self.batches.steps
        values = {**self.meter.read(self.device), "train/lr": lr}
        if self.learner.precision is Precision.fp16 or train.nonfinite is NonFinite.skip:
            values["train/skipped_steps"] = self.learner.skipped
        if self.data.bad_images == "skip":
            values["train/bad_images"] = self.bad_images
        left = (train.epochs * total - self.learner.step) * self.meter.seconds_a_step
        self._scalars(runlog, self.epoch, values)
        runlog.status(
            f"{description} step {self.position}/{total}",
            f"loss {values['train/loss']:.4g} lr {lr:.3g} "
            f"{values['train/images_per_second']:.0f} images/s {_clock(left)} left",
        )
        self.meter = Meter()

    def _scalars(self, runlog: RunLog, epoch: int, values: dict[str, float]) -> None:
        runlog.scalars(self.learner.step, epoch, values)
        self.lines += 1

    def _due(self) -> bool:
        """Tell whether it is time to save, as the main process sees it: the others have nothing to write."""
        steps, minutes = self.config.train.save_every_steps, self.config.train.save_every_minutes
        by_steps = steps is not None and self.learner.step % steps == 0
        return by_steps or (
            minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
        )

    def _stop(self, place: str, *, together: bool = False) -> None:
        """End the run; the main process has what was saved, and speaks for all that end together."""
        self.writer.wait()
        message = f"stopped by {self.stop.name} {place}"
        if distributed.is_main():
            message += f"; saved in {self.folder / 'last.pt'}: resume=auto goes on"
        elif together:
            message = ""
        else:
            message += " on a process that saves nothing: resume=auto goes on from last.pt"
        raise Stopped(message, self.stop.status)

    def evaluate(self, runlog: RunLog) -> dict[str, float]:
        """Evaluate the moving average and the raw weights, log both, and note whether one is the best so far.

        Returns:
            The metrics "val/..." of the moving average, or without one of the raw weights; with a moving average also
            "val_raw/...".
        """
        results = self._evaluate_weights(runlog)
        main, *others = results.values()
        self._warn(*left_out(main))
        metric = next(iter(main.metrics))
        self._update_best(metric, results)

        values = {f"val/{name}": value for name, value in main.metrics.items()}
        for other in others:
            values |= {f"val_raw/{name}": value for name, value in other.metrics.items()}
        self._scalars(runlog, self.epoch + 1, values)

        scores = ", ".join(
            f"{weights} {one.metrics[metric]:.2f}" for weights, one in results.items()
        )
        best = f"best {self.best.value:.2f} ({self.best.weights}, epoch {self.best.epoch})"
        epoch = f"epoch {self.epoch + 1}/{self.config.train.epochs}"
        log.info(f"{epoch}: val {metric} {scores} on {main.images:,} images; {best}")
        return values

    def _evaluate_weights(self, runlog: RunLog) -> dict[str, Results]:
        """Return the results by the name of the weights; the moving average, if there is one, comes first."""
        models: dict[str, nn.Module] = {}
        if self.learner.ema is not None:
            models["ema"] = self.learner.ema.module
        models["raw"] = self.learner.model

        results = {}
        for weights, model in models.items():
            distributed.copy_buffers(model)
            bar = partial(self._watched, runlog.evaluation(f"evaluate {weights}"))
            results[weights] = evaluate(
                model, self.data, self.config, device=self.device, progress=bar
            )
        return results

    def _update_best(self, metric: str, results: dict[str, Results]) -> None:
        for weights, one in results.items():
            value = one.metrics[metric]
            if value > self.best.value:
                self.best = Best(metric, value, weights, self.epoch + 1)

    def _watched(self, bar: Any, batches: Any, *, total: int) -> Iterator[Batch]:
        """Iterate over the batches of an evaluation, which no process leaves for another one's sake."""
        place = f"in the evaluation after step {self.learner.step}"
        try:
            for batch in bar(self.stop.bounded(batches), total=total):
                if self.stop:
                    self._stop(place)
                yield batch
        except NothingCame:
            self._stop(f"{place}, waiting for data")
        except DataError as error:
            raise self._with_checkpoint(error) from error

    def save(self, *, best: bool = False) -> None:
        """Write last.pt in the background, from a copy of the state as it is now; give it the name best.pt too."""
        self.saved_at = time.monotonic()
        if not distributed.is_main():
            return
        state, last = torch_files.snapshot(self.checkpoint().to_state()), self.folder / "last.pt"

        def write() -> None:
            torch_files.save(last, state, keep=self.config.train.keep_last)
            if best:
                torch_files.duplicate(last, self.folder / "best.pt")

        self.writer.submit(write)

    def checkpoint(self) -> Checkpoint:
        """Return the state of the run; its tensors are those that training goes on to change."""
        data = {key: value for key, value in self.config.data.items() if key != "changed"}
        config = dataclasses.replace(self.config, resume=None, data=data)  # however it came to here
        return Checkpoint(
            config=to_dict(config),
            classes=self.data.val.classes,
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
            versions=checkpoint.installed(),
            git=self.git,
            **self.learner.state(),
        )

    def resume(self, saved: Checkpoint, path: Path) -> None:
        """Go on from a checkpoint of the same run, read from a path.

        Raises:
            CheckpointError: if it is of another run or other data, or its epochs have another number of steps.
        """
        saved_config = checkpoint.saved_config(saved, path, self.config.plugins)
        changed = diff(saved_config, self.config)
        if changed:
            raise CheckpointError(
                f"{path} is of a run with other settings ({'; '.join(changed)}): "
                f"put them back, or start a new run with name=... init={path}"
            )
        check_classes(saved.classes, self.data.val.classes, path)
        if saved.steps_per_epoch != self.batches.steps:
            raise CheckpointError(
                f"{path} has {saved.steps_per_epoch} steps per epoch, this run {self.batches.steps}: use the same "
                f"training images, and a number of processes that divides their last batch as before"
            )
        warning = check_same(
            saved.fingerprint, self.fingerprint, path, allow=self.config.accepts_changed_data
        )
        self._warn(*[warning] if warning else [])

        self.learner.load_state(saved, path)
        self.epoch, self.metrics, self.best = saved.epoch, saved.metrics, saved.best
        self.lines, self.learner.skipped, self.bad_images = (
            saved.log.lines,
            saved.log.skipped,
            saved.log.bad_images,
        )
        self.meter = Meter(loss=saved.log.loss, steps=saved.log.steps)
        # Which weights the run once started from stays in its record.
        self.config = dataclasses.replace(self.config, init=saved.config.get("init"))
        self._restore_best(path)

    def _restore_best(self, path: Path) -> None:
        """Give a checkpoint the name best.pt again, if the run was killed between its save and that name."""
        is_best = (
            self.best.metric is not None and self.best.epoch == self.epoch and self.position == 0
        )
        if distributed.is_main() and is_best and path.parent == self.folder:
            best = self.folder / "best.pt"
            if torch_files.known_hashes(best) != torch_files.known_hashes(path):
                torch_files.duplicate(path, best)


def _grouped(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Gather the micro-batches of each optimiser step."""
    while group := list(islice(batches, size)):
        yield group


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
