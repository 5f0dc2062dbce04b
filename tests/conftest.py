import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as mldec train does, and for the same reason

# Tests run side by side, one thread each: more threads than cores would wait for one another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import fake_hub
import huggingface_hub
from support import QUICK, Cli

from mldec.runtime.devices import Precision

# tests/plugins holds parts of a user's own: importable here (pyproject.toml) and in the processes
# that tests start.
PLUGINS = Path(__file__).parent / "plugins"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])]
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what is not UTF-8 in captured output: reports travel between processes as UTF-8."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session")
def sample_data() -> Path:
    """Return the folder with pieces of the real datasets; skip the test where it is absent."""
    folder = Path(
        os.environ.get("MLDEC_SAMPLE_DATA") or Path(__file__).parents[2] / "shared" / "data"
    )
    if not folder.is_dir():
        pytest.skip(f"no sample data in {folder}; set MLDEC_SAMPLE_DATA")
    return folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(capsys, monkeypatch)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the working folder of the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished quick run, made by a real process; tests must not change it."""
    folder = tmp_path_factory.mktemp("digits_run")
    command = [sys.executable, "-m", "mldec.train", *QUICK]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "outputs" / "digits"


@pytest.fixture(scope="session")
def best(digits_run: Path) -> Path:
    """The best checkpoint of that run."""
    return digits_run / "checkpoints" / "best.pt"


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw 100 resamples instead of 1,000."""
    monkeypatch.setattr("mldec.tools.report.statistics.MAX_RESAMPLES", 100)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_hub.Hub]:
    """A hub on this machine, empty and without a token, for this process and those it starts."""
    with fake_hub.serving() as server:
        home, constants = tmp_path / "hf_home", huggingface_hub.constants
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
