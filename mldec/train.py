"""Train: `python -m mldec.train +experiment=digits`. Everything heavy is imported when the run starts."""

import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mldec.config import config_dir, explain, parse, prepare, to_yaml
from mldec.errors import CheckpointError, ConfigError, one_line
from mldec.settings import Config


def run(config: Config, directory: Path) -> None:
    """Do a run: check everything, build it, find where to start, train."""
    # Before torch: threads that wait by spinning make a CPU run ten times slower beside any other busy process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from mldec import build, checkpoint, distributed, runlog
    from mldec.losses.prior import save_estimate
    from mldec.stops import listening
    from mldec.trainer import Trainer

    build.check(config)
    last = resume_point(config, directory)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with this
        torch.use_deterministic_algorithms(True)
    device = distributed.pick_device(config.device)
    torch.backends.cudnn.benchmark = not config.train.deterministic
    with distributed.processes(device), listening() as stop:
        runlog.to_console()
        torch.manual_seed(config.seed)
        data, loss = build.data(config), build.loss(config)
        build.check_together(config, data, loss)
        # The main process alone reads and writes the folder of the run: nodes need not share a disk.
        found = distributed.broadcast(checkpoint.load_newest(last) if last and distributed.is_main() else None)
        model = build.model(config, data.train.classes, pretrained=not (found or config.init))
        if config.init and not found:
            runlog.log.info(checkpoint.initialise(model, config.init))
        folder = directory / "checkpoints"
        trainer = Trainer(config, model.to(device), loss, data, folder=folder, device=device, stop=stop)
        if found:
            path, state = found
            trainer.resume(state, path)
        if distributed.is_main():
            folder.mkdir(parents=True, exist_ok=True)
            (directory / "config.yaml").write_text(to_yaml(config))
        log = runlog.RunLog(directory, step=trainer.learner.step, lines=trainer.lines)
        runlog.log.info(trainer.summary())
        trainer.fit(log)
        best = trainer.best
        runlog.log.info(
            f"best {best['metric']} {best['value']:.2f} ({best['weights']}, epoch {best['epoch']}): {folder}/best.pt"
        )
        if distributed.is_main():
            save_estimate(loss, directory / "class_prior.csv", data.train.classes.names)
        log.close()


def resume_point(config: Config, directory: Path) -> Path | None:
    """Return the checkpoint to go on from, if any; there may be an older version of it only.

    Raises:
        CheckpointError: if the folder holds a run and nothing says to go on with it, or the named file is absent.
    """
    last = directory / "checkpoints" / "last.pt"
    holds_run = any(last.parent.glob("last*.pt"))
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # by torchrun, after a process failed
    if config.resume == "auto" or (config.resume is None and restarted):
        return last if holds_run else None
    if config.resume is None:
        if holds_run:
            raise CheckpointError(f"{directory} holds a run: pass resume=auto to go on, or name=... for a new run")
        return None
    if not Path(config.resume).is_file():
        raise CheckpointError(f"resume={config.resume}: there is no such file; pass resume=auto or a checkpoint")
    return Path(config.resume)


def said_once(message: str) -> str:
    """Return what this process should print of a fault: under torchrun the same is printed once."""
    if "RANK" not in os.environ:
        return message
    from mldec import distributed

    return distributed.said_once(message)


@hydra.main(version_base="1.3", config_path=config_dir(), config_name="config")
def app(node: DictConfig) -> None:
    """Do one run, or one of a sweep, in the folder that Hydra chose."""
    with one_line(said_once):
        hydra_config = HydraConfig.get()
        under_torchrun = os.environ.get("WORLD_SIZE", "1") != "1"
        if under_torchrun and hydra_config.mode is RunMode.MULTIRUN:
            raise ConfigError("a sweep (-m) cannot run under torchrun: start one torchrun for each value")
        job = run
        if under_torchrun:
            from torch.distributed.elastic.multiprocessing.errors import record

            job = record(run)  # without it torchrun loses the traceback of a rank
        job(parse(node), Path(hydra_config.runtime.output_dir))


def main() -> None:
    """Run the command."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us as they are, and end as one line
    with one_line(said_once):
        sys.argv[1:] = prepare(sys.argv[1:])
        try:
            app()
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(explain(error)) from error


if __name__ == "__main__":
    main()
