"""Choose a threshold by an objective, by an exact search over all cut points."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from mldec.errors import ConfigError

# Calibrated logits of annotated images [n], and whether the images show the class, bool [n].
Column = tuple[np.ndarray, np.ndarray]

NUMBER = r"([0-9]{0,9}\.?[0-9]{1,9})"
HIGHEST = np.nextafter(1, 0)  # a threshold of 1 could not be compared as a logit


@dataclass(frozen=True)
class Objective:
    """What a threshold is chosen for.

    Attributes:
        text: as the user writes it.
        kind: "f1": the highest F1. "precision": the highest recall whose precision is at least
            `values[0]`. "recall": the highest threshold whose recall is at least `values[0]`.
            "cost": the lowest sum of costs, `values[0]` per false positive and `values[1]` per
            false negative. Of equally good thresholds the highest is chosen.
        values: the numbers of the objective.
    """

    text: str
    kind: str
    values: tuple[float, ...]

    def choose(self, hits: np.ndarray, false_alarms: np.ndarray) -> tuple[int | None, bool]:
        """Choose one of C cut points, highest first.

        Args:
            hits: positives at or above each cut point, ascending; the last are all of them.
            false_alarms: negatives at or above each cut point.

        Returns:
            The index of the cut point, None if it is best to predict nothing; and whether the
            objective is reached. If no cut point has the precision that is asked for, the one of
            the highest precision is chosen, of several the one of the highest recall.
        """
        positives = hits[-1]
        precision = hits / (hits + false_alarms)

        if self.kind == "f1":
            return int(np.argmax(2 * hits / (positives + hits + false_alarms))), True
        if self.kind == "recall":
            return int(np.argmax(hits / positives >= self.values[0])), True
        if self.kind == "precision":
            reached = bool(precision.max() >= self.values[0])
            wanted = self.values[0] if reached else precision.max()
            return int(np.flatnonzero(precision >= wanted)[-1]), reached

        per_false_positive, per_false_negative = self.values
        costs = per_false_positive * false_alarms + per_false_negative * (positives - hits)
        is_never_best = per_false_negative * positives <= costs.min()
        return (None if is_never_best else int(np.argmin(costs))), True


@dataclass(frozen=True)
class Threshold:
    """A threshold, and what it reaches on the images that it was fitted on."""

    value: float  # the lowest calibrated score, from 0 to 1, that counts as present
    is_reached: bool  # the objective
    precision: float
    recall: float


def parse_objective(text: str) -> Objective:
    """Read f1, precision:P, recall:R or cost:FP,FN.

    Raises:
        ConfigError: for another text, or a number out of its range.
    """
    if text == "f1":
        return Objective(text, "f1", ())

    share = re.fullmatch(rf"(precision|recall):{NUMBER}", text)
    if share and 0 < float(share[2]) <= 1:
        return Objective(text, share[1], (float(share[2]),))

    costs = re.fullmatch(rf"cost:{NUMBER},{NUMBER}", text)
    if costs and float(costs[1]) > 0 and float(costs[2]) > 0:
        return Objective(text, "cost", (float(costs[1]), float(costs[2])))

    raise ConfigError(
        f"--objective {text}: it must be f1, precision:P or recall:R with a number above 0 and at "
        f"most 1, or cost:FP,FN with two costs above 0, such as precision:0.9 or cost:1,5"
    )


def fit_threshold(objective: Objective, columns: Iterable[Column]) -> Threshold:
    """Fit one threshold to the scores of a class, or of several classes together.

    Only the scores of positives are cut points that can be best: between two of them a lower
    threshold adds nothing but false positives. The threshold lies halfway between the lowest score
    that counts as present and the next one.

    Args:
        objective: that the threshold is chosen for.
        columns: the images of each class, at least one of them positive. They are iterated over
            several times, so that the scores of many classes need not be in memory together.
    """
    of_positives = np.concatenate([logits[present] for logits, present in columns])
    cuts, counts = np.unique(of_positives, return_counts=True)

    # How many cut points each negative reaches; most reach none, and need no search.
    reached = np.zeros(len(cuts) + 1, np.int64)
    for logits, present in columns:
        negatives = logits[~present & (logits >= cuts[0])]
        below = np.searchsorted(cuts, negatives, side="right")
        reached += np.bincount(below, minlength=len(reached))

    # From the highest cut point to the lowest.
    cuts, hits, false_alarms = cuts[::-1], counts[::-1].cumsum(), reached[::-1].cumsum()[:-1]
    index, is_reached = objective.choose(hits, false_alarms)
    if index is None:
        highest = max(logits.max() for logits, _ in columns if len(logits))
        return Threshold(min((expit(highest) + 1) / 2, HIGHEST), is_reached, 0.0, 0.0)

    lower = (logits[logits < cuts[index]] for logits, _ in columns)
    next_lower = max((logits.max() for logits in lower if len(logits)), default=-np.inf)
    value = expit(np.array([cuts[index], next_lower])).mean()

    return Threshold(
        float(min(value, HIGHEST)),
        is_reached,
        float(hits[index] / (hits[index] + false_alarms[index])),
        float(hits[index] / hits[-1]),
    )
