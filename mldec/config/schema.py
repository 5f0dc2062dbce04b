"""Every fixed setting of a run, with its default and its range.

The four parts (data, backbone, head, loss) are plain dictionaries here: the signature of the class that `_target_`
names is their schema, and `build.check` holds them to it.
"""

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from mldec.errors import ConfigError

MAX_WORKERS = 1024  # loader processes: beyond any machine, and few enough to start

PARTS = ("data", "backbone", "head", "loss")
MAX_IMAGE_SIZE = 4096  # pixels per side, of what a model is given, by a setting or by a checkpoint

# What may differ between a run and its continuation without making it another run.
HARMLESS = {
    "name",
    "device",
    "resume",
    "init",
    "plugins",
    "data.root",
    "data.bad_images",
    "data.changed",
    "train.epochs",
    "train.workers",
}
HARMLESS |= {"train.eval_batch_size", "train.eval_every", "train.log_every", "train.compile"}
HARMLESS |= {
    "train.nonfinite",
    "train.save_every_steps",
    "train.save_every_minutes",
    "train.keep_last",
}

MAX_SEED = 2**63 - 1  # what torch and NumPy both take


def _require(good: bool, name: str, value: Any, rule: str) -> None:
    if not good:
        raise ConfigError(f"{name} is {value}: it must be {rule}")


def check_device(name: str) -> None:
    """Check that a device has a name that we know; whether it is there, `distributed.pick_device` tells.

    Raises:
        ConfigError: if it has not.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", name):
        raise ConfigError(
            f"device '{name[:40]}' is unknown: choose auto, cpu, cuda or cuda:<number>"
        )


class Precision(Enum):
    """Number format of the forward pass; weights, losses and metrics stay in float32."""

    auto = "auto"  # fp16 on CUDA, as the official recipes; fp32 elsewhere
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"

    def on(self, device_type: str) -> "Precision":
        """Return the number format that is used on a type of device, such as "cuda": never `auto`."""
        if self is not Precision.auto:
            return self
        return Precision.fp16 if device_type == "cuda" else Precision.fp32

    def warning(self, device_type: str) -> str | None:
        """Return a line if this number format is slow on a type of device."""
        if device_type != "cpu" or self.on(device_type) is Precision.fp32:
            return None
        times = {Precision.fp16: "nine", Precision.bf16: "eight"}[self]
        return (
            f"train.precision={self.value} is slow on a CPU, up to {times} times slower than fp32: "
            f"pass train.precision=fp32"
        )


class ScheduleName(Enum):
    """Course of the learning rate, step by step."""

    onecycle = "onecycle"
    cosine = "cosine"
    cosine_epochs = "cosine_epochs"  # as timm: one rate an epoch


class MixMode(Enum):
    """For what a mixing draws its numbers."""

    batch = "batch"
    pair = "pair"
    elem = "elem"


class NonFinite(Enum):
    """What to do when a loss or its gradients are not finite."""

    stop = "stop"
    skip = "skip"  # leave the step out and count it


@dataclass(kw_only=True)
class Train:
    """How the loop runs. The batch size is global: it is divided over processes and accumulation steps."""

    epochs: int = 40
    batch_size: int = 56
    accumulate: int = 1  # micro-batches an optimiser step
    repeats: int = 1  # repeated augmentation: versions of an image in a batch, of so many fewer images an epoch
    eval_batch_size: int = 64  # images at a time on each process
    workers: int = 4  # loader processes on each rank
    precision: Precision = Precision.fp32
    clip_grad: float | None = None  # largest norm of all gradients together; null: no clipping
    ema_decay: float | None = 0.9997  # null: no moving average of the weights
    channels_last: bool = False
    compile: bool = False
    deterministic: bool = False  # same bits again on CUDA, at some cost in speed
    query_noise: float = (
        0.0  # noise on word queries in training, as a fraction of their spread; see word_queries.py
    )
    random_queries: int = 0  # added to the word queries in training, each with a positive target
    sync_batchnorm: bool = (
        False  # batch-norm statistics over all processes, not of each one's images; CUDA only
    )
    nonfinite: NonFinite = NonFinite.stop
    save_every_steps: int | None = None  # besides the end of each epoch; null: never
    save_every_minutes: float | None = 10.0  # likewise
    keep_last: int = 2  # last.pt and older ones, last.1.pt, ..., which resume=auto falls back on
    eval_every: int = 1  # epochs; the last epoch is always evaluated
    log_every: int = 50  # steps

    def __post_init__(self) -> None:
        positive = (
            "epochs",
            "batch_size",
            "accumulate",
            "repeats",
            "eval_batch_size",
            "eval_every",
            "log_every",
        )
        for name in (*positive, "keep_last"):
            _require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        for name in ("query_noise", "random_queries"):
            _require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "0 or more")
        rule = f"from 0 to {MAX_WORKERS:,}"
        _require(0 <= self.workers <= MAX_WORKERS, "train.workers", self.workers, rule)
        for name in ("save_every_steps", "save_every_minutes"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"train.{name}", value, "above 0, or null")
        if self.clip_grad is not None:
            _require(self.clip_grad > 0, "train.clip_grad", self.clip_grad, "above 0, or null")
        if self.ema_decay is not None:
            _require(
                0 < self.ema_decay < 1,
                "train.ema_decay",
                self.ema_decay,
                "between 0 and 1, or null",
            )


@dataclass(kw_only=True)
class Mix:
    """Mixup and cutmix of the images of a micro-batch, and soft labels: for data with one label an image. Off."""

    mixup: float = (
        0.0  # alpha of the beta distribution that an image's share is drawn from; 0: no mixup
    )
    cutmix: float = 0.0  # likewise, of the share of the area
    prob: float = 1.0  # of mixing at all
    switch_prob: float = 0.5  # of cutmix, where both are on
    mode: MixMode = (
        MixMode.batch
    )  # one draw for the batch, for each pair of images, or for each image
    smoothing: float = 0.0  # labels move towards 1/K by this share, before they are mixed

    @property
    def on(self) -> bool:
        """Whether images are mixed."""
        return self.prob > 0 and (self.mixup > 0 or self.cutmix > 0)

    @property
    def soft(self) -> bool:
        """Whether labels are other than 0 and 1."""
        return self.on or self.smoothing > 0

    def __post_init__(self) -> None:
        for name in ("mixup", "cutmix"):
            _require(
                getattr(self, name) >= 0, f"mix.{name}", getattr(self, name), "0 (off) or more"
            )
        for name in ("prob", "switch_prob"):
            _require(
                0 <= getattr(self, name) <= 1, f"mix.{name}", getattr(self, name), "from 0 to 1"
            )
        _require(
            0 <= self.smoothing < 1, "mix.smoothing", self.smoothing, "0 (off) or more, and below 1"
        )


@dataclass(kw_only=True)
class Optim:
    """The optimiser, by its name in timm (adam, adamw, lamb, sgd, ...)."""

    name: str = "adam"
    lr: float = 1e-4  # the highest of the schedule
    weight_decay: float = (
        1e-4  # on weights of two or more dimensions; with adam it is L2, with adamw decoupled
    )
    options: dict[str, Any] = field(default_factory=dict)  # further arguments, such as {eps: 1e-6}

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optim.lr", self.lr, "above 0")
        _require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more")


_USED = {  # the settings of each schedule
    ScheduleName.onecycle: ("pct_start",),
    ScheduleName.cosine: ("warmup_epochs", "min_lr"),
    ScheduleName.cosine_epochs: ("warmup_epochs", "min_lr", "warmup_lr", "cooldown_epochs"),
}


@dataclass(kw_only=True)
class Schedule:
    """OneCycle as the official code (Adam's beta1 cycles too), or warm-up and cosine."""

    name: ScheduleName = ScheduleName.onecycle
    pct_start: float | None = None  # onecycle: share of the steps that rise; null: 0.2
    warmup_epochs: float | None = None  # cosine, cosine_epochs: epochs of linear warm-up; null: 0
    min_lr: float | None = None  # cosine, cosine_epochs: the rate at the end; null: 0
    warmup_lr: float | None = (
        None  # cosine_epochs: the rate of the first epoch; null: 1e-5, as timm
    )
    # cosine_epochs: the last of train.epochs, at min_lr, and at most half of them; null: 0
    cooldown_epochs: int | None = None

    def __post_init__(self) -> None:
        for name in ("pct_start", "warmup_epochs", "min_lr", "warmup_lr", "cooldown_epochs"):
            value, used = getattr(self, name), name in _USED[self.name]
            if value is not None and not used:
                raise ConfigError(
                    f"schedule.{name} has no effect with schedule.name={self.name.value}: leave it out"
                )
            if value is not None and name != "pct_start":
                _require(value >= 0, f"schedule.{name}", value, "0 or more")
        if self.pct_start is not None:
            _require(
                0 < self.pct_start < 1, "schedule.pct_start", self.pct_start, "between 0 and 1"
            )


@dataclass(kw_only=True)
class Config:
    """A run, but for the folder it writes to."""

    name: str = MISSING  # of the run; its folder is outputs/<name>
    seed: int = 0  # of weights, order of images and augmentation
    device: str = "auto"  # auto: cuda if there is one, else cpu
    resume: str | None = (
        None  # "auto": go on from outputs/<name>/checkpoints/last.pt; or a checkpoint file
    )
    init: str | None = None  # start from the weights of this checkpoint that fit, as a new run
    plugins: list[str] = field(default_factory=list)  # packages of your own that may hold parts
    data: dict[str, Any] = MISSING
    backbone: dict[str, Any] = MISSING
    head: dict[str, Any] = MISSING
    loss: dict[str, Any] = MISSING
    train: Train = field(default_factory=Train)
    mix: Mix = field(default_factory=Mix)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)

    @property
    def accepts_changed_data(self) -> bool:
        """Whether a resumed run may go on with other training data than it was saved with."""
        return self.data.get("changed") == "allow"

    def __post_init__(self) -> None:
        if "/" in self.name or self.name in ("", ".", ".."):
            raise ConfigError(
                f"name '{self.name}' cannot be the name of a folder: choose one without '/'"
            )
        check_device(self.device)
        if self.resume and self.init:
            raise ConfigError(
                f"init={self.init} has no effect with resume={self.resume}: leave one out"
            )
        _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"from 0 to {MAX_SEED}")
