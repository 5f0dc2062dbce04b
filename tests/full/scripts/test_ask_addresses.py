"""The script that asks whether addresses answer, with a server of this machine."""

import runpy
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "ask_addresses.py"


class Answers(BaseHTTPRequestHandler):
    """A file of a thousand bytes; everything else is forbidden."""

    def do_GET(self) -> None:
        if self.path != "/file":
            self.send_error(403)
            return
        assert self.headers["Range"] == "bytes=0-0"
        self.send_response(206)
        self.send_header("Content-Range", "bytes 0-0/1000")
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"x")

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_what_answers_and_what_does_not(server: str) -> None:
    ask = runpy.run_path(str(SCRIPT))["ask"]
    assert ask(f"{server}/file") == (True, "206, 1,000 bytes")
    assert ask(f"{server}/gone") == (False, "403 Forbidden")
    is_there, answer = ask("http://127.0.0.1:1/file")
    assert not is_there
    assert answer.startswith("no answer (")


def test_addresses_are_those_of_the_zoo_and_of_the_data_sets() -> None:
    script = runpy.run_path(str(SCRIPT))
    listed = script["addresses"]()
    assert any(address.endswith("tresnet_l_COCO__448_90_0.pth") for address in listed)
    assert any("VOCtrainval_06-Nov-2007.tar" in address for address in listed)
    assert script["expanded"]("http://a/{b,c}.txt") == ["http://a/b.txt", "http://a/c.txt"]
    assert not any(mark in address for address in listed for mark in "{}`|")
