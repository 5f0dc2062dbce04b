"""Sources of weights, without a network. For the Hub see tests/full/checkpoint."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mldec.checkpoint import load_model, sources
from mldec.checkpoint.sources import RELEASED, local
from mldec.errors import CheckpointError, DataError
from mldec.files.torch_files import known_hashes, sha256_of

NAME = "tresnet_l_coco_448"
FILE = RELEASED[NAME].file


class Server:
    """A substitute for `http_get`."""

    def __init__(self):
        self.body = b"PK weights"
        self.urls = []
        self.error = None

    def get(self, url, file, **options):
        self.urls.append(url)
        file.write(self.body[:4])
        time.sleep(0.05)  # gives other threads time to start a download
        if self.error is not None:
            raise self.error
        file.write(self.body[4:])


@pytest.fixture
def server(monkeypatch, tmp_path):
    server = Server()
    monkeypatch.setattr(sources, "http_get", server.get)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return server


def test_threads_download_a_file_once_with_its_hash(server, tmp_path):
    together = threading.Barrier(3)

    def fetch(_):
        together.wait()
        return local(f"zoo:{NAME}")

    with ThreadPoolExecutor(3) as pool:
        (path,) = set(pool.map(fetch, range(3)))
    assert path == tmp_path / "mldec" / "zoo" / FILE
    assert path.read_bytes() == server.body
    assert known_hashes(path) == [sha256_of(path)]
    assert len(server.urls) == 1


@pytest.mark.parametrize(
    ("body", "error"),
    [(b"half of it", ConnectionError("403")), (b"<html>not found</html>", None), (b"", None)],
)
def test_failed_download_names_address_and_path(server, tmp_path, body, error):
    server.body = body
    server.error = error
    path = tmp_path / "mldec" / "zoo" / FILE
    with pytest.raises(CheckpointError, match=f"{RELEASED[NAME].url}.*{path}"):
        local(f"zoo:{NAME}")
    assert not path.exists()


def test_mirror_replaces_the_address(server, monkeypatch):
    monkeypatch.setenv("MLDEC_ZOO_URL", "https://mirror/")
    local(f"zoo:{NAME}")
    assert server.urls == [f"https://mirror/{FILE}"]


@pytest.mark.parametrize(
    ("source", "error", "name"),
    [
        ("zoo:tresnet_l_coco_44", CheckpointError, NAME),
        ("zoo:../../etc/passwd", CheckpointError, "zoo:"),
        (f"zoo:{NAME}", DataError, "cannot write"),
        ("hf:mine", CheckpointError, "owner/name"),
        ("mine", CheckpointError, "outputs/mine"),
    ],
)
def test_invalid_source_raises_an_error_without_a_request(server, here, source, error, name):
    Path("outputs/mine/checkpoints").mkdir(parents=True)
    Path("mldec").touch()  # the cache folder cannot be created
    with pytest.raises(error, match=name):
        load_model(source)
    assert server.urls == []


def test_released_files_have_different_names():
    assert len({released.file for released in RELEASED.values()}) == len(RELEASED) == 14
