"""Which thresholds a command uses: those of the command line, or those of the checkpoint."""

import argparse
import logging

from mldec.checkpoint import Loaded
from mldec.data.base import DataModule
from mldec.data.fingerprint import fingerprint
from mldec.errors import ConfigError

log = logging.getLogger("mldec")


def stored_thresholds(loaded: Loaded) -> list[float] | None:
    """Return the threshold of each class [K]; None if the checkpoint has none."""
    if loaded.calibration is None or not loaded.calibration.thresholds:
        return None

    thresholds = loaded.calibration.thresholds
    return [*thresholds] * (len(loaded.classes) if len(thresholds) == 1 else 1)


def chosen_thresholds(
    data: DataModule, loaded: Loaded, args: argparse.Namespace
) -> list[float] | None:
    """Return the thresholds of --threshold or of the checkpoint, and say which they are.

    Args:
        data: that is evaluated.
        loaded: the checkpoint.
        args: the command line.

    Returns:
        One threshold for all classes, or one per class of the data; None for `data.threshold`.

    Raises:
        ConfigError: for --threshold where an image has one label.
    """
    if args.threshold is not None:
        if loaded.classes.exclusive:
            raise ConfigError(
                "--threshold has no effect: an image of this data has one label; leave it out"
            )
        return [args.threshold]

    calibration = loaded.calibration
    is_chosen = any(setting.startswith("data.threshold=") for setting in args.settings)
    if calibration is None or not calibration.thresholds or is_chosen:
        return None

    path = args.checkpoint
    if calibration.fingerprint == fingerprint(data.val):
        log.warning(
            f"precision, recall and F1 are at the thresholds of {path} for "
            f"{calibration.objective}, which were fitted on these images: they are too good; "
            f"python -m mldec.calibrate prints those of images outside the fit"
        )
    else:
        log.info(
            f"precision, recall and F1 are at the thresholds of {path} for "
            f"{calibration.objective}, fitted on {calibration.images:,} other images"
        )
    return calibration.thresholds_of(loaded.classes.names, data.val.classes.names)
