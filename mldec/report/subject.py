"""The checkpoints of a report, and the images that they are asked about."""

import argparse
import logging
from dataclasses import dataclass, replace

import torch
from scipy.special import logit
from torch import nn

from mldec import build
from mldec.calibration.stored import chosen_thresholds
from mldec.checkpoint import Loaded, load_model
from mldec.checkpoint.classes import can_make
from mldec.cli import chosen_model, precision_setting
from mldec.config.schema import Config
from mldec.data.base import DataModule
from mldec.data.fingerprint import fingerprint
from mldec.errors import ConfigError, DataError
from mldec.evaluation import Scores, all_scores
from mldec.evaluation.command import (
    check_class_names,
    fit_to_device,
    scorer,
)
from mldec.evaluation.opening import asked_for, check_size, chosen_data, warn_of_scores
from mldec.evaluators import Evaluator, Thresholded
from mldec.runtime import distributed

log = logging.getLogger("mldec")


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and the data that it is asked about.

    Attributes:
        path: as the user names it.
        loaded: the checkpoint.
        config: its settings, with those of the command line.
        data: the images, as this model sees them.
        network: images and queries -> calibrated logits in the order of the data's classes.
        device: that computes.
        thresholds: one for all classes or one per class; None for that of the data's settings.
        threshold_notes: where they come from, a sentence or two.
    """

    path: str
    loaded: Loaded
    config: Config
    data: DataModule
    network: nn.Module
    device: torch.device
    thresholds: list[float] | None
    threshold_notes: list[str]

    def evaluator(self) -> Evaluator:
        """Return a new evaluator of the data, with the thresholds of choice.

        Raises:
            ConfigError: if it takes none.
        """
        evaluator = self.data.evaluator()
        if self.thresholds is not None:
            if not isinstance(evaluator, Thresholded):
                raise ConfigError("data: its evaluator takes no thresholds of a checkpoint")
            evaluator.logit_threshold = torch.tensor(logit(self.thresholds))
        return evaluator

    def scores(self) -> Scores:
        """Score all validation images.

        Raises:
            DataError: if there is none that can be read, or a score is not finite.
        """
        scores = all_scores(
            self.network, self.data, self.config, device=self.device, path=self.path
        )
        if not len(scores.indices):
            reason = "; ".join(scores.bad[:1]) or "there is none"
            raise DataError(f"no validation image can be scored: {reason}")
        log.info(f"{self.path}: {len(scores.indices):,} images are scored")
        return scores


def prepare(args: argparse.Namespace) -> Subject:
    """Load the checkpoint of a command line, and the data that it is asked about."""
    path = args.checkpoint
    args.settings += precision_setting(args)
    loaded = load_model(**chosen_model(args))
    check_class_names(loaded, args)
    config, parts = chosen_data(loaded, args)
    device = distributed.pick_device(config.device)
    fit_to_device(config, args.settings, device)

    # Images that cannot be read are part of the report.
    data = replace(build.data(parts), bad_images="skip")
    if not len(data.val.dataset):
        raise DataError("the validation split has no image: choose data with some")
    check_size(data, loaded, args)
    warn_of_scores(loaded, data, path)
    loaded, data = asked_for(loaded, data, path)
    thresholds = chosen_thresholds(data, loaded, args)
    network = scorer(loaded, data, path)
    origin = threshold_notes(args, loaded, data, is_chosen=thresholds is not None)
    subject = Subject(path, loaded, config, data, network, device, thresholds, origin)

    # Thresholds that it does not take are refused before the first image is scored.
    subject.evaluator()
    return subject


def prepare_other(args: argparse.Namespace, subject: Subject) -> Subject:
    """Load the checkpoint to compare with; it sees the images of the first one in its own way."""
    path = args.compare
    its_args = argparse.Namespace(**{**vars(args), "checkpoint": path})
    loaded = load_model(**chosen_model(its_args))
    split = subject.data.val.viewed(loaded.transform)
    if can_make(loaded.classes):
        # It is asked by word vectors of its own, whatever those of the first one are.
        split = replace(split, classes=replace(split.classes, queries=None, origin=None))
    data = replace(subject.data, load_val=lambda: split)
    loaded, data = asked_for(loaded, data, path)
    if loaded.classes.exclusive != subject.loaded.classes.exclusive:
        raise ConfigError(
            f"--compare {path}: one of the models is for one label per image, the other for "
            f"several; choose two of a kind"
        )

    network = scorer(loaded, data, path)
    thresholds = chosen_thresholds(data, loaded, its_args)
    return replace(
        subject, path=path, loaded=loaded, data=data, network=network, thresholds=thresholds
    )


def threshold_notes(
    args: argparse.Namespace, loaded: Loaded, data: DataModule, *, is_chosen: bool
) -> list[str]:
    """Return where the thresholds come from; see `chosen_thresholds`.

    Args:
        args: the command line.
        loaded: the checkpoint.
        data: the images.
        is_chosen: whether there are thresholds other than that of the data's settings.
    """
    if loaded.classes.exclusive:
        return [
            "A class is predicted if its score is the highest; precision, recall and F1 are of "
            "these predictions, average precision is of the scores."
        ]
    if args.threshold is not None:
        return [f"The threshold is {args.threshold:g}, as the command line says."]
    if not is_chosen:
        return [
            "The threshold is that of the data's settings (data.threshold); mldec.calibrate fits "
            "one per class."
        ]

    calibration = loaded.calibration
    assert calibration is not None
    sentences = [f"The thresholds are those of the checkpoint, for {calibration.objective}."]
    if calibration.fingerprint == fingerprint(data.val):
        sentences.append(
            "They were fitted on these very images, so that precision, recall and F1 are too good; "
            "mldec.calibrate prints those of images outside the fit."
        )
    return sentences
