"""Publish a checkpoint: the work of the command `mldec.publish`."""

import argparse
import logging
import tempfile
from dataclasses import replace
from pathlib import Path

from mldec.checkpoint import hub, is_tower, load_model, portable, to_store
from mldec.errors import CheckpointError, ConfigError, say
from mldec.files.results import check_folder, write_file
from mldec.publish.card import Known, card
from mldec.publish.facts import (
    command_of,
    cost_of,
    published_config,
    published_origin,
    start_of,
)
from mldec.publish.results import of_checkpoint, read_results

log = logging.getLogger("mldec")


def run(args: argparse.Namespace) -> None:
    """Do the work of `mldec.publish`: load, describe, write the files, and upload them.

    Args:
        args: the command line; see `mldec.publish.parser`.

    Raises:
        UserError: for a wrong option, a checkpoint or results that cannot be used, or an upload
            that the hub refuses.
    """
    # Everything that can be refused at once comes before the model.
    hub.check_repository(args.repository, args.repository)
    if is_tower(args.checkpoint):
        raise CheckpointError(
            f"{args.checkpoint} is a model of others, to which nothing was added: name it where "
            f"it is used, or publish the copy that mldec.calibrate makes"
        )
    if args.dry_run is None:
        hub.require_token()
    else:
        check_new_folder(args)

    known = gather(args)
    if args.dry_run is not None:
        write(Path(args.dry_run), known)
        say(*missing(known), f"{args.dry_run}: the files for {args.repository}; not uploaded")
        return

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), known)
        commit = hub.upload(Path(folder), args.repository, private=args.private)
    say(*missing(known), f"published: {hub.SCHEME}{args.repository}@{commit}")


def check_new_folder(args: argparse.Namespace) -> None:
    """Check that the folder of --dry-run can be made, or is empty.

    Raises:
        ConfigError: if it is not, or an option has no effect.
    """
    if args.private:
        raise ConfigError("--private has no effect with --dry-run: leave one of them out")
    check_folder("--dry-run", args.dry_run)

    folder = Path(args.dry_run)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--dry-run {folder}: it holds files; name a new folder, or empty it")


def gather(args: argparse.Namespace) -> Known:
    """Load a checkpoint, and gather what is known of it.

    Args:
        args: the command line.

    Raises:
        UserError: if the checkpoint or the results cannot be used.
    """
    loaded = load_model(args.checkpoint, args.weights, plugins=args.plugin)
    path = loaded.path
    if not loaded.classes.names:
        raise CheckpointError(
            f"{args.checkpoint} names no classes and holds no word vectors: it cannot be published"
        )

    checkpoint = portable.with_weights(to_store(loaded), loaded.weights, path)
    calibration = checkpoint.calibration
    if calibration is not None:
        calibration = replace(calibration, data=published_config(calibration.data))
    # Which packages are imported is the choice of whoever loads it.
    config = {**published_config(checkpoint.config), "plugins": []}
    classes = replace(checkpoint.classes, origin=published_origin(checkpoint.classes.origin))
    checkpoint = replace(checkpoint, config=config, calibration=calibration, classes=classes)

    measured = of_checkpoint(checkpoint, loaded.weights)
    if args.results is not None:
        measured = read_results(Path(args.results), loaded.classes, loaded.weights, args.checkpoint)
    return Known(
        repository=args.repository,
        checkpoint=checkpoint,
        loaded=loaded,
        measured=measured,
        start=start_of(checkpoint, loaded),
        cost=cost_of(loaded, path),
        command=command_of(path),
        license=args.license,
        plugins=args.plugin,
    )


def write(folder: Path, known: Known) -> None:
    """Write the files of a repository.

    Args:
        folder: for the files; it is created.
        known: of the checkpoint.

    Raises:
        DataError: if a file cannot be written.
        CheckpointError: if the checkpoint could not be read back.
    """
    portable.write(folder, known.checkpoint)
    write_file(folder / hub.CARD, card(known).encode())


def missing(known: Known) -> list[str]:
    """Return a line per option that would have told the card more."""
    lines = []
    if not known.measured.intervals:
        lines.append(
            "the card has no intervals: pass --results with a file of mldec.report --json"
            if known.measured.per_class
            else "the card has neither intervals nor a table of classes: pass --results with a "
            "file of mldec.report --json"
        )
    if known.license is None:
        lines.append("the card states no licence of the model: pass --license, such as apache-2.0")
    return lines
