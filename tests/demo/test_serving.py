"""The command from its options to its end; the page itself in a real browser."""

import errno
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import hostile
import networks
import numpy as np
import pytest
import torch
from browser import opened
from PIL import Image
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from support import one_line, wait_until

from mldec.checkpoint import load_model
from mldec.data.images import load_image
from mldec.demo import parser, serving
from mldec.demo.answering import Photo
from mldec.demo.serving import announce, listener, open_engine, require_gradio
from mldec.errors import CheckpointError, ConfigError
from mldec.inference.engine import ExportedEngine, TorchEngine
from mldec.inference.scoring import scores

Cli = Callable[..., Any]
Make = Callable[..., Photo]
MiB = 2**20


def options(*words: str | Path) -> Namespace:
    return parser().parse_args([*map(str, words)])


# --- Options and their faults -------------------------------------------------------------------


@pytest.mark.parametrize("spec", [None, Namespace(origin=None)])
def test_a_missing_extra_names_the_pip_command(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, spec: object
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    status, out, err = cli("demo", "absent.pt")
    assert (status, out) == (1, "")
    one_line(err, "needs gradio", "run pip install 'mldec[demo]'")


def test_a_port_in_use_is_named_before_the_model_is_loaded(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "require_gradio", lambda: None)
    with listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        status, out, err = cli("demo", "absent.pt", "--port", str(port))
    assert (status, out) == (1, "")
    one_line(err, f"--port {port} is in use on 127.0.0.1; pass another one, such as --port")


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_a_host_of_others_is_refused(host: str) -> None:
    with (
        pytest.raises(ConfigError, match=f"--host {host} is no address of this machine"),
        listener(host, 0),
    ):
        pass


def test_a_port_that_needs_rights_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refused)
    with pytest.raises(ConfigError, match="--port 80 needs more rights"), listener("127.0.0.1", 80):
        pass


def test_a_server_of_version_six_listens() -> None:
    try:
        with listener("::1", 0) as server:
            assert server.family == socket.AF_INET6
    except ConfigError:
        pytest.skip("this machine has no IPv6")


def test_the_console_says_who_can_reach_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with listener("127.0.0.1", 0) as server:
        port = server.getsockname()[1]
        announce(options("x"), server, is_local=True)
        out, err = capsys.readouterr()
        assert out == f"http://127.0.0.1:{port}: only this machine can reach it; Ctrl-C ends it\n"
        assert err == ""
        announce(options("x", "--host", "0.0.0.0"), server, is_local=False)
        out, err = capsys.readouterr()
        assert out.endswith(": Ctrl-C ends it\n")
        one_line(err, "--host 0.0.0.0: anyone who reaches port", "without a password")


def test_a_checkpoint_is_opened_with_its_thresholds(calibrated: Path) -> None:
    engine = open_engine(options(calibrated, "--device", "cpu"))
    assert isinstance(engine, TorchEngine)
    assert engine.thresholds == pytest.approx([0.2, 0.4, 0.6])
    with pytest.raises(ConfigError, match=r"--vectors has no effect: .* its own classes only"):
        open_engine(options(calibrated, "--vectors", "x.txt"))


def test_absent_and_strange_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("text")
    for name in ("absent.pt", "absent.onnx"):
        with pytest.raises(CheckpointError, match="no file at"):
            open_engine(options(tmp_path / name))
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        open_engine(options(tmp_path / "notes.txt"))


def test_an_onnx_file_without_metadata_is_refused(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "x.onnx"
    graph = onnx.helper.make_graph([], "empty", [], [])
    onnx.save(onnx.helper.make_model(graph), path)
    with pytest.raises(CheckpointError, match="does not say what its classes are"):
        open_engine(options(path))


def test_an_exported_file_is_opened_and_options_without_effect_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    path = networks.save_onnx(tmp_path / "x.onnx", "gap")
    engine = open_engine(options(path))
    assert isinstance(engine, ExportedEngine)
    assert not engine.zero_shot
    for words in (["--weights", "raw"], ["--image-size", "64"], ["--class-names", "x"]):
        with pytest.raises(ConfigError, match=f"{words[0]} has no effect on an exported file"):
            open_engine(options(path, *words))
    with pytest.raises(ConfigError, match="--vectors has no effect"):
        open_engine(options(path, "--vectors", "x.txt"))


def test_an_exported_zero_shot_file_needs_vectors(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    path = networks.save_onnx(tmp_path / "x.onnx", "words")
    with pytest.raises(CheckpointError, match="asks for word vectors: pass --vectors FILE"):
        open_engine(options(path))
    vectors = tmp_path / "vectors.txt"
    lines = [f"thing_{n} " + " ".join(str(n + k) for k in range(1, 6)) for n in range(7)]
    vectors.write_text("\n".join(lines))
    engine = open_engine(options(path, "--vectors", vectors))
    assert engine.zero_shot
    assert engine.classes.names == tuple(f"thing {number}" for number in range(7))


def test_gradio_is_found_where_it_is() -> None:
    pytest.importorskip("gradio", reason="needs the extra demo")
    require_gradio()


# --- A real server ------------------------------------------------------------------------------


class Server(NamedTuple):
    """A server in a process of its own, and the folder that holds all it could write to."""

    url: str
    process: subprocess.Popen[str]
    home: Path

    @property
    def resident(self) -> int:
        """Resident memory in bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    def files(self) -> list[str]:
        """All files below the folder."""
        return [str(path) for path in self.home.rglob("*") if path.is_file()]


@contextmanager
def served(home: Path, *words: str | Path) -> Iterator[Server]:
    """Start the command on a free port; at the end, end it by SIGTERM."""
    pytest.importorskip("gradio", reason="needs the extra demo")
    folders = {"HOME": home / "home", "TMPDIR": home / "tmp"}
    for folder in (*folders.values(), home / "work"):
        folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **{key: str(folder) for key, folder in folders.items()}}
    # Gradio imports matplotlib where it is, which lists the fonts of the machine.
    environment["MPLCONFIGDIR"] = f"{home}-matplotlib"
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(serving.__file__).parents[2]), environment["PYTHONPATH"]]
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
    line = process.stdout.readline()
    match = re.match(r"http://127\.0\.0\.1:\d+", line)
    if match is None:
        pytest.fail(process.communicate()[1])
    try:
        yield Server(match[0], process, home)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert process.returncode in (130, 143)
    one_line(err, "stopped by SIG")
    assert [str(path) for path in (home / "tmp").rglob("*")] == [], "its folder is removed"


def connection(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)


def post(url: str, path: str, body: bytes, kind: str = "application/json") -> tuple[int, bytes]:
    server = connection(url)
    server.request("POST", path, body, {"Content-Type": kind})
    reply = server.getresponse()
    return reply.status, reply.read()


def upload(url: str, *photos: Photo) -> tuple[int, bytes]:
    """Upload files as a form, by hand."""
    body = b""
    for photo in photos:
        disposition = f'Content-Disposition: form-data; name="files"; filename="{photo.name}"'
        body += b"--edge\r\n" + disposition.encode() + b"\r\n\r\n" + photo.content + b"\r\n"
    body += b"--edge--\r\n"
    return post(url, "/gradio_api/upload", body, "multipart/form-data; boundary=edge")


def file(path: str, **entries: str) -> dict[str, Any]:
    return {"path": path, **entries, "meta": {"_type": "gradio.FileData"}}


def call(url: str, files: list[Any], **settings: Any) -> tuple[str, Any]:
    """Call the endpoint for uploaded files: the kind of its answer, and the answer."""
    body = json.dumps({"photos": files, **settings}).encode()
    status, reply = post(url, "/gradio_api/call/v2/answer", body)
    if status != 200:
        return f"status {status}", reply
    server = connection(url)
    server.request("GET", f"/gradio_api/call/answer/{json.loads(reply)['event_id']}")
    events = server.getresponse()
    # Gradio sends a sign of life every few seconds: a limit of the connection would not end this.
    end = time.monotonic() + 300
    while time.monotonic() < end:
        event = events.readline().decode().removeprefix("event: ").strip()
        if event in ("complete", "error"):
            return event, json.loads(events.readline().decode().removeprefix("data: "))
    raise AssertionError("no answer came")


def answered(url: str, *photos: Photo, **settings: Any) -> list[dict[str, Any]]:
    status, reply = upload(url, *photos)
    assert status == 200, reply
    event, data = call(url, [file(name) for name in json.loads(reply)], **settings)
    assert event == "complete", data
    return data[0]


def expected(checkpoint: Path, photo: Photo) -> dict[str, float]:
    """Return the scores of a photo, straight from the checkpoint."""
    loaded = load_model(checkpoint)
    image = load_image(photo.name, loaded.transform, photo.content)[None]
    return dict(zip(loaded.classes.names, scores(loaded, image)[0].tolist(), strict=True))


@pytest.mark.slow
def test_the_endpoint_answers_and_says_what_is_wrong(
    calibrated: Path, photo: Make, bad_files: dict[str, bytes], tmp_path: Path
) -> None:
    with served(tmp_path, calibrated) as server:
        url = server.url
        bad = [Photo(f"{n}.jpg", content) for n, content in enumerate(bad_files.values())]
        entries = answered(url, photo(1), *bad, photo(2), heat_maps=True)
        assert [entry["image"] for entry in entries] == ["1.png", *[b.name for b in bad], "2.png"]
        for entry, reason in zip(entries[1:-1], bad_files, strict=True):
            assert reason in entry["error"]
        for entry, seed in ((entries[0], 1), (entries[-1], 2)):
            known = expected(calibrated, photo(seed))
            for item in entry["predictions"]:
                assert item["score"] == pytest.approx(known[item["name"]], abs=1e-5)
                assert item["present"] == (item["score"] >= item["threshold"])
                assert np.shape(item["heat"]) == (32, 32)
            assert entry["seen"] == [0, 0, 40, 30]
        lowest = sorted(item["threshold"] for item in entries[0]["predictions"])
        assert lowest == pytest.approx([0.2, 0.4, 0.6])
        [entry] = answered(url, photo(1), threshold=0.5, top=2)
        assert [item["threshold"] for item in entry["predictions"]] == [0.5, 0.5]

        # Wrong settings are told, and what is wrong inside is not.
        names = json.loads(upload(url, photo(1))[1])
        for settings, reason in (
            ({"threshold": 2}, "threshold: 2 is not a number from 0 to 1"),
            ({"threshold": "x"}, "threshold: 'x' is not a number"),
            ({"top": 0}, "top: 0 is not a whole number from 1 on"),
            ({"classes": "zebra"}, "it is no zero-shot model"),
            ({"classes": 5}, "classes: 5 is not a text"),
        ):
            names = json.loads(upload(url, photo(1))[1])
            event, data = call(url, [file(name) for name in names], **settings)
            assert (event, reason in str(data)) == ("error", True), data

        # Too many and too large uploads.
        assert upload(url, *[photo(1)] * 17)[0] == 400
        assert upload(url, Photo("x.jpg", b"x" * (20 * MiB + 1)))[0] == 413
        status, reply = upload(url, Photo("x.jpg", b"x" * (101 * MiB)))
        assert (status, reply) == (413, b"the upload has more than 100 MiB")

        # The documentation is there.
        info = connection(url)
        info.request("GET", "/gradio_api/info")
        about = json.loads(info.getresponse().read())["named_endpoints"]
        assert list(about) == ["/answer"]
        assert "lowest score of a present class" in about["/answer"]["description"]
        assert server.files() == []


@pytest.mark.slow
def test_no_request_reads_a_file_or_an_address(
    calibrated: Path, photo: Make, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(photo(1).content)
    asked: list[str] = []

    class Inside(BaseHTTPRequestHandler):
        """A server that only this machine reaches."""

        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        do_HEAD = do_GET

    with (
        HTTPServer(("127.0.0.1", 0), Inside) as inside,
        served(tmp_path / "x", calibrated) as server,
    ):
        threading.Thread(target=inside.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{inside.server_port}/x.png"
        [name] = json.loads(upload(server.url, photo(2))[1])
        data = [
            [file(str(secret))],
            [file(address)],
            [file(address, url=address)],
            [file("x.png", url=address)],
            [file(f"/{name}/../{secret}")],
            [str(secret)],
            [address],
            [{"path": str(secret)}],
        ]
        for files in data:
            event, reply = call(server.url, files)
            assert event == "error", reply
            assert "was not uploaded here" in str(reply)
        for path in (
            f"/gradio_api/file={secret}",
            f"/file={secret}",
            f"/gradio_api/file={address}",
        ):
            get = connection(server.url)
            get.request("GET", path)
            assert get.getresponse().status == 404

        # The functions of the page are no way around.
        for index in range(6):
            fields = {"data": [[file(str(secret))]] * 5, "fn_index": index, "session_hash": "abc"}
            post(server.url, "/gradio_api/queue/join", json.dumps(fields).encode())
        # An uploaded photo is still there, and taken once.
        assert call(server.url, [file(name)])[0] == "complete"
        assert call(server.url, [file(name)])[0] == "error"
        inside.shutdown()
        assert asked == []
        assert server.files() == []


@pytest.mark.slow
def test_fifty_uploads_at_once_are_answered_and_memory_is_flat(
    calibrated: Path, photo: Make, tmp_path: Path
) -> None:
    photos = [photo(seed, 1200, 900) for seed in range(50)]
    known = [expected(calibrated, each) for each in photos]
    with served(tmp_path, calibrated) as server, ThreadPoolExecutor(50) as pool:
        barrier = threading.Barrier(50)

        def ask(number: int) -> list[dict[str, Any]]:
            barrier.wait()
            return answered(server.url, photos[number])

        resident = []
        for _ in range(4):
            entries = list(pool.map(ask, range(50)))
            for number, [entry] in enumerate(entries):
                assert entry["image"] == photos[number].name
                assert len(entry["predictions"]) == len(hostile.NAMES)
                for item in entry["predictions"]:
                    assert item["score"] == pytest.approx(known[number][item["name"]], abs=1e-5)
            resident.append(server.resident)
            assert server.files() == []

        # The first rounds fill caches and heaps of threads.
        print("resident memory in MiB:", [round(size / MiB) for size in resident])
        assert resident[3] - resident[1] < 32 * MiB


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_in_order_also_with_open_pages(
    calibrated: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    with served(tmp_path, calibrated) as server:
        page = connection(server.url)
        page.request("GET", "/gradio_api/heartbeat/abc")
        page.getresponse()
        server.process.send_signal(number)
        assert server.process.wait(120) == status


# --- The page in a browser ----------------------------------------------------------------------


def waited(driver: Chrome, selector: str, ready: Callable[[list[Any]], bool] = bool) -> list[Any]:
    """Wait until the elements that a selector finds are as they should be; return them."""
    elements: list[Any] = []

    def are_ready() -> bool:
        with suppress(StaleElementReferenceException):
            elements[:] = driver.find_elements(By.CSS_SELECTOR, selector)
            return ready(elements)
        return False

    wait_until(are_ready, lambda: f"{selector} in\n{driver.page_source[-3000:]}")
    return elements


def drop(driver: Chrome, *paths: Path) -> None:
    [entry] = waited(driver, "#photos input[type=file]", lambda found: len(found) == 1)
    entry.send_keys("\n".join(map(str, paths)))


def bars(driver: Chrome) -> list[tuple[str, str, bool]]:
    """Return name, score and decision of each bar."""
    script = """return [...document.querySelectorAll('.mldec-bar')].map(bar => [
        bar.querySelector('.name').textContent.replace('✓ ', ''),
        bar.querySelector('.score').textContent, bar.classList.contains('present')])"""
    return [(name, score, present) for name, score, present in driver.execute_script(script)]


def check_quiet(driver: Chrome, url: str, absent: str = "nothing") -> None:
    """Check that nothing went wrong on the console, and that no request left for another host.

    Args:
        driver: of the page.
        url: of the server.
        absent: an address that Gradio's page asks for to see that it is not there.
    """
    messages = [log["message"] for log in driver.get_log("browser") if log["level"] == "SEVERE"]
    assert [message for message in messages if absent not in message] == []
    requested = set()
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
            requested.add(message["params"].get("request", message["params"])["url"])
    assert len(requested) > 20
    foreign = {
        address for address in requested if not address.startswith((f"{url}/", "data:", "blob:"))
    }
    assert foreign == set()


@pytest.fixture
def pictures(tmp_path: Path, photo: Make) -> list[Path]:
    paths = []
    for seed in (1, 2):
        paths.append(tmp_path / f"{seed}.png")
        paths[-1].write_bytes(photo(seed, 400, 300).content)
    return paths


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_shows_the_answers_of_the_model(
    calibrated: Path, pictures: list[Path], photo: Make, tmp_path: Path, width: int
) -> None:
    thresholds = dict(zip(hostile.NAMES, (0.2, 0.4, 0.6), strict=True))
    shown = [expected(calibrated, photo(seed, 400, 300)) for seed in (1, 2)]
    with served(tmp_path / "x", calibrated) as server, opened(server.url, width=width) as driver:
        drop(driver, *pictures)
        waited(driver, ".mldec-card", lambda cards: len(cards) == 2)

        def check(lowest: dict[str, float]) -> None:
            wanted = [
                (name, f"{score:.3f}", score >= lowest[name])
                for known in shown
                for name, score in sorted(known.items(), key=lambda item: -item[1])
            ]
            wait_until(lambda: bars(driver) == wanted, lambda: f"{wanted}, not {bars(driver)}")

        check(thresholds)

        # The slider counts for all classes, and the switch goes back to those of the model.
        [slider] = driver.find_elements(By.CSS_SELECTOR, "#threshold input[type=range]")
        slider.send_keys(Keys.END)
        check(dict.fromkeys(hostile.NAMES, 1.0))
        slider.send_keys(Keys.HOME)
        check(dict.fromkeys(hostile.NAMES, 0.0))
        own, single = driver.find_elements(By.CSS_SELECTOR, "#source input")
        assert single.is_selected()
        own.click()
        check(thresholds)

        [heat] = driver.find_elements(By.CSS_SELECTOR, "#heat input")
        heat.click()
        waited(driver, ".mldec-heat img", lambda found: len(found) >= 2)
        heat.click()
        waited(driver, ".mldec-heat", lambda found: not found)

        # A second drop replaces the first, and a bad file is answered beside a good one.
        bad = tmp_path / "text.jpg"
        bad.write_text("text")
        drop(driver, pictures[0], bad)
        waited(driver, ".mldec-fault", lambda found: len(found) == 1)
        assert len(driver.find_elements(By.CSS_SELECTOR, ".mldec-card")) == 2

        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        screenshot = tmp_path / f"{width}.png"
        driver.save_screenshot(str(screenshot))
        with Image.open(screenshot) as image:
            assert len(image.convert("RGB").getcolors(2**24)) > 1000, "not a blank page"
        check_quiet(driver, server.url)
        assert server.files() == []


@pytest.mark.slow
def test_the_documentation_of_the_endpoint_is_on_the_page(calibrated: Path, tmp_path: Path) -> None:
    with served(tmp_path, calibrated) as server, opened(server.url, width=1600) as driver:
        [button] = waited(driver, "footer button.show-api", lambda found: len(found) == 1)
        button.click()
        waited(
            driver,
            "body",
            lambda found: (
                "/answer" in found[0].text and "lowest score of a present" in found[0].text
            ),
        )
        check_quiet(driver, server.url, absent="/gradio_api/mcp/schema - ")


@pytest.mark.slow
def test_classes_are_typed_into_the_page_of_a_zero_shot_model(
    words_checkpoint: Path, pictures: list[Path], tmp_path: Path, vectors: str, photo: Make
) -> None:
    with (
        served(tmp_path / "x", words_checkpoint, "--vectors", vectors) as server,
        opened(server.url, width=1600) as driver,
    ):
        drop(driver, pictures[0])
        waited(driver, ".mldec-bar", lambda found: len(found) == 3)
        assert {name for name, *_ in bars(driver)} == set(hostile.NAMES)
        [box] = driver.find_elements(By.CSS_SELECTOR, "#classes textarea, #classes input")
        box.send_keys("zebra, umbrella", Keys.ENTER)
        waited(driver, ".mldec-bar", lambda found: len(found) == 2)

        loaded = load_model(words_checkpoint)
        image = load_image("1.png", loaded.transform, photo(1, 400, 300).content)[None]
        queries = torch.tensor([[1.0, 0, 0, 0, 0], [0, 1, 0, 1, 0]])
        known = loaded.model(image, queries).sigmoid()[0].tolist()
        wanted = dict(zip(("zebra", "umbrella"), (f"{score:.3f}" for score in known), strict=True))
        assert {name: score for name, score, _ in bars(driver)} == wanted

        # A name without a vector is told on the page, which goes on.
        box.send_keys(", unicorn", Keys.ENTER)
        waited(driver, "body", lambda found: "unicorn" in found[0].text)
        [entry] = answered(server.url, photo(1, 400, 300), classes="zebra,umbrella")
        assert {item["name"]: f"{item['score']:.3f}" for item in entry["predictions"]} == wanted
        check_quiet(driver, server.url)


@pytest.mark.slow
def test_the_page_of_an_exported_file_says_what_it_lacks(
    pictures: list[Path], tmp_path: Path
) -> None:
    pytest.importorskip("onnx")
    path = networks.save_onnx(tmp_path / "x.onnx", "gap")
    with served(tmp_path / "x", path) as server, opened(server.url, width=1600) as driver:
        drop(driver, pictures[0])
        waited(driver, ".mldec-bar", lambda found: len(found) == 5)
        assert "An exported file has no heat maps" in driver.page_source
        assert not driver.find_elements(By.CSS_SELECTOR, "#heat input")
        names = [file(name) for name in json.loads(upload(server.url, Photo("a", b"x"))[1])]
        assert call(server.url, names, heat_maps=True)[0] == "complete", "a fault has no maps"
        check_quiet(driver, server.url)
