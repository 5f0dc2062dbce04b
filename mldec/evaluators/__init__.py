"""Evaluators: logits and targets in, named percentages out."""

from typing import Protocol, runtime_checkable

from torch import Tensor


class Evaluator(Protocol):
    """Gather predictions batch by batch, then compute every number at once.

    The constructor takes the number of classes K and keywords of its own. With several processes
    each gets its share of the images, possibly none; `compute` exchanges what it needs, with
    `mldec.runtime.distributed`, and returns the same on every process.
    """

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: logits float [B, K]; targets [B, K] of 1, 0 or -1 (not annotated)."""
        ...

    def compute(self) -> dict[str, float]:
        """Return the metrics in percent, and numbers of classes as "classes_...".

        The first metric decides which checkpoint is the best; it is a `DataError` if it is NaN.
        """
        ...

    def per_class(self) -> dict[str, list[float]]:
        """Return K values per column, after `compute`, for the JSON and CSV reports."""
        ...


@runtime_checkable
class Thresholded(Protocol):
    """An evaluator that counts a class as predicted if its logit is above a threshold.

    The threshold is one for all classes, or one per class, float64 [K].
    """

    logit_threshold: float | Tensor


# What each metric is called and means, for people.

MEANINGS = {
    "mAP": "Mean over the classes of the average precision (AP); a class without a positive "
    "counts as 0",
    "mAP_skip_empty": "mAP without the classes that no image shows",
    "mAP_interpolated": "mAP with the precision made monotonic, as in VOC 2010",
    "mAP_11point": "mAP with the precision at 11 values of recall, as in VOC 2007",
    "mAP_partial": "mAP of annotated labels, over classes with positives and negatives",
    "mAP_weighted": "mAP_partial with each class weighted by its positives",
    "mAP_naive": "mAP with labels that are not annotated taken as negative",
    "CP": "Precision, averaged over classes",
    "CR": "Recall, averaged over classes",
    "CF1": "Harmonic mean of CP and CR",
    "CF1_mean": "F1, averaged over classes",
    "OP": "Precision of all decisions together",
    "OR": "Recall of all decisions together",
    "OF1": "Harmonic mean of OP and OR",
    "P": "Precision of all decisions together",
    "R": "Recall of all decisions together",
    "F1": "Harmonic mean of P and R",
    "class_accuracy": "Share of the images of a class that are right, averaged over classes",
    "top1": "Share of the images whose label has the highest score",
    "top5": "Share of the images whose label is among the five highest scores",
    "ECE": "Expected calibration error: how far scores are from observed frequencies",
    "seen_mAP": "mAP over the classes of the training",
    "harmonic_mAP": "Harmonic mean of the mAP over seen and over unseen classes",
}

# Longer prefixes first: one begins with another one.
AMONG = {
    "zsl_all_": "among the classes that training did not see, over all images",
    "zsl_": "among the classes that training did not see",
    "gzsl_": "among all classes",
}


def is_count(name: str) -> bool:
    """Tell whether a metric is a number of classes or images, not a percentage."""
    return name.startswith(("classes", "images"))


def meaning(name: str) -> str:
    """Return what a metric means, as a sentence; empty if it is not known."""
    if is_count(name):
        return "A number, not a percentage."

    base, _, k = name.partition("@")
    prefix = next((prefix for prefix in AMONG if base.startswith(prefix)), "")
    text = MEANINGS.get(base.removeprefix(prefix))
    if text is None:
        return ""

    if prefix:
        text += f", {AMONG[prefix]}"
    if k:
        text += f", if the {k} highest scores of an image are predicted"
    return f"{text}."
