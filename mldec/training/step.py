"""One optimizer step and its state: weights, moving average, optimizer, schedule and scaler."""

import copy
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mldec.checkpoint.loading import load_strict
from mldec.checkpoint.state import Checkpoint
from mldec.config.schema import Config, NonFinite
from mldec.data.loader import Batch, sample_seed
from mldec.errors import ConfigError, log, naming_errors
from mldec.losses.base import as_loss
from mldec.model import Classifier
from mldec.runtime import distributed
from mldec.runtime.devices import Precision, autocast, memory_format, to_device
from mldec.training import optim
from mldec.training.ema import ModelEma
from mldec.training.sync_batchnorm import synchronize


class StepStatus:
    """Stop request and number of unreadable images of a step, all-reduced asynchronously."""

    def __init__(self, *, stop: bool, micro_batches: list[Batch]) -> None:
        self.messages: list[str] = []  # one per unreadable image of this rank
        for batch in micro_batches:
            self.messages += batch.bad
        self._total = distributed.start_total(torch.tensor([stop, len(self.messages)]))

    @property
    def stop_requested(self) -> bool:
        """Whether at least one rank received a stop request."""
        return bool(self._total()[0])

    @property
    def bad_images(self) -> int:
        """Number of unreadable images on all ranks."""
        return int(self._total()[1])


class StepStats(NamedTuple):
    """Numbers of a finished step. Only `indices` differ between ranks."""

    step: int  # counted from 1
    loss: float  # of the whole batch
    fault: str | None  # the non-finite loss or gradient, if any; the weights were not updated
    indices: list[int]  # dataset indices of the images of this rank


class PendingStats(NamedTuple):
    """Numbers of a finished step that are still on the device."""

    step: int
    loss: Tensor  # []
    fault: Tensor  # [], whether loss or gradients are not finite
    indices: list[Tensor]  # one tensor per micro-batch


class Learner:
    """A model in training on its device, with everything that changes in an optimizer step.

    Args:
        config: The config of the run.
        model: The model, which is changed in place.
        loss: A `Loss`, or another module or function with the attribute `reduction`.
        device: The device of the training steps.
        steps: Number of optimizer steps of the whole run.
        word_vectors: Word vectors [K, D] of zero-shot data.
    """

    def __init__(
        self,
        config: Config,
        model: Classifier,
        loss: nn.Module,
        *,
        device: torch.device,
        steps: int,
        word_vectors: Tensor | None = None,
    ) -> None:
        train = config.train
        self.memory_format = memory_format(channels_last=train.channels_last)
        # A single process already computes the statistics of the whole batch.
        if train.sync_batchnorm and distributed.world_size() > 1:
            if device.type != "cuda":
                raise ConfigError(f"train.sync_batchnorm: it needs CUDA, not {device}; remove it")
            synchronize(model)
        model.to(memory_format=self.memory_format)

        self.config = config
        self.device = device
        self.steps = steps
        self.model = model
        self.loss = as_loss(loss).to(device)
        self.word_vectors = None if word_vectors is None else word_vectors.to(device)

        # Freeze first, because the optimizer and the moving average depend on it.
        self.frozen_norms = optim.freeze(model, train)
        grouping = {**vars(config.optim), "decay": config.optim.decay.value}
        self.optimizer = optim.build_optimizer(model, loss=self.loss, **grouping)
        self.schedule = optim.build_schedule(
            self.optimizer, config.schedule, lr=config.optim.lr, steps=steps, epochs=train.epochs
        )
        self.precision = train.precision.for_device(device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision is Precision.fp16)
        self.ema = ModelEma(model, train.ema_decay) if train.ema_decay else None
        # After this step the moving average is a copy of the weights.
        self.ema_start = (train.ema_start_epoch - 1) * (steps // train.epochs)
        self.net = self._wrap(model)

        self.step = 0  # finished steps
        self.pieces = train.pieces  # number of pieces of each micro-batch, or None
        # Finished steps that did not change the weights. In fp16 this is usual while GradScaler
        # searches for its scale.
        self.skipped = 0
        self.pending: list[PendingStats] = []
        # Device flag that is cleared by the first fatal non-finite step. The host reads it with
        # the next report.
        self.all_finite = torch.ones((), dtype=torch.bool, device=device)

    def _wrap(self, model: nn.Module) -> nn.Module:
        """Return the compiled and distributed model, which shares all parameters."""
        train = self.config.train
        if train.compile:
            # After a smaller last batch, torch would by default compile graphs with a dynamic batch
            # size, whose convolutions are slow.
            model = torch.compile(  # type: ignore[assignment]
                model, dynamic=False, mode=train.compile_mode
            )

        # The only buffers that differ between ranks are batch-norm statistics. Training steps do
        # not read them, and evaluations and checkpoints use the main rank. Averaged statistics must
        # be equal at the start of each step, see `Trainer.train_epoch`.
        return distributed.wrap(
            model,
            static=train.accumulate == 1 and not train.compile,
            same_buffers=train.average_batchnorm,
        )

    @property
    def lr(self) -> float:
        """Base learning rate of the next step."""
        return self.optimizer.param_groups[0]["lr"]

    @property
    def average(self) -> nn.Module | None:
        """Model with the averaged weights, or None before the average starts."""
        if self.ema is None or self.step <= self.ema_start:
            return None
        return self.ema.module

    def train(self) -> None:
        """Set the model to training mode, except for frozen batch norms."""
        self.net.train()
        for norm in self.frozen_norms:
            norm.eval()

    def learn(
        self, micro_batches: list[Batch], images_in_step: int, *, stop: object = False
    ) -> StepStatus:
        """Do one optimizer step without waiting for the device.

        A step with a non-finite loss or gradient changes no weights. Unless `train.nonfinite` is
        "skip", no later step changes weights either, and `read` reports the fault.

        Args:
            micro_batches: The share of this rank. An unreadable image counts with a loss of 0.
            images_in_step: Number of images of the whole batch.
            stop: Whether to stop after the step; its truth value is read at the end of the step.

        Returns:
            The status of the step. `read` returns its loss.
        """
        train = self.config.train
        skip = train.nonfinite is NonFinite.skip

        # A skipped step must not change the batch-norm statistics either.
        buffers_before: list[Tensor] = []
        if skip:
            buffers_before = flatten(self.model.buffers())

        # Allow CUDA graphs to overwrite the outputs of the previous step.
        if train.compile_mode:
            torch.compiler.cudagraph_mark_step_begin()

        # 1. Compute the gradients of the whole batch.
        if self.pieces is None:
            loss, finite_gradients = self._backward(micro_batches, images_in_step)
        else:
            loss, finite_gradients = self._backward_in_pieces(micro_batches, images_in_step)

        # 2. Check on the device that loss and gradients are finite. All ranks get the same result,
        # because they have the same gradients.
        loss = distributed.total(loss)
        finite_loss = torch.isfinite(loss)
        finite = finite_loss & finite_gradients
        # A step without a fault may still have infinite gradients in fp16, where these are usual:
        # GradScaler then lowers its scale, and the next step is normal.
        without_fault = finite_loss if self.scaler.is_enabled() else finite
        if not skip:
            self.all_finite &= without_fault

        # 3. Update the weights, unless this step is not finite or an earlier step had a fault.
        optim.step_if(finite & self.all_finite, self.optimizer)
        if skip:
            restore_unless(without_fault, self.model.buffers(), buffers_before)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

        # 4. Update the step, the schedule and the moving average.
        self.step += 1
        self._update_schedule_and_ema()

        # 5. Queue the loss for `read`, and start the all-reduce of the status.
        indices = [batch.indices for batch in micro_batches]
        self.pending.append(PendingStats(self.step, loss, ~finite, indices))
        return StepStatus(stop=bool(stop), micro_batches=micro_batches)

    def _backward_in_pieces(
        self, micro_batches: list[Batch], images_in_step: int
    ) -> tuple[Tensor, Tensor]:
        """Compute the gradients, and halve the pieces after each out-of-memory error of CUDA."""
        assert self.pieces is not None
        # An attempt that runs out of memory has changed batch-norm statistics and estimated priors.
        buffers_before = [buffer.clone() for buffer in self.model.buffers()]
        loss_before = copy.deepcopy(self.loss.state_dict())

        while True:
            pieces = []
            for batch in micro_batches:
                pieces += divide(batch, self.pieces)
            try:
                return self._backward(pieces, images_in_step)
            except torch.OutOfMemoryError:
                if max(len(piece.images) for piece in pieces) == 1:
                    raise

            # Outside the `except` clause, the error no longer holds references to device tensors.
            self.pieces *= 2
            self.optimizer.zero_grad(set_to_none=True)
            for buffer, before in zip(self.model.buffers(), buffers_before, strict=True):
                buffer.copy_(before)
            self.loss.load_state_dict(loss_before)
            torch.cuda.empty_cache()
            log.warning(
                f"train.batch_size=auto: out of memory in step {self.step + 1}; each micro-batch "
                f"is divided into {self.pieces} pieces"
            )

    def _backward(self, micro_batches: list[Batch], images_in_step: int) -> tuple[Tensor, Tensor]:
        """Compute and clip the gradients. Returns the loss of this rank, and if all are finite."""
        # Random numbers depend on seed, step and rank only, so checkpoints need no generator state.
        torch.manual_seed(sample_seed(self.config.seed, self.step, distributed.rank()))
        self.loss.progress = self.step / self.steps
        loss = torch.zeros((), device=self.device)
        for batch in micro_batches:
            with distributed.no_sync(self.net, unless=batch is micro_batches[-1]):
                loss = loss + self._forward_backward(batch, images_in_step)

        self.scaler.unscale_(self.optimizer)
        max_norm = self.config.train.clip_grad
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        elif self.scaler.is_enabled():
            # `unscale_` has already looked for infinite gradients.
            [found_inf] = self.scaler._found_inf_per_device(self.optimizer).values()
            return loss, found_inf == 0
        else:
            parameters = self.model.parameters()
            gradients = [value.grad for value in parameters if value.grad is not None]
            norm = nn.utils.get_total_norm(gradients)
        return loss, torch.isfinite(norm)

    def _forward_backward(self, batch: Batch, images_in_step: int) -> Tensor:
        """Add the gradients of a micro-batch, and return its share of the loss."""
        train = self.config.train
        images = to_device(batch.images, self.device, memory_format=self.memory_format)
        targets = to_device(batch.targets, self.device)

        word_vectors = self.word_vectors
        if word_vectors is not None:
            word_vectors, targets = augment(
                word_vectors, targets, noise=train.query_noise, extra=train.random_queries
            )

        with autocast(self.device, self.precision):
            logits = self.net(images, word_vectors)
        # The loss is computed in float32, or in float64 if the logits are.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # The forward of a user's loss may have two arguments only.
        if self.loss.per_image:
            loss = self.loss(logits, targets, to_device(batch.indices, self.device))
        else:
            loss = self.loss(logits, targets)

        # Weight a mean by the size of the micro-batch, so that the loss of the batch does not
        # depend on its division.
        share = 1.0
        if self.loss.reduction == "mean":
            share = len(images) / images_in_step
        loss = loss * share

        # DistributedDataParallel averages gradients over ranks; the loss is a sum over ranks.
        self.scaler.scale(loss * distributed.world_size()).backward()
        return loss.detach()

    def _update_schedule_and_ema(self) -> None:
        # The schedule has no value after its last step.
        if self.step < self.steps:
            self.schedule.step()

        if self.ema is not None:
            if self.step > self.ema_start:
                self.ema.update()
            elif self.step == self.ema_start:
                self.ema.reset()

    def read(self) -> list[StepStats]:
        """Return the stats of all pending steps. This waits for the device."""
        if not self.pending:
            return []

        losses = torch.stack([pending.loss for pending in self.pending]).tolist()
        faults = torch.stack([pending.fault for pending in self.pending]).tolist()
        stats = []
        for pending, loss, is_fault in zip(self.pending, losses, faults, strict=True):
            fault = None
            if not math.isfinite(loss):
                fault = f"the loss is {loss}"
            elif is_fault and not self.scaler.is_enabled():
                fault = f"the gradients are not finite (the loss is {loss:.4g})"

            self.skipped += is_fault
            indices = torch.cat(pending.indices).tolist()
            stats.append(StepStats(pending.step, loss, fault, indices))
        self.pending.clear()
        return stats

    def state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint. The schedule is restored from the step."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "ema": None if self.average is None else self.average.state_dict(),
            "loss": self.loss.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state(self, saved: Checkpoint, path: Path) -> None:
        """Restore weights, moving average, optimizer, scaler and step from a checkpoint."""
        load_strict(self.model, saved.model, path)
        if self.ema is not None and saved.step > self.ema_start:
            load_strict(self.ema.module, saved.ema or {}, path)
        elif self.ema is not None:
            self.ema.reset()

        self.step = saved.step
        with naming_errors(path, remedy=f"start a new run with init={path}"):
            self.loss.load_state_dict(saved.loss)
            optim.load_state(self.optimizer, saved.optimizer)
            if self.step < self.steps:
                optim.fast_forward(self.schedule, self.step)

            # A run that started in fp32 (auto on a CPU) has no scaler state.
            if saved.scaler:
                self.scaler.load_state_dict(saved.scaler)
                self.scaler.scale(torch.zeros((), device=self.device))


def divide(batch: Batch, pieces: int) -> list[Batch]:
    """Divide a micro-batch into pieces of at least one image, whose sizes differ by at most one."""
    pieces = min(pieces, len(batch.images))
    images = batch.images.tensor_split(pieces)
    targets = batch.targets.tensor_split(pieces)
    indices = batch.indices.tensor_split(pieces)
    return [Batch(*piece) for piece in zip(images, targets, indices, strict=True)]


def flatten(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return copies of all values, as one tensor [N] per dtype. It takes few kernel launches."""
    flat: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        flat.setdefault(tensor.dtype, []).append(tensor.flatten())
    return [torch.cat(values) for values in flat.values()]


def restore_unless(condition: Tensor, tensors: Iterable[Tensor], before: list[Tensor]) -> None:
    """Set tensors in place to their earlier values unless a condition is True, without a host sync.

    The condition is a bool [] on the device, and `before` the result of `flatten` for the tensors.
    """
    tensors = list(tensors)
    for now, earlier in zip(flatten(tensors), before, strict=True):
        same_dtype = [tensor for tensor in tensors if tensor.dtype == now.dtype]
        values = torch.where(condition, now, earlier).split([t.numel() for t in same_dtype])
        shaped = [value.view_as(t) for value, t in zip(values, same_dtype, strict=True)]
        torch._foreach_copy_(same_dtype, shaped)


def augment(
    word_vectors: Tensor, targets: Tensor, *, noise: float, extra: int
) -> tuple[Tensor, Tensor]:
    """Add noise to the word vectors, and append random vectors with a target of 1 in every image.

    Both augmentations are in table 3 of the paper, and not in the public code. We chose normal
    distributions, and apply them before any projection. The random numbers come from torch's
    global generator.

    Args:
        word_vectors: Word vectors [K, D].
        targets: Targets [B, K].
        noise: Standard deviation of the noise, in units of the standard deviation of all entries.
        extra: Number E of random vectors, with the mean and standard deviation of all entries.

    Returns:
        Word vectors [K + E, D] and targets [B, K + E].
    """
    if not noise and not extra:
        return word_vectors, targets

    spread, mean = torch.std_mean(word_vectors, correction=0)
    random = mean + spread * torch.randn(
        extra, word_vectors.shape[1], device=word_vectors.device, dtype=word_vectors.dtype
    )
    noisy = word_vectors
    if noise:
        noisy = word_vectors + noise * spread * torch.randn_like(word_vectors)

    positive = targets.new_ones(len(targets), extra)
    return torch.cat([noisy, random]), torch.cat([targets, positive], 1)
