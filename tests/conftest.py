import importlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in mldec train

# torch would start processes that import torch again.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Parallel test processes use one thread each: more threads than cores wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import fake_hub
import huggingface_hub
from filelock import FileLock
from support import QUICK, Cli, train_here

from mldec.runtime.devices import Precision

# Child processes import tests/plugins and scripts, too. pyproject.toml adds the folders for this
# process.
FOLDERS = [str(Path(__file__).parent / "plugins"), str(Path(__file__).parents[1] / "scripts")]
if os.environ.get("PYTHONPATH"):
    FOLDERS.append(os.environ["PYTHONPATH"])
os.environ["PYTHONPATH"] = os.pathsep.join(FOLDERS)


# Packages that no step of .ci/run installs for all tests: one step needs OpenVINO, which changes
# numbers, and imagehash and termios are only compared with.
NEVER_REQUIRED = {"imagehash", "openvino", "termios"}


def required(name: str, *args: Any, **options: Any) -> Any:
    """Import a package. This replaces `pytest.importorskip`, so that no test is skipped."""
    if name in NEVER_REQUIRED:
        return importorskip(name, *args, **options)
    return importlib.import_module(name)


# Files that take longest. A process runs all tests of a file, so they start first: otherwise one
# of them would keep a single process busy at the end.
SLOW = (
    "test_notebooks.py",
    "test_onnx_networks.py",
    "test_scale.py",
    "test_compile.py",
    "test_resume.py",
    "test_trajectory.py",
    "test_steps.py",
    "test_gpu_report.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the slow files come first."""
    items.sort(key=lambda item: item.path.name not in SLOW)


importorskip = pytest.importorskip
if os.environ.get("MLDEC_REQUIRE_PACKAGES") == "1":
    pytest.importorskip = required


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape invalid UTF-8 in captured output, because pytest-xdist sends reports as UTF-8."""
    report = yield
    sections = []
    for name, text in report.sections:
        sections.append((name, text.encode("utf-8", "backslashreplace").decode()))
    report.sections = sections
    return report


@pytest.fixture(autouse=True, scope="session")
def torch_engine():
    """Compute backbones in torch, because the numbers of OpenVINO differ slightly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mldec.backbones.openvino_backbone.is_installed", lambda: False)
        yield


@pytest.fixture(scope="session")
def sample_data() -> Path:
    """Folder with samples of the real datasets. Tests are skipped without it."""
    default = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("MLDEC_SAMPLE_DATA") or default)
    if not folder.is_dir():
        pytest.skip(f"no sample data in {folder}; set MLDEC_SAMPLE_DATA")
    return folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(capsys, monkeypatch)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def digits_run(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished quick run.

    The parallel test processes share it. Tests must not change it.
    """
    shared = tmp_path_factory.getbasetemp()
    # Not PYTEST_XDIST_WORKER: a test that starts pytest passes this variable on.
    if hasattr(pytestconfig, "workerinput"):
        shared = shared.parent
    folder = shared / "digits_run"
    run = folder / "outputs" / "digits"
    with FileLock(f"{folder}.lock"):
        if not run.exists():
            folder.mkdir()
            train_here(folder, *QUICK)
    return run


@pytest.fixture(scope="session")
def best(digits_run: Path) -> Path:
    """Best checkpoint of `digits_run`."""
    return digits_run / "checkpoints" / "best.pt"


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw 100 resamples instead of 1,000."""
    monkeypatch.setattr("mldec.tools.report.statistics.MAX_RESAMPLES", 100)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_hub.Hub]:
    """Empty hub on this machine without a token, for this process and its children."""
    with fake_hub.serving() as server:
        home = tmp_path / "hf_home"
        constants = huggingface_hub.constants
        template = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        settings = {
            "ENDPOINT": server.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)

        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_HOME", str(home))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server


@pytest.fixture
def fp16_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the forward pass use fp16 as on CUDA: torch's scaler works on a CPU too."""
    monkeypatch.setattr(Precision, "for_device", lambda self, device: self)
