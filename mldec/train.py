"""Train a model: `mldec train +experiment=digits`.

Slow modules are imported when the run starts, so that --help and errors in settings are fast.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import mldec
from mldec.cli import VERSION, require
from mldec.config.compose import config_dir, explain, parse, to_hydra, to_yaml
from mldec.config.help import help_text
from mldec.config.schema import Config
from mldec.errors import ConfigError, log, one_line, printable, say, writing
from mldec.files.run_folder import RUN_FILE, RunFacts, command_line
from mldec.runtime.console import to_console

if TYPE_CHECKING:
    import torch

    from mldec.build import Parts
    from mldec.runtime.signals import StopRequest
    from mldec.training.trainer import Trainer


def announce(name: str) -> None:
    """Prepare the process for a run and log its start, before torch is imported."""
    # OpenMP threads that spin make a CPU run ten times slower if another process is busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    to_console()
    log.info(f"{name}: starting, mldec {mldec.__version__}")


def run(
    config: Config,
    directory: Path,
    *,
    in_memory: Any = None,
    typed: Sequence[str] = (),
) -> None:
    """Validate the config, lock the folder of the run, and train.

    `in_memory` is data that the reader gets from Python, see `build.data`. `typed` are the settings
    that the user typed, as key=value.
    """
    started = time.monotonic()
    import torch

    from mldec import build
    from mldec.checkpoint import loading
    from mldec.files.run_folder import RunLock
    from mldec.runtime import distributed
    from mldec.runtime.signals import listening
    from mldec.training.closed_form import check_settings
    from mldec.training.optim import check_trainable

    # 1. Validate the settings before any file or device is used.
    if config.log.wandb:
        require("log.wandb=true", "wandb", "wandb")
    config = loading.check_start(config)
    parts = build.check(config)
    # Record the defaults of all parts, which later versions may change.
    config = build.recorded(config, parts)
    check_settings(config, parts, typed)
    check_trainable(config)

    # 2. Prepare the device.
    if config.train.deterministic:
        # cuBLAS is only deterministic with this workspace.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.train.deterministic)
    device = distributed.pick_device(config.device)
    train = config.train
    distributed.prepare_device(device, tf32=train.tf32, deterministic=train.deterministic)

    # 3. Start the processes, divide the batch, and lock the folder. Only the main process uses the
    # folder, because nodes may have separate disks.
    with distributed.processes(device), listening() as stop, RunLock(directory) as lock:
        config = config.for_world_size(distributed.world_size())
        distributed.on_main(lock.take)
        _train(config, parts, directory, device, stop, started, in_memory)


def _train(
    config: Config,
    parts: "Parts",
    directory: Path,
    device: "torch.device",
    stop: "StopRequest",
    started: float,
    in_memory: Any,
) -> None:
    from mldec.files.class_prior import write_prior
    from mldec.files.torch_files import write_text
    from mldec.runtime import distributed
    from mldec.runtime.environment import git_commit
    from mldec.training.describe import describe_best, describe_run, next_commands
    from mldec.training.log import RunLog, clock
    from mldec.training.start import is_inside, prepare_trainer

    # Buffer the messages until train.log is open.
    early = MemoryHandler(capacity=10_000, flushOnClose=False)
    log.addHandler(early)
    commit = f"(mldec {mldec.__version__}, commit {git_commit() or 'none'})"
    try:
        log.info(printable(f"{command_line()} {commit}"))
        trainer, path = prepare_trainer(config, parts, directory, device, stop, in_memory)
    finally:
        log.removeHandler(early)
    # Continue the log of a checkpoint in this folder. Otherwise start an empty log.
    lines = trainer.lines if path and is_inside(path, directory) else 0
    facts = distributed.on_main(partial(_open_folder, directory, trainer))

    run_log = RunLog(
        directory,
        step=trainer.learner.step,
        lines=lines,
        started=started,
        config=trainer.config,
        earlier=early.buffer,
    )
    with closing(run_log):
        if path:
            log.info(f"resumed from {path}")
        log.info(describe_run(trainer, config.train.precision))
        slow = trainer.config.train.precision.warning(device)
        if slow and distributed.is_main():
            log.warning(slow)
        trainer.fit(run_log)

        seconds = clock(run_log.seconds)
        log.info(f"ended after epoch {trainer.epoch} and {seconds}: {trainer.ended}")
        best = trainer.best
        facts = replace(facts, best=asdict(best), ended=trainer.ended)
        distributed.on_main(partial(write_text, directory / RUN_FILE, facts.to_json()))
        log.info(describe_best(best, trainer.epoch, directory / "checkpoints" / "best.pt"))
        # Some losses estimate class priors, which a second run can use.
        prior = trainer.learner.loss.estimated_prior()
        if prior is not None and distributed.is_main():
            file = directory / "class_prior.csv"
            with writing(file, of_run=True):
                write_prior(file, trainer.data.train.classes.names, prior.tolist())
            log.info(f"wrote the estimated class priors to {file}; see loss.class_prior")
        log.info(f"next: {next_commands(directory, trainer)}")


def _open_folder(directory: Path, trainer: "Trainer") -> RunFacts:
    """Create the folders of a run, write config.yaml and run.json, and return the run facts."""
    from mldec.files.torch_files import write_text
    from mldec.training.describe import run_facts

    with writing(directory, of_run=True):
        (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_text(directory / "config.yaml", to_yaml(trainer.config))
    facts = run_facts(trainer)
    write_text(directory / RUN_FILE, facts.to_json())
    return facts


@hydra.main(version_base="1.3", config_path=config_dir(), config_name="config")
def app(node: DictConfig) -> None:
    """Run one training, which may be a job of a sweep, in the output folder of Hydra."""
    with one_line():
        hydra_config = HydraConfig.get()
        under_torchrun = os.environ.get("WORLD_SIZE", "1") != "1"
        if under_torchrun and hydra_config.mode is RunMode.MULTIRUN:
            raise ConfigError("--multirun does not work with torchrun; start one run per value")

        directory = Path(hydra_config.runtime.output_dir)
        try:
            announce(node.name)
            typed = list(hydra_config.overrides.task)
            run(parse(node, typed), directory, typed=typed)
        finally:
            # Remove the folder that Hydra created if the run failed before it wrote a file.
            with suppress(OSError):
                directory.rmdir()


@hydra.main(version_base="1.3", config_path=config_dir(), config_name="config")
def show(node: DictConfig) -> None:
    """Print the config of a run on this machine as YAML, including all defaults."""
    from mldec import build
    from mldec.runtime import distributed
    from mldec.training.optim import check_trainable
    from mldec.training.start import used_precision

    with one_line():
        config = parse(node, HydraConfig.get().overrides.task).for_world_size(processes=1)
        config = build.recorded(config, build.check(config))
        device = distributed.pick_device(config.device)
        config.train.precision = used_precision(config.train, None, device)
        check_trainable(config)
        say(*to_yaml(config).splitlines())


def choose_task(arguments: list[str]) -> tuple[Callable[[], None], list[str]]:
    """Return the task of a command line (`app` or `show`), and the words for Hydra, or print help.

    `show` replaces Hydra's `--cfg job`, which omits the defaults of the parts.
    """
    if "--help" in arguments or "-h" in arguments:
        say(*help_text(arguments).splitlines())
        sys.exit(0)

    for index, pair in enumerate(pairwise(arguments)):
        if pair == ("--cfg", "job"):
            other_arguments = arguments[:index] + arguments[index + 2 :]
            # Prevent Hydra from creating an output folder.
            return show, other_arguments + ["hydra.run.dir=.", "hydra.output_subdir=null"]
    return app, arguments


def main() -> None:
    """Run the command."""
    # Hydra reraises errors unchanged, and `one_line` prints them.
    os.environ["HYDRA_FULL_ERROR"] = "1"

    if "--version" in sys.argv[1:]:
        print(VERSION)
        return

    with one_line():
        task, arguments = choose_task(sys.argv[1:])
        sys.argv[1:] = to_hydra(arguments)
        try:
            task()
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(explain(error)) from error


if __name__ == "__main__":
    main()
