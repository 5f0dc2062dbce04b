"""Build the null GPU once per session, and run programs with it."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import forked
import pytest
import torch

HERE = Path(__file__).parent
SOURCES = HERE / "source"
SCRIPTS = HERE / "scripts"
sys.path.insert(0, str(SCRIPTS))  # of the processes, too

from null_gpu import reporting  # noqa: E402


class Finished(NamedTuple):
    """Results of a process."""

    out: str
    counts: Counter[str]  # of this process and of its children, see null_gpu.h

    @property
    def result(self) -> Any:
        """Parsed JSON of the last line of the output."""
        return json.loads(self.out.splitlines()[-1])


class NullGPU:
    """Runs Python with a preloaded library that replaces the libraries of CUDA."""

    def __init__(self, libraries: Path) -> None:
        self.counts = libraries / "counts"
        self.variables = {
            "LD_PRELOAD": str(libraries / "libnull_gpu.so"),
            "LD_LIBRARY_PATH": str(libraries),
            "NULL_GPU_COUNTS": str(self.counts),
            "TORCH_CUDNN_V8_API_DISABLED": "1",  # plans of v8 need a device
            "TRITON_CACHE_DIR": str(libraries / "triton"),
            "OMP_NUM_THREADS": "1",
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.variables.items():
                patch.setenv(name, value)
            forkserver.ensure_running()

    def run(
        self,
        job: Callable[..., Any] | str,
        *words: Any,
        cwd: Path,
        devices: int = 1,
        env: Mapping[str, str | None] | None = None,
    ) -> Finished:
        """Run a job in a process with null GPUs.

        Args:
            job: Function, or a file in scripts/.
            words: Arguments of the job.
            cwd: Working folder.
            devices: Number of GPUs.
            env: Environment variables. None removes one.
        """
        if isinstance(job, str):
            words = (str(SCRIPTS / job), *words)
            job = forked.script
        shutil.rmtree(self.counts, ignore_errors=True)
        self.counts.mkdir()
        variables = {**self.variables, "NULL_GPU_DEVICES": str(devices), **(env or {})}
        done = forked.run(reporting, job, *words, cwd=cwd, env=variables)
        assert done.status == 0, done.err[-8000:]

        total: Counter[str] = Counter()
        for file in self.counts.iterdir():
            total.update(json.loads(file.read_text()))
        return Finished(done.out, total)


def _compile(*words: str | Path) -> None:
    command = ["g++", "-O1", "-std=c++17", "-fPIC", "-shared", *map(str, words)]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def null_gpu(tmp_path_factory: pytest.TempPathFactory) -> NullGPU:
    """The null GPU. Tests are skipped if it cannot be built."""
    if not (shutil.which("gcc") and shutil.which("g++")):
        pytest.skip("the null GPU needs gcc and g++")
    site_packages = Path(torch.__file__).parents[1]
    headers = sorted(site_packages.glob("nvidia/*/include/cuda_runtime_api.h"))
    if not headers:
        pytest.skip("the null GPU needs the CUDA wheels of torch: no cuda_runtime_api.h")

    libraries = tmp_path_factory.mktemp("null_gpu")
    include = ["-I", SOURCES, "-I", headers[-1].parent]
    preloaded = ["cudart.cpp", "counters.cpp", "cublas_cudnn.cpp", "nccl.cpp"]
    driver = ["driver.cpp", "-Wl,-soname,libcuda.so.1"]
    _compile(*include, *preloaded, "-o", libraries / "libnull_gpu.so")
    _compile(*include, *driver, "-o", libraries / "libcuda.so.1")
    return NullGPU(libraries)
