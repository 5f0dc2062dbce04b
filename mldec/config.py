"""Every fixed setting of a run with its default, and the way from YAML to it.

The four parts (data, backbone, head, loss) are plain dictionaries here: the signature of the class that `_target_`
names is their schema, and `build.check` holds them to it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import hydra
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from mldec.errors import ConfigError, suggest

PARTS = ("data", "backbone", "head", "loss")
PART_KEY = re.compile(rf"(?:{'|'.join(PARTS)})\.")


def _require(good: bool, name: str, value: Any, rule: str) -> None:
    if not good:
        raise ConfigError(f"{name} is {value}: it must be {rule}")


class Precision(Enum):
    """Number format of the forward pass; weights, losses and metrics stay in float32."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class ScheduleName(Enum):
    """Course of the learning rate, step by step."""

    onecycle = "onecycle"
    cosine = "cosine"


@dataclass(kw_only=True)
class Train:
    """How the loop runs. The batch size is global: it is divided over processes and accumulation steps."""

    epochs: int = 40
    batch_size: int = 56
    accumulate: int = 1  # micro-batches an optimiser step
    eval_batch_size: int = 64  # images at a time on each process
    workers: int = 4  # loader processes on each rank
    precision: Precision = Precision.fp32
    clip_grad: float | None = None  # largest norm of all gradients together; null: no clipping
    ema_decay: float | None = 0.9997  # null: no moving average of the weights
    channels_last: bool = False
    compile: bool = False
    deterministic: bool = False  # same bits again on CUDA, at some cost in speed
    eval_every: int = 1  # epochs; the last epoch is always evaluated
    log_every: int = 50  # steps

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "eval_batch_size", "eval_every", "log_every"):
            _require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        _require(self.workers >= 0, "train.workers", self.workers, "0 or more")
        if self.clip_grad is not None:
            _require(self.clip_grad > 0, "train.clip_grad", self.clip_grad, "above 0, or null")
        if self.ema_decay is not None:
            _require(0 < self.ema_decay < 1, "train.ema_decay", self.ema_decay, "between 0 and 1, or null")


@dataclass(kw_only=True)
class Optim:
    """The optimiser, by its name in timm (adam, adamw, lamb, sgd, ...)."""

    name: str = "adam"
    lr: float = 1e-4  # the highest of the schedule
    weight_decay: float = 1e-4  # on weights of two or more dimensions; with adam it is L2, with adamw decoupled
    options: dict[str, Any] = field(default_factory=dict)  # further arguments, such as {eps: 1e-6}

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optim.lr", self.lr, "above 0")
        _require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "0 or more")


@dataclass(kw_only=True)
class Schedule:
    """OneCycle as the official code (Adam's beta1 cycles too), or warm-up and cosine."""

    name: ScheduleName = ScheduleName.onecycle
    pct_start: float | None = None  # onecycle: share of the steps that rise; null: 0.2
    warmup_epochs: float | None = None  # cosine: epochs of linear warm-up; null: 0
    min_lr: float | None = None  # cosine: the rate at the end; null: 0

    def __post_init__(self) -> None:
        onecycle = self.name is ScheduleName.onecycle
        for name in ("warmup_epochs", "min_lr") if onecycle else ("pct_start",):
            if getattr(self, name) is not None:
                raise ConfigError(f"schedule.{name} has no effect with schedule.name={self.name.value}: leave it out")
        if self.pct_start is not None:
            _require(0 < self.pct_start < 1, "schedule.pct_start", self.pct_start, "between 0 and 1")
        for name in ("warmup_epochs", "min_lr"):
            value = getattr(self, name)
            _require(value is None or value >= 0, f"schedule.{name}", value, "0 or more")


@dataclass(kw_only=True)
class Config:
    """A run, but for the folder it writes to."""

    name: str = MISSING  # of the run; its folder is outputs/<name>
    seed: int = 0
    device: str = "auto"  # auto: cuda if there is one, else cpu
    resume: str | None = None  # "auto": go on from outputs/<name>/checkpoints/last.pt; or a checkpoint file
    init: str | None = None  # start from the weights of this checkpoint that fit, as a new run
    plugins: list[str] = field(default_factory=list)  # packages of your own that may hold parts
    data: dict[str, Any] = MISSING
    backbone: dict[str, Any] = MISSING
    head: dict[str, Any] = MISSING
    loss: dict[str, Any] = MISSING
    train: Train = field(default_factory=Train)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        if "/" in self.name or self.name in ("", ".", ".."):
            raise ConfigError(f"name '{self.name}' cannot be the name of a folder: choose one without '/'")
        if self.device != "auto" and self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise ConfigError(f"device '{self.device}' is unknown: choose auto, cpu, cuda or cuda:<number>")
        if self.resume and self.init:
            raise ConfigError(f"init={self.init} has no effect with resume={self.resume}: leave one out")


ConfigStore.instance().store(name="schema", node=Config)

# What may differ between a run and its continuation without making it another run.
HARMLESS = {"name", "device", "resume", "init", "plugins", "data.root", "train.epochs", "train.workers"}
HARMLESS |= {"train.eval_batch_size", "train.eval_every", "train.log_every", "train.compile"}


def config_dir() -> str:
    """Return the folder of the YAML files: inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    return str(installed if installed.is_dir() else package.parent / "configs")


def experiments() -> list[str]:
    """Return the names that `+experiment=` takes."""
    return sorted(path.stem for path in Path(config_dir(), "experiment").glob("*.yaml"))


def prepare(words: list[str]) -> list[str]:
    """Return the command line as Hydra takes it, after refusing what is misspelt.

    A part takes any argument of its class, listed in its YAML or not: `head.num_groups=20` becomes `++head...`, and
    `build.check` holds it to the signature. Flags come first, because Hydra's parser loses settings behind them.
    """
    flags, settings = [], []
    own_folder = any(word.startswith(("--config-dir", "-cd")) for word in words)
    for word in words:
        key, equals, value = word.partition("=")
        bare = key.lstrip("+~")
        if not equals or word.startswith("-"):
            flags.append(word)
            continue
        if bare == "experiment":
            _check_experiment(word, value, experiments(), own_folder)
        elif not bare.startswith("hydra") and not PART_KEY.match(bare):
            check_key(bare.partition("@")[0])
        settings.append(f"++{word}" if key == bare and PART_KEY.match(bare) else word)
    return flags + settings


def _check_experiment(word: str, value: str, known: list[str], own_folder: bool) -> None:
    if not word.startswith("+"):
        raise ConfigError(f"write +experiment={value}, with a plus: it adds to the config")
    if value not in known and not own_folder and re.fullmatch(r"[\w-]+", value):  # a sweep names several
        raise ConfigError(f"there is no experiment '{value}'{suggest(value, known)}")


def compose(words: list[str]) -> Config:
    """Return the config of a command line such as ["+experiment=digits", "train.epochs=1"]."""
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return parse(hydra.compose("config", prepare(words)))


def parse(values: Any) -> Config:
    """Turn Hydra's composition, or the dictionary in a checkpoint, into a `Config`; OmegaConf ends here.

    Raises:
        ConfigError: for an unknown key, a wrong type, a missing value or one out of range.
    """
    try:
        # Plain first: a key added with '+' is in the composed node, and only a merge into the schema refuses it.
        plain = OmegaConf.to_container(values, resolve=True) if OmegaConf.is_config(values) else values
        merged = OmegaConf.merge(OmegaConf.structured(Config), plain)
        missing = sorted(str(key) for key in OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(f"nothing is chosen for {', '.join(missing)}: pass {missing[0]}=NAME, or an experiment")
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, Config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as plain dictionaries, lists, numbers and strings, for YAML and checkpoints."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def to_yaml(config: Config) -> str:
    """Return the config as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def override(config: Config, words: list[str]) -> Config:
    """Return the config with words such as `data=coco data.root=/data/coco` merged in, as `train` takes them.

    Raises:
        ConfigError: for a word without '=', an unknown key or a wrong type.
    """
    base, changes = to_dict(config), []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or word.startswith("-"):
            raise ConfigError(f"'{word}' is not understood: write key=value, such as data.root=/data/coco")
        check_key(key)
        if key in PARTS:
            base[key] = option(key, value)
        else:
            changes.append(word)
    try:
        return parse(OmegaConf.merge(OmegaConf.create(base), OmegaConf.from_dotlist(changes)))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error


def option(part: str, name: str) -> dict[str, Any]:
    """Return the node of an option file, such as data=coco, its interpolations as they are."""
    folder = Path(config_dir(), part)
    known = [path.stem for path in folder.glob("*.yaml")]
    if name not in known:
        raise ConfigError(f"{part}={name}: there is no such option{suggest(name, known)}")
    node = OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml"))
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def check_key(key: str) -> None:
    """Raise a `ConfigError` with the nearest name if no setting is called `key`; keys inside a part always pass."""
    kind: Any = Config
    names = key.split(".")
    for depth, name in enumerate(names):
        if not is_dataclass(kind):
            return
        known = [item.name for item in fields(kind)]
        if name not in known:
            here = ".".join(names[:depth])
            raise ConfigError(f"{key}: {here or 'the config'} has no setting '{name}'{suggest(name, known)}")
        kind = get_type_hints(kind)[name]


def diff(old: Config, new: Config) -> list[str]:
    """Return `key: old -> new` for each setting that differs and matters to the numbers of a run."""
    before, after = _flatten(to_dict(old)), _flatten(to_dict(new))
    keys = [key for key in {**before, **after} if key not in HARMLESS and before.get(key) != after.get(key)]
    return [f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys]


def explain(error: BaseException) -> str:
    """Say in one line what OmegaConf or Hydra found wrong."""
    if isinstance(error, InterpolationToMissingValueError):  # ${name}, the folder of the run
        return f"no run is chosen: pass +experiment=NAME, one of {', '.join(experiments())}"
    text = str(error).partition("Config search path")[0]
    # The error below it, if any, has what was wrong with which key.
    reason, _, named = str(error.__cause__ or text).partition("full_key: ")
    if not named.strip():
        return " ".join(text.split())
    key = named.split()[0]
    try:
        check_key(key)
    except ConfigError as better:
        return str(better)
    return f"{key}: {reason.strip().splitlines()[-1]}"


def _flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
