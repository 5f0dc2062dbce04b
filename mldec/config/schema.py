"""The fixed settings of a run, with their defaults and ranges.

The four parts (data, backbone, head, loss) are plain dictionaries here. `build.check` validates
them against the signature of the class or function in `_target_`.
"""

import inspect
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import MISSING

from mldec.errors import ConfigError
from mldec.runtime.devices import EngineName, Precision, check_device, loader_processes


def matches(value: Any, hint: Any) -> bool:
    """Return True if a value from YAML fits an annotation, such as `float | None`.

    An integer fits `float`; NaN and infinity do not. True and False fit only `bool`.
    """
    origin = get_origin(hint)
    arguments = get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(matches(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments
    if hint in (None, type(None)):
        return value is None

    # A Python bool is an int, so booleans are checked before numbers.
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
    """Return a description of an annotation, for messages."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    return "null" if hint is type(None) else inspect.formatannotation(hint)


MAX_WORKERS = 1024  # maximum of train.workers
MAX_DEFAULT_WORKERS = 16  # maximum of its default: enough for a GPU, and each worker takes memory

PARTS = ("data", "backbone", "head", "loss")

# Short forms on the command line. `auto` keeps the batch size of the experiment.
SHORT_FORMS = {"train.batch_size=auto": "train.pieces=1"}

# Removed settings, options, parts and commands, with the replacement of each. Commit 5852d40b has
# all of them except train.fit_memory and log.*, which only older checkpoints contain.
# `parse` drops the settings of checkpoints, because they never had an effect on the model. A
# removed loss only prevents a resume, but without its head a model cannot be loaded.
RETIRED = {
    "train.fit_memory": "pass train.batch_size=auto",
    "train.focus_few_images": "pass loss.gamma_neg=2 if there are fewer images than classes",
    "log.classes": "run mldec report",
    "log.trackio": "pass log.wandb=true",
    "mldec predict --merge": "join JSON Lines with cat, and other formats with pandas",
    "mldec predict --progress": "unfinished rows are in FILE.progress, next to the result file",
    "mldec benchmark": "run python scripts/benchmark.py in a checkout",
    "head=ram_match": "pass head=gap_words or another head for word vectors",
    "mldec.heads.RAMMatch": "checkpoints of head=ram_match need commit 5852d40b",
    "backbone=hf": "pass backbone=timm with a backbone.name of timm, or backbone=cvt_w24",
    "loss=vlpl": "pass loss=em_apl or loss=em",
    "mldec.losses.VisionLanguagePseudoLabels": "only commit 5852d40b resumes runs of loss=vlpl",
    "experiment=digits_csv": "pass +experiment=digits_coco data=csv",
    "experiment=digits_yolo": "pass +experiment=digits_coco data=yolo",
    "experiment=digits_voc": "pass +experiment=digits_coco data=voc2007",
    "experiment=digits_openimages": (
        "pass +experiment=digits_coco data=openimages_miil loss=partial"
    ),
    "experiment=digits_imagenet": (
        "scripts/make_digits.py --layout imagenet prints the command that replaces it"
    ),
}


def check_retired(name: str, key: str | None = None) -> None:
    """Raise ConfigError for a removed setting, option or part. `key` is its setting."""
    if name in RETIRED:
        prefix = f"{key}: " if key else ""
        raise ConfigError(f"{prefix}{name} was removed; {RETIRED[name]}")


# Settings and sections that may change when a run is resumed. `batch_per_gpu` only changes the
# resulting `batch_size`, which is compared.
HARMLESS = {
    "name",
    "device",
    "resume",
    "init",
    "log",
    "plugins",
    "data.root",
    "data.cache_dir",
    "data.bad_images",
    "data.changed",
    "data.skip_empty",  # a resumed run keeps its metric
    "train.epochs",
    "train.min_steps",
    "train.stop_epoch",
    "train.patience",
    "train.max_drop",
    "train.workers",
    "train.compile",
    "train.engine",
    "train.fold_batchnorms",
    "train.batch_per_gpu",
    "train.eval_batch_size",
    "train.eval_every",
    "train.log_every",
    "train.pieces",  # a resumed run keeps the pieces of its checkpoint
    "train.nonfinite",
    "train.save_every_steps",
    "train.save_every_minutes",
    "train.keep_last",
}

# Whether to compile, or a mode of torch.compile. True selects the default mode.
Compile = bool | Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

MAX_SEED = 2**63 - 1  # largest seed that both torch and NumPy accept


def _require(
    settings: Any, prefix: str, names: str, rule: str, is_valid: Callable[[Any], bool]
) -> None:
    """Raise ConfigError for an invalid value that is not None. `rule` describes valid values."""
    for name in names.split():
        value = getattr(settings, name)
        if value is not None and not is_valid(value):
            raise ConfigError(f"{prefix}{name} is {value}; it must be {rule}")


class ScheduleName(Enum):
    """Schedule of the learning rate; see `optim.build_schedule`."""

    onecycle = "onecycle"
    cosine = "cosine"
    cosine_epochs = "cosine_epochs"  # constant within an epoch, as in timm
    step = "step"  # reduced after fixed epochs, as torch's StepLR and MultiStepLR


class MixMode(Enum):
    """Granularity of the random numbers of mixup and cutmix."""

    batch = "batch"  # one draw for all images
    pair = "pair"  # one draw for two images that are mixed with each other
    elem = "elem"  # one draw per image


class MixLabels(Enum):
    """Labels of an image that is mixed from two; see `data.mixing.Mixing`."""

    weighted = "weighted"  # average weighted by the share of each image, from 0 to 1, as in timm
    union = "union"  # union of the labels of both images, 0 or 1, for multi-label data


class NonFinite(Enum):
    """Action after a non-finite loss or gradient."""

    stop = "stop"
    skip = "skip"  # skip the step, and count it


class FreezeBatchNorm(Enum):
    """Batch-norm layers whose statistics, scale and shift are frozen."""

    frozen = "frozen"  # layers inside the modules of train.freeze
    all = "all"


class Decay(Enum):
    """Parameters with weight decay."""

    weights = "weights"  # parameters with at least two dimensions, except biases
    all = "all"


@dataclass(kw_only=True)
class Train:
    """The training loop."""

    epochs: int = 40  # length of the schedule
    min_steps: int | None = None  # minimum number of optimizer steps; raises `epochs` if necessary
    stop_epoch: int | None = None  # last epoch of the run; the schedule is not shortened
    # Early stopping: number of successive evaluations without an improvement of the first metric.
    patience: int | None = None
    # Early stopping: end when the first metric is more points than this below its best value.
    max_drop: float | None = None
    batch_size: int = 56  # images per optimizer step, over all processes and micro-batches
    # Images per process and micro-batch. batch_size becomes batch_per_gpu x processes x accumulate.
    batch_per_gpu: int | None = None
    accumulate: int = 1  # micro-batches per optimizer step
    # Number of pieces of each micro-batch, doubled after each out-of-memory error of CUDA.
    # train.batch_size=auto sets 1. null: micro-batches are never divided.
    pieces: int | None = None
    # Repeated augmentation: versions of an image per batch; an epoch has 1/repeats of the images.
    repeats: int = 1
    eval_batch_size: int = 64  # images per batch on each process
    # Loader processes per rank; null: one per processor available to the rank, at most 16. On CUDA,
    # two processors are left for the main thread and for copies to pinned memory.
    workers: int | None = None
    # Number format of the forward pass. config.yaml records the format in use. auto is bf16 or fp16
    # on CUDA, and fp32 on a CPU, or bf16 with cached tokens if the CPU has instructions for it.
    precision: Precision = Precision.auto
    # Program that computes the features of a head that is fitted in closed form, on a CPU. auto is
    # openvino if it is installed. config.yaml records the program in use.
    engine: EngineName = EngineName.auto
    # Use TF32 in float32 matrix products and convolutions on CUDA.
    tf32: bool = False
    # Full names of parameters, or prefixes up to a dot. They are neither trained nor decayed.
    freeze: list[str] = field(default_factory=list)
    # Batch norms kept in evaluation mode and not trained, as in Query2Label; null: none.
    freeze_batchnorm: FreezeBatchNorm | None = None
    # Initialize the bias of each class from its frequency among the training labels.
    start_at_frequency: bool = False
    # Compute the tokens of a frozen backbone once, and train the head on them, unaugmented.
    # The files in data.cache_dir are reused by later runs with any head, and by evaluations.
    cache_features: bool = False
    clip_grad: float | None = None  # maximum total gradient norm; null: no clipping
    ema_decay: float | None = 0.9997  # decay of the moving average of the weights; null: none
    # First epoch with a moving average, from 1. The average starts as a copy of the weights.
    ema_start_epoch: int = 1
    channels_last: bool = False  # memory format of images and weights
    # true: compile with the default mode. Other modes of torch.compile: reduce-overhead,
    # max-autotune, max-autotune-no-cudagraphs.
    compile: Any = False
    # Fold batch norms into convolutions in evaluations: faster, and equal up to rounding.
    fold_batchnorms: bool = False
    deterministic: bool = False  # bitwise reproducible on CUDA, but slower
    # Noise on the word queries in training, as a fraction of their spread; see step.augment.
    query_noise: float = 0.0
    random_queries: int = 0  # extra word queries in training, each with a positive target
    # Synchronize batch-norm statistics across all processes (CUDA only).
    sync_batchnorm: bool = False
    # Average running statistics over the processes after each epoch, as timm's --dist-bn reduce.
    # false: evaluate the statistics of the main process, as always for the moving average.
    average_batchnorm: bool = False
    nonfinite: NonFinite = NonFinite.stop
    # Steps between checkpoints, in addition to the end of each epoch; null: never.
    save_every_steps: int | None = None
    # Minutes between checkpoints, in addition to the end of each epoch; null: never.
    save_every_minutes: float | None = 10.0
    # Number of versions of the last checkpoint: last.pt, last.1.pt, ... resume=auto falls back to
    # older versions.
    keep_last: int = 2
    eval_every: int = 1  # epochs between evaluations; the last epoch is always evaluated
    log_every: int = 50  # steps between lines of the log

    def __post_init__(self) -> None:
        require = partial(_require, self, "train.")
        names = "epochs batch_size accumulate repeats eval_batch_size eval_every log_every"
        require(f"{names} keep_last ema_start_epoch", "at least 1", lambda value: value >= 1)
        names = "min_steps patience batch_per_gpu pieces"
        require(names, "at least 1, or null", lambda value: value >= 1)
        require("query_noise random_queries", "0 or more", lambda value: value >= 0)
        names = "max_drop save_every_steps save_every_minutes clip_grad"
        require(names, "above 0, or null", lambda value: value > 0)
        require("ema_decay", "between 0 and 1, or null", lambda value: 0 < value < 1)

        rule = f"from 0 to {MAX_WORKERS:,}, or null"
        require("workers", rule, lambda value: 0 <= value <= MAX_WORKERS)
        rule = f"from 1 to train.epochs ({self.epochs}), or null"
        require("stop_epoch", rule, lambda value: 1 <= value <= self.epochs)
        rule = f"at most the last epoch ({self.last_epoch})"
        require("ema_start_epoch", rule, lambda value: value <= self.last_epoch)

        if not matches(self.compile, Compile):
            raise ConfigError(f"train.compile is {self.compile}; it must be {describe(Compile)}")
        if self.compile == "default":
            self.compile = True

        if self.cache_features and "backbone" not in self.freeze:
            raise ConfigError(
                "train.cache_features: the backbone is not frozen; pass train.freeze=[backbone]"
            )

    def loader_workers(self, device_type: str) -> int:
        """Return the number of loader processes of this rank for "cpu", "cuda" or "mps"."""
        if self.workers is None:
            return min(loader_processes(device_type), MAX_DEFAULT_WORKERS)
        return self.workers

    @property
    def compile_mode(self) -> str | None:
        """Mode of torch.compile; None for its default mode, or if the model is not compiled."""
        return self.compile if isinstance(self.compile, str) else None

    @property
    def last_epoch(self) -> int:
        """Last epoch of the run without early stopping."""
        return self.epochs if self.stop_epoch is None else self.stop_epoch

    def for_world_size(self, processes: int) -> "Train":
        """Return the settings with the batch size that follows from `batch_per_gpu`, if it is set.

        Raises:
            ConfigError: If the batch size is not divisible by processes x accumulate.
        """
        if self.pieces is not None and processes > 1:
            raise ConfigError(
                f"train.batch_size=auto: it supports one process, not {processes}; "
                f"pass train.accumulate instead"
            )
        parts = processes * self.accumulate
        if self.batch_per_gpu is not None:
            return replace(self, batch_size=self.batch_per_gpu * parts)

        remainder = self.batch_size % parts
        if remainder:
            below = self.batch_size - remainder
            above = below + parts
            nearest = [str(size) for size in (below, above) if size > 0]
            raise ConfigError(
                f"train.batch_size: {self.batch_size} is not divisible by {processes} processes x "
                f"train.accumulate={self.accumulate}; use {' or '.join(nearest)}"
            )
        return self

    def with_resolved_epochs(self, steps_per_epoch: int) -> "Train":
        """Return the settings with `epochs` raised to cover `min_steps` optimizer steps."""
        needed = -(-(self.min_steps or 0) // steps_per_epoch)  # rounded up
        return replace(self, epochs=max(self.epochs, needed))

    def micro_batch(self, processes: int) -> int:
        """Return the number of images per process and micro-batch."""
        return self.batch_size // (processes * self.accumulate)


@dataclass(kw_only=True)
class Mix:
    """Mixup, cutmix and label smoothing; off by default.

    The images of a micro-batch are mixed with each other.
    """

    mixup: float = 0.0  # alpha of the beta distribution for the weight of an image; 0: off
    cutmix: float = 0.0  # alpha of the beta distribution for the area of an image; 0: off
    prob: float = 1.0  # probability of mixing
    switch_prob: float = 0.5  # probability of cutmix instead of mixup, if both are on
    mode: MixMode = MixMode.batch
    labels: MixLabels = MixLabels.weighted
    # Fraction by which labels move toward 1/K (single-label data) or 1/2 (multi-label data).
    smoothing: float = 0.0

    @property
    def enabled(self) -> bool:
        """Whether mixup or cutmix is enabled."""
        return self.prob > 0 and (self.mixup > 0 or self.cutmix > 0)

    @property
    def soft(self) -> bool:
        """Whether labels can have values between 0 and 1."""
        return (self.enabled and self.labels is MixLabels.weighted) or self.smoothing > 0

    def __post_init__(self) -> None:
        require = partial(_require, self, "mix.")
        require("mixup cutmix", "0 (off) or more", lambda value: value >= 0)
        require("prob switch_prob", "from 0 to 1", lambda share: 0 <= share <= 1)
        # At 1, all classes would have the same label.
        require("smoothing", "0 (off) or more, and below 1", lambda share: 0 <= share < 1)


@dataclass(kw_only=True)
class Optim:
    """The optimizer.

    `sgd` has Nesterov momentum and `momentum` is SGD with classical momentum, as in timm. Both
    have a momentum of 0.9, which onecycle varies between 0.95 and 0.85.
    """

    name: str = "adam"  # name in timm, such as adam, adamw, lamb or sgd
    lr: float = 1e-4  # maximum learning rate of the schedule
    weight_decay: float = 1e-4  # L2 regularization with adam, decoupled with adamw
    decay: Decay = Decay.weights  # all: biases and norms decay too, as in Query2Label
    backbone_lr: float | None = None  # maximum learning rate of the backbone; null: lr
    # Factor between the learning rates of successive backbone layers, from the head to the input,
    # as timm's layer decay. The last layer has the rate backbone_lr. null: off.
    layer_decay: float | None = None
    # Other arguments of the optimizer: optim.options.momentum=0.8 or 'optim.options={eps: 1e-6}'.
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require = partial(_require, self, "optim.")
        require("lr", "above 0", lambda value: value > 0)
        require("weight_decay", "0 or more", lambda value: value >= 0)
        rule = "above 0, or null; train.freeze=[backbone] freezes it"
        require("backbone_lr", rule, lambda value: value > 0)
        require("layer_decay", "between 0 and 1, or null", lambda value: 0 < value < 1)


@dataclass(kw_only=True)
class Schedule:
    """OneCycle as in the official code (Adam's beta1 cycles too), or warm-up and decay."""

    name: ScheduleName = ScheduleName.onecycle
    pct_start: float | None = None  # onecycle: fraction of the steps with a rising rate; null: 0.2
    warmup_epochs: float | None = None  # cosine, cosine_epochs, step: linear warm-up; null: 0
    min_lr: float | None = None  # cosine, cosine_epochs: final rate; null: 0
    warmup_lr: float | None = None  # cosine_epochs: initial rate; null: 1e-5, as in timm
    # cosine_epochs: number of final epochs at min_lr, at most half of train.epochs; null: 0
    cooldown_epochs: int | None = None
    # step: ascending numbers of epochs after which gamma multiplies the rate
    milestones: list[int] = field(default_factory=list)
    gamma: float | None = None  # step: factor of the rate at each milestone; null: 0.1

    def __post_init__(self) -> None:
        require = partial(_require, self, "schedule.")
        names = "warmup_epochs min_lr warmup_lr cooldown_epochs"
        require(names, "0 or more", lambda value: value >= 0)
        require("pct_start gamma", "between 0 and 1", lambda value: 0 < value < 1)
        rule = "ascending epochs from 1, such as [10,20]"
        require("milestones", rule, self._are_milestones)

    def _are_milestones(self, epochs: list[int]) -> bool:
        """Return True for ascending epochs. Only `step` requires any."""
        if self.name is ScheduleName.step and not epochs:
            return False
        return epochs == sorted(set(epochs)) and all(epoch >= 1 for epoch in epochs)


@dataclass(kw_only=True)
class Log:
    """TensorBoard, and Weights & Biases, which receives what is written to TensorBoard."""

    # Number of validation images that are shown with the predictions of the best evaluation. With
    # `wandb`, they are uploaded. 0: none
    images: int = 16
    wandb: bool = False  # log to Weights & Biases
    project: str | None = None  # name of the project; null: mldec

    def __post_init__(self) -> None:
        _require(self, "log.", "images", "0 or more", lambda value: value >= 0)


class ByName(Enum):
    """Matching of the classes of a checkpoint with the classes of the data; see `Init`."""

    by_name = "by_name"


@dataclass(kw_only=True)
class Init:
    """Initial weights of a new run. `init=FILE` is short for `init.path=FILE`."""

    path: str | None = MISSING  # a checkpoint; tensors that fit the model are copied
    # by_name: copy the queries and rows of the head from the class with the same name. Names are
    # compared ignoring case, spaces, hyphens and underscores. null: no matching.
    classes: ByName | None = None
    # A class list (docs/zero_shot.md) with the names of a class in each line.
    synonyms: str | None = None


@dataclass(kw_only=True)
class Config:
    """All settings of a run, except the folder that it writes to."""

    name: str = MISSING  # name of the run; its folder is outputs/<name>
    seed: int = 0  # seed of the initial weights, the image order and the augmentation
    device: str = "auto"  # auto: cuda, then an Apple GPU, then cpu
    # Checkpoint to resume from; "auto": outputs/<name>/checkpoints/last.pt.
    resume: str | None = None
    init: Any = None  # checkpoint with initial weights, or an `Init`
    plugins: list[str] = field(default_factory=list)  # third-party packages that may define parts
    data: dict[str, Any] = MISSING  # the data set; data=NAME selects an option file
    backbone: dict[str, Any] = MISSING  # the network that maps images to tokens
    head: dict[str, Any] = MISSING  # maps tokens to logits
    # The training loss. Default: cross_entropy if data.exclusive is true (one label per image),
    # else bce.
    loss: dict[str, Any] = field(default_factory=dict)
    train: Train = field(default_factory=Train)
    mix: Mix = field(default_factory=Mix)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    log: Log = field(default_factory=Log)

    def for_world_size(self, processes: int) -> "Config":
        """Return the config for a number of processes; see `Train.for_world_size`."""
        return replace(self, train=self.train.for_world_size(processes))

    @property
    def start(self) -> Init:
        """Initial weights of a new run; its path is None without `init`."""
        return self.init if isinstance(self.init, Init) else Init(path=self.init)

    def __post_init__(self) -> None:
        if not {"/", "\0"}.isdisjoint(self.name) or self.name in ("", ".", ".."):
            raise ConfigError(
                f"name: '{self.name}' is not a valid folder name; choose one without '/'"
            )
        check_device(self.device)
        if not matches(self.init, Init | str | None):
            raise ConfigError(f"init is {self.init}; it must be the path of a checkpoint, or null")
        if self.train.cache_features and self.mix.soft:
            raise ConfigError("train.cache_features: mixed images cannot be cached; remove mix")
        rule = f"from 0 to {MAX_SEED}"
        _require(self, "", "seed", rule, lambda s: matches(s, int) and 0 <= s <= MAX_SEED)
