"""Open a checkpoint and its data for evaluation."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mldec import build
from mldec.checkpoint import Loaded, load_model
from mldec.checkpoint.classes import check_queries, scoring
from mldec.checkpoint.state import Calibration
from mldec.config.compose import override
from mldec.config.schema import Config
from mldec.data.fingerprint import difference, fingerprint
from mldec.data.readers.hugging_face import READER
from mldec.data.types import Classes, DataModule, same_images
from mldec.errors import ConfigError, log
from mldec.evaluation.frozen_features import reuse_tokens
from mldec.evaluation.left_out import reuse_left_out
from mldec.evaluation.options import EvalOptions, ModelOptions
from mldec.evaluation.run import Scores, all_scores, evaluator_of
from mldec.evaluators import Evaluator
from mldec.evaluators.average_precision import average_precision
from mldec.evaluators.constant import LEARNED_AP, ConstantScores
from mldec.files.run_folder import LEFT_OUT
from mldec.runtime import distributed
from mldec.runtime.devices import Precision

DEFAULT_THRESHOLD = 0.5  # for models without thresholds


@dataclass(frozen=True)
class EvaluationSetup:
    """A checkpoint and the data for its evaluation."""

    path: str  # path of the checkpoint on the command line
    loaded: Loaded  # with the classes of the data if the checkpoint has no classes
    config: Config  # settings of the checkpoint, with the overrides of the command line
    data: DataModule  # its validation images are scored
    # Images [B, 3, H, W] or cached tokens, and word vectors -> logits [B, K] of the data's classes.
    network: nn.Module
    device: torch.device
    thresholds: list[float] | None  # one or K in [0, 1]; None: the threshold of the data's settings
    ranks_only: bool  # whether scores are only comparable between classes, not with a threshold

    def logit_threshold(self) -> Tensor | None:
        """Return the thresholds as logits float64 [1] or [K]; None: the data's threshold."""
        if self.thresholds is None:
            return None

        from scipy.special import logit  # slow import, not needed for training

        # No score reaches a threshold above 1. Its logit is infinite, as for 1.
        return torch.from_numpy(logit(np.minimum(1, self.thresholds)))

    def evaluator(self) -> Evaluator:
        """Create an evaluator of the data with the selected thresholds."""
        return evaluator_of(self.data, self.logit_threshold())

    def scored_data(self) -> DataModule:
        """Return the data for `network`, with stored scores or tokens if possible.

        See `reuse_left_out` and `reuse_tokens`.
        """
        stored = reuse_left_out(self.data, self.loaded, self.config)
        if stored is not None:
            return stored
        is_same = self.loaded.fingerprint == fingerprint(self.data.val)
        # Images of two folders may have the same fingerprint.
        if self.loaded.model.is_fitted and is_same and same_images(self.data.train, self.data.val):
            log.warning(
                f"{self.path} was fitted to these images and their leave-one-out scores cannot be "
                f"used (they need {LEFT_OUT} of the run and its settings), so the metrics are too "
                f"high; pass other images"
            )
        return reuse_tokens(self.data, self.loaded, self.config, device=self.device)

    def scores(self) -> Scores:
        """Score all validation images; see `all_scores`."""
        data = self.scored_data()
        return all_scores(self.network, data, self.config, device=self.device, path=self.path)

    def constant_classes(self, scores: Scores) -> tuple[str, ...]:
        """Return the names of the classes that `ConstantScores` finds and that were not learned."""
        classes = self.data.val.classes
        constant = ConstantScores(len(classes))
        # CLIP scores are only comparable between classes. They may all be near 1.
        if not classes.exclusive and not self.ranks_only:
            logits = torch.from_numpy(scores.logits)
            labels = torch.from_numpy(scores.labels)
            for block in zip(logits.split(1024), labels.split(1024), strict=True):
                constant.update(*block)
        found = constant.classes()
        ap = average_precision(scores.logits[:, found], scores.labels[:, found])["none"].tolist()
        pairs = zip(found, ap, strict=True)
        return tuple(classes.names[index] for index, value in pairs if 100 * value <= LEARNED_AP)


def load_checkpoint(options: ModelOptions, device: str = "cpu") -> Loaded:
    """Load the checkpoint of some options on a device, with the classes of the options, if any."""
    loaded = load_model(
        options.checkpoint,
        options.weights,
        image_size=options.image_size,
        class_names=options.class_names,
        thresholds=options.thresholds,
        device=device,
        plugins=options.plugin,
        views=options.views,
    )
    if options.classes is None:
        return loaded

    from mldec.evaluation.class_list import with_classes

    return with_classes(loaded, options.classes, options.vectors)


def open_for_evaluation(
    loaded: Loaded, options: EvalOptions, *, calibrated: bool = True
) -> EvaluationSetup:
    """Prepare the evaluation of a checkpoint: build the data, and select device and thresholds.

    `calibrated` is False to ignore the calibration of the checkpoint. Raises UserError if the data
    does not fit the model, or an option is invalid.
    """
    path = options.checkpoint
    config, parts = chosen_settings(loaded, options)
    device = distributed.pick_device(config.device)
    data = build.data(parts, options.in_memory)
    fit_to_device(config, options, device, len(data.val.dataset))
    check_size(data, loaded, options)
    # Another split that the user selects differs from the validation data on purpose.
    if options.in_memory is not None and loaded.val_fingerprint and not options.sets("data.val"):
        changed = difference(loaded.val_fingerprint, fingerprint(data.val), "validation")
        if changed:
            log.warning(f"data: these are not the validation images of {path} ({changed})")

    # A softmax over the classes, as of CLIP, has no meaningful threshold for multi-label data.
    is_open_softmax = not loaded.classes.names and loaded.classes.exclusive
    ranks_only = is_open_softmax and not data.val.classes.exclusive
    if ranks_only and calibrated:
        log.warning(
            f"{path}: its scores are only comparable between classes, so precision, recall and F1 "
            f"are not meaningful; mldec calibrate fits thresholds"
        )

    if options.class_list is not None:
        from mldec.evaluation.class_list import with_class_list

        # The calibration is for the checkpoint's classes, not for the class list.
        thresholds = None if options.threshold is None else [options.threshold]
        network, data = with_class_list(loaded, data, options)
    else:
        loaded, data = with_same_classes(loaded, data, path)
        network = scorer(loaded, data, path, calibrated=calibrated)
        thresholds = chosen_thresholds(data, loaded, options) if calibrated else None
        if thresholds is not None and len(thresholds) > 1:
            data = with_ranking(data, loaded.calibration)

    setup = EvaluationSetup(path, loaded, config, data, network, device, thresholds, ranks_only)
    if thresholds is not None:
        # Raise an error for unsupported thresholds before the first image is scored.
        setup.evaluator()
    return setup


def chosen_settings(loaded: Loaded, options: EvalOptions) -> tuple[Config, build.Parts]:
    """Return the config with the settings of the command line, and its validated data part."""
    # Keep the image size of the options, because data=NAME replaces it.
    settings = options.overrides
    if options.image_size is not None or loaded.model.views == "scales":
        settings.insert(0, f"data.image_size={loaded.transform.image_size}")
    if options.in_memory is not None and loaded.config.data.get("_target_") != READER:
        settings.insert(0, f"data._target_={READER}")
    config = override(loaded.config, settings)
    data = build.check(config, ["data"])["data"]

    # A checkpoint without a dataset, such as an open_clip model, still has image settings. They
    # override the defaults of data=NAME.
    if "_target_" not in loaded.config.data:
        arguments = dict(data.arguments)
        for name, value in loaded.config.data.items():
            if name in arguments and not options.sets(f"data.{name}"):
                arguments[name] = value
        data = replace(data, arguments=arguments)

    parts = {"data": data}
    return build.recorded(config, parts), parts


def fit_to_device(config: Config, options: EvalOptions, device: torch.device, images: int) -> None:
    """Prepare the device, and set its memory format and precision in the config in place."""
    train = config.train
    flags = {"tf32": train.tf32, "deterministic": train.deterministic}
    distributed.prepare_device(device, **flags, batches=images // train.eval_batch_size)

    wanted = train.precision
    if options.sets("train.precision"):
        if slow := wanted.warning(device):
            log.warning(slow)
    else:
        wanted = wanted.after_training(device)
    train.precision = wanted.for_device(device)
    log.info(f"{options.checkpoint}: scoring in {train.precision.value} on {device}")

    # Tensor cores are faster with channels_last, regardless of the training setting. Convolutions
    # in bf16 are faster with it on a CPU, too.
    train.channels_last = device.type == "cuda" or train.precision is Precision.bf16


def check_size(data: DataModule, loaded: Loaded, options: EvalOptions) -> None:
    """Warn if the image size differs from the training. Raise ConfigError if it is fixed."""
    trained = loaded.transform.image_size
    evaluated = data.transform.image_size
    if evaluated == trained:
        return

    if loaded.config.backbone.get("image_size") is not None:
        raise ConfigError(
            f"data.image_size={evaluated}: the image size of {options.checkpoint} is fixed; pass "
            f"data.image_size={trained}"
        )
    if not options.sets("data.image_size"):
        log.warning(
            f"evaluated at {evaluated} pixels, the default of this data; {options.checkpoint} was "
            f"trained at {trained}: pass data.image_size={trained} to use that"
        )


def with_same_classes(
    loaded: Loaded, data: DataModule, path: str | Path
) -> tuple[Loaded, DataModule]:
    """Return model and data with the same classes, whose word vectors are encoded if necessary."""
    trained = loaded.classes
    classes = data.val.classes
    if trained.origin is None or not trained.origin.can_encode:
        return loaded, data

    if classes.word_vectors is None:
        from mldec.words.vectors import encode_like_training

        vectors = encode_like_training(
            classes.names, trained.origin, where=str(path), remedy="restore its weights"
        )
        classes = replace(classes, word_vectors=vectors.word_vectors, origin=vectors.origin)
        split = replace(data.val, classes=classes)
        data = replace(data, load_val=lambda: split)

    check_queries(trained, classes, path)
    if not trained.names:
        loaded = replace(loaded, classes=classes)
    return loaded, data


def scorer(loaded: Loaded, data: DataModule, path: str, *, calibrated: bool = True) -> nn.Module:
    """Return the model of a checkpoint with its logits in the order of the data's classes."""
    calibration = loaded.calibration if calibrated else None
    return scoring(loaded.model, loaded.classes, data.val.classes, path, calibration)


def stored_thresholds(loaded: Loaded) -> list[float] | None:
    """Return the K thresholds of the checkpoint in [0, 1], or None if it has none."""
    if loaded.calibration is None:
        return None
    return loaded.calibration.per_class(len(loaded.classes)) or None


def chosen_thresholds(data: DataModule, loaded: Loaded, options: EvalOptions) -> list[float] | None:
    """Return the thresholds of --threshold or the checkpoint; None selects `data.threshold`."""
    if options.threshold is not None:
        return [options.threshold]

    calibration = loaded.calibration
    if calibration is None or not calibration.thresholds or options.sets("data.threshold"):
        return None

    origin = thresholds_origin(calibration, data)
    log.info(f"precision, recall and F1 use the thresholds of {options.checkpoint} {origin}")
    return calibration.thresholds_of(loaded.classes.names, data.val.classes.names)


def with_ranking(data: DataModule, calibration: Calibration | None) -> DataModule:
    """Return data with metrics at top-k that rank by margin, if the thresholds are for that."""
    # Thresholds for other objectives are decisions about one class, not between classes.
    if calibration is None or not (calibration.objective or "").startswith("per_image"):
        return data

    def evaluator(classes: Classes) -> Evaluator:
        made = data.make_evaluator(classes)
        made.ranks_by_margin = True  # type: ignore[attr-defined]
        return made

    log.info("metrics at top-k rank the classes of an image by logit minus logit of the threshold")
    return replace(data, make_evaluator=evaluator)


def thresholds_origin(calibration: Calibration, data: DataModule) -> str:
    """Describe how the thresholds of a checkpoint were selected, and on which images."""
    if calibration.file is not None:
        return calibration.reason
    if calibration.fingerprint == fingerprint(data.val):
        return (
            f"{calibration.reason}, fitted on these images; the metrics are optimistic, mldec "
            f"calibrate prints out-of-fold metrics"
        )
    # They may include some of these images, or these images with other labels.
    return f"{calibration.reason}, fitted on other data of {calibration.images:,} images"
