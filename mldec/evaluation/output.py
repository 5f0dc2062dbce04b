"""Results of an evaluation as JSON, CSV and text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from mldec.files.atomic import csv_lines
from mldec.names import format_list

# A slow import, which a message about a missing checkpoint does not need.
if TYPE_CHECKING:
    from mldec.evaluators.average_precision import Predictions

# Descriptions of the metrics, also used by the report and the model card.
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
    "N+": "Number of classes with at least one correct prediction",
    "P": "Precision of all decisions together",
    "R": "Recall of all decisions together",
    "F1": "Harmonic mean of P and R",
    "class_accuracy": "Recall, averaged over classes",
    "top1": "Share of the images whose label has the highest score",
    "top5": "Share of the images whose label is among the five highest scores",
    "ECE": "Expected calibration error: how far scores are from observed frequencies",
    "LRAP": "Label-ranking average precision: mean precision at the positives of an image",
    "coverage": "Mean rank of the last positive of an image: a number of classes, not a percentage",
    "ranking_loss": "Share of the pairs of a positive and a negative of an image in wrong order",
    "one_error": "Share of the images whose highest score is of a negative",
    "AUROC_macro": "Area under the ROC curve, averaged over classes",
    "AUROC_micro": "Area under the ROC curve of all labels together",
    "F1_samples": "F1, averaged over images",
    "exact_match": "Share of the images whose decisions on all annotated labels are right",
    "hamming_loss": "Share of the decisions on annotated labels that are wrong",
    "head_mAP": "mAP over the frequent classes of the training",
    "medium_mAP": "mAP over the classes of medium frequency",
    "tail_mAP": "mAP over the rare classes of the training",
    "seen_mAP": "mAP over the classes of the training",
    "harmonic_mAP": "Harmonic mean of the mAP over seen and over unseen classes",
}

# Longer prefixes first, because "zsl_" is a prefix of "zsl_all_".
AMONG = {
    "zsl_all_": "among the classes that training did not see, over all images",
    "zsl_": "among the classes that training did not see",
    "gzsl_": "among all classes",
}


def is_count(name: str) -> bool:
    """Return True if a metric is a number of classes or images, not a percentage."""
    return name.startswith(("classes", "images", "N+"))


def meaning(name: str) -> str:
    """Return the description of a metric as a sentence, or "" for an unknown metric."""
    base, _, k = name.partition("@")
    prefix = next((prefix for prefix in AMONG if base.startswith(prefix)), "")
    text = MEANINGS.get(base.removeprefix(prefix))
    if text is None:
        return "A number, not a percentage." if is_count(name) else ""

    if prefix:
        text += f", {AMONG[prefix]}"
    if k:
        text += f", if the {k} highest-ranked classes of an image are predicted"
    return f"{text}."


@dataclass(frozen=True)
class Results:
    """The results of an evaluation."""

    metrics: dict[str, float]  # percentages by name
    per_class: dict[str, list[float]]  # K values per column
    images: int  # number of evaluated images
    bad: list[str]  # one message per skipped image
    # (label, prediction, number of images), most frequent first; None for multi-label data.
    confusions: list[tuple[int, int, int]] | None
    # Of this rank; None for single-label data.
    predictions: "Predictions | None" = field(default=None, compare=False)


def left_out(bad: Sequence[str], images: int) -> list[str]:
    """Return a list with zero or one warning about skipped images, with a message for each."""
    if not bad:
        return []
    messages = "; ".join(bad[:10])
    if len(bad) > 10:
        messages += "; ..."
    return [f"{len(bad):,} images are left out, {images:,} are evaluated: {messages}"]


def same_scores(names: Sequence[str], weights: str, loss: Mapping[str, Any]) -> list[str]:
    """Return a list with zero or one warning about classes with constant scores.

    `weights` are "ema" or "raw", and `loss` is the setting of the run; {} if unknown.
    """
    if not names:
        return []
    # Focusing and clip of the asymmetric losses remove the gradient of easy negatives.
    advice = ""
    if str(loss.get("_target_")).endswith((".AsymmetricLoss", ".PartialAsymmetricLoss")):
        advice = "; try loss=bce or loss.clip=0" if loss.get("clip") else "; try loss=bce"
    found = f"nearly constant scores of the {weights} weights for {format_list(names)}"
    return [f"{found}: these classes were not learned{advice}"]


def report(results: Results, weights: str, path: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the content of `--json`, before `to_json`. Undefined values are NaN."""
    content: dict[str, Any] = {
        "metrics": results.metrics,
        "images": results.images,
        "left_out": results.bad,
        "weights": weights,
        "checkpoint": path,
    }
    if results.confusions is not None:
        content["confusions"] = []
        for label, prediction, images in results.confusions:
            entry = {"label": names[label], "prediction": names[prediction], "images": images}
            content["confusions"].append(entry)

    columns = results.per_class.items()
    content["per_class"] = {}
    for index, name in enumerate(names):
        content["per_class"][name] = {key: column[index] for key, column in columns}
    return content


def to_csv(results: Results, names: tuple[str, ...]) -> str:
    """Return the content of `--csv`: a header, and one row per class."""
    header = ["class"] + list(results.per_class)
    columns = [as_text(values, ".6g") for values in results.per_class.values()]
    rows = zip(names, *columns, strict=True)
    return "".join(csv_lines(chain([header], rows)))


def as_text(values: Sequence[float], form: str) -> list[str]:
    """Format a column of numbers: integers without decimals, others with the format `form`."""
    if all(float(value).is_integer() for value in values):
        form = ".0f"
    return [format(value, form) for value in values]
