"""The tasks: several labels per image, one, partial labels, or unseen classes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from mldec.data.base import Classes, LabelledImages
from mldec.data.vector_origin import VectorOrigin
from mldec.evaluators import Evaluator
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator


class Task(Protocol):
    """What the labels of a data set mean: it determines classes, images and metrics."""

    def training(self, images: LabelledImages) -> tuple[LabelledImages, Classes]:
        """Return the images of the training split to train on, and their target classes."""
        ...

    def validation(self, images: LabelledImages) -> tuple[LabelledImages, Classes]:
        """Return the images of the validation split to evaluate, and their target classes."""
        ...

    def evaluator(self, classes: Classes) -> Evaluator:
        """Return a new evaluator for the classes of the validation split.

        Raises:
            ConfigError: for a setting that does not fit these classes, such as top-5 of three.
        """
        ...


@dataclass(frozen=True)
class _KnownClasses:
    """The common part of the tasks whose splits have the same classes; every image is used.

    Args:
        vectors: maps the names of the K classes to word vectors, float32 [K, D], and how they were
            made (None: not known), for a head that takes word queries; None for data without them.
            Each split asks for them.
    """

    vectors: Callable[[tuple[str, ...]], tuple[Tensor, VectorOrigin | None]] | None = field(
        default=None, kw_only=True
    )

    @property
    def exclusive(self) -> bool:
        """Whether each image has exactly one label."""
        return False

    def training(self, images: LabelledImages) -> tuple[LabelledImages, Classes]:
        """See `Task`."""
        queries, origin = None, None
        if self.vectors is not None:
            queries, origin = self.vectors(images.classes)
        return images, Classes(images.classes, self.exclusive, queries, origin)

    def validation(self, images: LabelledImages) -> tuple[LabelledImages, Classes]:
        """See `Task`."""
        return self.training(images)


@dataclass(frozen=True)
class MultiLabel(_KnownClasses):
    """Several labels per image, all of them known.

    Args:
        threshold: probability above which a class counts as predicted, in (0, 1), for precision,
            recall and F1.

    Raises:
        ConfigError: for a threshold outside (0, 1).
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        # The evaluator checks the threshold: a wrong one must fail now, not after an epoch.
        MultiLabelEvaluator(1, threshold=self.threshold)

    def evaluator(self, classes: Classes) -> Evaluator:
        """See `Task`."""
        return MultiLabelEvaluator(len(classes), threshold=self.threshold)


@dataclass(frozen=True)
class PartialLabels(_KnownClasses):
    """Several labels per image, of which only some are known; the others are -1 (not annotated).

    Args:
        threshold: see `MultiLabel`.

    Raises:
        ConfigError: for a threshold outside (0, 1).
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        # The evaluator checks the threshold: a wrong one must fail now, not after an epoch.
        PartialLabelEvaluator(1, threshold=self.threshold)

    def evaluator(self, classes: Classes) -> Evaluator:
        """See `Task`."""
        return PartialLabelEvaluator(len(classes), threshold=self.threshold)


@dataclass(frozen=True)
class SingleLabel(_KnownClasses):
    """One label per image.

    Args:
        top_k: k of the second accuracy, 2 or more; None is 5, omitted if there are fewer classes.
        suffix: appended to the names of the metrics, such as "_real" for the labels of ImageNet
            ReaL.

    Raises:
        ConfigError: for a `top_k` below 2.
    """

    top_k: int | None = None
    suffix: str = ""

    def __post_init__(self) -> None:
        # The evaluator checks top_k: a wrong one must fail now, not after an epoch.
        SingleLabelEvaluator(self.top_k or 1, top_k=self.top_k)

    @property
    def exclusive(self) -> bool:
        """Whether each image has exactly one label."""
        return True

    def evaluator(self, classes: Classes) -> Evaluator:
        """See `Task`."""
        return SingleLabelEvaluator(len(classes), top_k=self.top_k, suffix=self.suffix)
