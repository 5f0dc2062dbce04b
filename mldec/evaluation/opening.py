"""A checkpoint and the data that it is asked about, made to fit each other."""

import argparse
import logging
from dataclasses import replace
from pathlib import Path

from mldec import build
from mldec.checkpoint import Loaded, check_queries
from mldec.config.compose import override
from mldec.config.schema import Config
from mldec.data.base import DataModule
from mldec.data.zero_shot.word_vectors import made_alike
from mldec.errors import ConfigError

log = logging.getLogger("mldec")


def chosen_data(loaded: Loaded, args: argparse.Namespace) -> tuple[Config, build.Parts]:
    """Return the settings of a checkpoint with those of the command line, and the checked data.

    A file that names no data set, such as a model of open_clip, has image settings nevertheless:
    they take the place of those that data=NAME brings.

    Args:
        loaded: the checkpoint.
        args: the command line, with `settings` and the options of a model.

    Raises:
        ConfigError: for a wrong setting.
    """
    config = override(loaded.config, [*size_setting(args), *args.settings])
    data = build.check(config, ["data"])["data"]

    if "_target_" not in loaded.config.data:
        chosen = {setting.partition("=")[0] for setting in args.settings}
        own = {
            name: value
            for name, value in loaded.config.data.items()
            if name in data.arguments and f"data.{name}" not in chosen
        }
        data = replace(data, arguments=data.arguments | own)

    parts = {"data": data}
    return build.recorded(config, parts), parts


def size_setting(args: argparse.Namespace) -> list[str]:
    """Return --image-size as a setting, since data=NAME brings an image size of its own."""
    return [] if args.image_size is None else [f"data.image_size={args.image_size}"]


def check_size(data: DataModule, loaded: Loaded, args: argparse.Namespace) -> None:
    """Warn of an image size that data=NAME brings, and that is not the checkpoint's.

    Raises:
        ConfigError: if the checkpoint takes images of one size only.
    """
    trained, evaluated = loaded.transform.image_size, data.transform.image_size
    if evaluated == trained:
        return

    if loaded.config.backbone.get("image_size") is not None:
        raise ConfigError(
            f"data.image_size {evaluated}: {args.checkpoint} takes images of {trained} pixels "
            f"only; pass data.image_size={trained}"
        )
    if not any(setting.startswith("data.image_size=") for setting in args.settings):
        log.warning(
            f"evaluated at {evaluated} pixels, the default of this data; {args.checkpoint} is for "
            f"{trained}: pass data.image_size={trained} for that"
        )


def asked_for(loaded: Loaded, data: DataModule, path: str | Path) -> tuple[Loaded, DataModule]:
    """Ask a model for the classes of the data, if it takes any.

    Word vectors that the data lacks are made by the text encoder that made those of the checkpoint.
    A model that has no classes of its own takes those of the data.

    Args:
        loaded: the checkpoint.
        data: whose validation images it is asked about.
        path: of the checkpoint, for messages.

    Returns:
        Both, with the same classes if the model has none of its own.

    Raises:
        CheckpointError: if the word vectors have another width, or none can be made.
        ConfigError: if the text encoder cannot be had.
    """
    trained, classes = loaded.classes, data.val.classes
    if trained.origin is None or not trained.origin.is_encoder:
        return loaded, data

    if classes.queries is None:
        remedy = "put its weights there again"
        made = made_alike(classes.names, trained.origin, where=str(path), remedy=remedy)
        classes = replace(classes, queries=made.queries, origin=made.origin)
        split = replace(data.val, classes=classes)
        data = replace(data, load_val=lambda: split)

    check_queries(trained, classes, path)
    return (loaded if trained.names else replace(loaded, classes=classes)), data


def warn_of_scores(loaded: Loaded, data: DataModule, path: str | Path) -> None:
    """Warn of scores that have a meaning beside those of other classes only.

    Args:
        loaded: the checkpoint, before `asked_for`.
        data: that it is asked about.
        path: of the checkpoint, for messages.
    """
    if is_relative(loaded, data):
        log.warning(
            f"{path} ranks images, and its scores have no threshold of their own: mAP holds, "
            f"precision, recall and F1 do not; python -m mldec.calibrate --platt mends that"
        )


def is_relative(loaded: Loaded, data: DataModule) -> bool:
    """Tell whether the scores of a softmax are asked for several labels per image.

    The arguments are those of `asked_for`.
    """
    return not loaded.classes.names and loaded.classes.exclusive and not data.val.classes.exclusive
