"""Build the null GPU once per session, and run programs on it."""

import importlib.util
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

HERE = Path(__file__).parent
SOURCES = HERE / "source"
SCRIPTS = HERE / "scripts"
ROOT = HERE.parents[1]


class Finished(NamedTuple):
    """A process that has ended."""

    status: int
    out: str
    err: str
    counts: Counter[str]  # of this process and of its children, see null_gpu.h

    @property
    def result(self) -> Any:
        """The JSON in the last line that a script has printed."""
        return json.loads(self.out.splitlines()[-1])


class NullGPU:
    """Runs Python under the null GPU: a preloaded library in place of CUDA's libraries."""

    def __init__(self, libraries: Path) -> None:
        self.libraries = libraries

    def run(
        self,
        *words: str | Path,
        cwd: Path,
        devices: int = 1,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> Finished:
        """Run `python WORDS` on one or several null GPUs.

        Args:
            words: the arguments of Python, such as "-m", "mldec train", "device=cuda". The name of
                a file in scripts/ is completed to its path.
            cwd: working folder.
            devices: number of GPUs.
            env: further environment variables.
            check: fail if the process does not end with status 0.
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
            "TORCH_CUDNN_V8_API_DISABLED": "1",  # plans of that interface need a device
            "TRITON_CACHE_DIR": str(self.libraries / "triton"),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }

        if str(words[0]).endswith(".py"):
            words = (SCRIPTS / words[0], *words[1:])
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(
            command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=400
        )
        if check:
            assert done.returncode == 0, done.stderr[-8000:]

        total: Counter[str] = Counter()
        for file in counts.iterdir():
            total.update(json.loads(file.read_text()))
        return Finished(done.returncode, done.stdout, done.stderr, total)


def _compile(*words: str | Path) -> None:
    command = ["g++", "-O1", "-std=c++17", "-fPIC", "-shared", *map(str, words)]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def null_gpu(tmp_path_factory: pytest.TempPathFactory) -> NullGPU:
    """The null GPU; skip tests where it cannot be built."""
    if not (shutil.which("gcc") and shutil.which("g++")):
        pytest.skip("the null GPU needs gcc and g++")
    headers = sorted(_site_packages().glob("nvidia/*/include/cuda_runtime_api.h"))
    if not headers:
        pytest.skip("the null GPU needs a torch with CUDA wheels: there is no cuda_runtime_api.h")

    libraries = tmp_path_factory.mktemp("null_gpu")
    include = ["-I", SOURCES, "-I", headers[-1].parent]
    preloaded = ["cudart.cpp", "counters.cpp", "cublas_cudnn.cpp", "nccl.cpp"]
    driver = ["driver.cpp", "-Wl,-soname,libcuda.so.1"]
    _compile(*include, *preloaded, "-o", libraries / "libnull_gpu.so")
    _compile(*include, *driver, "-o", libraries / "libcuda.so.1")
    return NullGPU(libraries)


def _site_packages() -> Path:
    """Return the folder of torch, which has the CUDA wheels beside it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]
