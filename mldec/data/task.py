"""What the labels of a data set mean: several per image, one, only some of them known, or classes never seen."""

from dataclasses import dataclass
from typing import Protocol

from mldec.data.base import Classes, LabelledImages
from mldec.evaluators import Evaluator
from mldec.evaluators.multi_label import MultiLabelEvaluator
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.evaluators.single_label import SingleLabelEvaluator
from mldec.evaluators.sizes import SizesEvaluator


class Task(Protocol):
    """What the labels mean: decides about classes, images and metrics."""

    def training(self, images: LabelledImages) -> tuple[LabelledImages, Classes]:
        """Return the images to learn from, of those of the training split, and the classes of their targets."""
        ...

    def validation(self, images: LabelledImages) -> tuple[LabelledImages, Classes]:
        """Return the images to evaluate on, of those of the validation split, and the classes of their targets."""
        ...

    def evaluator(self, classes: Classes) -> Evaluator:
        """Return a new evaluator for the classes of the validation split.

        Raises:
            ConfigError: for a setting that does not fit these classes, such as top-5 of three.
        """
        ...


@dataclass(frozen=True)
class _KnownClasses:
    """What the three tasks have in common whose splits have the same classes: every image is used as it is."""

    @property
    def exclusive(self) -> bool:
        """Whether each image has exactly one label."""
        return False

    def training(self, images: LabelledImages) -> tuple[LabelledImages, Classes]:
        """See `Task`."""
        return images, Classes(images.classes, exclusive=self.exclusive)

    def validation(self, images: LabelledImages) -> tuple[LabelledImages, Classes]:
        """See `Task`."""
        return self.training(images)


@dataclass(frozen=True)
class MultiLabel(_KnownClasses):
    """Several labels per image, all of them known.

    Args:
        threshold: probability from which on a class counts as predicted, for precision, recall and F1.
        sizes: targets are sums of `mldec.evaluators.sizes.SIZES`; the mAP of each size is reported too.

    Raises:
        ConfigError: for a threshold outside (0, 1).
    """

    threshold: float = 0.5
    sizes: bool = False

    def __post_init__(self) -> None:
        MultiLabelEvaluator(
            1, threshold=self.threshold
        )  # refuses a wrong value now, not after an epoch

    def evaluator(self, classes: Classes) -> Evaluator:
        """See `Task`."""
        kind = SizesEvaluator if self.sizes else MultiLabelEvaluator
        return kind(len(classes), threshold=self.threshold)


@dataclass(frozen=True)
class PartialLabels(_KnownClasses):
    """Several labels per image, of which only some are known; the others are -1."""

    def evaluator(self, classes: Classes) -> Evaluator:
        """See `Task`."""
        return PartialLabelEvaluator(len(classes))


@dataclass(frozen=True)
class SingleLabel(_KnownClasses):
    """One label per image.

    Args:
        top_k: of the second accuracy; None is 5, left out where there are fewer classes.
        suffix: of the metrics' names, for other labels than the data set's own, such as "_real".

    Raises:
        ConfigError: for a `top_k` below 2.
    """

    top_k: int | None = None
    suffix: str = ""

    def __post_init__(self) -> None:
        SingleLabelEvaluator(
            self.top_k or 1, top_k=self.top_k
        )  # refuses a wrong value now, not after an epoch

    @property
    def exclusive(self) -> bool:
        """Whether each image has exactly one label."""
        return True

    def evaluator(self, classes: Classes) -> Evaluator:
        """See `Task`."""
        return SingleLabelEvaluator(len(classes), top_k=self.top_k, suffix=self.suffix)
