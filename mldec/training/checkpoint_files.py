"""The checkpoint files of a run."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mldec.checkpoint.state import Checkpoint
from mldec.config.schema import Train
from mldec.files import torch_files
from mldec.runtime import distributed


class CheckpointFiles:
    """Write last.pt and best.pt in the background, on the main rank only."""

    def __init__(self, folder: Path, train: Train) -> None:
        self.last = folder / "last.pt"
        self.best = folder / "best.pt"
        self._train = train
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._saved_at = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after a step. Each rank uses its own clock."""
        steps = self._train.save_every_steps
        minutes = self._train.save_every_minutes
        if steps is not None and step % steps == 0:
            return True
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def save(self, checkpoint: Callable[[], Checkpoint], *, best: bool) -> None:
        """Write last.pt, and best.pt if `best` is set, in the background."""
        self._saved_at = time.monotonic()
        if not distributed.is_main():
            return

        # Training changes the tensors while the file is written.
        state = torch_files.snapshot(checkpoint().to_state())

        def write() -> None:
            torch_files.save(self.last, state, keep=self._train.keep_last)
            if best:
                torch_files.duplicate(self.last, self.best)

        # Raise an error of the previous write, such as a full disk, before the end of the run.
        self.wait()
        self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Wait until the last save is on the disk; raise its error, if any."""
        # Clear it first, so that its error is raised only once.
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()

    def restore_best(self, path: Path) -> None:
        """Copy a checkpoint with the best result to best.pt, if it is in the folder of this run.

        best.pt is older if the run was killed after it wrote last.pt.
        """
        if not distributed.is_main() or path.resolve().parent != self.last.parent.resolve():
            return

        # Equal hashes: best.pt was written before the run was killed.
        if torch_files.known_hashes(self.best) != torch_files.known_hashes(path):
            torch_files.duplicate(path, self.best)
