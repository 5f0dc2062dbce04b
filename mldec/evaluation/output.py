"""Results of an evaluation as JSON, CSV and text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mldec.files.atomic import csv_lines
from mldec.names import listed

# What each metric is called and means; the report and the model card say it too.
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


@dataclass(frozen=True)
class Results:
    """The results of an evaluation."""

    metrics: dict[str, float]  # percentages by name
    per_class: dict[str, list[float]]  # K values per column
    images: int  # that count
    bad: list[str]  # one message per image that was left out
    # Label, prediction and number of images, most frequent first; None for multi-label data.
    confusions: list[tuple[int, int, int]] | None


def left_out(bad: Sequence[str], images: int) -> list[str]:
    """Return at most one line, which names images that could not be read; the others count."""
    if not bad:
        return []

    names = "; ".join(bad[:10])
    if len(bad) > 10:
        names += "; ..."
    return [f"{len(bad)} images are left out, {images:,} count: {names}"]


def same_scores(names: Sequence[str]) -> list[str]:
    """Return at most one line, on the classes whose scores are the same for nearly all images."""
    if not names:
        return []

    return [
        f"classes whose scores are the same for nearly all images, and say nothing: "
        f"{listed(names)}; it happens to a class that most images show, or none, with loss=asl to "
        f"any frequent one: train with loss=bce, or with loss.clip=0"
    ]


def report(results: Results, weights: str, path: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the content of `--json`, before `to_json`; a value that is undefined is NaN."""
    content: dict[str, Any] = {
        "metrics": results.metrics,
        "images": results.images,
        "left_out": results.bad,
        "weights": weights,
        "checkpoint": path,
    }
    if results.confusions is not None:
        content["confusions"] = [
            {"label": names[label], "prediction": names[prediction], "images": images}
            for label, prediction, images in results.confusions
        ]

    # From columns to one entry per class.
    columns = results.per_class.items()
    content["per_class"] = {
        name: {key: column[index] for key, column in columns} for index, name in enumerate(names)
    }
    return content


def to_csv(results: Results, names: tuple[str, ...]) -> str:
    """Return the content of `--csv`: a heading, and one row per class."""
    columns = [as_text(values, ".6g") for values in results.per_class.values()]
    rows = zip(names, *columns, strict=True)
    return "".join(csv_lines([["class", *results.per_class], *rows]))


def as_text(values: Sequence[float], form: str) -> list[str]:
    """Return the values of a column as text: counts as whole numbers, others in a format."""
    is_whole = all(float(value).is_integer() for value in values)
    return [format(value, ".0f" if is_whole else form) for value in values]
