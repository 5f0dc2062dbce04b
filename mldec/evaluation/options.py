"""Options of an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self


class FromValues:
    """Base class of options that are selected from the values of a command line."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Select the values that are fields of this dataclass."""
        known = cls.__dataclass_fields__  # type: ignore[attr-defined]
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True, kw_only=True)
class EvalOptions(FromValues):
    """Options of an evaluation, named as the options of the commands."""

    checkpoint: str  # path on the command line, for messages
    settings: list[str] = field(default_factory=list)  # "key=value", overrides of the config
    in_memory: Any = None  # data set that is passed in Python, see `build.data`
    image_size: int | None = None  # pixels per side; None: from the checkpoint
    threshold: float | None = None  # score above which a class is present, in [0, 1]

    # Evaluation of other classes, see `evaluation.class_list`.
    class_list: str | None = None  # file with class names
    vectors: str | None = None  # file with word vectors, or a text encoder
    seen: str | None = None  # file with the names of the training classes

    def sets(self, key: str) -> bool:
        """Return True if the command line has a value for a key such as "data.threshold"."""
        return any(setting.startswith(f"{key}=") for setting in self.settings)
