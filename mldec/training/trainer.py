"""The training loop: epochs, evaluations, checkpoints and early stopping."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.utils import distribute_bn
from torch import Tensor, nn

from mldec import build
from mldec.checkpoint.state import Best, Calibration, Checkpoint, LogPosition
from mldec.config.compose import to_dict
from mldec.config.schema import Config, Init, NonFinite
from mldec.data.fingerprint import fingerprint
from mldec.data.loader import Batch, TrainBatches, end_workers, labels_of, train_loader
from mldec.data.types import DataModule, StoredImages
from mldec.errors import DataError, Stopped, UserError, log
from mldec.evaluation.left_out import SOURCE, image_names, with_left_out
from mldec.evaluation.left_out import write as write_left_out
from mldec.evaluation.output import Results, left_out, same_scores
from mldec.evaluation.run import MeanLoss, evaluate_all, memory_advice, score
from mldec.evaluators.constant import LEARNED_AP, ConstantScores
from mldec.losses.base import Loss
from mldec.model import Classifier
from mldec.runtime import distributed
from mldec.runtime.devices import Precision
from mldec.runtime.environment import explain_out_of_memory, git_commit, installed
from mldec.runtime.signals import DataTimeout, StopRequest
from mldec.training.checkpoint_files import CheckpointFiles
from mldec.training.closed_form import HeadFit, calibrate, uncertain_classes
from mldec.training.examples import ExampleImages, weakest_curves, write_pictures
from mldec.training.log import Meter, RunLog, best_of, clock
from mldec.training.step import Learner, StepStatus


class Trainer:
    """Train and evaluate a model, and write last.pt and best.pt to `folder`."""

    def __init__(
        self,
        config: Config,
        model: Classifier,
        loss: Loss,
        data: DataModule,
        *,
        folder: Path,
        device: torch.device,
        stop: StopRequest | None = None,
    ) -> None:
        self.data = data
        self.device = device
        # `StopRequest()` never requests a stop.
        self.stop = StopRequest() if stop is None else stop
        self.is_fitted = model.is_fitted
        images = len(data.train.dataset)
        batching = config.train
        factors = None
        if self.is_fitted:
            # The fit is an epoch of one step, which uses each image once.
            train = dataclasses.replace(config.train, epochs=1, min_steps=None, stop_epoch=None)
            config = dataclasses.replace(config, train=train)
            batching = dataclasses.replace(train, batch_size=images, accumulate=1, repeats=1)
        else:
            factors = data.sampling.factors(lambda: labels_of(data.train, config.seed))
        self.batches = TrainBatches(
            images,
            batch_size=batching.batch_size,
            accumulate=batching.accumulate,
            repeats=batching.repeats,
            factors=factors,
            seed=config.seed,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        train = config.train.with_resolved_epochs(self.batches.steps)
        if train.epochs > config.train.epochs:
            log.info(
                f"train.epochs={config.train.epochs} is raised to {train.epochs}, because "
                f"train.min_steps is {train.min_steps}"
            )
        self.config = dataclasses.replace(config, train=train)
        self.loader = train_loader(
            data,
            self.batches,
            workers=train.loader_workers(device.type),
            pin=device.type == "cuda",
            mixing=build.mixing(config.mix, data.train.classes),
        )
        self.learner: Learner | HeadFit
        if self.is_fitted:
            self.learner = HeadFit(self.config, model, loss, device=device)
        else:
            self.learner = Learner(
                self.config,
                model,
                loss,
                device=device,
                steps=train.epochs * self.batches.steps,
                word_vectors=data.train.classes.word_vectors,
            )

        # Progress and results of the run.
        self.epoch = 0  # finished epochs
        self.pending: list[StepStatus] = []  # steps whose status is not processed yet
        self.bad_images = 0  # skipped in training, on all ranks
        self.metrics: dict[str, float] = {}  # of the last evaluation
        self.constant: list[str] = []  # classes with constant scores in the last evaluation
        self.best = Best()
        self.calibration: Calibration | None = None  # of a head that was fitted in closed form
        self.source: str | None = None  # of the metrics, if they are leave-one-out
        self.meter = Meter()
        self.lines = 0  # in metrics.jsonl

        self.files = CheckpointFiles(folder, train)
        self.git = git_commit()
        # Only the main rank writes checkpoints, so its fingerprints count.
        self.fingerprint = distributed.on_main(partial(fingerprint, data.train))
        self.val_fingerprint = distributed.on_main(partial(fingerprint, data.val))
        trained = set(data.train.classes.names)
        self.unseen = tuple(name for name in data.val.classes.names if name not in trained)

    @property
    def position(self) -> int:
        """Number of finished steps of the current epoch."""
        return self.learner.step - self.epoch * self.batches.steps

    @property
    def ended(self) -> str | None:
        """Reason for the end of the run, or None. It depends only on the state in a checkpoint."""
        train = self.config.train
        best = self.best
        if self.is_fitted and self.epoch:
            return "the head was fitted in closed form"
        if self.epoch >= train.epochs:
            return f"train.epochs is {train.epochs}"
        if self.epoch >= train.last_epoch:
            return f"train.stop_epoch is {train.stop_epoch}, of {train.epochs} planned epochs"

        # A moving average that still improves may become the best, so wait until its metric drops.
        out_of_patience = train.patience is not None and best.evaluations_since >= train.patience
        if out_of_patience and best.falls:
            return (
                f"train.patience is {train.patience}, evaluations without progress: "
                f"{best.evaluations_since}, the best one was in epoch {best.epoch}"
            )

        # Compare the better of the moving average and the raw weights with the best value.
        keys = (f"val/{best.metric}", f"val_raw/{best.metric}")
        scores = [self.metrics[key] for key in keys if key in self.metrics]
        if train.max_drop is not None and scores and best.value - max(scores) > train.max_drop:
            return (
                f"train.max_drop is {train.max_drop:g}, the last {best.metric} is "
                f"{max(scores):.2f}, the best one was {best.value:.2f} in epoch {best.epoch}"
            )
        return None

    def fit(self, runlog: RunLog) -> dict[str, float]:
        """Train until the run ends, and return the metrics of the last evaluation.

        Raises:
            Stopped: After a stop request, which writes a checkpoint first.
        """
        train = self.config.train
        # A damaged metrics.jsonl may have fewer lines than the checkpoint expects.
        self.lines = runlog.lines

        try:
            with explain_out_of_memory(lambda: memory_advice(self.config, self.device)):
                while self.ended is None:
                    if self.is_fitted:
                        self.fit_head(runlog)
                    else:
                        self.train_epoch(runlog)

                    is_last = self.epoch + 1 == train.last_epoch
                    if is_last or (self.epoch + 1) % train.eval_every == 0:
                        # Save first, so that a stop during a long evaluation loses no step.
                        self.save()
                        self.metrics = self.evaluate(runlog)

                    # Save again with the results. This evaluation may have been the best one.
                    self.epoch += 1
                    self.save(best=self.best.epoch == self.epoch)
            weights = "raw" if self.learner.average is None else "ema"
            warn(*same_scores(self.constant, weights, self.config.loss))
        except (Stopped, KeyboardInterrupt):
            # A worker that hangs, for example in a read from a network disk, would block the exit.
            end_workers()
            raise
        finally:
            # Checkpoints are written in the background, so the last one may not be complete yet.
            self.files.wait()
        return self.metrics

    def fit_head(self, runlog: RunLog) -> None:
        """Fit the head in closed form, and store the leave-one-out scores of the training images.

        They replace the scores of these images if there is no validation split.
        """
        assert isinstance(self.learner, HeadFit)

        # 1. Fit and calibrate the head, and report what is uncertain.
        split = self.data.train
        left_out, fitted, bad = self.learner.fit(split)
        if bad and self.data.bad_images == "stop":
            raise DataError(bad[0])
        self.bad_images = len(bad)
        warn(*[f"skipped: {message}" for message in bad])
        head: Any = self.learner.model.head
        log.info(f"fitted in closed form to {len(left_out) - len(bad):,} images: {head.summary}")
        if head.has_series:
            log.warning(
                "photos with neighboring names resemble each other: for new series, the "
                "leave-one-out metrics are too high; give the series of each photo as its group"
            )
        warn(*uncertain_classes(HeadFit.labels(split)[fitted], split.classes.names))
        self.calibration = calibrate(left_out, split, self.config)

        # 2. Store the scores for a later `mldec evaluate` or `calibrate`.
        names = image_names(split, self.config)
        images = split.dataset
        assert isinstance(images, StoredImages)
        write_left_out(self.files.last.parents[1], head, images, names, left_out, fitted)

        # 3. If all validation images are training images, `evaluate` uses the stored scores.
        stored = with_left_out(self.data.val, self.config, names, left_out)
        if stored is not None:
            self.source = SOURCE
            self.data = dataclasses.replace(self.data, load_val=lambda: stored)
            return

        # 4. Otherwise `evaluate` scores the validation images. Log the leave-one-out metrics, too.
        trained = with_left_out(split, self.config, names, left_out)
        assert trained is not None
        data = dataclasses.replace(self.data, load_val=lambda: trained)
        [results] = evaluate_all([self.learner.model], data, self.config, device=self.device)
        values = {f"loo/{name}": value for name, value in results.metrics.items()}
        self._write_scalars(runlog, self.epoch + 1, values)
        metric, value = next(iter(results.metrics.items()))
        log.info(f"{SOURCE} {metric} {value:.2f} on {results.images:,} training images")

    def train_epoch(self, runlog: RunLog) -> None:
        """Do the remaining optimizer steps of the current epoch."""
        assert isinstance(self.learner, Learner)
        train = self.config.train
        total = self.batches.steps
        description = f"epoch {self.epoch + 1}/{train.last_epoch}"

        # After a resume, the sampler skips the images of the finished steps.
        self.batches.epoch = self.epoch
        self.batches.start = self.position
        if self.position == 0:
            predict = partial(self._predict_train, runlog)
            self.learner.loss.start_epoch(self.epoch, train.epochs, predict)
        self.learner.train()
        # Evaluations and checkpoints between the epochs do not count in the speed.
        self.meter.restart()

        for micro_batches in runlog.progress(
            self._steps(), total=total, done=self.position, description=description
        ):
            self.meter.loaded()

            # 1. Do a step. Read the position and the learning rate first, because it changes them.
            images = self.batches.images_in_step(self.position)
            lr = self.learner.lr
            status = self.learner.learn(micro_batches, images, stop=self.stop)
            self.pending.append(status)
            self.meter.stepped(images)

            # 2. Process stop requests and unreadable images of all ranks.
            is_last = self.position == total
            reporting = is_last or self.position % train.log_every == 0
            stopping = self.collect_outcomes(now=reporting)

            # 3. Average batch-norm statistics before they are saved. The statistics of the main
            # rank are enough in a checkpoint, because each step broadcasts them first.
            if is_last and train.average_batchnorm and distributed.world_size() > 1:
                distribute_bn(self.learner.model, distributed.world_size(), reduce=True)

            # 4. Report, stop or save.
            if reporting:
                self._report(runlog, description, lr)
            if stopping:
                self.save()
                self._stop(f"after step {self.learner.step}", together=True)
            if self.files.is_due(self.learner.step):
                self.save()

    def _predict_train(self, runlog: RunLog) -> Tensor:
        """Return the logits of all training images, float32 [N, K]; NaN for unreadable images."""
        # Dropout would draw random numbers that a resumed run cannot repeat.
        self.learner.model.eval()
        split = self.data.train
        shape = (len(split.dataset), len(split.classes))
        logits = torch.full(shape, math.nan, device=self.device)
        scored = score(
            [self.learner.model],
            dataclasses.replace(self.data, load_val=lambda: split),
            self.config,
            device=self.device,
            progress=partial(self.check_stop, runlog.evaluation()),
        )
        for batch, [values] in scored:
            if len(batch.images):
                logits[batch.indices] = values
        return logits

    def _steps(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step. A stop while waiting for data saves the state."""
        micro_batches: list[Batch] = []
        try:
            for batch in self.stop.bounded(self.loader):
                if not len(batch.images):
                    raise DataError(f"no image of a micro-batch can be read: {batch.bad[0]}")
                micro_batches.append(batch)
                if len(micro_batches) == self.config.train.accumulate:
                    yield micro_batches
                    micro_batches = []
        except DataTimeout:
            self.save()
            self._stop(f"after step {self.learner.step}, waiting for data")
        except DataError as error:
            # There is no progress to save before the first step.
            if self.learner.step:
                self.save()
            raise self._with_checkpoint(error) from error

    def _with_checkpoint(self, error: DataError) -> DataError:
        """Return the error with the path of the checkpoint, if there is one."""
        if not self.learner.step or not distributed.is_main():
            return error

        self.files.wait()
        return DataError(f"{error}; saved in {self.files.last}; pass resume=auto to continue")

    def collect_outcomes(self, *, now: bool) -> bool:
        """Process the pending status of past steps. Returns True if training should stop.

        With several ranks, the newest status is read one step later unless `now` is set, so that
        the next step does not wait for the all-reduce. All ranks stop after the same step.
        """
        ready = self.pending
        if distributed.world_size() > 1 and not now:
            ready = self.pending[:-1]
        stopping = any(status.stop_requested for status in ready)

        # The checkpoint of a stopped run includes the newest step.
        if stopping:
            ready = self.pending
        for status in ready:
            self.bad_images += status.bad_images
            if status.bad_images:
                for messages in distributed.gather(status.messages):
                    warn(*[f"skipped: {message}" for message in messages])
        self.pending = self.pending[len(ready) :]
        return stopping

    def _read(self) -> None:
        """Read the stats of the steps since the last call from the device.

        Non-finite steps raise an error or log a warning, as `train.nonfinite` selects.
        """
        for stats in self.learner.read():
            self.meter.add(stats.loss)
            if not stats.fault:
                continue

            newest = "no checkpoint was written yet"
            if self.files.last.exists():
                newest = f"the last good checkpoint is {self.files.last}"
            names = ", ".join(map(self.data.train.dataset.name, stats.indices))
            fault = f"{stats.fault} in step {stats.step} (epoch {self.epoch + 1})"
            fix = f"{newest}; lower optim.lr, or check these images and their labels: {names}"
            if self.config.train.nonfinite is NonFinite.stop:
                raise UserError(f"{fault}; the step did not change the weights; {fix}")
            log.warning(f"{fault}; the step is skipped; {fix}")

    def _report(self, runlog: RunLog, description: str, lr: float) -> None:
        """Log the numbers since the last report, and start a new meter."""
        train = self.config.train
        total = self.batches.steps
        self._read()
        values = {**self.meter.read(self.device), "train/lr": lr}

        # Counters appear only in runs where they can be above 0.
        if self.learner.precision is Precision.fp16 or train.nonfinite is NonFinite.skip:
            values["train/skipped_steps"] = self.learner.skipped
        if self.data.bad_images == "skip":
            values["train/bad_images"] = self.bad_images
        self._write_scalars(runlog, self.epoch, values)

        remaining_steps = train.last_epoch * total - self.learner.step
        remaining = clock(remaining_steps * self.meter.seconds_per_step)
        runlog.status(
            f"{description} step {self.position}/{total}",
            f"loss {values['train/loss']:.4g} lr {lr:.3g} "
            f"{values['train/images_per_second']:.0f} images/s, {remaining} remaining",
        )
        self.meter = Meter()

    def _write_scalars(
        self, runlog: RunLog, epoch: int, values: dict[str, float], source: str | None = None
    ) -> None:
        runlog.scalars(self.learner.step, epoch, values, source)
        self.lines += 1

    def _stop(self, moment: str, *, together: bool = False) -> None:
        """Raise Stopped. If all ranks stop `together`, only the main rank has a message."""
        self.files.wait()

        message = f"stopped by {self.stop.name} {moment}"
        if distributed.is_main():
            message += f"; saved in {self.files.last}; pass resume=auto to continue"
        elif together:
            message = ""
        else:
            message += " on a rank that saves nothing; pass resume=auto to continue from last.pt"
        raise Stopped(message, self.stop.status)

    def evaluate(self, runlog: RunLog) -> dict[str, float]:
        """Evaluate the moving average and the raw weights, log both, and update the best result.

        Returns:
            Metrics of the average as "val/...", and of the raw weights as "val_raw/...". Without an
            average, "val/..." are the metrics of the raw weights. The log also has the mean loss.
        """
        models: dict[str, nn.Module] = {}
        if self.learner.average is not None:
            models["ema"] = self.learner.average
        models["raw"] = self.learner.model

        # Batch-norm statistics differ between ranks. Checkpoints hold the main rank's.
        for model in models.values():
            distributed.copy_buffers(model)

        classes = self.data.val.classes
        constant = ConstantScores(len(classes))
        mean_loss = self._mean_loss(len(models))
        examples = ExampleImages(self.data.val, self.config.log.images)

        def observe(batch: Batch, logits: list[Tensor]) -> None:
            # The evaluation raises an error for non-finite logits.
            constant.update(logits[0].nan_to_num(), batch.targets)
            if mean_loss:
                mean_loss.update(logits, batch.targets)
            examples.update(batch, logits)

        evaluated = evaluate_all(
            list(models.values()),
            self.data,
            self.config,
            device=self.device,
            progress=partial(self.check_stop, runlog.evaluation()),
            observe=observe,
        )
        results = dict(zip(models, evaluated, strict=True))
        main = evaluated[0]
        warn(*left_out(main.bad, main.images))
        # All classes of single-label data compete, so a constant score does not show a failure.
        if not classes.exclusive:
            ap = main.per_class.get("AP", [0.0] * len(classes))
            found = [index for index in constant.classes() if not ap[index] > LEARNED_AP]
            self.constant = [classes.names[index] for index in found]

        # The first metric selects the best checkpoint. A run that was started by a version with
        # another first metric keeps that metric, and logs it first.
        metric = next(iter(main.metrics))
        if self.best.metric in main.metrics:
            metric = self.best.metric
        losses: dict[str, float] = {}
        if mean_loss:
            measured = zip(models, mean_loss.compute(), strict=True)
            losses = {name: loss for name, loss in measured if math.isfinite(loss)}
        self.best = update_best(self.best, metric, results, losses, self.epoch + 1)

        # The keys without "raw" are of the weights that are used by default.
        prefixes = dict(zip(models, ("val", "val_raw"), strict=False))
        values = {f"val/{metric}": main.metrics[metric]}
        for weights, prefix in prefixes.items():
            for name, value in results[weights].metrics.items():
                values[f"{prefix}/{name}"] = value

        # The loss only decides between equal metrics. It is not a metric of a model.
        logged = {f"{prefixes[weights]}/loss": loss for weights, loss in losses.items()}
        self._write_scalars(runlog, self.epoch + 1, values | logged, self.source)
        self._log_evaluation(metric, results)
        if self.best.epoch == self.epoch + 1:
            self._write_best(runlog, results, examples)
        return values

    def _write_best(
        self, runlog: RunLog, results: Mapping[str, Results], examples: ExampleImages
    ) -> None:
        """Write the best result to TensorBoard, with pictures of the evaluation that gave it."""
        # All ranks hold some of the images, so all ranks take part.
        examples.gather()
        pictures = partial(
            write_pictures,
            step=self.learner.step,
            curves=weakest_curves(results[self.best.weights], self.data.val.classes.names),
            examples=examples,
            model=list(results).index(self.best.weights),
        )
        runlog.best(self.learner.step, self.best, pictures)

    def _mean_loss(self, models: int) -> MeanLoss | None:
        """Return the loss of the evaluation; None if it has no meaning or may wait for ranks."""
        loss = self.learner.loss
        # Zero-shot data has other classes for validation.
        if self.data.val.classes.names != self.data.train.classes.names:
            return None
        # Validation images have no state.
        if loss.per_image:
            return None
        # Ranks have different numbers of batches, so a loss must not all-reduce.
        if loss.all_reduces and distributed.world_size() > 1:
            return None
        return MeanLoss(
            loss,
            progress=(self.learner.step - 1) / self.learner.steps,  # of the last step
            batch_size=self.config.train.batch_size,
            models=models,
            device=self.device,
        )

    def _log_evaluation(self, metric: str, results: Mapping[str, Results]) -> None:
        """Log one metric of all evaluated weights, and the best result."""
        scores = []
        for name, result in results.items():
            scores.append(f"{name} {result.metrics[metric]:.2f}")
        images = results["raw"].images
        epoch = f"epoch {self.epoch + 1}/{self.config.train.last_epoch}"
        best = f"best {self.best.value:.2f} ({self.best.weights}, epoch {self.best.epoch})"
        where = f"{images:,} images"
        if self.source is not None:
            where += f" ({self.source})"
        log.info(f"{epoch}: val {metric} {', '.join(scores)} on {where}; {best}")

    def check_stop(self, bar: Any, batches: Any, *, total: int) -> Iterator[Batch]:
        """Yield the batches of an evaluation; raise Stopped after a stop request."""
        moment = f"in the evaluation after step {self.learner.step}"
        try:
            for batch in bar(self.stop.bounded(batches), total=total):
                if self.stop:
                    self._stop(moment)
                yield batch
        except DataTimeout:
            self._stop(f"{moment}, waiting for data")
        except DataError as error:
            raise self._with_checkpoint(error) from error

    def save(self, *, best: bool = False) -> None:
        """Write a copy of the state to last.pt in the background; with `best` also to best.pt."""
        # Only the main rank writes, so the other ranks need not read their stats here.
        if distributed.is_main():
            self._read()
        self.files.save(self.checkpoint, best=best)

    def checkpoint(self) -> Checkpoint:
        """Return the state of the run, with references to its tensors."""
        # Omit `resume` and `data.changed`, which apply only to this start.
        data = {key: value for key, value in self.config.data.items() if key != "changed"}
        train = dataclasses.replace(self.config.train, pieces=self.learner.pieces)
        config = dataclasses.replace(self.config, resume=None, data=data, train=train)

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
                bad_images=self.bad_images + sum(status.bad_images for status in self.pending),
            ),
            versions=installed(),
            git=self.git,
            calibration=self.calibration,
            **self.learner.state(),
        )

    def resume(self, saved: Checkpoint, path: Path) -> None:
        """Restore the state from a checkpoint of the same run; see `start.check_same_run`."""
        self.learner.load_state(saved, path)
        # Keep the number of pieces, because it changes rounding and batch-norm statistics.
        self.learner.pieces = saved.config["train"].get("pieces") or self.learner.pieces
        self.learner.skipped = saved.log.skipped
        self.epoch = saved.epoch
        self.metrics = saved.metrics
        if self.is_fitted:
            self.calibration = saved.calibration
        self.best = saved.best
        # Lines of metrics.jsonl after the checkpoint are removed, because their steps are repeated.
        self.lines = saved.log.lines
        if self.is_fitted and not self.epoch:
            self.lines = 0  # the fit is repeated, and writes its line again
        self.bad_images = saved.log.bad_images
        # The next report also covers the steps between the last report and the checkpoint.
        self.meter = Meter(loss=saved.log.loss, steps=saved.log.steps)

        # Keep the record of the initial weights.
        init = saved.config.get("init")
        if isinstance(init, dict):
            init = Init(**init)
        self.config = dataclasses.replace(self.config, init=init)

        # The run may have been killed after it wrote last.pt and before it wrote best.pt.
        has_result = self.best.metric is not None
        if has_result and self.best.epoch == self.epoch and self.position == 0:
            self.files.restore_best(path)


def warn(*messages: str) -> None:
    """Log warnings on the main rank only."""
    if distributed.is_main():
        for message in messages:
            log.warning(message)


def update_best(
    best: Best,
    metric: str,
    results: Mapping[str, Results],
    losses: Mapping[str, float],
    epoch: int,
) -> Best:
    """Return the best result after another evaluation, by `best_of`.

    `results` and the known `losses` are by the name of the weights. `evaluations_since` and `falls`
    follow the early stopping of Query2Label (its main_mlc.py): an equal value does not count.
    """
    values = {weights: result.metrics[metric] for weights, result in results.items()}
    average = values.get("ema", -math.inf)
    best_raw = -math.inf if best.raw is None else best.raw
    best_average = -math.inf if best.average is None else best.average

    best = dataclasses.replace(best, evaluations_since=best.evaluations_since + 1, falls=True)
    if values["raw"] > best_raw or average > best.value:
        best = dataclasses.replace(best, evaluations_since=0)
    if values["raw"] > best_raw:
        best = dataclasses.replace(best, raw=values["raw"])
    if average > best_average:
        best = dataclasses.replace(best, average=average, falls=False)

    # The average is last, because it wins ties with the raw weights that the losses do not decide.
    found = [best]
    of_epoch = dataclasses.replace(best, metric=metric, epoch=epoch)
    for name in sorted(values, reverse=True):
        loss = losses.get(name)
        found.append(dataclasses.replace(of_epoch, value=values[name], weights=name, loss=loss))
    return best_of(found) or best
