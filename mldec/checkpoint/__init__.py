"""Checkpoints: enough by themselves to rebuild the model, its classes and its input transform."""

from mldec import lazily
from mldec.checkpoint.classes import check_classes, check_queries, scoring
from mldec.checkpoint.loading import (
    Loaded,
    check_start,
    initialise,
    load,
    load_model,
    load_newest,
    load_strict,
    saved_config,
    to_store,
)
from mldec.checkpoint.state import FORMAT, Best, Calibrated, Calibration, Checkpoint, LogPosition

# A run that starts from no file does not import where files come from.
__getattr__ = lazily(
    __name__, dict.fromkeys(("is_download", "is_exported", "is_open_clip", "local"), "sources")
)

__all__ = [
    "FORMAT",
    "Best",
    "Calibrated",
    "Calibration",
    "Checkpoint",
    "Loaded",
    "LogPosition",
    "check_classes",
    "check_queries",
    "check_start",
    "initialise",
    "is_download",
    "is_exported",
    "is_open_clip",
    "load",
    "load_model",
    "load_newest",
    "load_strict",
    "local",
    "saved_config",
    "scoring",
    "to_store",
]
