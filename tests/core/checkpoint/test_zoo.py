"""Released files: which there are, and how they are fetched; no test asks a server."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from mldec import checkpoint
from mldec.checkpoint import zoo
from mldec.errors import CheckpointError
from mldec.files.torch_files import known_hashes, sha256_of

NAME = "tresnet_l_coco_448"
FILE = zoo.FILES[NAME].file


class Server:
    """What stands in for the server and its client."""

    def __init__(self) -> None:
        self.body, self.error, self.requests = b"PK weights", None, 0
        self.pause = 0.0

    def get(self, url: str, file: BinaryIO, **options: Any) -> None:
        self.requests += 1
        time.sleep(self.pause)
        file.write(self.body[:4])
        if self.error is not None:
            raise self.error
        file.write(self.body[4:])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(zoo, "http_get", server.get)
    return server


def test_a_file_is_fetched_once_with_its_hash_beside_it(server: Server, tmp_path: Path) -> None:
    path = zoo.fetch(NAME, tmp_path)
    assert path == tmp_path / FILE
    assert path.read_bytes() == server.body
    assert known_hashes(path) == [sha256_of(path)]
    assert zoo.fetch(NAME, tmp_path) == path
    assert server.requests == 1


@pytest.mark.parametrize(
    ("body", "error", "reason"),
    [
        (b"half of it", ConnectionError("403 Forbidden"), "ConnectionError: 403 Forbidden"),
        (b"<html>no such file</html>", None, "an HTML page, not a file"),
        (b"", None, "the answer is empty"),
    ],
)
def test_a_download_that_fails_is_one_line_and_leaves_no_file(
    server: Server, tmp_path: Path, body: bytes, error: Any, reason: str
) -> None:
    server.body, server.error = body, error
    with pytest.raises(CheckpointError) as caught:
        zoo.fetch(NAME, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"cannot download {zoo.FILES[NAME].url} (")
    assert reason in message
    assert "the authors' links are reported to answer 403" in message
    assert message.endswith(
        f"/path/to/{FILE}, in place of the zoo: name, or put it at {tmp_path / FILE}"
    )
    assert "\n" not in message
    assert {path.name for path in tmp_path.iterdir()} <= {f"{FILE}.lock"}


def test_another_hash_than_the_published_one_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(zoo.FILES, NAME, replace(zoo.FILES[NAME], sha256="0" * 64))
    with pytest.raises(CheckpointError, match=r"its sha256 is .*, not the expected 0000"):
        zoo.fetch(NAME, tmp_path)
    assert not (tmp_path / FILE).exists()


def test_those_that_fetch_together_download_once(server: Server, tmp_path: Path) -> None:
    server.pause = 0.3
    together = threading.Barrier(3)

    def fetch(_: int) -> Path:
        together.wait()
        return zoo.fetch(NAME, tmp_path)

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(fetch, range(3))) == {tmp_path / FILE}
    assert server.requests == 1


def test_a_folder_that_cannot_be_written_is_one_line(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot download .*\((Not a directory|File exists)"):
        zoo.fetch(NAME, tmp_path / "file")


def test_the_default_folder_is_in_the_cache(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert checkpoint.local(f"zoo:{NAME}") == tmp_path / "mldec" / "zoo" / FILE


@pytest.mark.parametrize("name", ["tresnet_l_coco_44", "../../etc/passwd", "", "\x00"])
def test_an_unknown_name_is_no_path(server: Server, tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="no released file"):
        zoo.fetch(name, tmp_path)
    with pytest.raises(CheckpointError, match="no released file"):
        checkpoint.load_model(f"zoo:{name}")
    assert server.requests == 0


def test_the_released_files_are_known_by_their_file_names() -> None:
    assert len({entry.file for entry in zoo.FILES.values()}) == len(zoo.FILES) == 12
    assert all(entry.url.startswith("https://") for entry in zoo.FILES.values())
    entry = zoo.known(Path("/any/folder") / FILE)
    assert entry is not None
    assert (entry.name, entry.image_size) == (NAME, 448)
    assert zoo.known(Path("other.pth")) is None
