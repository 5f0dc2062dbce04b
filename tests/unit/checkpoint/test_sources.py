"""Where files of weights come from; no test asks a server. For the Hub: tests/full/checkpoint."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mldec.checkpoint import load_model, sources
from mldec.checkpoint.sources import RELEASED, local, released_file
from mldec.errors import CheckpointError, DataError
from mldec.files.torch_files import known_hashes, sha256_of

NAME = "tresnet_l_coco_448"
FILE = RELEASED[NAME].file


class Server:
    """What stands in for the server of the authors and its client."""

    def __init__(self):
        self.body, self.requests = b"PK weights", 0
        self.urls = []
        self.error = None

    def get(self, url, file, **options):
        self.requests += 1
        self.urls.append(url)
        file.write(self.body[:4])
        time.sleep(0.05)  # others come meanwhile, if they can
        if self.error is not None:
            raise self.error
        file.write(self.body[4:])


@pytest.fixture
def server(monkeypatch, tmp_path):
    server = Server()
    monkeypatch.setattr(sources, "http_get", server.get)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return server


def test_a_file_is_fetched_once_with_its_hash_beside_it(server, tmp_path):
    together = threading.Barrier(3)

    def fetch(_):
        together.wait()
        return local(f"zoo:{NAME}")

    with ThreadPoolExecutor(3) as pool:
        (path,) = set(pool.map(fetch, range(3)))
    assert path == tmp_path / "mldec" / "zoo" / FILE
    assert path.read_bytes() == server.body
    assert known_hashes(path) == [sha256_of(path)]
    assert server.requests == 1


@pytest.mark.parametrize(
    ("body", "error", "reason"),
    [
        (b"half of it", ConnectionError("403 Forbidden"), "ConnectionError: 403 Forbidden"),
        (b"<html>no such file</html>", None, "the answer is empty or an HTML page"),
        (b"", None, "the answer is empty"),
    ],
)
def test_a_download_that_fails_is_one_line_and_leaves_no_file(
    server, tmp_path, body, error, reason
):
    server.body, server.error = body, error
    with pytest.raises(CheckpointError) as caught:
        released_file(NAME)
    message = str(caught.value)
    assert message.startswith(f"cannot download {RELEASED[NAME].folder}{FILE} ({reason}")
    assert "the authors' links are reported to answer 403" in message
    path = tmp_path / "mldec" / "zoo" / FILE
    assert f"/path/to/{FILE}, in place of the zoo: name, put it at {path}, or" in message
    assert "\n" not in message
    assert {path.name for path in path.parent.iterdir()} <= {f"{FILE}.lock"}


def test_a_mirror_is_asked_first(server, monkeypatch):
    monkeypatch.setenv("MLDEC_ZOO_URL", "https://mirror/")
    released_file(NAME)
    assert server.urls == [f"https://mirror/{FILE}"]


def test_a_folder_that_cannot_be_written_is_one_line(server, tmp_path):
    (tmp_path / "mldec").touch()
    with pytest.raises(DataError, match=r"cannot write .*: (Not a directory|File exists)"):
        released_file(NAME)


@pytest.mark.parametrize("name", ["tresnet_l_coco_44", "../../etc/passwd", "", "\x00"])
def test_an_unknown_name_is_no_path(server, name):
    with pytest.raises(CheckpointError, match="no released file"):
        load_model(f"zoo:{name}")
    assert server.requests == 0


def test_the_released_files_have_names_of_their_own():
    assert len({released.file for released in RELEASED.values()}) == len(RELEASED) == 14


@pytest.mark.parametrize("address", ["", "mine", "me/", "me/mine/more", "../mine", "me/mi ne@v1"])
def test_a_malformed_address_is_refused_without_a_request(address):
    with pytest.raises(CheckpointError, match=r"is no repository; write owner/name"):
        local(f"hf:{address}")


def test_the_name_of_a_run_alone_is_refused_with_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("outputs/mine/checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"^no file at mine; did you mean outputs/mine\?$"):
        local("mine")
    assert local("yours") == Path("yours")
