"""Experiment trackers: numbers and images of a run in Weights & Biases and trackio.

A tracker never ends a run. After its first error, it logs a warning and is disabled.
"""

import importlib
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from mldec.config.compose import to_dict
from mldec.config.schema import Config
from mldec.errors import brief
from mldec.files import torch_files
from mldec.training.monitor import Details

log = logging.getLogger("mldec")

ID_FILE = "tracker_id.txt"  # in the folder of a run
UPLOAD_SECONDS = 300  # limit of the remaining uploads of wandb at the end of a run


def start_trackers(config: Config, directory: Path) -> "list[Tracker]":
    """Create or continue the tracker runs; call this on the main rank."""
    path = directory / ID_FILE
    run_id = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if not run_id:
        run_id = uuid.uuid4().hex[:16]
        torch_files.write_text(path, f"{run_id}\n")
    return [Tracker(name, config, directory, run_id) for name in config.log.trackers]


class Tracker:
    """Send numbers to wandb or trackio until the first error; `run_id` identifies a resumed run."""

    def __init__(self, name: str, config: Config, directory: Path, run_id: str) -> None:
        self.name = name
        self.run: Any = None  # None after a failure, and at the end
        with self._or_give_up():
            self.package = importlib.import_module(name)
            self.run = self.package.init(
                project=config.log.project or "mldec",
                config=to_dict(config),
                resume="allow",
                **self._options(config.name, directory, run_id),
            )
            if name == "wandb":
                # wandb's own step never decreases: wandb would drop repeated steps after a resume.
                self.run.define_metric("*", step_metric="step")

    def _options(self, name: str, directory: Path, run_id: str) -> dict[str, Any]:
        """Return options that identify the run and disable telemetry."""
        if self.name == "trackio":
            # trackio identifies a run by its name.
            options = {"auto_log_gpu": False, "auto_log_cpu": False, "embed": False}
            return {"name": f"{name}-{run_id}", **options}

        settings = self.package.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            finish_timeout=UPLOAD_SECONDS,
            quiet=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        return {"name": name, "id": run_id, "dir": directory, "settings": settings}

    def add(self, step: int, details: Details) -> None:
        """Send the scalars and images of a step. Curves are sent to TensorBoard only."""
        if self.run is None:
            return

        with self._or_give_up():
            images = {tag: self.package.Image(image) for tag, image in details.images.items()}
            finite = {tag: value for tag, value in details.scalars.items() if isfinite(value)}
            if self.name == "wandb":
                self.run.log({"step": step, **finite, **images})
            else:
                self.run.log({**finite, **images}, step=step)

    def close(self) -> None:
        """Finish the tracker run."""
        if self.run is not None:
            with self._or_give_up():
                self.package.finish()
                self.run = None

    @contextmanager
    def _or_give_up(self) -> Iterator[None]:
        """Log an error and disable the tracker; trackers may raise any exception."""
        try:
            yield
        except Exception as error:
            self.run = None
            log.warning(f"log.{self.name}: {brief(error)}; training goes on, nothing more is sent")
