"""Build the null GPU once per session, and run programs with it."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

HERE = Path(__file__).parent
SOURCES = HERE / "source"
SCRIPTS = HERE / "scripts"
ROOT = HERE.parents[1]


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
        self.libraries = libraries

    def run(
        self,
        *words: str | Path,
        cwd: Path,
        devices: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> Finished:
        """Run Python with null GPUs.

        Args:
            words: Arguments of Python, such as "-m", "mldec", "train", or a file in scripts/ and
                its arguments.
            cwd: Working folder.
            devices: Number of GPUs.
            env: Additional environment variables.
        """
        counts = self.libraries / "counts"
        shutil.rmtree(counts, ignore_errors=True)
        counts.mkdir()
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]]),
            "LD_PRELOAD": str(self.libraries / "libnull_gpu.so"),
            "LD_LIBRARY_PATH": str(self.libraries),
            "NULL_GPU_COUNTS": str(counts),
            "NULL_GPU_DEVICES": str(devices),
            "TORCH_CUDNN_V8_API_DISABLED": "1",  # plans of v8 need a device
            "TRITON_CACHE_DIR": str(self.libraries / "triton"),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }

        command = [sys.executable] + [str(word) for word in words]
        if command[1].endswith(".py"):
            command[1] = str(SCRIPTS / command[1])
        done = subprocess.run(
            command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stderr[-8000:]

        total: Counter[str] = Counter()
        for file in counts.iterdir():
            total.update(json.loads(file.read_text()))
        return Finished(done.stdout, total)


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
