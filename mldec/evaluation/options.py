"""Options of an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Which checkpoint is evaluated, and how; the fields are options of the commands."""

    checkpoint: str  # as the user names it, for messages
    settings: list[str] = field(default_factory=list)  # "key=value", replacing those of the config
    image_size: int | None = None  # pixels per side; None: that of the checkpoint
    threshold: float | None = None  # score above which a class is present, in [0, 1]

    # Other classes, see `evaluation.class_list`.
    class_list: str | None = None  # file with the names of the classes
    vectors: str | None = None  # file of their word vectors, or a text encoder
    seen: str | None = None  # file with the names of the training classes

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "EvalOptions":
        """Return the options among the values of a command line."""
        names = [option.name for option in fields(cls)]
        return cls(**{name: values[name] for name in names if name in values})
