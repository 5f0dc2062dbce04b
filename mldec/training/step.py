"""One optimiser step, and everything that it changes: weights, moving average, optimiser, schedule, scaler."""

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from mldec.checkpoint import Checkpoint, load_strict
from mldec.config.schema import Config, NonFinite, Precision
from mldec.data.loader import Batch, sample_seed
from mldec.errors import CheckpointError, ConfigError
from mldec.evaluation import autocast
from mldec.losses.targets import at_least_float32
from mldec.model import Classifier
from mldec.optim import build_optimizer, build_schedule, check_state, fast_forward
from mldec.runtime import distributed
from mldec.training.word_queries import augment, check


class Outcome(NamedTuple):
    """What a step found, the same on every process."""

    loss: float  # of the whole batch
    fault: str | None  # what was not finite, if that kept the weights as they were
    stopping: bool  # some process was asked to stop
    bad_images: int  # left out


class Learner:
    """A model in training.

    Args:
        config: of the run; only its fixed sections are read.
        model: on its device.
        loss: logits float32 [B, K], targets [B, K] -> []; summed or averaged over the batch, as `loss.reduction` says.
        device: of the model.
        steps: of the whole run.
        queries: word vectors [K, D] of the training classes; None for closed-set data.

    Raises:
        ConfigError: if synchronised batch norm is asked for without CUDA, or changes of word queries without any.
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
        check(train, queries)
        self.memory_format = torch.channels_last if train.channels_last else torch.contiguous_format
        if train.sync_batchnorm:
            if device.type != "cuda":
                raise ConfigError(
                    f"train.sync_batchnorm needs CUDA, the device is {device}: leave it out"
                )
            model = distributed.synchronised_batch_norm(model)  # type: ignore[assignment]
        model.to(memory_format=self.memory_format)
        self.config, self.model, self.loss, self.device, self.steps = (
            config,
            model,
            loss.to(device),
            device,
            steps,
        )
        self.queries = None if queries is None else queries.to(device)
        self.optimizer = build_optimizer(model, **vars(config.optim))
        self.schedule = self._build_schedule()
        self.precision = train.precision.on(device.type)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision is Precision.fp16)
        self.ema = ModelEmaV3(model, decay=train.ema_decay) if train.ema_decay else None
        net: nn.Module = torch.compile(model) if train.compile else model  # type: ignore[assignment]
        self.net = distributed.wrap(net, static=train.accumulate == 1 and not train.compile)
        self.step = 0  # done
        self.skipped = (
            0  # of them without effect: not finite, or in fp16 while the scaler looks for its scale
        )

    def _build_schedule(self) -> torch.optim.lr_scheduler.LRScheduler:
        schedule, epochs = self.config.schedule, self.config.train.epochs
        epoch = self.steps / epochs
        cooldown = min(
            schedule.cooldown_epochs or 0, epochs // 2
        )  # a short trial of a long recipe still learns
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
        """Return the learning rate of the next step."""
        return self.optimizer.param_groups[0]["lr"]

    def learn(
        self, micro_batches: list[Batch], images_in_step: int, *, stop: object = False
    ) -> Outcome:
        """Do one optimiser step.

        Args:
            micro_batches: this process's share of the batch.
            images_in_step: size of the whole batch; an image that was left out counts with a loss of 0.
            stop: true if this process was asked to stop, also while the step is done.
        """
        # Random numbers are a function of seed, step and process, as the data's are: nothing of them need be saved.
        torch.manual_seed(sample_seed(self.config.seed, self.step, distributed.rank()))
        skip = self.config.train.nonfinite is NonFinite.skip
        statistics = [buffer.clone() for buffer in self.model.buffers()] if skip else []
        loss = torch.zeros((), device=self.device)
        for batch in micro_batches:
            with distributed.no_sync(self.net, unless=batch is micro_batches[-1]):
                loss = loss + self._forward_backward(batch, images_in_step)
        self.scaler.unscale_(self.optimizer)
        norm = _clip(self.model.parameters(), self.config.train.clip_grad)
        outcome = self._agree(loss, norm, stop, sum(len(batch.bad) for batch in micro_batches))
        if outcome.fault is None:
            self.scaler.step(
                self.optimizer
            )  # in fp16 it leaves out a step whose gradients overflow
        elif skip:
            for buffer, before in zip(self.model.buffers(), statistics, strict=True):
                buffer.copy_(before)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.step < self.steps:
            self.schedule.step()
        if self.ema is not None:
            self.ema.update(self.model)
        return outcome

    def _forward_backward(self, batch: Batch, images_in_step: int) -> Tensor:
        """Add the gradients of a micro-batch, and return its share of the loss."""
        images = batch.images.to(self.device, non_blocking=True, memory_format=self.memory_format)
        targets = batch.targets.to(self.device, non_blocking=True)
        queries, train = self.queries, self.config.train
        if queries is not None:
            queries, targets = augment(
                queries, targets, noise=train.query_noise, extra=train.random_queries
            )
        with autocast(self.device, self.precision):
            logits = self.net(images, queries)
        loss = self.loss(at_least_float32(logits), targets)
        # A batch means the same however it is divided: a mean is weighted by the share of the micro-batch.
        loss = loss * (len(images) / images_in_step if self.loss.reduction == "mean" else 1.0)
        # Times the processes, because their gradients are averaged while their losses add up.
        self.scaler.scale(loss * distributed.world_size()).backward()
        return loss.detach()

    def _agree(self, loss: Tensor, norm: Tensor, stop: object, bad_images: int) -> Outcome:
        """Add up over the processes: one exchange, and one wait for the device, in a step."""
        own = torch.stack([loss, loss.new_tensor(bool(stop)), loss.new_tensor(bad_images)])
        *sums, gradients = torch.cat([distributed.total(own), norm[None].to(own.dtype)]).tolist()
        value, stopping, bad = sums
        overflow = self.scaler.is_enabled() and math.isfinite(value)  # the scaler's own affair
        fault = None
        if not math.isfinite(value):
            fault = f"the loss is {value}"
        elif not math.isfinite(gradients) and not overflow:
            fault = f"the gradients are not finite (the loss is {value:.4g})"
        self.skipped += not math.isfinite(value + gradients)
        return Outcome(value, fault, stopping > 0, int(bad))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the training; the schedule is a function of the step."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "loss": self.loss.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state(self, saved: Checkpoint, path: Path) -> None:
        """Take over the training of a checkpoint, read from a path.

        Raises:
            CheckpointError: if a tensor does not fit.
        """
        load_strict(self.model, saved.model, path)
        if self.ema is not None:
            load_strict(self.ema.module, saved.ema or {}, path)
        self._check_training_state(saved, path)

        try:
            self.loss.load_state_dict(saved.loss)
            self.optimizer.load_state_dict(saved.optimizer)
            if (
                saved.scaler
            ):  # empty after steps on a CPU, where auto is fp32: start with a new scale
                self.scaler.load_state_dict(saved.scaler)
        except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
            reason = " ".join(str(error).split())  # torch writes a line per tensor
            raise CheckpointError(
                f"{path} does not fit the optimiser, the loss or the precision: {reason}"
            ) from error

        self.step = saved.step
        if self.step < self.steps:
            fast_forward(self.schedule, self.step)

    def _check_training_state(self, saved: Checkpoint, path: Path) -> None:
        """Raise a `CheckpointError` for a state of the optimiser or the scaler from which no step can be done."""
        trial = build_optimizer(copy.deepcopy(self.model), **vars(self.config.optim))
        check_state(trial, saved.optimizer, self.optimizer.param_groups, path)

        for name, own in self.scaler.state_dict().items() if saved.scaler else ():
            value = saved.scaler.get(name)
            if (
                not isinstance(value, int | float)
                or type(value) is not type(own)
                or not math.isfinite(value)
            ):
                raise CheckpointError(
                    f"{path} does not fit the precision: the '{name}' of its scaler is no number"
                )


def _clip(parameters: Iterable[nn.Parameter], largest: float | None) -> Tensor:
    """Return the norm of all gradients together, after clipping them if it is too large."""
    if largest is not None:
        return nn.utils.clip_grad_norm_(parameters, largest)
    return nn.utils.get_total_norm(
        [parameter.grad for parameter in parameters if parameter.grad is not None]
    )
