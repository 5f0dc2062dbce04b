"""Choose the images that a report shows: surest right, surest wrong, missed, suspected labels."""

from dataclasses import dataclass

import numpy as np

from mldec.check_data.label_errors import rank
from mldec.report.answers import Answers
from mldec.report.content import Kind

PER_KIND = 3  # images of each class and kind
MOST_CLASSES = 100  # with images
MOST_SUSPECTS = 60


@dataclass(frozen=True)
class Pick:
    """An image of a class that a report shows; its attributes are those of `Example`."""

    class_index: int
    kind: Kind
    row: int  # of the answers
    score: float


@dataclass(frozen=True)
class SuspectedLabel:
    """A label that is likely wrong; its attributes are those of `Suspect`."""

    class_index: int
    row: int  # of the answers
    present: bool
    probability: float


def classes_with_images(precision: np.ndarray, most: int = MOST_CLASSES) -> np.ndarray:
    """Choose the classes whose images are shown: all, or some from the best to the worst one.

    Args:
        precision: average precision of each class, NaN without a positive, [K].
        most: number of classes at most.

    Returns:
        Their indices, ascending; of many classes, those at equal distances in the order of the
        average precision.
    """
    if len(precision) <= most:
        return np.arange(len(precision))

    ranked = np.argsort(precision, kind="stable")
    ranked = ranked[: np.isfinite(precision).sum()]
    places = np.linspace(0, len(ranked) - 1, min(most, len(ranked))).round().astype(int)
    return np.sort(ranked[places])


def examples(answers: Answers, classes: np.ndarray) -> list[Pick]:
    """Choose the images of some classes, the surest of each kind first.

    A missed image is the surer the lower its score is.

    Args:
        answers: of N images and K classes.
        classes: indices of the classes.
    """
    picks: list[Pick] = []
    for index in classes.tolist():
        scores = np.ascontiguousarray(answers.logits[:, index])
        labels = answers.labels[:, index]
        decided = answers.decided(np.array([index]), scores[None])[0]

        kinds: dict[Kind, tuple[np.ndarray, np.ndarray]] = {
            "right": (decided & (labels == 1), -scores),
            "wrong": (decided & (labels == 0), -scores),
            "missed": (~decided & (labels == 1), scores),
        }
        for kind, (chosen, order) in kinds.items():
            rows = np.flatnonzero(chosen)
            rows = rows[np.argsort(order[rows], kind="stable")[:PER_KIND]]
            values = answers.probabilities(scores[rows])
            picks += [
                Pick(index, kind, int(row), float(value))
                for row, value in zip(rows, values, strict=True)
            ]
    return picks


def suspected_labels(answers: Answers, classes: np.ndarray) -> list[SuspectedLabel]:
    """Choose the labels of some classes that are most likely wrong; see `label_errors.rank`.

    As many of the labels `present` as of the labels `absent`, if there are enough: of rare classes
    the ones or the others would come first.

    Args:
        answers: of N images and K classes, which are independent of one another.
        classes: indices of the classes.
    """
    logits, labels = answers.logits[:, classes], answers.labels[:, classes]
    ranking = rank(logits, labels, np.zeros(len(logits), int))

    halves = []
    for present in (True, False):
        chosen = ranking.suspected & (ranking.present == present)
        halves.append(np.flatnonzero(chosen)[: MOST_SUSPECTS // 2])
    return [
        SuspectedLabel(
            int(classes[ranking.classes[place]]),
            int(ranking.images[place]),
            bool(ranking.present[place]),
            float(ranking.probabilities[place]),
        )
        for place in np.sort(np.concatenate(halves))
    ]
