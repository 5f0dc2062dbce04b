"""The fixed settings of a run, with their defaults and ranges.

The four parts (data, backbone, head, loss) are plain dictionaries here. Their schema is the
signature of the class or function that `_target_` names, and `build.check` checks them against it.
"""

import math
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import MISSING

from mldec.errors import ConfigError
from mldec.runtime.devices import Precision, check_device, processors


def matches(value: Any, hint: Any) -> bool:
    """Tell whether a value from YAML fits the annotation of an argument.

    A whole number fits `float`, NaN and infinity do not; true and false fit only `bool`.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(matches(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if hint in (None, type(None)):
        return value is None

    # In Python a bool is an int, so booleans come before numbers.
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    if hint is float:
        return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))

    kind = origin or hint
    if kind in (list, tuple, Sequence):
        items = arguments[0] if arguments else Any
        return isinstance(value, list | tuple) and all(matches(item, items) for item in value)
    return isinstance(value, kind)


def describe(hint: Any) -> str:
    """Describe an annotation in terms of YAML, for messages."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))

    names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
    if hint in names:
        return names[hint]
    if hint is type(None):
        return "null"
    return "a list" if (origin or hint) in (list, tuple, Sequence) else "a mapping"


MAX_WORKERS = 1024  # loader processes: more than any machine needs, and few enough to start
MOST_WORKERS = 16  # if the user names no number: they feed a GPU, and each takes memory

PARTS = ("data", "backbone", "head", "loss")

# Settings that may differ between a run and its continuation without making it another run. What
# batch_per_gpu comes to is in train.batch_size, which is compared.
HARMLESS = {
    *("name", "device", "resume", "init", "plugins"),
    *("init.path", "init.classes", "init.synonyms"),
    *("data.root", "data.cache_dir", "data.bad_images", "data.changed"),
    "data.skip_empty",  # a resumed run keeps its metric
    *("train.epochs", "train.min_steps", "train.stop_epoch", "train.patience", "train.workers"),
    *("train.compile", "train.batch_per_gpu", "train.eval_batch_size", "train.eval_every"),
    *("train.log_every", "train.fit_memory"),
    *("train.nonfinite", "train.save_every_steps", "train.save_every_minutes", "train.keep_last"),
    *("log.images", "log.classes", "log.wandb", "log.trackio", "log.project"),
}

# Whether to compile, and with which mode of torch.compile; true means its default.
Compile = bool | Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

MAX_SHOWN = 100  # images, or classes with a curve of their own, that an evaluation shows
MAX_SEED = 2**63 - 1  # torch and NumPy both accept seeds up to here


def _require(
    settings: Any, names: str, rule: str, good: Callable[[Any], bool], *, within: str
) -> None:
    """Refuse values of settings, but null; `within` is their section, with a dot."""
    for name in names.split():
        value = getattr(settings, name)
        if value is not None and not good(value):
            raise ConfigError(f"{within}{name} is {value}: it must be {rule}")


class ScheduleName(Enum):
    """Schedule of the learning rate; see `optim.build_schedule`."""

    onecycle = "onecycle"
    cosine = "cosine"
    cosine_epochs = "cosine_epochs"  # as timm: one rate per epoch


class MixMode(Enum):
    """Unit for which mixup and cutmix draw their random numbers."""

    batch = "batch"
    pair = "pair"  # two images that are mixed with one another
    elem = "elem"  # a single image


class MixLabels(Enum):
    """Labels of an image that is mixed from two; see `data.mixing.Mixing`."""

    weighted = "weighted"  # the mean of both, by their shares of the image: from 0 to 1
    union = "union"  # of all that is visible: 0 and 1; for several labels per image


class NonFinite(Enum):
    """What to do when a loss or its gradients are not finite."""

    stop = "stop"
    skip = "skip"  # leave the step out, and count it


class FreezeBatchNorm(Enum):
    """Which batch norms keep their statistics, scale and shift in training."""

    frozen = "frozen"  # those inside the parts that train.freeze names
    all = "all"


class Decay(Enum):
    """Which parameters weight decay applies to."""

    weights = "weights"  # those of two or more dimensions that are no bias
    all = "all"


@dataclass(kw_only=True)
class Train:
    """The training loop. The batch size is global: processes and micro-batches divide it."""

    epochs: int = 40  # that the schedule is planned for
    min_steps: int | None = None  # `epochs` is raised to what so many optimiser steps take
    stop_epoch: int | None = None  # after which the run ends, in the middle of its schedule
    # Evaluations in succession without a better value of the first metric, after which it ends.
    patience: int | None = None
    batch_size: int = 56
    # Images of a micro-batch on each process: batch_size is then this x processes x accumulate.
    batch_per_gpu: int | None = None
    accumulate: int = 1  # micro-batches per optimiser step
    # train.batch_size=auto: choose `accumulate` and backbone.checkpointing by a GPU's memory.
    fit_memory: bool = False
    # Repeated augmentation: versions of an image per batch; an epoch covers 1/repeats of them.
    repeats: int = 1
    eval_batch_size: int = 64  # images per batch on each process
    # Loader processes per rank; null: one per processor that the rank may use, at most 16.
    workers: int | None = None
    # auto: bf16 on CUDA devices that compute with it (capability 8.0 and above), fp16 on older
    # ones, fp32 on a CPU. fp16 is for CUDA: on a CPU it means fp32. A run records what it used.
    precision: Precision = Precision.auto
    # Round the factors of float32 products on CUDA to TF32, in matrix products and convolutions.
    tf32: bool = False
    # Names of parameters, or their beginnings up to a dot, that neither train nor decay.
    freeze: list[str] = field(default_factory=list)
    # Batch norms that stay in evaluation mode, and do not train, as Query2Label's; null: none.
    freeze_batchnorm: FreezeBatchNorm | None = None
    # The bias of each class starts where its score is its frequency among the training labels.
    start_at_frequency: bool = False
    # Compute the tokens of a frozen backbone once, and train the head on them, without augmenting.
    # They are files in data.cache_dir, which later runs use too, whatever their head.
    cache_features: bool = False
    clip_grad: float | None = None  # maximal norm of all gradients together; null: no clipping
    ema_decay: float | None = 0.9997  # null: no moving average of the weights
    # The moving average starts as a copy of the weights at the beginning of this epoch, from 1 on.
    ema_start_epoch: int = 1
    channels_last: bool = False
    # The mode of torch.compile, see `Compile`; true: its default, false: not compiled.
    compile: Any = False
    deterministic: bool = False  # bitwise reproducible on CUDA, at some cost in speed
    # Noise on the word queries in training, as a fraction of their spread; see step.augment.
    query_noise: float = 0.0
    random_queries: int = 0  # added to the word queries in training, each with a positive target
    # Batch-norm statistics over the images of all processes, which need CUDA for it.
    sync_batchnorm: bool = False
    # Average running statistics over the processes at the end of each epoch, as timm's --dist-bn
    # reduce. Otherwise those of the main process are evaluated, as always of the moving average.
    average_batchnorm: bool = False
    nonfinite: NonFinite = NonFinite.stop
    save_every_steps: int | None = None  # besides the end of each epoch; null: never
    save_every_minutes: float | None = 10.0  # likewise
    # Versions of the last checkpoint: last.pt, last.1.pt, ... resume=auto falls back on older ones.
    keep_last: int = 2
    eval_every: int = 1  # epochs; the last epoch is always evaluated
    log_every: int = 50  # steps

    def __post_init__(self) -> None:
        require = partial(_require, self, within="train.")
        last = self.last_epoch
        counts = "epochs batch_size accumulate repeats eval_batch_size eval_every log_every"
        above_0 = "save_every_steps save_every_minutes clip_grad"
        up_to_last = f"from 1 to train.epochs ({self.epochs}), or null"
        require(f"{counts} keep_last ema_start_epoch", "at least 1", lambda value: value >= 1)
        require("min_steps patience batch_per_gpu", "at least 1, or null", lambda value: value >= 1)
        require("query_noise random_queries", "0 or more", lambda value: value >= 0)
        require(above_0, "above 0, or null", lambda value: value > 0)
        require("ema_decay", "between 0 and 1, or null", lambda value: 0 < value < 1)
        workers = f"from 0 to {MAX_WORKERS:,}, or null"
        require("workers", workers, lambda value: 0 <= value <= MAX_WORKERS)
        require("stop_epoch", up_to_last, lambda epoch: 1 <= epoch <= self.epochs)
        require("ema_start_epoch", f"at most the last epoch ({last})", lambda epoch: epoch <= last)

        if not matches(self.compile, Compile):
            raise ConfigError(f"train.compile is {self.compile}: it must be {describe(Compile)}")
        if self.compile == "default":
            self.compile = True

        if self.fit_memory and (self.batch_per_gpu is not None or self.accumulate != 1):
            raise ConfigError(
                "train.batch_size=auto chooses how the batch is divided: leave train.accumulate "
                "and train.batch_per_gpu out"
            )
        if self.cache_features and "backbone" not in self.freeze:
            raise ConfigError("train.cache_features needs train.freeze=[backbone]: pass it too")

    @property
    def loader_workers(self) -> int:
        """The number of loader processes of this process."""
        return min(processors(), MOST_WORKERS) if self.workers is None else self.workers

    @property
    def compile_mode(self) -> str | None:
        """The mode of torch.compile, or None for its default and without compiling."""
        return self.compile if isinstance(self.compile, str) else None

    @property
    def last_epoch(self) -> int:
        """The epoch after which the run ends, if patience does not end it before."""
        return self.epochs if self.stop_epoch is None else self.stop_epoch

    def on(self, processes: int) -> "Train":
        """Return the settings for a number of processes, with the batch size that they share."""
        parts = processes * self.accumulate
        if self.batch_per_gpu is not None:
            return replace(self, batch_size=self.batch_per_gpu * parts)

        remainder = self.batch_size % parts
        if remainder:
            below = self.batch_size - remainder
            nearest = [str(size) for size in (below, below + parts) if size]
            raise ConfigError(
                f"train.batch_size {self.batch_size} is not divisible by "
                f"{processes} processes x train.accumulate {self.accumulate}; "
                f"use {' or '.join(nearest)}, the nearest that is"
            )
        return self

    def lasting(self, steps_per_epoch: int) -> "Train":
        """Return the settings for data with so many steps per epoch, with enough epochs."""
        needed = -(-(self.min_steps or 0) // steps_per_epoch)  # rounded up
        return replace(self, epochs=max(self.epochs, needed))

    def micro_batch(self, processes: int) -> int:
        """Return the number of images that each process has at a time."""
        return self.batch_size // (processes * self.accumulate)


@dataclass(kw_only=True)
class Mix:
    """Mixup, cutmix and label smoothing; off by default.

    The images of a micro-batch are mixed with one another.
    """

    # Alpha of the beta distribution of an image's weight (mixup) or area (cutmix); 0: off.
    mixup: float = 0.0
    cutmix: float = 0.0
    prob: float = 1.0  # probability of mixing at all
    switch_prob: float = 0.5  # probability of cutmix instead of mixup, if both are on
    mode: MixMode = MixMode.batch  # one draw per batch, per pair of images, or per image
    # weighted fits one label per image and several, and is what timm does. union keeps labels of 0
    # and 1, for losses that need them.
    labels: MixLabels = MixLabels.weighted
    # Fraction by which labels move towards 1/K (one label per image) or 1/2 (several).
    smoothing: float = 0.0

    @property
    def on(self) -> bool:
        """Whether images are mixed."""
        return self.prob > 0 and (self.mixup > 0 or self.cutmix > 0)

    @property
    def soft(self) -> bool:
        """Whether labels have values between 0 and 1."""
        return (self.on and self.labels is MixLabels.weighted) or self.smoothing > 0

    def __post_init__(self) -> None:
        require = partial(_require, self, within="mix.")
        require("mixup cutmix", "0 (off) or more", lambda value: value >= 0)
        require("prob switch_prob", "from 0 to 1", lambda share: 0 <= share <= 1)
        # At 1, all classes would have the same label.
        require("smoothing", "0 (off) or more, and below 1", lambda share: 0 <= share < 1)


@dataclass(kw_only=True)
class Optim:
    """The optimizer, by its name in timm (adam, adamw, lamb, sgd, ...).

    As in timm, `sgd` has Nesterov momentum; `momentum` is SGD with classical momentum. Both have a
    momentum of 0.9, and onecycle changes it between 0.95 and 0.85.
    """

    name: str = "adam"
    lr: float = 1e-4  # the highest rate of the schedule
    weight_decay: float = 1e-4  # with adam it is L2 regularisation, with adamw decoupled
    decay: Decay = Decay.weights  # what decays; all: biases and norms too, as in Query2Label
    backbone_lr: float | None = None  # the highest rate of the backbone's parameters; null: lr
    # From the head towards the image, the rate of each layer of the backbone is that of the layer
    # before times this factor, as timm's layer decay; it starts from backbone_lr. null: off.
    layer_decay: float | None = None
    # Further arguments of the optimizer: optim.options.momentum=0.8 or 'optim.options={eps: 1e-6}'.
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require = partial(_require, self, within="optim.")
        frozen = "above 0, or null; train.freeze=[backbone] freezes it"
        require("lr", "above 0", lambda value: value > 0)
        require("weight_decay", "0 or more", lambda value: value >= 0)
        require("backbone_lr", frozen, lambda value: value > 0)
        require("layer_decay", "between 0 and 1, or null", lambda value: 0 < value < 1)


@dataclass(kw_only=True)
class Schedule:
    """OneCycle as in the official code (Adam's beta1 cycles too), or warm-up and cosine."""

    name: ScheduleName = ScheduleName.onecycle
    pct_start: float | None = None  # onecycle: fraction of the steps of the rise; null: 0.2
    warmup_epochs: float | None = None  # cosine, cosine_epochs: linear warm-up; null: 0
    min_lr: float | None = None  # cosine, cosine_epochs: the rate at the end; null: 0
    warmup_lr: float | None = None  # cosine_epochs: the first rate; null: 1e-5, as in timm
    # cosine_epochs: number of the last epochs, at min_lr, at most half of train.epochs; null: 0
    cooldown_epochs: int | None = None

    def __post_init__(self) -> None:
        require = partial(_require, self, within="schedule.")
        rates = "warmup_epochs min_lr warmup_lr cooldown_epochs"
        require(rates, "0 or more", lambda value: value >= 0)
        require("pct_start", "between 0 and 1", lambda value: 0 < value < 1)


@dataclass(kw_only=True)
class Log:
    """What an evaluation shows in TensorBoard beside its metrics, and who else gets the numbers."""

    # Validation images that are shown with labels and predictions, always the same ones; 0: none.
    images: int = 8
    # Classes with a precision-recall curve and an AP of their own: those with the most positives
    # among the validation images. The curves over all classes are drawn in any case.
    classes: int = 10
    wandb: bool = False  # send numbers and images to Weights & Biases too
    trackio: bool = False  # likewise to trackio
    project: str | None = None  # of both; null: mldec

    @property
    def trackers(self) -> list[str]:
        """The packages that get the numbers too."""
        return [name for name in ("wandb", "trackio") if getattr(self, name)]

    def __post_init__(self) -> None:
        require = partial(_require, self, within="log.")
        require("images classes", f"from 0 to {MAX_SHOWN}", lambda number: 0 <= number <= MAX_SHOWN)
        # It becomes the name of a file and a part of an address.
        require(
            "project",
            "a name of at most 100 letters, digits and _ . -",
            lambda name: re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", name, re.ASCII) is not None,
        )


class ByName(Enum):
    """How the classes of `init` find their own; null instead: they do not, see `Init`."""

    by_name = "by_name"


@dataclass(kw_only=True)
class Init:
    """What a new run starts from; `init=FILE` alone stands for `init.path=FILE`."""

    path: str | None = MISSING  # a checkpoint, whose fitting weights are copied
    # by_name: the queries and rows of the head that belong to a class are taken from the class of
    # the same name. Case, spaces, hyphens and underscores make no other name.
    classes: ByName | None = None
    # A class list (docs/zero_shot.md): the names in a line are of the same class.
    synonyms: str | None = None


@dataclass(kw_only=True)
class Config:
    """All settings of a run, except the folder that it writes to."""

    name: str = MISSING  # of the run; its folder is outputs/<name>
    seed: int = 0  # for the initial weights, the order of images and the augmentation
    device: str = "auto"  # auto: cuda, else an Apple GPU, else cpu
    # A checkpoint to continue from; "auto": outputs/<name>/checkpoints/last.pt.
    resume: str | None = None
    init: Any = None  # a checkpoint whose fitting weights a new run starts from, or an `Init`
    plugins: list[str] = field(default_factory=list)  # packages of your own that may hold parts
    data: dict[str, Any] = MISSING
    backbone: dict[str, Any] = MISSING
    head: dict[str, Any] = MISSING
    # Without a choice: cross_entropy if data.exclusive is true (one label per image), else bce.
    loss: dict[str, Any] = field(default_factory=dict)
    train: Train = field(default_factory=Train)
    mix: Mix = field(default_factory=Mix)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    log: Log = field(default_factory=Log)

    def on(self, processes: int) -> "Config":
        """Return the config for a number of processes; see `Train.on`."""
        return replace(self, train=self.train.on(processes))

    @property
    def start(self) -> Init:
        """What a new run starts from; its path is None if that is nothing."""
        return self.init if isinstance(self.init, Init) else Init(path=self.init)

    def __post_init__(self) -> None:
        if "/" in self.name or self.name in ("", ".", ".."):
            raise ConfigError(
                f"name '{self.name}' cannot be the name of a folder: choose one without '/'"
            )
        check_device(self.device)
        if not matches(self.init, Init | str | None):
            raise ConfigError(f"init is {self.init}: it must be the path of a checkpoint, or null")

        if self.train.cache_features and self.mix.soft:
            raise ConfigError("mix changes images, train.cache_features must not: leave one out")
        rule = f"from 0 to {MAX_SEED}"
        _require(self, "seed", rule, lambda seed: 0 <= seed <= MAX_SEED, within="")
