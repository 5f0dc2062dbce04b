"""What is answered of an image: its best classes, all scores, or the classes that are present."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from mldec.data.base import Classes
from mldec.errors import ConfigError, printable


class Content(Enum):
    """What a row holds of an image."""

    TOP = "top"  # the classes with the highest scores
    SCORES = "scores"  # the scores of all classes
    DECISIONS = "decisions"  # the names of the classes that are present


@dataclass(frozen=True)
class Prediction:
    """A class in the answer for an image.

    Attributes:
        index: of the class.
        name: of the class.
        score: from 0 to 1.
        threshold: the lowest score of its class, where each class has one.
    """

    index: int
    name: str
    score: float
    threshold: float | None = None

    def entry(self) -> dict[str, Any]:
        """Return the prediction as it stands in JSON."""
        values = {"name": self.name, "score": self.score, "threshold": self.threshold}
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True)
class Row:
    """The answer for an image: its predictions or all scores, or an error.

    Attributes:
        image: its name.
        predictions: highest score first; empty after an error.
        scores: float32 [K], in [0, 1]; None after an error.
        features: float32 [C], if they are wanted; None after an error.
        error: why there is no answer, in one line.
        picture: path of the picture with heat maps, if it is wanted.
    """

    image: str
    predictions: Sequence[Prediction] = ()
    scores: Tensor | None = None
    features: Tensor | None = None
    error: str | None = None
    picture: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which classes are in the answer for an image.

    Attributes:
        classes: that were scored.
        content: of a row; decisions are not limited in number.
        top: number of classes at most.
        threshold: lowest score of every class.
        stored: a threshold per class [K] instead; None without.
    """

    classes: Classes
    content: Content = Content.TOP
    top: int = 10
    threshold: float = 0.0
    stored: Sequence[float] | None = None

    def chosen(self, scores: Tensor) -> list[Prediction]:
        """Return the classes in the answer, highest score first.

        Of equal scores the lower class comes first.

        Args:
            scores: float32 [K].
        """
        most = self.top if self.content is Content.TOP else len(scores)
        # An image with one label has the class of the highest score, whatever the score is.
        if self.content is Content.DECISIONS and self.classes.exclusive:
            most = 1

        values, order = scores.sort(descending=True, stable=True)
        predictions: list[Prediction] = []
        for index, score in zip(order.tolist(), values.tolist(), strict=True):
            if len(predictions) == most:
                break
            lowest = self.threshold if self.stored is None else self.stored[index]
            if score >= lowest:
                threshold = None if self.stored is None else lowest
                name = self.classes.names[index]
                predictions.append(Prediction(index, name, score, threshold))
            elif self.stored is None:
                break
        return predictions


def chosen_rule(
    classes: Classes,
    stored: Sequence[float] | None,
    *,
    content: str,
    top: int | None,
    threshold: float | None,
) -> Rule:
    """Return the rule that the options of a command line stand for.

    Args:
        classes: that are scored.
        stored: thresholds [K] of the checkpoint; None if it has none.
        content: value of a `Content`.
        top: number of classes per image at most; None for 10.
        threshold: lowest score of every class; None for the stored thresholds, else 0.

    Raises:
        ConfigError: if an option has no effect, or decisions have no threshold.
    """
    kind = Content(content)
    if top is not None and kind is not Content.TOP:
        raise ConfigError(f"--top has no effect with --content {content}: leave it out")
    if threshold is not None and kind is Content.SCORES:
        raise ConfigError("--threshold has no effect with --content scores: leave it out")

    is_decided = threshold is not None or stored is not None
    if kind is Content.DECISIONS:
        if classes.exclusive and threshold is not None:
            raise ConfigError(
                "--threshold has no effect on the decision of an image with one label: leave it out"
            )
        if not classes.exclusive and not is_decided:
            raise ConfigError(
                "--content decisions: the checkpoint has no thresholds; pass --threshold, or "
                "calibrate it with python -m mldec.calibrate"
            )

    return Rule(
        classes=classes,
        content=kind,
        top=10 if top is None else top,
        threshold=0.0 if threshold is None else threshold,
        stored=stored if threshold is None else None,
    )


def named(name: str) -> dict[str, str]:
    """Return the entries of a row in JSON that name an image.

    JSON is UTF-8, which a path need not be: such a path is given in hexadecimal too.
    """
    encoded = os.fsencode(name)
    try:
        return {"image": encoded.decode("utf-8")}
    except UnicodeDecodeError:
        return {"image": encoded.decode("utf-8", "backslashreplace"), "image_bytes": encoded.hex()}


def entries(rule: Rule) -> Callable[[Row], dict[str, Any]]:
    """Return the function that makes the entries of a row in JSON."""

    def answer(row: Row) -> dict[str, Any]:
        if row.error is not None:
            return {"error": printable(row.error)}

        if rule.content is Content.DECISIONS:
            answer: dict[str, Any] = {"classes": [item.name for item in row.predictions]}
        elif rule.content is Content.SCORES:
            assert row.scores is not None
            answer = {"scores": dict(zip(rule.classes.names, row.scores.tolist(), strict=True))}
        else:
            answer = {"predictions": [item.entry() for item in row.predictions]}
        if row.picture is not None:
            answer["picture"] = row.picture
        return answer

    return lambda row: {**named(row.image), **answer(row)}
