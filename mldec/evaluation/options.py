"""Options of a model and of an evaluation: one dataclass for the command line and for Python.

An option is checked when its dataclass is created, so that `mldec.load(top=0)` and `--top 0` have
the same error. This module does not import torch, because the command line needs it first.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Self

from mldec.errors import ConfigError, OptionError, UserError, suggest
from mldec.runtime.devices import MAX_IMAGE_SIZE, EngineName, Precision

# Parts of --help.
PRECISIONS = [precision.value for precision in Precision]
PRECISION = (
    "number format; auto: bf16 if the GPU supports it, else fp16, and fp32 on a CPU; default: "
)
THRESHOLD = (
    "score in [0, 1] above which a class is predicted; default: the calibrated thresholds of the "
    "checkpoint, else data.threshold"
)


def whole(value: Any, *, smallest: int = 0) -> int:
    """Convert text or a number to an integer of at least `smallest`. Raises ValueError."""
    if not str(value).isdecimal() or int(value) < smallest:
        raise ValueError(f"{value} is not an integer of at least {smallest}")
    return int(value)


positive = partial(whole, smallest=1)


def image_side(value: Any) -> int:
    """Convert to an image size in pixels, from 1 to `MAX_IMAGE_SIZE`."""
    side = positive(value)
    if side > MAX_IMAGE_SIZE:
        raise ValueError(f"{value} is above {MAX_IMAGE_SIZE} pixels")
    return side


def fraction(value: Any) -> float:
    """Convert to a number in [0, 1]."""
    number = float(value)
    if not 0 <= number <= 1:
        raise ValueError(f"{value} is not in [0, 1]")
    return number


def one_of(*choices: str) -> Callable[[Any], str]:
    """Return a check that the value is one of several texts."""

    def check(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"invalid choice: {value!r} (choose from {', '.join(choices)})")
        return str(value)

    return check


def texts(value: str | Sequence[str]) -> tuple[str, ...]:
    """Convert one or several texts."""
    return (value,) if isinstance(value, str) else tuple(value)


def split_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """Convert a list of class names, or text with commas. None, or a duplicate, is an error."""
    names = value.split(",") if isinstance(value, str) else value
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{value!r} is not a list of class names; write them as text")
    names = tuple(name.strip() for name in names if name.strip())
    if not names:
        raise ValueError(f"{value!r} has no class names; separate names with commas")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"duplicate name {name!r}; pass each name once")
    return names


def option(
    text: str,
    check: Callable[[Any], Any] = str,
    default: Any = None,
    *,
    choices: Sequence[str] = (),
    **argument: Any,
) -> Any:
    """Return the field of an option, for the command line and for Python.

    `text` is the description in --help. `check` converts a value, unless it is None, and raises
    ValueError or TypeError. The valid texts in `choices` replace it. `argument` are other arguments
    of argparse's `add_argument`, such as metavar.
    """
    argument["help"] = text
    if choices:
        check = one_of(*choices)
        argument["choices"] = choices
    return field(default=default, metadata={"check": check, "argument": argument})


def boolean(value: Any) -> bool:
    """Return True or False. Other values, such as the text "no", raise ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not True or False")
    return value


def flag(text: str) -> Any:
    """Return the field of an option without a value, which is False by default."""
    return option(text, boolean, False)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class of the options of a command. The fields have the names of the options."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None or "check" not in each.metadata:
                continue
            try:
                value = each.metadata["check"](value)
            except (TypeError, ValueError) as error:
                raise OptionError(each.name, str(error)) from error
            object.__setattr__(self, each.name, value)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the options of a parsed command line, ignoring the values of other classes."""
        given = {}
        for name in cls.__dataclass_fields__.keys() & values.keys():
            if values[name] is not None:
                given[name] = values[name]
        return cls(**given)

    @classmethod
    def from_keywords(
        cls, keywords: Mapping[str, Any], known: Collection[str] | None = None, **fixed: Any
    ) -> Self:
        """Return the options of keyword arguments, of which None selects the default.

        `known` are the accepted names; None accepts all fields. `fixed` are the values of other
        fields. Raises ConfigError for an unknown name or an invalid value.
        """
        names = cls.__dataclass_fields__.keys() & (known or cls.__dataclass_fields__)
        names -= fixed.keys()
        for name in keywords:
            if name not in names:
                raise ConfigError(f"{name}: unknown option{suggest(name, sorted(names))}")
        given = {name: value for name, value in keywords.items() if value is not None}
        return cls(**given, **fixed)


def option_of(name: str) -> str:
    """Return the option of a field, such as --batch-size for batch_size."""
    return f"--{name.replace('_', '-')}"


@contextmanager
def naming_keywords(kind: type[Options]) -> Iterator[None]:
    """Name the options in messages for callers in Python: class_names instead of --class-names."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for name in kind.__dataclass_fields__:
            # Another option may begin with the same letters.
            message = re.sub(rf"{option_of(name)}(?![\w-])", name, message)
        error.args = (message,)
        raise


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """How a model is opened: the checkpoint, its input and classes, and the computation."""

    checkpoint: str = field(metadata={"check": str})
    weights: str | None = option(
        "averaged or raw weights of best.pt; default: the better ones", choices=("ema", "raw")
    )
    plugin: Sequence[str] = option(
        "third-party package that defines parts", texts, (), type=str, action="append"
    )
    image_size: int | None = option(
        "pixels per side; default: the size in the checkpoint", image_side, metavar="S"
    )
    class_names: str | None = option(
        "file with other class names, one per line, in the order of the checkpoint", metavar="FILE"
    )
    thresholds: str | None = option(
        "file with one threshold per class: one number per line in the order of the "
        "checkpoint, or a .csv file with the columns class and threshold",
        metavar="FILE",
    )
    views: str | None = option(
        "average the logits of two views of each image: mirrored (flip) or at two sizes",
        choices=("flip", "scales"),
    )

    device: str = option("auto, cpu, mps, cuda or cuda:<number>", default="auto")
    precision: str | None = option(
        f"{PRECISION}on a GPU that of the training if fp16 or bf16, else auto; on a CPU fp32",
        choices=PRECISIONS,
    )
    compile: bool = flag(
        "compile the network with torch.compile: takes minutes, and is faster for many images"
    )
    engine: str = option(
        "program that computes the backbone on a CPU; auto: openvino if it is installed, and "
        "for head=ridge the engine of the training",
        default="auto",
        choices=[engine.value for engine in EngineName],
    )

    classes: Sequence[str] | None = option(
        "other classes of a zero-shot model, separated by commas",
        split_names,
        type=str,
        metavar="NAMES",
    )
    vectors: str | None = option(
        "word vectors of --classes, or a text encoder; default: the text encoder of the "
        "training; see DATASETS.md, Word vectors",
        metavar="FILE|clip:MODEL",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes is not None and self.class_names is not None:
            raise OptionError("classes", "it excludes class_names, a file; remove one")
        if self.compile and self.engine == EngineName.openvino.value:
            fault = "openvino does not support a compiled network"
            raise OptionError("engine", f"{fault}; remove engine or compile")


@dataclass(frozen=True, kw_only=True)
class EvalOptions(ModelOptions):
    """Options of an evaluation: a model, its data and the classes."""

    settings: Sequence[str] = ()  # "key=value", overrides of the config
    in_memory: Any = None  # data set that is passed in Python, see `build.data`
    precision: str | None = option(
        f"{PRECISION}that of the training; on a CPU fp32", choices=PRECISIONS
    )
    threshold: float | None = option(THRESHOLD, fraction)

    # Evaluation of other classes, see `evaluation.class_list`.
    class_list: str | None = option(
        "evaluate these classes of the data: one line per class with its name in the data and "
        "synonyms, separated by semicolons (see docs/zero_shot.md)",
        metavar="FILE",
    )
    vectors: str | None = option(
        "word vectors of the names in --class-list, or clip:MODEL:WEIGHTS", metavar="FILE"
    )
    seen: str | None = option(
        "with --class-list: the training classes; default: from the checkpoint", metavar="FILE"
    )

    @property
    def overrides(self) -> list[str]:
        """The settings, with the precision as a setting of the run."""
        if self.precision is None:
            return [*self.settings]
        return [*self.settings, f"train.precision={self.precision}"]

    def sets(self, key: str) -> bool:
        """Return True if there is a setting for a key such as "data.threshold"."""
        return any(setting.startswith(f"{key}=") for setting in self.overrides)
