"""What an evaluation shows beside its metrics: images, curves, and histograms.

All of it comes from the logits of the evaluation that runs anyway; no image is read or scored
again.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mldec.config.schema import Config
from mldec.data.base import DataModule
from mldec.data.loader import Batch
from mldec.evaluation import Results
from mldec.evaluators import Thresholded
from mldec.runtime import distributed
from mldec.training.gallery import Answer, Example, Verdict, draw, fit

THRESHOLDS = 101  # of a precision-recall curve: 0, 0.01, ... 1
# Bins of the logits; those beyond an end count in the last bin.
LOGIT_EDGES = np.linspace(-25, 25, 201)
AP_EDGES = np.linspace(0, 100, 21)


class Histogram(NamedTuple):
    """Numbers of values between edges, and the moments of all values."""

    counts: np.ndarray  # int64 [n]
    edges: np.ndarray  # float64 [n + 1]
    lowest: float
    highest: float
    total: float
    squares: float  # sum of the squares


class Curve(NamedTuple):
    """Counts, precision and recall at the thresholds 0, 1 / (T - 1), ... 1: float64 [T] each.

    A class is predicted if its probability is at least the threshold.
    """

    true_positives: np.ndarray
    false_positives: np.ndarray
    true_negatives: np.ndarray
    false_negatives: np.ndarray
    precision: np.ndarray  # 0 without a prediction
    recall: np.ndarray  # 0 without a positive


@dataclass(frozen=True)
class Details:
    """What an evaluation shows beside its metrics, by tag."""

    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    images: dict[str, Image.Image] = field(default_factory=dict)


class Shown(NamedTuple):
    """One of the images that are shown."""

    image: Image.Image
    labels: Tensor  # int8 [K]
    logits: Tensor  # float32 [K]


class Observer:
    """Gather the details of one evaluation, batch by batch.

    The images that are shown are drawn from all validation images by the seed of the run, so that
    they are the same in each evaluation and after a resume. Images whose tokens are stored
    (`train.cache_features`) are not read in an evaluation, and none is shown.

    Args:
        data: the dataset.
        config: for `log` and the seed.
    """

    def __init__(self, data: DataModule, config: Config) -> None:
        self.classes, self.log = data.val.classes, config.log

        # A generator of its own: that of training must not notice.
        generator = torch.Generator().manual_seed(config.seed)
        order = torch.randperm(len(data.val.dataset), generator=generator)
        self.chosen = order[: self.log.images].tolist()
        self.shown: dict[int, Shown] = {}

        # A class is predicted above the threshold of the data's settings; of exclusive classes, the
        # highest one is.
        evaluator = data.evaluator()
        self.logit_threshold: float | Tensor = 0.0
        if isinstance(evaluator, Thresholded):
            self.logit_threshold = evaluator.logit_threshold

        num_classes = len(self.classes)
        # Of absent (0) and present (1) labels: numbers per class and threshold, numbers per bin,
        # and lowest, highest, sum and sum of squares of the logits.
        self.scores = torch.zeros(num_classes, 2, THRESHOLDS, dtype=torch.int64)
        self.bins = torch.zeros(2, len(LOGIT_EDGES) - 1, dtype=torch.int64)
        self.moments = torch.tensor([[np.inf, -np.inf, 0.0, 0.0]] * 2, dtype=torch.float64)

    def __call__(self, batch: Batch, logits: Tensor) -> None:
        """Add a batch of this process and its logits float32 [b, K]; see `evaluate`."""
        # A logit that is not finite ends the evaluation with an error of its own.
        logits = logits.nan_to_num()
        labels = batch.targets.to(logits.device)
        self._show(batch, logits)
        self._count_scores(self._probabilities(logits), labels)
        self._count_logits(logits, labels)

    def _probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities of the classes: [..., K] in [0, 1]."""
        return logits.softmax(-1) if self.classes.exclusive else logits.sigmoid()

    def _show(self, batch: Batch, logits: Tensor) -> None:
        """Keep the images of the batch that are shown."""
        if batch.images.dtype is not torch.uint8:
            return

        for row, index in enumerate(batch.indices.tolist()):
            if index in self.chosen:
                image = Image.fromarray(batch.images[row].permute(1, 2, 0).numpy())
                labels = batch.targets[row].cpu()
                self.shown[index] = Shown(fit(image), labels, logits[row].cpu())

    def _count_scores(self, probabilities: Tensor, labels: Tensor) -> None:
        """Count the annotated labels per class, label and highest threshold that they reach."""
        steps = (probabilities * (THRESHOLDS - 1)).floor().long()
        classes = torch.arange(labels.shape[1], device=labels.device)
        codes = (2 * classes + (labels > 0)) * THRESHOLDS + steps

        counts = codes[labels >= 0].bincount(minlength=self.scores.numel())
        self.scores = self.scores.to(counts.device) + counts.view_as(self.scores)

    def _count_logits(self, logits: Tensor, labels: Tensor) -> None:
        """Count the logits per label and bin, and add to their moments."""
        width, last = LOGIT_EDGES[1] - LOGIT_EDGES[0], len(LOGIT_EDGES) - 2
        bins = ((logits - LOGIT_EDGES[0]) / width).floor().clamp(0, last).long()
        codes = (labels > 0) * (last + 1) + bins

        counts = codes[labels >= 0].bincount(minlength=self.bins.numel())
        self.bins = self.bins.to(counts.device) + counts.view_as(self.bins)

        for sign, has_sign in enumerate((labels == 0, labels > 0)):
            values = logits[has_sign].double()
            if len(values):
                low, high = torch.aminmax(values)
                new = torch.stack([low, high, values.sum(), values.square().sum()]).cpu()
                self.moments[sign] = _joined(self.moments[sign], new)

    def details(self, results: Results) -> Details | None:
        """Combine what all processes have seen.

        Every process must call it.

        Args:
            results: of the evaluation.

        Returns:
            The details on the main process, None on the others.
        """
        scores = distributed.total(self.scores.cpu()).double().numpy()
        bins = distributed.total(self.bins.cpu()).numpy()
        parts = distributed.gather((self.shown, self.moments))
        if not distributed.is_main():
            return None

        shown: dict[int, Shown] = {}
        moments = self.moments
        for number, (own_shown, own_moments) in enumerate(parts):
            shown |= own_shown
            if number:
                rows = zip(moments, own_moments, strict=True)
                moments = torch.stack([_joined(a, b) for a, b in rows])

        details = Details()
        self._add_curves(details, scores)
        self._add_columns(details, results, scores)
        for present, sign in enumerate(("negatives", "positives")):
            if bins[present].any():
                details.histograms[f"val_logits/{sign}"] = _trimmed(
                    bins[present], LOGIT_EDGES, moments[present].tolist()
                )

        examples = [self._example(shown[index]) for index in self.chosen if index in shown]
        if examples:
            details.images["val_images"] = draw(examples)
        return details

    def _add_curves(self, details: Details, scores: np.ndarray) -> None:
        """Add precision-recall curves over all classes, and of some classes.

        Args:
            details: that they are added to.
            scores: numbers of labels [K, 2, T] per class, label and highest threshold reached.
        """
        per_class = [_curve(counts) for counts in scores]
        details.curves["val_pr/micro"] = micro = _curve(scores.sum(0))

        # Of the classes that have a positive, as far as there are any.
        counted = [curve for curve in per_class if curve.recall[0] > 0]
        if counted:
            precision = np.mean([curve.precision for curve in counted], axis=0)
            recall = np.mean([curve.recall for curve in counted], axis=0)
            details.curves["val_pr/macro"] = micro._replace(precision=precision, recall=recall)

        for index in self._frequent(scores):
            details.curves[f"val_pr_class/{self.classes.names[index]}"] = per_class[index]

    def _add_columns(self, details: Details, results: Results, scores: np.ndarray) -> None:
        """Add the first column of the evaluator, which is AP or accuracy in percent, per class."""
        name, column = next(iter(results.per_class.items()))
        for index in self._frequent(scores):
            details.scalars[f"val_{name}/{self.classes.names[index]}"] = column[index]

        values = np.array(column, dtype=np.float64)
        values = values[np.isfinite(values)]
        if len(values):
            counts = np.histogram(values, AP_EDGES)[0]
            moments = [values.min(), values.max(), values.sum(), np.square(values).sum()]
            details.histograms[f"val_{name}_of_classes"] = _trimmed(counts, AP_EDGES, moments)

    def _frequent(self, scores: np.ndarray) -> list[int]:
        """Return the classes with the most positives, of equally frequent ones the first."""
        positives = scores[:, 1].sum(1)
        order = np.argsort(-positives, kind="stable")[: self.log.classes]
        return [int(index) for index in order if positives[index] > 0]

    def _example(self, shown: Shown) -> Example:
        """Compare the labels of an image with its predictions."""
        probabilities = self._probabilities(shown.logits)
        if self.classes.exclusive:
            predicted = probabilities == probabilities.max()
        else:
            predicted = shown.logits > self.logit_threshold

        # The labelled classes first, since there may be many wrong ones.
        answers = []
        is_labelled = shown.labels > 0
        relevant = (predicted | is_labelled).nonzero()[:, 0]
        order = relevant[(probabilities + 2 * is_labelled)[relevant].argsort(descending=True)]
        for index in order.tolist():
            verdict = _verdict(int(shown.labels[index]), bool(predicted[index]))
            answers.append(Answer(self.classes.names[index], verdict, float(probabilities[index])))
        return Example(shown.image, answers)


def _verdict(label: int, is_predicted: bool) -> Verdict:
    """Compare a label (1, 0 or -1) with a prediction; one of them is positive."""
    if label > 0:
        return Verdict.right if is_predicted else Verdict.missed
    return Verdict.wrong if label == 0 else Verdict.unknown


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """Return lowest, highest, sum and sum of squares of two sets of values together: [4]."""
    low, high = torch.minimum(one, other)[0], torch.maximum(one, other)[1]
    return torch.stack([low, high, *(one + other)[2:]])


def _curve(counts: np.ndarray) -> Curve:
    """Return the curve of numbers of labels [2, T] per label and highest threshold reached."""
    # What reaches a threshold reaches all lower ones.
    false_positives, true_positives = counts[:, ::-1].cumsum(1)[:, ::-1]
    positives = true_positives[0]
    return Curve(
        true_positives=true_positives,
        false_positives=false_positives,
        true_negatives=false_positives[0] - false_positives,
        false_negatives=positives - true_positives,
        precision=true_positives / np.maximum(1, true_positives + false_positives),
        recall=true_positives / max(1, positives),
    )


def _trimmed(counts: np.ndarray, edges: np.ndarray, moments: list[float]) -> Histogram:
    """Return a histogram without the empty bins at its ends.

    Args:
        counts: int [n], not all of them 0.
        edges: [n + 1].
        moments: lowest, highest, sum and sum of squares of all values.
    """
    filled = counts.nonzero()[0]
    first, last = filled[0], filled[-1]
    return Histogram(counts[first : last + 1], edges[first : last + 2], *map(float, moments))
