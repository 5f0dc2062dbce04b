"""Send the numbers of a run to Weights & Biases and to trackio.

A tracker never ends a run: what it raises becomes one warning, and nothing more is sent to it.
"""

import importlib
import importlib.util
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mldec.config.compose import to_dict
from mldec.config.schema import Config, Log
from mldec.errors import ConfigError, brief, writing
from mldec.files import torch_files
from mldec.runtime import distributed
from mldec.training.details import Details

log = logging.getLogger("mldec")

PROJECT = "mldec"  # unless log.project names another one
ID_FILE = "tracker_id.txt"  # in the folder of a run
UPLOAD_SECONDS = 300  # that wandb may take at the end of a run for what is not uploaded yet


class Record(NamedTuple):
    """The record of a run at one tracker, in the terms that all of them share."""

    log: Callable[[int, dict[str, Any]], None]  # step and values by name
    # The package: its classes Image and Histogram take the same arguments in each of them.
    package: Any
    finish: Callable[[], None]


def open_wandb(config: Config, directory: Path, run_id: str) -> Record:
    """Begin a record of wandb, or go on with the one of this id."""
    import wandb

    run = wandb.init(
        project=config.log.project or PROJECT,
        id=run_id,
        name=config.name,
        config=to_dict(config),
        resume="allow",
        dir=directory,
        # The settings of the run and its numbers only: no console, code, command line, or
        # description of the machine.
        settings=wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            finish_timeout=UPLOAD_SECONDS,
            quiet=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
        ),
    )

    # The steps that wandb counts by itself never go back: of a resumed run it would drop all up to
    # the last one before the stop.
    run.define_metric("*", step_metric="step")
    return Record(
        log=lambda step, values: run.log({"step": step, **values}),
        package=wandb,
        finish=run.finish,
    )


def open_trackio(config: Config, directory: Path, run_id: str) -> Record:
    """Begin a record of trackio, or go on with the one of this id; it has a folder of its own."""
    import trackio

    run = trackio.init(
        project=config.log.project or PROJECT,
        # trackio finds the record of a run by its name.
        name=f"{config.name}-{run_id}",
        config=to_dict(config),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return Record(
        log=lambda step, values: run.log(values, step=step),
        package=trackio,
        finish=trackio.finish,
    )


OPEN = {"wandb": open_wandb, "trackio": open_trackio}


def chosen(settings: Log) -> list[str]:
    """Return the names of the trackers that a run sends its numbers to."""
    return [name for name in OPEN if getattr(settings, name)]


def require(settings: Log) -> None:
    """Check that the packages of the chosen trackers are installed.

    Raises:
        ConfigError: if one of them is missing.
    """
    for name in chosen(settings):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.{name}=true needs the package {name}, which is not installed; "
                f"run pip install 'mldec[{name}]'"
            )


class Tracker:
    """Send the numbers of a run to one tracker, until that fails.

    Args:
        name: of the tracker, a key of `OPEN`.
        config: of the run, which becomes part of the record.
        directory: of the run.
        run_id: by which a resumed run finds its record.
    """

    def __init__(self, name: str, config: Config, directory: Path, run_id: str) -> None:
        self.name = name
        self.record: Record | None = None  # None after a failure, and at the end
        try:
            self.record = OPEN[name](config, directory, run_id)
        except Exception as error:
            self._give_up(error)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of one step."""
        self._send(step, lambda _: dict(values))

    def details(self, step: int, details: Details) -> None:
        """Send what the evaluation after a step shows; the curves are for TensorBoard only."""

        def converted(package: Any) -> dict[str, Any]:
            values: dict[str, Any] = dict(details.scalars)
            for tag, histogram in details.histograms.items():
                pair = histogram.counts, histogram.edges
                values[tag] = package.Histogram(np_histogram=pair)
            for tag, image in details.images.items():
                values[tag] = package.Image(image)
            return values

        self._send(step, converted)

    def close(self) -> None:
        """End the record."""
        record, self.record = self.record, None
        if record is not None:
            try:
                record.finish()
            except Exception as error:
                self._give_up(error)

    def _send(self, step: int, values: Callable[[Any], dict[str, Any]]) -> None:
        """Send what a function makes of the tracker's package."""
        if self.record is None:
            return
        try:
            self.record.log(step, values(self.record.package))
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Send nothing more; a tracker may raise anything."""
        self.record = None
        log.warning(f"log.{self.name}: {brief(error)}; training goes on, nothing more is sent")


def start(config: Config, directory: Path) -> list[Tracker]:
    """Begin or continue the records of a run, on the main process.

    Args:
        config: of the run.
        directory: of the run, where the id of its records is kept.

    Returns:
        The chosen trackers; none on another process.

    Raises:
        DataError: if the file with the id cannot be written.
    """
    names = chosen(config.log)
    if not names or not distributed.is_main():
        return []

    run_id = _run_id(directory / ID_FILE)
    return [Tracker(name, config, directory, run_id) for name in names]


def _run_id(path: Path) -> str:
    """Return the id in a file; a file that is absent or damaged gets a new one."""
    if path.exists():
        content = path.read_text(encoding="utf-8", errors="replace").strip()
        if re.fullmatch(r"[0-9a-f]{16}", content):
            return content

    run_id = uuid.uuid4().hex[:16]
    with writing(path, of_run=True):
        torch_files.write_text(path, f"{run_id}\n")
    return run_id
