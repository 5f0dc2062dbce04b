"""The checkpoint files of a run, last.pt and best.pt: when they are due, and who writes them."""

import time
from collections.abc import Callable
from pathlib import Path

from mldec.checkpoint import Checkpoint
from mldec.config.schema import Train
from mldec.files import torch_files
from mldec.runtime import distributed


class CheckpointFiles:
    """Write last.pt and best.pt in the background; only the main process writes.

    Args:
        folder: of the two files.
        train: for the intervals between two saves, and how many older versions of last.pt to keep.
    """

    def __init__(self, folder: Path, train: Train) -> None:
        self.last, self.best = folder / "last.pt", folder / "best.pt"
        self._train = train
        self._writer = torch_files.Writer()
        self._saved_at = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Tell whether to save after a step: `save_every_steps` or `save_every_minutes` is reached.

        Each process goes by its own clock. Only that of the main process matters.
        """
        steps, minutes = self._train.save_every_steps, self._train.save_every_minutes
        if steps is not None and step % steps == 0:
            return True
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def save(self, checkpoint: Callable[[], Checkpoint], *, best: bool) -> None:
        """Write last.pt from a copy of the current state, and return before the file is complete.

        Args:
            checkpoint: builds the checkpoint; called on the main process only.
            best: give the file the name best.pt too.

        Raises:
            CheckpointError: if the file before this one could not be written.
        """
        self._saved_at = time.monotonic()
        if not distributed.is_main():
            return

        # Training goes on to change the tensors while the file is written.
        state = torch_files.snapshot(checkpoint().to_state())

        def write() -> None:
            torch_files.save(self.last, state, keep=self._train.keep_last)
            if best:
                torch_files.duplicate(self.last, self.best)

        self._writer.submit(write)

    def wait(self) -> None:
        """Wait until the last save is on the disk.

        Raises:
            CheckpointError: if it could not be written.
        """
        self._writer.wait()

    def restore_best(self, path: Path) -> None:
        """Give the name best.pt to a checkpoint of this folder that holds the best result.

        A run that was killed between the save and the second name left an older best.pt behind.
        A checkpoint in another folder is left alone: that run has a best.pt of its own.
        """
        if not distributed.is_main() or path.parent != self.last.parent:
            return

        if torch_files.known_hashes(self.best) != torch_files.known_hashes(path):
            torch_files.duplicate(path, self.best)
