"""Training photos that speak most for the predictions of a head that was fitted in closed form."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from mldec.data.fingerprint import fingerprint
from mldec.data.types import Split, StoredImages, fixed_sample
from mldec.errors import DataError, UserError
from mldec.evaluation.frozen_features import reuse_tokens
from mldec.evaluation.left_out import TrainingImages, image_names, read_training_images
from mldec.evaluation.open import EvaluationSetup
from mldec.runtime.console import progress_bar
from mldec.tools.report.examples import Decision, model_columns, thumbnail

# Names of up to three training photos and their contributions to the logit of each predicted class.
Speaking = dict[int, list[tuple[str, float]]]


@dataclass(frozen=True)
class TrainingPhotos:
    """Training photos of a report. A photo can speak for several predictions."""

    speaking: dict[int, Speaking] = field(default_factory=dict)  # by the row of the image
    thumbnails: dict[str, str] = field(default_factory=dict)  # by the name; JPEG as data URLs
    note: str = ""  # the reason why there are none


def find_training_photos(
    rows: Sequence[int],
    setup: EvaluationSetup,
    indices: np.ndarray,
    decisions: list[list[Decision]],
) -> TrainingPhotos:
    """Find the training photos that speak most for the predictions on some images.

    `rows` are the rows of these images in the scores, and `indices` [N] the indices of the scored
    images in the validation split. Heads that were not fitted in closed form have no such photos.
    """
    loaded = setup.loaded
    if not loaded.model.is_fitted or not isinstance(setup.data.val.dataset, StoredImages):
        return TrainingPhotos()
    training = read_training_images(loaded)
    if training is None:
        return TrainingPhotos(note="Training photos are not shown: their features are not stored.")
    try:
        train = setup.data.train
    except UserError as error:
        return TrainingPhotos(note=f"Training photos are not shown: {error}.")
    # Photos of other data may have the same names.
    if loaded.fingerprint is None or loaded.fingerprint.files != fingerprint(train).files:
        return TrainingPhotos(note="Training photos are not shown: the training data has changed.")

    speaking = explain(training, rows, setup, indices, decisions)
    shown = {name for own in speaking.values() for found in own.values() for name, _ in found}
    names = sorted(shown)
    images = train.viewed(setup.data.transform).dataset
    index_of = {os.fsdecode(key): n for n, key in enumerate(image_names(train, setup.config))}

    def make(name: str) -> str | None:
        try:
            return thumbnail(images, index_of[name])
        except DataError:
            return None  # the file was deleted after the training

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        made = progress_bar(threads.map(make, names), desc="training photos", total=len(names))
        thumbnails = {name: made for name, made in zip(names, made, strict=True) if made}
    return TrainingPhotos(speaking, thumbnails)


def explain(
    training: TrainingImages,
    rows: Sequence[int],
    setup: EvaluationSetup,
    indices: np.ndarray,
    decisions: list[list[Decision]],
) -> dict[int, Speaking]:
    """Return the names and contributions of training images by row; see `find_training_photos`."""
    val = setup.data.val
    assert isinstance(val.dataset, StoredImages)
    names = image_names(val, setup.config)[indices]
    selected = Split(val.dataset.select(indices[rows]), val.classes)
    # The features are in the cache, unless the training had another precision.
    data = replace(setup.data, load_val=lambda: selected)
    data = reuse_tokens(data, setup.loaded, setup.config, device=setup.device)

    column_of = model_columns(setup)
    model = setup.loaded.model.to(setup.device)
    speaking = {}
    for number, row in enumerate(rows):
        classes = [one.class_index for one in decisions[row] if one.kind != "missed"]
        features = fixed_sample(data.val.dataset, number)[0][None].to(setup.device)
        with torch.no_grad():
            if features.ndim == 4:
                features = model.backbone(features)
        # The left-out score of a training image has no contribution of the image itself.
        own = os.fsdecode(names[row])
        columns = [column_of[index] for index in classes]
        found = training.speaking_for(model.head, features, columns, without=own)
        speaking[row] = dict(zip(classes, found, strict=True))
    model.cpu()
    return speaking
