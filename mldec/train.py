"""Train: `python -m mldec.train +experiment=digits`. Everything heavy is imported when the run starts."""

import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
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
from mldec.cli import VERSION, said_once
from mldec.config.compose import COMPLETION, config_dir, explain, parse, prepare, to_yaml
from mldec.config.schema import Config
from mldec.errors import CheckpointError, ConfigError, one_line, printable, say, writing
from mldec.files.run_folder import RUN_FILE, RunFacts, command_line

if TYPE_CHECKING:
    import torch

    from mldec.build import Parts
    from mldec.checkpoint import Checkpoint
    from mldec.runtime.signals import StopRequest
    from mldec.training.trainer import Trainer


def run(config: Config, directory: Path) -> None:
    """Do a run: check everything, lock its folder, build it, find where to start, train."""
    # Before torch: threads that wait by spinning make a CPU run ten times slower beside any other busy process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from mldec import build
    from mldec.runtime import distributed
    from mldec.runtime.console import to_console
    from mldec.runtime.signals import listening
    from mldec.training.run_lock import RunLock

    parts = build.check(config)
    if config.train.deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS repeats itself only with this
        torch.use_deterministic_algorithms(True)
    device = distributed.pick_device(config.device)
    torch.backends.cudnn.benchmark = not config.train.deterministic

    with distributed.processes(device), listening() as stop, RunLock(directory) as lock:
        to_console()
        # The main process alone reads and writes the folder of the run: nodes need not share a disk.
        distributed.on_main(lock.take)
        _train(config, parts, directory, device, stop)


def _train(
    given: Config, parts: "Parts", directory: Path, device: "torch.device", stop: "StopRequest"
) -> None:
    """Train in a folder that is ours.

    Args:
        given: the config as the user gave it.
        parts: those that it names, with all their arguments.
        directory: of the run.
        device: to train on.
        stop: turns true when the run should end.
    """
    import torch

    from mldec import build, checkpoint
    from mldec.losses.prior import save_estimate
    from mldec.runtime import distributed
    from mldec.training import runlog
    from mldec.training.trainer import Trainer

    # What is recorded of the run: every argument of every part, whatever the defaults become.
    config = build.recorded(given, parts)
    saved = distributed.on_main(partial(find_start, config, directory))

    torch.manual_seed(config.seed)
    data, loss = build.data(parts), build.loss(parts)
    build.check_together(given, data, loss)
    model = build.model(parts, data.train.classes, pretrained=not (saved or config.init))
    if config.init and not saved:
        runlog.log.info(checkpoint.initialise(model, config.init))

    folder = directory / "checkpoints"
    trainer = Trainer(config, model.to(device), loss, data, folder=folder, device=device, stop=stop)
    lines = 0
    if saved:
        path, saved_checkpoint = saved
        trainer.resume(saved_checkpoint, path)
        lines = (
            trainer.lines if _is_inside(path, directory) else 0
        )  # the lines of another run stay in its folder
    distributed.on_main(partial(_open_folder, directory, trainer))

    with closing(runlog.RunLog(directory, step=trainer.learner.step, lines=lines)) as log:
        commit = trainer.git or "none"
        runlog.log.info(printable(f"{command_line()} (mldec {mldec.__version__}, commit {commit})"))
        runlog.log.info(trainer.summary())
        if slow := config.train.precision.warning(device.type):
            runlog.log.warning(slow)
        trainer.fit(log)
        best = trainer.best
        runlog.log.info(
            f"best {best.metric} {best.value:.2f} ({best.weights}, epoch {best.epoch}): {folder}/best.pt"
        )
        priors = directory / "class_prior.csv"
        if distributed.is_main():
            with writing(priors, of_run=True):
                save_estimate(loss, priors, data.train.classes.names)


def find_start(config: Config, directory: Path) -> "tuple[Path, Checkpoint] | None":
    """Read the checkpoint to go on from, if any.

    Raises:
        CheckpointError: from `resume_point`, or if no version of that checkpoint can be read.
    """
    from mldec import checkpoint

    last = resume_point(config, directory)
    return checkpoint.load_newest(last) if last else None


def describe(trainer: "Trainer") -> RunFacts:
    """Return what run.json says of a run that is about to start or to go on."""
    from mldec import checkpoint
    from mldec.runtime.cost import count_parameters, multiply_accumulates

    config, classes, model = trainer.config, trainer.data.val.classes, trainer.learner.model
    size = trainer.data.transform.image_size
    queries = None if classes.queries is None else (len(classes), classes.queries.shape[1])
    products: int | None
    try:
        products = round(multiply_accumulates(model, size, queries))
    except Exception:  # a part of the user's own may do anything without values; the number is for the summary only
        products = None

    return RunFacts(
        name=config.name,
        command=command_line(),
        versions=checkpoint.installed(),
        commit=trainer.git,
        epochs=config.train.epochs,
        image_size=size,
        parameters=count_parameters(model)[0],
        multiply_accumulates=products,
        start_epoch=trainer.epoch,
        best={} if trainer.best.metric is None else asdict(trainer.best),
    )


def resume_point(config: Config, directory: Path) -> Path | None:
    """Return the checkpoint to go on from, if any; there may be an older version of it only.

    Raises:
        CheckpointError: if the folder holds a run and nothing says to go on with it, or the named file is absent or
            of another folder.
    """
    last = directory / "checkpoints" / "last.pt"
    holds_run = any(last.parent.glob("last*.pt"))
    restarted = (
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    )  # by torchrun, after a process failed
    if restarted and holds_run:
        return last
    if config.resume == "auto":
        return last if holds_run else None
    if config.resume is None:
        if holds_run:
            raise CheckpointError(
                f"{directory} holds a run: pass resume=auto to go on, or name=... for a new run"
            )
        return None

    path = Path(config.resume)
    if not path.is_file():
        raise CheckpointError(
            f"resume={config.resume}: there is no such file; pass resume=auto or a checkpoint"
        )
    if holds_run and not _is_inside(path, directory):
        raise CheckpointError(
            f"resume={config.resume}: {directory} holds another run, which it would replace; "
            f"pass name=... for a new folder, or resume=auto to go on with the one that is there"
        )
    return path


def _is_inside(path: Path, directory: Path) -> bool:
    """Tell whether a file is in the folder of a run; it may be a link to one elsewhere."""
    return path.parent.resolve().is_relative_to(directory.resolve())


def _open_folder(directory: Path, trainer: "Trainer") -> None:
    """Make the folders of a run, and write what runs in it."""
    from mldec.files import torch_files

    file = directory / "config.yaml"
    with writing(file, of_run=True):
        (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
        torch_files.write_text(file, to_yaml(trainer.config))
    facts = directory / RUN_FILE
    with writing(facts, of_run=True):
        torch_files.write_text(facts, describe(trainer).to_json())


@hydra.main(version_base="1.3", config_path=config_dir(), config_name="config")
def app(node: DictConfig) -> None:
    """Do one run, or one of a sweep, in the folder that Hydra chose."""
    with one_line(said_once):
        hydra_config = HydraConfig.get()
        under_torchrun = os.environ.get("WORLD_SIZE", "1") != "1"
        if under_torchrun and hydra_config.mode is RunMode.MULTIRUN:
            raise ConfigError(
                "a sweep (-m) cannot run under torchrun: start one torchrun for each value"
            )
        job = run
        if under_torchrun:
            from torch.distributed.elastic.multiprocessing.errors import record

            job = record(run)  # without it torchrun loses the traceback of a rank
        job(parse(node), Path(hydra_config.runtime.output_dir))


@hydra.main(version_base="1.3", config_path=config_dir(), config_name="config")
def show(node: DictConfig) -> None:
    """Print the config that a run records, as YAML."""
    from mldec import build

    with one_line():
        config = parse(node)
        say(*to_yaml(build.recorded(config, build.check(config))).splitlines())


def choose_task(words: list[str]) -> tuple[Callable[[], None], list[str]]:
    """Return what a command line asks for, and the words for it.

    For `--cfg job` Hydra would print the settings that YAML gives, without the defaults of the parts.
    """
    place = words.index("--cfg") if "--cfg" in words else len(words)
    if words[place : place + 2] != ["--cfg", "job"]:
        return app, words

    # Without a folder, which Hydra would make for a run.
    no_folder = ["hydra.run.dir=.", "hydra.output_subdir=null"]
    return show, [*words[:place], *words[place + 2 :], *no_folder]


def main() -> None:
    """Run the command."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us as they are, and end as one line
    if "--version" in sys.argv[1:]:  # Hydra would say its own
        print(VERSION)
        return
    with one_line(said_once):
        task, words = choose_task(sys.argv[1:])
        sys.argv[1:] = prepare(words)
        if any(word.startswith(COMPLETION) for word in sys.argv[1:]):
            sys.argv[0] = (
                "mldec-train"  # the command that a shell completes: it knows no `python -m`
            )
        try:
            task()
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(explain(error)) from error


if __name__ == "__main__":
    main()
