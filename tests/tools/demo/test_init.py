"""The command of the web page: its options, a real server, and the page in a real browser."""

import base64
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hostile
import httpx
import networks
import pytest
import torch
from browser import opened
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from support import one_line

import mldec
from mldec.demo import announce, listener, parser
from mldec.demo.app import open_engine
from mldec.errors import CheckpointError, ConfigError
from mldec.predict.engine import ExportedEngine

Cli = Callable[..., Any]
Make = Callable[..., bytes]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three classes with thresholds."""
    return networks.save_calibrated(tmp_path_factory.mktemp("demo") / "calibrated.pt")


def options(*words: str | Path) -> Namespace:
    return parser().parse_args([*map(str, words)])


# --- Options and their faults -------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--port", "65536"], ["--port", "-1"], ["--token", " "]])
def test_wrong_words_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        options("x", *words)
    assert stop.value.code == 2


def test_a_missing_extra_names_the_pip_command(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, out, err = cli("demo", "absent.pt")
    assert (status, out) == (1, "")
    one_line(err, "needs fastapi", "run pip install 'mldec[demo]'")


def test_a_port_in_use_is_named_before_the_model_is_loaded(cli: Cli) -> None:
    with listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        status, out, err = cli("demo", "absent.pt", "--port", str(port))
    assert (status, out) == (1, "")
    one_line(
        err, f"--host 127.0.0.1 --port {port}: cannot listen there", "in use", "another --port"
    )


def test_a_host_of_others_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--host 203.0.113.7 --port 0: cannot listen there"):
        listener("203.0.113.7", 0)


def test_the_console_says_who_can_reach_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with listener(options("x").host, 0) as server:
        announce(options("x"), server)
    out, err = capsys.readouterr()
    assert out.endswith(": only this machine can reach it; Ctrl-C ends it\n")
    assert err == ""

    for words, risk in (([], "without a password"), (["--token", "x"], "knows the token")):
        with listener("0.0.0.0", 0) as server:
            announce(options("x", "--host", "0.0.0.0", *words), server)
        out, err = capsys.readouterr()
        assert out.endswith(": Ctrl-C ends it\n")
        one_line(err, "--host 0.0.0.0: anyone who reaches port", risk)


def test_a_checkpoint_and_an_exported_file_are_opened(calibrated: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    engine = open_engine(options(calibrated, "--device", "cpu"))
    assert engine.thresholds == pytest.approx([0.2, 0.4, 0.6])
    exported = networks.save_onnx(tmp_path / "x.onnx", "gap")
    assert isinstance(open_engine(options(exported)), ExportedEngine)
    with pytest.raises(ConfigError, match="--weights has no effect on an exported file"):
        open_engine(options(exported, "--weights", "raw"))
    for path in (calibrated, exported):
        with pytest.raises(ConfigError, match=r"--vectors has no effect: .* its own classes only"):
            open_engine(options(path, "--vectors", "x.txt"))


def test_an_exported_zero_shot_file_needs_vectors(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    path, vectors = networks.save_onnx(tmp_path / "x.onnx", "words"), tmp_path / "vectors.txt"
    with pytest.raises(CheckpointError, match="asks for word vectors: pass --vectors FILE"):
        open_engine(options(path))
    vectors.write_text("".join(f"thing_{number} 1 0 {number} 0 1\n" for number in range(7)))
    engine = open_engine(options(path, "--vectors", vectors))
    assert engine.classes.names == tuple(f"thing {number}" for number in range(7))


# --- A real server ------------------------------------------------------------------------------


@contextmanager
def served(
    home: Path, *words: str | Path, number: signal.Signals = signal.SIGTERM, status: int = 143
) -> Iterator[str]:
    """Yield the address of a server; end it by a signal, and check that it wrote no file."""
    folders = {"HOME": home / "home", "TMPDIR": home / "tmp"}
    for folder in (*folders.values(), home / "work"):
        folder.mkdir(parents=True)
    environment = {**os.environ, **{key: str(folder) for key, folder in folders.items()}}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(mldec.__file__).parents[1]), environment["PYTHONPATH"]]
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "mldec.demo", *map(str, words), "--port", "0", "--device", "cpu"],
        cwd=home / "work",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    match = re.match(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
    if match is None:
        pytest.fail(process.communicate()[1])
    try:
        yield match[0]
    finally:
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == status
    one_line(err, f"stopped by {number.name}")
    assert [path for path in home.rglob("*") if path.is_file()] == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_server_asks_for_its_token_and_ends_in_order(
    calibrated: Path, photo: Make, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    words = (calibrated, "--token", "secret")
    with served(tmp_path / "x", *words, number=number, status=status) as url:
        files = [("photos", ("../1.png", photo(1, 1200, 900)))]
        assert httpx.post(f"{url}/api/predict", files=files).status_code == 401
        [row] = httpx.post(f"{url}/api/predict", files=files, auth=("", "secret")).json()
        assert (row["image"], len(row["predictions"])) == ("1.png", 3)

        # The signal comes while a request is received: it is cut off, and no traceback is printed.
        connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        headers = "Host: localhost\r\nAuthorization: Bearer secret\r\nContent-Length: 99\r\n"
        connection.sendall(f"POST /api/predict HTTP/1.1\r\n{headers}\r\n".encode())


# --- The page in a browser ----------------------------------------------------------------------


def waited(driver: Chrome, condition: str, seconds: float = 60) -> Any:
    """Wait until an expression of the page is true, and return its value."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = driver.execute_script(f"return {condition}")
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"{condition} is not true:\n{driver.page_source[-3000:]}")


DROP = """
const bytes = Uint8Array.from(atob(arguments[0]), letter => letter.charCodeAt(0));
const dataTransfer = new DataTransfer();
dataTransfer.items.add(new File([bytes], "1.png", {type: "image/png"}));
document.body.dispatchEvent(new DragEvent("drop", {dataTransfer, bubbles: true}));
"""


def count(selector: str) -> str:
    return f"document.querySelectorAll({selector!r}).length"


def bars(driver: Chrome) -> list[tuple[str, str, bool]]:
    """Return name, score and decision of each bar."""
    script = """return [...document.querySelectorAll('.bar')].map(bar => [
        bar.querySelector('.name').textContent.replace('✓ ', ''),
        bar.querySelector('.score').textContent, bar.classList.contains('present')])"""
    return [(name, score, present) for name, score, present in driver.execute_script(script)]


def check_quiet(driver: Chrome, url: str) -> None:
    """Check that the console is empty, and that no request left for another host."""
    assert driver.get_log("browser") == []
    requested = set()
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            requested.add(message["params"]["request"]["url"])
    assert {f"{url}/", f"{url}/api/predict"} <= requested
    assert [each for each in requested if not each.startswith((f"{url}/", "data:"))] == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_shows_the_answers_of_the_model(
    calibrated: Path, photo: Make, tmp_path: Path, width: int
) -> None:
    for seed in (1, 2):
        (tmp_path / f"{seed}.png").write_bytes(photo(seed, 400, 300))
    (tmp_path / "text.jpg").write_text("text")

    with served(tmp_path / "x", calibrated) as url, opened(url, width=width) as driver:
        files = [("photos", (tmp_path / f"{seed}.png").read_bytes()) for seed in (1, 2)]
        rows = httpx.post(f"{url}/api/predict", files=files).json()

        def expected(threshold: float | None) -> list[tuple[str, str, bool]]:
            """Return the bars for a threshold; None for those of the model."""
            named = []
            for item in itertools.chain(*[row["predictions"] for row in rows]):
                lowest = item["threshold"] if threshold is None else threshold
                named.append((item["name"], f"{item['score']:.3f}", item["score"] >= lowest))
            return named

        [entry] = driver.find_elements(By.ID, "photos")
        entry.send_keys("\n".join(str(tmp_path / name) for name in ("1.png", "2.png", "text.jpg")))
        waited(driver, f"{count('.fault')} === 1 && {count('.card')} === 3")
        assert bars(driver) == expected(None)

        # The slider counts for all classes, and the switch goes back to those of the model.
        [slider] = driver.find_elements(By.ID, "threshold")
        slider.send_keys(Keys.END)
        assert bars(driver) == expected(1)
        slider.send_keys(Keys.HOME)
        assert bars(driver) == expected(0)
        driver.find_element(By.ID, "own").click()
        assert bars(driver) == expected(None)

        # With the slider at 0 all three classes are present, and have a map.
        driver.find_element(By.ID, "own").click()
        driver.find_element(By.ID, "heat").click()
        waited(driver, f"{count('.heat img')} === 6")
        waited(driver, "document.getElementById('status').textContent.includes('Bright')")
        sizes = "[...document.images].every(image => image.complete && image.naturalWidth > 100)"
        waited(driver, sizes)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        driver.find_element(By.ID, "heat").click()
        waited(driver, f"{count('.heat img')} === 0")

        driver.find_element(By.ID, "clear").click()
        waited(driver, f"{count('.card')} === 0")
        check_quiet(driver, url)


@pytest.mark.slow
def test_classes_are_typed_into_the_page_of_a_zero_shot_model(
    tmp_path: Path, vectors: str, photo: Make
) -> None:
    checkpoint = tmp_path / "words.pt"
    words = [word for word in hostile.WORDS if not word.startswith("head.")]
    queries = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    torch.save(hostile.good([*words, "head=gap_words", "head.word_dim=5"], queries), checkpoint)
    with (
        served(tmp_path / "x", checkpoint, "--vectors", vectors) as url,
        opened(url, width=1400) as driver,
    ):
        # Photos are dropped anywhere on the page.
        driver.execute_script(DROP, base64.b64encode(photo(1, 400, 300)).decode())
        waited(driver, f"{count('.bar .score')} === 3")
        assert {name for name, *_ in bars(driver)} == set(hostile.NAMES)

        box = driver.find_element(By.ID, "classes")
        box.send_keys("zebra, red <i>", Keys.ENTER)
        waited(driver, f"{count('.bar .score')} === 2")
        assert {name for name, *_ in bars(driver)} == {"zebra", "red <i>"}

        # A name without a vector is told on the page, which goes on.
        box.send_keys(", unicorn", Keys.ENTER)
        waited(driver, "document.querySelector('.fault')?.textContent.includes('unicorn')")
        box.send_keys(Keys.BACKSPACE * len(", unicorn"), Keys.ENTER)
        waited(driver, f"{count('.bar .score')} === 2")
        assert [log for log in driver.get_log("browser") if "400" not in log["message"]] == []
