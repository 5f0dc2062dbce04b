"""The folder of a run: where its checkpoints are, and the facts about the run in run.json."""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mldec.errors import CheckpointError

RUN_FILE = "run.json"
LOG_FILE = "metrics.jsonl"
CHECKPOINTS = ("best.pt", "last.pt")  # last.pt alone before the first evaluation


def find_checkpoint(folder: Path) -> Path:
    """Return the checkpoint that represents a run: the best one, else the last one."""
    paths = [folder / "checkpoints" / name for name in CHECKPOINTS]
    for path in paths:
        if path.exists():
            return path

    looked_for = " nor ".join(str(path) for path in paths)
    raise CheckpointError(
        f"{folder} is no folder of a run: there is neither {looked_for}; check the path"
    )


def command_line() -> str:
    """Return the command that started this process, quoted for a shell."""
    return shlex.join(sys.orig_argv)


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run that `mldec.summary` shows beside its log: the content of run.json."""

    name: str
    command: str
    versions: dict[str, str]  # of mldec, torch and timm
    commit: str | None
    epochs: int  # planned
    image_size: int  # pixels per side
    parameters: int  # trainable
    multiply_accumulates: int | None  # per image; None if the model cannot be counted
    all_parameters: int | None = None  # with the frozen ones; None in a file of an older version
    start_epoch: int = 0  # epochs finished before this start
    # The best result before this start, as in a checkpoint: metric, value, weights and so on.
    best: dict[str, Any] = field(default_factory=dict)
    ended: str | None = None  # why the run has ended; None while it goes on

    def to_json(self) -> str:
        """Return the content of run.json."""
        return json.dumps(asdict(self), indent=1) + "\n"


@contextmanager
def written_by_run(path: Path) -> Iterator[None]:
    """Name a file of a run whose content is not what a run writes."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{path} is not what a run writes: {error}") from error


def read_facts(folder: Path) -> RunFacts | None:
    """Read run.json; None if there is none."""
    path = folder / RUN_FILE
    with written_by_run(path):
        return RunFacts(**json.loads(path.read_text())) if path.exists() else None


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl, each a number or null by name; none without the file."""
    with written_by_run(path):
        texts = path.read_text().splitlines() if path.exists() else []
        return [dict(json.loads(text)) for text in texts]
