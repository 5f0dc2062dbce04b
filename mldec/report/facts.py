"""What a report says in words: facts about checkpoint and data, and notes on its numbers."""

from datetime import UTC, datetime

import numpy as np

import mldec
from mldec.report.examples import MOST_SUSPECTS, PER_KIND
from mldec.report.histograms import SHOWN
from mldec.report.subject import Subject


def summary(subject: Subject, labels: np.ndarray, unreadable: int) -> list[tuple[str, str]]:
    """Return headings and texts about the checkpoint and the data.

    Args:
        subject: the checkpoint and the data.
        labels: of the images that can be read, int8 [N, K].
        unreadable: number of images that cannot be read.
    """
    loaded, node = subject.loaded, subject.config.data
    data = str(node.get("_target_", "")).removeprefix("mldec.data.")
    if "root" in node:
        data += f" in {node['root']}"

    images = f"{len(labels):,}"
    if unreadable:
        images += f", and {unreadable:,} that cannot be read"
    parameters = sum(tensor.numel() for tensor in loaded.model.parameters())
    return [
        ("Checkpoint", f"{subject.path} ({loaded.weights} weights)"),
        ("Data", data),
        ("Validation images", images),
        ("Classes", f"{labels.shape[1]:,}"),
        ("Positive labels", f"{np.count_nonzero(labels == 1):,}"),
        ("Image size", f"{subject.data.transform.image_size} pixels"),
        ("Parameters", f"{parameters:,}"),
        ("Written", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by mldec {mldec.__version__}"),
    ]


def notes(subject: Subject, resamples: int, classes_with_images: int) -> list[str]:
    """Return what was sampled, and which scores and thresholds the numbers are of.

    Args:
        subject: the checkpoint and the data.
        resamples: number of resamples of the images.
        classes_with_images: number of classes whose images are shown.
    """
    classes, calibration = subject.data.val.classes, subject.loaded.calibration
    sentences = [
        f"Intervals are 95 % percentile intervals of {resamples:,} resamples of the images by the "
        f"Bayesian bootstrap (Rubin 1981): random weights of the images, always the same."
    ]
    if calibration is None:
        sentences.append("The scores are those of the model: the checkpoint is not calibrated.")
    else:
        sentences.append(
            f"The scores are calibrated, fitted to {calibration.images:,} images on "
            f"{calibration.date}."
        )
    sentences += subject.threshold_notes

    pictured = f"the {PER_KIND} surest images of each kind are shown"
    if classes_with_images < len(classes):
        sentences.append(
            f"Of {classes_with_images:,} of the {len(classes):,} classes, spread evenly over their "
            f"ranking by average precision, {pictured}; suspected labels are of these classes."
        )
    else:
        sentences.append(f"Of each class {pictured}.")

    if classes.exclusive:
        sentences.append("Suspected labels are looked for only if images have several labels.")
    else:
        sentences.append(
            f"Suspected labels are at most {MOST_SUSPECTS} of those that confident learning counts "
            f"as wrong. They are labels of validation images, which the training did not see."
        )
    if len(classes) > SHOWN:
        which = "most mistakes" if classes.exclusive else "most images"
        sentences.append(f"The matrix shows the {SHOWN} classes with the {which}.")
    return sentences
