"""Train a model: `mldec train +experiment=digits`.

Slow modules are imported when the run starts, so that --help and a wrong setting answer at once.
"""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import partial
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import mldec
from mldec.cli import VERSION, require
from mldec.config.compose import config_dir, explain, parse, prepare, to_yaml
from mldec.config.schema import Config
from mldec.errors import ConfigError, one_line, printable, say, writing
from mldec.files.run_folder import RUN_FILE, RunFacts, command_line
from mldec.runtime.console import to_console

if TYPE_CHECKING:
    import torch

    from mldec.build import Parts
    from mldec.runtime.signals import StopRequest
    from mldec.training.trainer import Trainer

log = logging.getLogger("mldec")


def run(config: Config, directory: Path) -> None:
    """Check the config, lock the folder of the run, and train there."""
    # Set before torch is imported: threads that wait by spinning make a CPU run ten times slower
    # beside any other busy process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    to_console()
    log.info(f"{config.name}: starting, mldec {mldec.__version__}")
    import torch

    from mldec import build
    from mldec.checkpoint import loading
    from mldec.files.run_folder import RunLock
    from mldec.runtime import distributed
    from mldec.runtime.environment import keep_freed_memory
    from mldec.runtime.signals import listening
    from mldec.training.optim import check_trainable

    # 1. What is wrong with the settings is said before any file or device is touched.
    keep_freed_memory()
    for tracker in config.log.trackers:
        require(f"log.{tracker}=true", tracker, tracker)
    config = loading.check_start(config)
    parts = build.complete(build.check(config))
    # The recorded config has all arguments of all parts, so that later defaults do not change it.
    config = build.recorded(config, parts)
    check_trainable(config)

    # 2. The device.
    if config.train.deterministic:
        # cuBLAS is deterministic only with this workspace.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device = distributed.pick_device(config.device)
    train = config.train
    distributed.prepare_device(device, tf32=train.tf32, deterministic=train.deterministic)

    # 3. The processes, and the folder: only the main process reads and writes it, since nodes need
    # not share a disk. A batch that the processes cannot share is refused before it is touched.
    with distributed.processes(device), listening() as stop, RunLock(directory) as lock:
        config = config.on(distributed.world_size())
        distributed.on_main(lock.take)
        _train(config, parts, directory, device, stop)


def _train(
    config: Config, parts: "Parts", directory: Path, device: "torch.device", stop: "StopRequest"
) -> None:
    """Train a run in its locked folder, from its start or from where it was."""
    from mldec.files.torch_files import write_text
    from mldec.runtime import distributed
    from mldec.runtime.environment import git_commit
    from mldec.training.log import RunLog
    from mldec.training.start import (
        describe_run,
        few_per_batch_norm,
        is_inside,
        prepare_trainer,
        start_weights,
    )

    # The messages until train.log is open: about the data, and the pass of a frozen network.
    early = MemoryHandler(capacity=10_000, flushOnClose=False)
    log.addHandler(early)
    commit = f"(mldec {mldec.__version__}, commit {git_commit() or 'none'})"
    try:
        log.info(printable(f"{command_line()} {commit}"))
        trainer, path = prepare_trainer(config, parts, directory, device, stop)
    finally:
        log.removeHandler(early)
    # The log of another run stays in its folder: this one starts with an empty log.
    lines = trainer.lines if path and is_inside(path, directory) else 0
    facts = distributed.on_main(partial(_open_folder, directory, trainer))

    step, tracked = trainer.learner.step, trainer.config
    run_log = RunLog(directory, step=step, lines=lines, tracked=tracked, earlier=early.buffer)
    with closing(run_log):
        # What is run, on what, from which weights, and warnings: once for all processes.
        log.info(describe_run(trainer, config.train.precision))
        log.info(start_weights(trainer.config, path))
        slow = trainer.config.train.precision.warning(device)
        for warning in (slow, few_per_batch_norm(trainer)):
            if warning and distributed.is_main():
                log.warning(warning)
        trainer.fit(run_log)

        log.info(f"ended after epoch {trainer.epoch}: {trainer.ended}")
        best = trainer.best
        facts = replace(facts, best=asdict(best), ended=trainer.ended)
        distributed.on_main(partial(write_text, directory / RUN_FILE, facts.to_json()))
        log.info(
            f"best {best.metric} {best.value:.2f} ({best.weights}, epoch {best.epoch}): "
            f"{directory}/checkpoints/best.pt"
        )
        # A loss for partial labels estimates the class frequencies on the way.
        if config.loss.get("class_prior") == "estimate" and distributed.is_main():
            from mldec.losses.partial import save_estimate

            priors = directory / "class_prior.csv"
            with writing(priors, of_run=True):
                save_estimate(trainer.learner.loss, priors, trainer.data.train.classes.names)


def _open_folder(directory: Path, trainer: "Trainer") -> RunFacts:
    """Create the folders of a run, write config.yaml and run.json, and return the facts in it."""
    from mldec.files.torch_files import write_text
    from mldec.training.start import run_facts

    with writing(directory, of_run=True):
        (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_text(directory / "config.yaml", to_yaml(trainer.config))
    facts = run_facts(trainer)
    write_text(directory / RUN_FILE, facts.to_json())
    return facts


@hydra.main(version_base="1.3", config_path=config_dir(), config_name="config")
def app(node: DictConfig) -> None:
    """Do one run, or one of a sweep, in the folder that Hydra chose."""
    with one_line():
        hydra_config = HydraConfig.get()
        under_torchrun = os.environ.get("WORLD_SIZE", "1") != "1"
        if under_torchrun and hydra_config.mode is RunMode.MULTIRUN:
            raise ConfigError("a sweep (-m) cannot run under torchrun: start one for each value")

        directory = Path(hydra_config.runtime.output_dir)
        try:
            run(parse(node), directory)
        finally:
            # Hydra has made the folder. A start that fails leaves it empty.
            with suppress(OSError):
                directory.rmdir()


@hydra.main(version_base="1.3", config_path=config_dir(), config_name="config")
def show(node: DictConfig) -> None:
    """Print the config that a run on this machine records, as YAML."""
    from mldec import build
    from mldec.runtime import distributed
    from mldec.training.optim import check_trainable
    from mldec.training.start import used_precision

    with one_line():
        config = parse(node).on(processes=1)
        config = build.recorded(config, build.check(config))
        device = distributed.pick_device(config.device)
        config.train.precision = used_precision(config.train.precision, None, device)
        check_trainable(config)
        say(*to_yaml(config).splitlines())


def choose_task(arguments: list[str]) -> tuple[Callable[[], None], list[str]]:
    """Return what a command line asks for, and the arguments for it.

    For `--cfg job` Hydra would print what YAML gives, without the defaults of the parts.
    """
    flag = arguments.index("--cfg") if "--cfg" in arguments else len(arguments)
    if arguments[flag : flag + 2] != ["--cfg", "job"]:
        return app, arguments

    # Without a folder, which Hydra would make for a run.
    no_folder = ["hydra.run.dir=.", "hydra.output_subdir=null"]
    return show, [*arguments[:flag], *arguments[flag + 2 :], *no_folder]


def main() -> None:
    """Run the command."""
    # Hydra then passes errors on as they are, and `one_line` prints them.
    os.environ["HYDRA_FULL_ERROR"] = "1"

    # Hydra would print its own version.
    if "--version" in sys.argv[1:]:
        print(VERSION)
        return

    with one_line():
        task, arguments = choose_task(sys.argv[1:])
        sys.argv[1:] = prepare(arguments)
        try:
            task()
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(explain(error)) from error


if __name__ == "__main__":
    main()
