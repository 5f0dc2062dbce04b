"""What a report says: numbers and small pictures, before they become a page."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A number with its 95 % bootstrap interval over images; bounds are NaN if there is none."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """A number over the steps of training."""

    name: str  # as in metrics.jsonl, such as "val/mAP_ema"
    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class ClassTable:
    """The columns of the table of classes.

    Attributes:
        names: of the K classes.
        columns: K values per heading; percentages except "positives" and "threshold". NaN where a
            value is undefined.
        intervals: of the average precision, K low and K high values in percent; None if they were
            not computed.
    """

    names: tuple[str, ...]
    columns: dict[str, list[float]]
    intervals: tuple[list[float], list[float]] | None


@dataclass(frozen=True)
class Histograms:
    """How often each score occurs, per class: curves and the slider are computed from them.

    Attributes:
        edges: of the bins, ascending from 0 to 1, [T + 1]. A score that equals an edge is in the
            bin above it, so that counts at or above an edge are exact.
        positives: images that show the class, per bin, int64 [K, T].
        negatives: annotated images that do not show it, int64 [K, T].
        score_sums: sum of the scores of both, float64 [K, T]: the mean score of a bin is the
            abscissa of the calibration curve.
    """

    edges: np.ndarray
    positives: np.ndarray
    negatives: np.ndarray
    score_sums: np.ndarray


@dataclass(frozen=True)
class CoOccurrence:
    """Labels against predictions of the C classes that the matrix shows.

    If an image has one label, `predictions` is the confusion matrix: images labelled with the
    class of the row whose prediction is the class of the column. `labels` has the images of each
    class on its diagonal then, and zeros elsewhere.

    Attributes:
        classes: their indices.
        labels: images whose labels have both classes; on the diagonal, the class. int64 [C, C]
        predictions: images whose predictions have both, int64 [C, C].
    """

    classes: list[int]
    labels: np.ndarray
    predictions: np.ndarray


Kind = Literal["right", "wrong", "missed"]


@dataclass(frozen=True)
class Example:
    """An image of one class: surest right, surest wrong (false positive) or missed.

    Attributes:
        class_index: of the class.
        kind: "right", "wrong" (predicted, not labelled) or "missed" (labelled, not predicted).
        image: index into `Content.pictures`.
        score: of the class, from 0 to 1.
        heat: where the model looked, uint8 [h, w], 255 at the maximum; None without a map.
    """

    class_index: int
    kind: Kind
    image: int
    score: float
    heat: np.ndarray | None


@dataclass(frozen=True)
class Picture:
    """A small copy of an image.

    Attributes:
        name: path or key of the image.
        jpeg: the content of a JPEG file.
        labels: names of its classes.
    """

    name: str
    jpeg: bytes
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Suspect:
    """A label that is likely wrong.

    Attributes:
        class_index: of the class.
        image: index into `Content.pictures`.
        present: what the label says.
        probability: that the image shows the class, calibrated.
    """

    class_index: int
    image: int
    present: bool
    probability: float


@dataclass(frozen=True)
class ChangedImage:
    """An image whose decision for a class differs between two models.

    If an image has one label, only its own class counts, which is decided right by top-1.

    Attributes:
        class_index: of the class.
        image: index into `Content.pictures`.
        present: what the label says.
        score: of this model.
        other_score: of the other one.
        fixed: whether only this model decides right; otherwise only the other one does.
    """

    class_index: int
    image: int
    present: bool
    score: float
    other_score: float
    fixed: bool


@dataclass(frozen=True)
class Comparison:
    """This model (A) against another one (B) on the same images.

    Attributes:
        other: path of the other checkpoint.
        metrics: A, B and the difference A - B by the name of the metric, in percent.
        p_value: two-sided, of the main metric's difference.
        test: how it was computed, one sentence.
        per_class: difference of the average precision A - B of K classes in percent.
        changed: images that changed sides; a sample of the surest.
        fixed: number of pairs of image and class that only A decides right.
        broken: number of those that only B decides right.
    """

    other: str
    metrics: dict[str, tuple[Interval, Interval, Interval]]
    p_value: float
    test: str
    per_class: list[Interval]
    changed: list[ChangedImage]
    fixed: int
    broken: int


@dataclass(frozen=True)
class Content:
    """A report.

    Attributes:
        title: of the page.
        summary: pairs of a heading and a text: checkpoint, data, images, cost and so on.
        settings: the configuration as YAML.
        images: number of images that are scored.
        curves: learning curves; empty if there are none, which `notes` then explains.
        metrics: by name, in percent; numbers of classes have no interval.
        table: of classes.
        histograms: of scores.
        exclusive: whether an image has one label: the page then has no thresholds to move.
        co_occurrence: of classes in labels and in predictions, or the confusion matrix.
        heat_method: how the maps were made, one sentence; None without maps.
        pictures: that examples, suspects and changed images refer to.
        examples: of the classes that have some, the surest first.
        suspects: most suspicious first.
        unreadable: one message per image that could not be read.
        comparison: with another checkpoint, or None.
        notes: what was sampled, left out or is not known, one sentence each.
    """

    title: str
    summary: list[tuple[str, str]]
    settings: str
    images: int
    curves: list[Curve]
    metrics: dict[str, Interval]
    table: ClassTable
    histograms: Histograms
    exclusive: bool
    co_occurrence: CoOccurrence
    heat_method: str | None
    pictures: list[Picture]
    examples: list[Example]
    suspects: list[Suspect]
    unreadable: list[str]
    comparison: Comparison | None = None
    notes: list[str] = field(default_factory=list)
