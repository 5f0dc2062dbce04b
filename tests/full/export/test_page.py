"""scripts/browser.html, in a browser."""

import shutil
import subprocess
import tarfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import hostile
import pytest
import torch
from browser import opened
from pictures import picture
from selenium.webdriver.support.wait import WebDriverWait

from mldec.checkpoint import load_model
from mldec.data.images import load_image
from mldec.evaluation.run import scores

PAGE = Path(__file__).parents[3] / "scripts" / "browser.html"
ENGINE = ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")


class Quiet(SimpleHTTPRequestHandler):
    """A web server without a log."""

    def log_message(self, *_):
        """Print nothing."""


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_page_shows_the_predictions(cli, here):
    subprocess.run(["npm", "pack", "onnxruntime-web@1.30.0"], check=True, capture_output=True)
    with tarfile.open("onnxruntime-web-1.30.0.tgz") as archive:
        for name in ENGINE:
            member = archive.extractfile(f"package/dist/{name}")
            Path(name).write_bytes(member.read())

    torch.save(hostile.good(), "best.pt")
    picture(90, 70).save("photo.png")
    shutil.copy(PAGE, "index.html")
    assert cli("export", "best.pt", "any_size.onnx", "--any-size").status == 0
    assert cli("evaluate", "best.pt", "--write-classes", "classes.txt").status == 0

    handler = partial(Quiet, directory=str(here))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            with opened(Path("classes.txt"), width=800) as browser:
                browser.get(f"http://127.0.0.1:{server.server_port}/index.html")
                wait = WebDriverWait(browser, 60)
                wait.until(lambda page: page.find_element("id", "answer").text)
                lines = browser.find_element("id", "answer").text.splitlines()
                log = [entry["message"] for entry in browser.get_log("browser")]
        finally:
            server.shutdown()

    loaded = load_model("best.pt")
    row = scores(loaded, load_image(Path("photo.png"), loaded.transform)[None])[0].tolist()
    assert lines == [
        f"{name} {score:.3f}{' present' if score >= 0.5 else ''}"
        for name, score in zip(loaded.classes.names, row, strict=True)
    ]
    assert not [line for line in log if "favicon" not in line]
