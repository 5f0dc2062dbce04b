"""Commands in real processes that need not import torch and timm, which takes several seconds.

A server that has only imported modules forks them, so they get nothing of the state of the tests.
It must not initialize CUDA, which `support` does.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm  # noqa: F401
import torch.utils.tensorboard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import mldec.__main__
import mldec.api
import mldec.tools.predict

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([__name__])


class Outcome(NamedTuple):
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


def mldec_command(*words: str) -> None:
    """Run a command of mldec in this process."""
    sys.argv = ["mldec", *words]
    mldec.__main__.main()


def script(path: str, *words: str) -> None:
    """Run a script in this process."""
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="__main__")


def torchrun(count: int, restarts: int, job: Callable[..., Any], *arguments: Any) -> None:
    """Run job(*arguments) in `count` ranks, as torchrun starts them. They are forks, too."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        start_method="fork",
    )
    elastic_launch(config, _rank)(job, *arguments)


def _rank(job: Callable[..., Any], *arguments: Any) -> None:
    # torchrun sends it to the other ranks of a failed one, which then print no traceback.
    signal.signal(signal.SIGTERM, lambda *_: None)
    # After a fork, the first use of torch's thread pool makes a new one. Several threads of autograd
    # do this at the same time otherwise, which is not safe.
    torch.set_num_threads(1)
    try:
        job(*arguments)
    except Exception:
        traceback.print_exc()  # as in a process of Python
        raise


class Forked:
    """A process that runs job(*arguments), with the methods of `subprocess.Popen`.

    It has the environment variables of this process and those of `env`. None removes one.
    """

    def __init__(
        self,
        job: Callable[..., Any],
        *arguments: Any,
        cwd: Path,
        out: Path,
        err: Path | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        files = (str(out), str(err or out))
        variables: dict[str, str | None] = {**os.environ, **(env or {})}
        words = (job, arguments, str(cwd), files, variables)
        self.process = SERVER.Process(target=_run, args=words)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float = 1200) -> int:
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"timeout after {timeout} s"
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(
    job: Callable[..., Any],
    arguments: Sequence[Any],
    cwd: str,
    files: Sequence[str],
    env: Mapping[str, str | None],
) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update({name: value for name, value in env.items() if value is not None})
    for stream, path in enumerate(files, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    torch.set_num_threads(1)
    job(*arguments)


def run(
    job: Callable[..., Any],
    *arguments: Any,
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
) -> Outcome:
    """Run job(*arguments) in a process of its own, and wait for it."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        status = Forked(job, *arguments, cwd=cwd or Path.cwd(), out=out, err=err, env=env).wait()
        return Outcome(status, out.read_text(), err.read_text())


@atexit.register
def kill_remaining() -> None:
    """End the processes of failed tests, because multiprocessing would wait for them."""
    for child in multiprocessing.active_children():
        child.kill()
