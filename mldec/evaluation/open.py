"""Open a checkpoint and its data for evaluation."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mldec import build
from mldec.checkpoint import Loaded
from mldec.checkpoint.classes import check_queries, scoring
from mldec.checkpoint.state import Calibration
from mldec.config.compose import override
from mldec.config.schema import Config
from mldec.data.fingerprint import fingerprint
from mldec.data.types import DataModule
from mldec.errors import ConfigError
from mldec.evaluation.options import EvalOptions
from mldec.evaluation.run import Scores, all_scores, evaluator_of
from mldec.evaluators import Evaluator
from mldec.evaluators.constant import ConstantScores
from mldec.runtime import distributed
from mldec.runtime.devices import Precision

log = logging.getLogger("mldec")


DEFAULT_THRESHOLD = 0.5  # of a model without thresholds


@dataclass(frozen=True)
class EvaluationSetup:
    """A checkpoint, and the data that it is evaluated on."""

    path: str  # of the checkpoint, as the user names it
    loaded: Loaded  # with the classes of the data if it has none of its own
    config: Config  # its settings, with those of the command line
    data: DataModule  # its validation images are those to score
    network: nn.Module  # images [B, 3, H, W], queries -> logits [B, K] of the data's classes
    device: torch.device
    thresholds: list[float] | None  # of all classes or each; None: as the data's settings say
    ranks_only: bool  # scores have a meaning beside those of other classes only

    def logit_threshold(self) -> Tensor | None:
        """Return the thresholds as logits, float64 [1] or [K]; None for that of the data."""
        from scipy.special import logit  # slow to import, and training has no use for it

        # One above 1, which no score reaches, is that of an infinite logit.
        thresholds = np.minimum(1, self.thresholds or [])
        return None if self.thresholds is None else torch.from_numpy(logit(thresholds))

    def evaluator(self) -> Evaluator:
        """Return a new evaluator of the data, with the thresholds of choice."""
        return evaluator_of(self.data, self.logit_threshold())

    def scores(self) -> "Scores":
        """Score all validation images; see `all_scores`."""
        return all_scores(self.network, self.data, self.config, device=self.device, path=self.path)

    def constant_classes(self, scores: "Scores") -> tuple[str, ...]:
        """Name the classes whose scores are the same for nearly all of these images."""
        classes = self.data.val.classes
        constant = ConstantScores(len(classes))
        # Scores of CLIP are compared with those of other classes, and may all be near 1.
        if not classes.exclusive and not self.ranks_only:
            logits, labels = torch.from_numpy(scores.logits), torch.from_numpy(scores.labels)
            for block in zip(logits.split(1024), labels.split(1024), strict=True):
                constant.update(*block)
        return tuple(classes.names[index] for index in constant.classes())


def open_for_evaluation(
    loaded: Loaded, options: EvalOptions, *, calibrated: bool = True
) -> EvaluationSetup:
    """Choose the data that a checkpoint is asked about, its device and its thresholds.

    The command line has the options of a model and `settings`, perhaps `threshold` and
    `class_list`. With `calibrated` the calibration of the checkpoint is used.
    """
    path = options.checkpoint
    config, parts = chosen_settings(loaded, options)
    device = distributed.pick_device(config.device)
    fit_to_device(config, options.settings, device)
    data = build.data(parts)
    check_size(data, loaded, options)

    # Of a softmax over classes that are not known, as of CLIP.
    ranks_only = not loaded.classes.names and loaded.classes.exclusive
    ranks_only = ranks_only and not data.val.classes.exclusive
    if ranks_only and calibrated:
        log.warning(
            f"{path} ranks images, and its scores have no threshold of their own: mAP holds, "
            f"precision, recall and F1 do not; mldec calibrate mends that"
        )

    if options.class_list is not None:
        from mldec.evaluation.class_list import with_class_list

        # Calibration is of the checkpoint's own classes, each by one name.
        thresholds = None if options.threshold is None else [options.threshold]
        network, data = with_class_list(loaded, data, options)
    else:
        loaded, data = with_same_classes(loaded, data, path)
        # This checks the classes, whose thresholds are looked up next.
        network = scorer(loaded, data, path, calibrated=calibrated)
        thresholds = chosen_thresholds(data, loaded, options) if calibrated else None

    setup = EvaluationSetup(path, loaded, config, data, network, device, thresholds, ranks_only)
    if thresholds is not None:
        # Those that the evaluator does not take are refused before the first image is scored.
        setup.evaluator()
    return setup


def chosen_settings(loaded: Loaded, options: EvalOptions) -> tuple[Config, build.Parts]:
    """Return the settings of a checkpoint with those of the command line, and the checked data."""
    # data=NAME brings an image size of its own.
    has_own_size = options.image_size is not None or loaded.model.views == "scales"
    size = [f"data.image_size={loaded.transform.image_size}"] if has_own_size else []
    config = override(loaded.config, [*size, *options.settings])
    data = build.check(config, ["data"])["data"]

    # A file that names no data set, such as a model of open_clip, has image settings nevertheless:
    # they take the place of those that data=NAME brings.
    if "_target_" not in loaded.config.data:
        chosen = {setting.partition("=")[0] for setting in options.settings}
        own = {
            name: value
            for name, value in loaded.config.data.items()
            if name in data.arguments and f"data.{name}" not in chosen
        }
        data = replace(data, arguments=data.arguments | own)

    parts = {"data": data}
    return build.recorded(config, parts), parts


def fit_to_device(config: Config, settings: list[str], device: torch.device) -> None:
    """Prepare the device, and choose memory format and precision for it in the config."""
    train = config.train
    distributed.prepare_device(device, tf32=train.tf32, deterministic=train.deterministic)
    # What tensor cores want, whatever the training had.
    train.channels_last = device.type == "cuda"

    recorded = train.precision
    is_chosen = any(setting.startswith("train.precision=") for setting in settings)
    if is_chosen and (slow := recorded.warning(device)):
        log.warning(slow)
    if device.type == "cuda" or (is_chosen and recorded is Precision.bf16):
        return

    # Half precision is slow on a CPU.
    train.precision = Precision.fp32
    if recorded.half:
        log.info(f"evaluated in fp32 on a CPU, not in train.precision={recorded.value}")


def check_size(data: DataModule, loaded: Loaded, options: EvalOptions) -> None:
    """Warn of an image size that data=NAME brings, or refuse it if the backbone has one size."""
    trained, evaluated = loaded.transform.image_size, data.transform.image_size
    if evaluated == trained:
        return

    if loaded.config.backbone.get("image_size") is not None:
        raise ConfigError(
            f"data.image_size {evaluated}: {options.checkpoint} takes images of {trained} pixels "
            f"only; pass data.image_size={trained}"
        )
    if not any(setting.startswith("data.image_size=") for setting in options.settings):
        log.warning(
            f"evaluated at {evaluated} pixels, the default of this data; {options.checkpoint} was "
            f"trained at {trained}: pass data.image_size={trained} to use that"
        )


def with_same_classes(
    loaded: Loaded, data: DataModule, path: str | Path
) -> tuple[Loaded, DataModule]:
    """Give model and data the same classes; an encoder makes word vectors that the data lacks."""
    trained, classes = loaded.classes, data.val.classes
    if trained.origin is None or not trained.origin.makes_others:
        return loaded, data

    if classes.queries is None:
        from mldec.words.vectors import made_alike

        remedy = "put its weights there again"
        made = made_alike(classes.names, trained.origin, where=str(path), remedy=remedy)
        classes = replace(classes, queries=made.queries, origin=made.origin)
        split = replace(data.val, classes=classes)
        data = replace(data, load_val=lambda: split)

    check_queries(trained, classes, path)
    return (loaded if trained.names else replace(loaded, classes=classes)), data


def scorer(loaded: Loaded, data: DataModule, path: str, *, calibrated: bool = True) -> nn.Module:
    """Return a checkpoint's model with its logits in the order of the data's classes."""
    calibration = loaded.calibration if calibrated else None
    return scoring(loaded.model, loaded.classes, data.val.classes, path, calibration)


def stored_thresholds(loaded: Loaded) -> list[float] | None:
    """Return the threshold of each class [K]; None if the checkpoint has none."""
    if loaded.calibration is None or not loaded.calibration.thresholds:
        return None

    thresholds = list(loaded.calibration.thresholds)
    return thresholds * len(loaded.classes) if len(thresholds) == 1 else thresholds


def chosen_thresholds(data: DataModule, loaded: Loaded, options: EvalOptions) -> list[float] | None:
    """Return the thresholds of --threshold or of the checkpoint; None for `data.threshold`."""
    if options.threshold is not None:
        return [options.threshold]

    calibration = loaded.calibration
    is_chosen = any(setting.startswith("data.threshold=") for setting in options.settings)
    if calibration is None or not calibration.thresholds or is_chosen:
        return None

    origin = thresholds_origin(calibration, data)
    log.info(f"precision, recall and F1 are at the thresholds of {options.checkpoint} {origin}")
    return calibration.thresholds_of(loaded.classes.names, data.val.classes.names)


def thresholds_origin(calibration: Calibration, data: DataModule) -> str:
    """Say what chose the thresholds of a checkpoint, and on which images they were fitted."""
    if calibration.file is not None:
        return calibration.reason
    if calibration.fingerprint == fingerprint(data.val):
        return (
            f"{calibration.reason}, fitted on these images; the metrics are optimistic: "
            f"mldec calibrate prints those of images outside the fit"
        )
    return f"{calibration.reason}, fitted on {calibration.images:,} other images"
