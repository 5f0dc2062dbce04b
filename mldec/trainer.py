"""The one training loop. It owns everything that changes during a run, and nothing else."""

import dataclasses
import logging
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from mldec import checkpoint, distributed, storage
from mldec.config import Config, Precision, diff, to_dict
from mldec.data.base import DataModule
from mldec.data.loader import Batch, TrainBatches, train_loader, unwrap
from mldec.errors import CheckpointError, NonFiniteError
from mldec.evaluate import Results, autocast, check_classes, evaluate
from mldec.losses.targets import at_least_float32
from mldec.model import Classifier
from mldec.optim import build_optimizer, build_schedule, fast_forward
from mldec.runlog import Meter, RunLog

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
    ) -> None:
        train = config.train
        self.config, self.model, self.loss, self.data = config, model, loss.to(device), data
        self.folder, self.device = folder, device
        self.memory_format = torch.channels_last if train.channels_last else torch.contiguous_format
        model.to(memory_format=self.memory_format)
        self.batches = TrainBatches(
            len(data.train.dataset),
            batch_size=train.batch_size,
            accumulate=train.accumulate,
            seed=config.seed,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        cuda = device.type == "cuda"
        self.loader = train_loader(data.train.dataset, self.batches, workers=train.workers, pin=cuda)
        queries = data.train.classes.queries
        self.queries = None if queries is None else queries.to(device)
        self.optimizer = build_optimizer(model, **vars(config.optim))
        self.schedule = self._build_schedule()
        self.scaler = torch.amp.GradScaler(device.type, enabled=train.precision is Precision.fp16)
        self.ema = ModelEmaV3(model, decay=train.ema_decay) if train.ema_decay else None
        net: nn.Module = torch.compile(model) if train.compile else model  # type: ignore[assignment]
        self.net = distributed.wrap(net)
        self.epoch = 0  # finished
        self.step = 0  # optimiser steps done
        self.metrics: dict[str, float] = {}  # of the last evaluation
        self.best: dict[str, Any] = {"metric": None, "value": -math.inf, "weights": "raw", "epoch": 0}

    def _build_schedule(self) -> torch.optim.lr_scheduler.LRScheduler:
        schedule = self.config.schedule
        return build_schedule(
            self.optimizer,
            name=schedule.name.value,
            lr=self.config.optim.lr,
            steps=self.config.train.epochs * self.batches.steps,
            pct_start=0.2 if schedule.pct_start is None else schedule.pct_start,
            warmup_steps=round((schedule.warmup_epochs or 0) * self.batches.steps),
            min_lr=schedule.min_lr or 0.0,
        )

    def fit(self, runlog: RunLog) -> dict[str, float]:
        """Train to the last epoch and return its metrics: "val/..." and, with a moving average, "val_raw/..."."""
        train = self.config.train
        while self.epoch < train.epochs:
            self.train_epoch(runlog)
            self.epoch += 1
            if self.epoch % train.eval_every == 0 or self.epoch == train.epochs:
                self.metrics = self.evaluate(runlog)
            self.save()
        return self.metrics

    def summary(self) -> str:
        """Return what is about to be trained, on what, and where it starts."""
        millions = sum(p.numel() for p in self.model.parameters() if p.requires_grad) / 1e6
        train, val = self.data.train, self.data.val
        return (
            f"{self.config.name}: {millions:.2f} M trainable parameters, {len(val.classes)} classes, "
            f"{len(train.dataset):,} training and {len(val.dataset):,} validation images, "
            f"{self.config.train.precision.value} on {self.device} x {distributed.world_size()}, "
            f"epoch {self.epoch + 1} of {self.config.train.epochs}, {self.batches.steps} steps an epoch"
        )

    def train_epoch(self, runlog: RunLog) -> None:
        """Do the optimiser steps of one epoch."""
        train = self.config.train
        self.net.train()
        self.batches.epoch = self.epoch
        steps = _grouped(unwrap(self.loader), train.accumulate)
        description = f"epoch {self.epoch + 1}/{train.epochs}"
        meter = Meter()
        for index, micro_batches in enumerate(
            runlog.progress(steps, total=self.batches.steps, description=description)
        ):
            meter.loaded()
            images = self.batches.images_in_step(index)
            lr = self.optimizer.param_groups[0]["lr"]
            meter.add(self.train_step(micro_batches, images), images)
            if (index + 1) % train.log_every == 0 or index + 1 == self.batches.steps:
                values = {**meter.read(self.device), "train/lr": lr}
                runlog.scalars(self.step, self.epoch, values)
                left = (train.epochs * self.batches.steps - self.step) * meter.seconds_a_step
                runlog.status(
                    f"{description} step {index + 1}/{self.batches.steps}",
                    f"loss {values['train/loss']:.4g} lr {lr:.3g} "
                    f"{values['train/images_per_second']:.0f} images/s {_clock(left)} left",
                )
                meter = Meter()

    def train_step(self, micro_batches: list[Batch], images_in_step: int) -> float:
        """Do one optimiser step and return the loss of its whole batch, over all processes.

        Args:
            micro_batches: this process's share of the batch.
            images_in_step: size of the whole batch.

        Raises:
            NonFiniteError: if the loss is not finite; the weights are then those before the step.
        """
        world = distributed.world_size()
        step_loss = torch.zeros((), device=self.device)
        for batch in micro_batches:
            images = batch.images.to(self.device, non_blocking=True, memory_format=self.memory_format)
            targets = batch.targets.to(self.device, non_blocking=True)
            with distributed.no_sync(self.net, unless=batch is micro_batches[-1]):
                with autocast(self.device, self.config.train.precision):
                    logits = self.net(images, self.queries)
                loss = self.loss(at_least_float32(logits), targets)
                # A batch means the same however it is divided: a mean is weighted by the share of the micro-batch.
                loss = loss * (len(images) / images_in_step if self.loss.reduction == "mean" else 1.0)
                # Times the processes, because their gradients are averaged while their losses add up.
                self.scaler.scale(loss * world).backward()
            step_loss += loss.detach()
        value = distributed.total(step_loss).item()  # the one wait for the device in a step
        if not math.isfinite(value):
            raise NonFiniteError(self._non_finite(value, micro_batches))
        if self.config.train.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.step < self.config.train.epochs * self.batches.steps:
            self.schedule.step()
        if self.ema is not None:
            self.ema.update(self.model)
        return value

    def evaluate(self, runlog: RunLog) -> dict[str, float]:
        """Evaluate the moving average and the raw weights, log both, and note whether one is the best so far."""
        found: dict[str, Results] = {}
        for weights, model in (("ema", None if self.ema is None else self.ema.module), ("raw", self.model)):
            if model is not None:
                bar = runlog.evaluation(f"evaluate {weights}")
                found[weights] = evaluate(model, self.data, self.config, device=self.device, progress=bar)
        main = next(iter(found))
        values = {f"val/{name}": value for name, value in found[main].metrics.items()}
        if len(found) > 1:
            values |= {f"val_raw/{name}": value for name, value in found["raw"].metrics.items()}
        metric = next(iter(found[main].metrics))
        for weights, results in found.items():
            value = results.metrics[metric]
            if value > self.best["value"]:
                self.best = {"metric": metric, "value": value, "weights": weights, "epoch": self.epoch}
        runlog.scalars(self.step, self.epoch, values)
        scores = ", ".join(f"{weights} {results.metrics[metric]:.2f}" for weights, results in found.items())
        log.info(
            f"epoch {self.epoch}/{self.config.train.epochs}: val {metric} {scores} on {found[main].images:,} images; "
            f"best {self.best['value']:.2f} ({self.best['weights']}, epoch {self.best['epoch']})"
        )
        return values

    def save(self) -> None:
        """Write last.pt, and best.pt if this epoch is the best."""
        if distributed.is_main():
            state = self.state_dict()
            storage.save(self.folder / "last.pt", state)
            if self.best["epoch"] == self.epoch:
                storage.save(self.folder / "best.pt", state)

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint: plain containers and tensors only."""
        classes = self.data.val.classes
        cuda = self.device.type == "cuda"
        return {
            "format": checkpoint.FORMAT,
            "config": to_dict(self.config),
            "classes": {"names": list(classes.names), "exclusive": classes.exclusive, "queries": classes.queries},
            "transform": dataclasses.asdict(self.data.transform),
            "metrics": self.metrics,
            "best": self.best,
            "epoch": self.epoch,
            "step": self.step,
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(self.device) if cuda else None},
            "versions": checkpoint.versions(),
            "git": checkpoint.git_commit(),
        }

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of the same run.

        Raises:
            CheckpointError: if it cannot be read, or is of another run.
        """
        state = checkpoint.load(path)
        changed = diff(checkpoint.saved_config(state, path, self.config.plugins), self.config)
        if changed:
            raise CheckpointError(
                f"{path} is of a run with other settings ({'; '.join(changed)}): "
                f"put them back, or start a new run with name=... init={path}"
            )
        check_classes(checkpoint.saved_classes(state), self.data.val.classes, path)
        checkpoint.load_strict(self.model, state["model"], path)
        if self.ema is not None:
            checkpoint.load_strict(self.ema.module, state["ema"], path)
        self.epoch, self.step = state["epoch"], state["step"]
        self.metrics, self.best = state["metrics"], state["best"]
        self.optimizer.load_state_dict(state["optimizer"])
        if self.epoch < self.config.train.epochs:
            fast_forward(self.schedule, self.step)
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"]["cpu"])
        if self.device.type == "cuda" and state["rng"]["cuda"] is not None:
            torch.cuda.set_rng_state(state["rng"]["cuda"], self.device)

    def _non_finite(self, value: float, micro_batches: list[Batch]) -> str:
        dataset = self.data.train.dataset
        names = [dataset.name(int(index)) for batch in micro_batches for index in batch.indices]
        last = self.folder / "last.pt"
        kept = f"the last good checkpoint is {last}" if last.exists() else "no checkpoint was written yet"
        return (
            f"the loss is {value} in step {self.step + 1} (epoch {self.epoch + 1}), "
            f"the weights are those before it; {kept}; lower optim.lr, or look at the images {', '.join(names)}"
        )


def _grouped(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Gather the micro-batches of each optimiser step."""
    while group := list(islice(batches, size)):
        yield group


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
