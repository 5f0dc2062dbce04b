"""Train in float64 without batch norm, to compare one process with several."""

import json
from pathlib import Path

import torch
from squares import fit, resume, settings, trainer

from mldec.runtime import distributed
from mldec.runtime.console import to_console
from mldec.runtime.signals import listening


def main(name: str, *words: str) -> None:
    """Train in a folder. A second call resumes."""
    folder = Path(name)
    config = settings(
        "train.epochs=3",
        "train.stop_epoch=2",
        "train.ema_start_epoch=2",
        "train.batch_size=16",
        "train.log_every=3",
        "device=cpu",
        *words,
    )
    with distributed.processes(torch.device("cpu")), listening() as stop:
        to_console()
        job = trainer(
            config,
            folder,
            images=56,  # four micro-batches share the last batch
            broken=(7, 30),
            bad_images="skip",
            dropout=0.0,
            dtype=torch.float64,
        )
        job.stop = stop
        if job.files.last.exists():
            resume(job, folder)
        metrics = fit(job, folder)
        if distributed.is_main():
            outcome = {"bad_images": job.bad_images, "metrics": metrics}
            (folder / "outcome.json").write_text(json.dumps(outcome))
