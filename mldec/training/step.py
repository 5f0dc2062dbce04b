"""One optimiser step, and its state: weights, moving average, optimiser, schedule and scaler."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.layers import convert_sync_batchnorm
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from mldec.checkpoint.loading import load_strict
from mldec.checkpoint.state import Checkpoint
from mldec.config.schema import Config, NonFinite
from mldec.data.loader import Batch, sample_seed
from mldec.errors import ConfigError, refusing
from mldec.model import Classifier
from mldec.runtime import distributed
from mldec.runtime.devices import Precision, autocast, memory_format, moved
from mldec.training.optim import (
    build_optimizer,
    build_schedule,
    fast_forward,
    freeze,
    load_state,
    step_if,
)


class Outcome:
    """What the hosts know of a step, the same on all of them, exchanged while the next one runs."""

    def __init__(self, *, stop: bool, messages: list[str]) -> None:
        self.messages = messages  # one per image that this process left out
        self._total = distributed.start_total(torch.tensor([stop, len(messages)]))

    @property
    def stopping(self) -> bool:
        """Whether a stop was requested on at least one process."""
        return bool(self._total()[0])

    @property
    def bad_images(self) -> int:
        """The number of images that were left out, over all processes."""
        return int(self._total()[1])


class Numbers(NamedTuple):
    """The numbers of a finished step, the same on every process but for the images."""

    step: int  # finished steps, this one included
    loss: float  # of the whole batch
    fault: str | None  # which number was not finite, if the weights were left as they are for it
    indices: list[int]  # in the dataset, of the images that this process had in the step


class Learner:
    """A model in training, on its device, for all optimiser steps of a run.

    The loss takes logits float32 [B, K] and targets [B, K]. Zero-shot data has word vectors [K, D]
    as `queries`.
    """

    def __init__(
        self,
        config: Config,
        model: Classifier,
        loss: nn.Module,
        *,
        device: torch.device,
        steps: int,
        queries: Tensor | None = None,
    ) -> None:
        train = config.train
        self.memory_format = memory_format(channels_last=train.channels_last)
        # One process has all images, whatever its device.
        if train.sync_batchnorm and distributed.world_size() > 1:
            if device.type != "cuda":
                raise ConfigError(f"train.sync_batchnorm needs CUDA, not {device}: leave it out")
            model = convert_sync_batchnorm(model)
        model.to(memory_format=self.memory_format)

        self.config, self.device, self.steps = config, device, steps
        self.model, self.loss = model, loss.to(device)
        self.queries = None if queries is None else queries.to(device)

        # Before what follows copies the model or goes through its parameters.
        self.frozen_norms = freeze(model, train)  # they stay in evaluation mode
        self.optimizer = build_optimizer(
            model, **{**vars(config.optim), "decay": config.optim.decay.value}
        )
        self.schedule = self._build_schedule()
        self.precision = train.precision.on(device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision is Precision.fp16)
        self.ema = ModelEmaV3(model, decay=train.ema_decay) if train.ema_decay else None
        # The step after which the moving average is a copy of the weights.
        self.ema_start = (train.ema_start_epoch - 1) * (steps // train.epochs)

        # `net` is what a step calls; `model` shares its parameters, and has the names that
        # checkpoints use.
        net: nn.Module = model
        if train.compile:
            # A ragged last batch gets a static graph of its own. By default it would make the sizes
            # of all later batches dynamic, and their convolutions slow.
            net = torch.compile(model, dynamic=False, mode=train.compile_mode)  # type: ignore[assignment]
        # Only the running statistics of batch norms differ between processes. No training step
        # reads them, and evaluations and checkpoints take those of the main process; but a mean
        # over the processes must be that of one step, see `train_epoch`.
        self.net = distributed.wrap(
            net,
            static=train.accumulate == 1 and not train.compile,
            same_buffers=train.average_batchnorm,
        )

        self.step = 0  # finished steps
        # Of steps whose numbers only the device knows: the step, its loss and the norm of its
        # gradients [2], and the indices of this process's images.
        self.unread: list[tuple[int, Tensor, list[Tensor]]] = []
        # Whether training may go on: false on the device from the first step on whose fault ends
        # the run. The host learns of it when it next reads the numbers.
        self.sound = torch.ones((), dtype=torch.bool, device=device)
        # Finished steps that changed no weights: a number was not finite, which in fp16 is usual
        # while the scaler looks for its scale.
        self.skipped = 0

    def _build_schedule(self) -> torch.optim.lr_scheduler.LRScheduler:
        schedule, epochs = self.config.schedule, self.config.train.epochs
        epoch = self.steps / epochs  # steps per epoch

        # A short trial of a long recipe must still learn before it cools down.
        cooldown = min(schedule.cooldown_epochs or 0, epochs // 2)

        return build_schedule(
            self.optimizer,
            name=schedule.name.value,
            lr=self.config.optim.lr,
            steps=self.steps,
            pct_start=0.2 if schedule.pct_start is None else schedule.pct_start,
            warmup_steps=round((schedule.warmup_epochs or 0) * epoch),
            min_lr=schedule.min_lr or 0.0,
            warmup_lr=1e-5 if schedule.warmup_lr is None else schedule.warmup_lr,
            cooldown_steps=round(cooldown * epoch),
            epoch_steps=round(epoch),
        )

    @property
    def lr(self) -> float:
        """Return the learning rate of the next step, for parameters without a rate of their own."""
        return self.optimizer.param_groups[0]["lr"]

    @property
    def average(self) -> nn.Module | None:
        """Return the model of the moving average, or None as long as it has not begun."""
        if self.ema is None or self.step <= self.ema_start:
            return None
        return self.ema.module

    def train(self) -> None:
        """Switch the model to training mode, but for frozen batch norms."""
        self.net.train()
        for norm in self.frozen_norms:
            norm.eval()

    def learn(
        self, micro_batches: list[Batch], images_in_step: int, *, stop: object = False
    ) -> Outcome:
        """Do one optimiser step, without waiting for the device; see `read` for its numbers.

        A loss or gradients that are not finite change no weights. If the run is to stop for them,
        no later step changes any either. The micro-batches are this process's share of the
        `images_in_step`; an image that was left out counts with a loss of 0.
        """
        # Random numbers are a function of seed, step and process, as those of the data are, so that
        # a checkpoint need not hold the state of a generator.
        torch.manual_seed(sample_seed(self.config.seed, self.step, distributed.rank()))

        # A step that is skipped must leave no trace in the batch-norm statistics either.
        skip = self.config.train.nonfinite is NonFinite.skip
        statistics = [buffer.clone() for buffer in self.model.buffers()] if skip else []

        # With CUDA graphs the outputs of one step are overwritten in the next. Its micro-batches
        # keep theirs: the gradients that they add up.
        if self.config.train.compile_mode:
            torch.compiler.cudagraph_mark_step_begin()

        # 1. Gradients of the whole batch.
        self.loss.progress = self.step / self.steps  # type: ignore[assignment]
        loss = torch.zeros((), device=self.device)
        for batch in micro_batches:
            with distributed.no_sync(self.net, unless=batch is micro_batches[-1]):
                loss = loss + self._forward_backward(batch, images_in_step)
        self.scaler.unscale_(self.optimizer)
        norm = _clip(self.model.parameters(), self.config.train.clip_grad)

        # 2. Whether the step counts: the device decides by itself, for all processes alike. The
        # norm is the same on every process, because their gradients are.
        loss = distributed.total(loss)
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        # In fp16 an overflow of the gradients is usual: the scaler lowers its scale.
        sound = torch.isfinite(loss) if self.scaler.is_enabled() else finite
        if not skip:
            self.sound &= sound

        # 3. Weights.
        step_if(finite & self.sound, self.optimizer)
        if skip:
            for buffer, before in zip(self.model.buffers(), statistics, strict=True):
                buffer.copy_(torch.where(sound, buffer, before))
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

        # 4. What follows the weights. The schedule has no value after its last step.
        self.step += 1
        if self.step < self.steps:
            self.schedule.step()
        if self.ema is not None and self.step > self.ema_start:
            self.ema.update(self.model)
        elif self.ema is not None and self.step == self.ema_start:
            self.ema.set(self.model)

        # 5. What is to be known of the step: later from the device, now from the other hosts.
        values = torch.stack([loss, norm.to(loss.dtype)])
        indices = [batch.indices for batch in micro_batches]
        self.unread.append((self.step, values, indices))
        messages = [message for batch in micro_batches for message in batch.bad]
        return Outcome(stop=bool(stop), messages=messages)

    def read(self) -> list[Numbers]:
        """Return the numbers of the steps since the last reading: the one wait for the device."""
        if not self.unread:
            return []

        values = torch.stack([of_step for _, of_step, _ in self.unread]).tolist()
        numbers = []
        for (step, _, indices), (loss, norm) in zip(self.unread, values, strict=True):
            self.skipped += not math.isfinite(loss + norm)
            fault = None
            if not math.isfinite(loss):
                fault = f"the loss is {loss}"
            elif not math.isfinite(norm) and not self.scaler.is_enabled():
                fault = f"the gradients are not finite (the loss is {loss:.4g})"
            numbers.append(Numbers(step, loss, fault, torch.cat(indices).tolist()))
        self.unread.clear()
        return numbers

    def _forward_backward(self, batch: Batch, images_in_step: int) -> Tensor:
        """Add the gradients of a micro-batch, and return its share of the loss."""
        images = moved(batch.images, self.device, memory_format=self.memory_format)
        targets = moved(batch.targets, self.device)

        queries, train = self.queries, self.config.train
        if queries is not None:
            queries, targets = augment(
                queries, targets, noise=train.query_noise, extra=train.random_queries
            )

        with autocast(self.device, self.precision):
            logits = self.net(images, queries)
        # Half precision is too coarse for a loss; float64 stays.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = self.loss(logits, targets)

        # The loss of a batch must not depend on how the batch is divided: a mean is weighted by the
        # share of the micro-batch.
        share = len(images) / images_in_step if self.loss.reduction == "mean" else 1.0
        loss = loss * share

        # DistributedDataParallel averages the gradients of the processes; their losses add up.
        self.scaler.scale(loss * distributed.world_size()).backward()
        return loss.detach()

    def state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint; the schedule is a function of the step."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "ema": None if self.average is None else self.average.state_dict(),
            "loss": self.loss.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state(self, saved: Checkpoint, path: Path) -> None:
        """Restore weights, moving average, optimiser, scaler and step from a checkpoint."""
        load_strict(self.model, saved.model, path)
        if self.ema is not None and saved.step > self.ema_start:
            load_strict(self.ema.module, saved.ema or {}, path)
        elif self.ema is not None:
            self.ema.set(self.model)

        self.step = saved.step
        with refusing(path, remedy=f"start a new run with init={path}"):
            self.loss.load_state_dict(saved.loss)
            load_state(self.optimizer, saved.optimizer)
            if self.step < self.steps:
                fast_forward(self.schedule, self.step)

            # Empty after steps on a CPU, where auto is fp32: start with a new scale.
            if saved.scaler:
                self.scaler.load_state_dict(saved.scaler)
                self.scaler.scale(torch.zeros((), device=self.device))


def _clip(parameters: Iterable[nn.Parameter], largest: float | None) -> Tensor:
    """Clip the gradients to a norm, if one is given; return the norm that they had before."""
    if largest is not None:
        return nn.utils.clip_grad_norm_(parameters, largest)
    return nn.utils.get_total_norm(
        [parameter.grad for parameter in parameters if parameter.grad is not None]
    )


def augment(queries: Tensor, targets: Tensor, *, noise: float, extra: int) -> tuple[Tensor, Tensor]:
    """Add noise to queries [K, D], and append `extra` random ones, positive in every image [B, K].

    The paper names the two augmentations and gives their settings in table 3; the public code has
    neither. How they are drawn is our choice: both are normal and act on the vectors before any
    projection. Their unit is the standard deviation of the vectors' own numbers, so that a setting
    means the same for any source of vectors. Random numbers come from torch's global generator.
    """
    if not noise and not extra:
        return queries, targets

    spread, mean = torch.std_mean(queries, correction=0)
    random = mean + spread * torch.randn(
        extra, queries.shape[1], device=queries.device, dtype=queries.dtype
    )
    noisy = queries
    if noise:
        noisy = queries + noise * spread * torch.randn_like(queries)

    positive = targets.new_ones(len(targets), extra)
    return torch.cat([noisy, random]), torch.cat([targets, positive], 1)
