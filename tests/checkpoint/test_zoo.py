"""The released files, fetched from a real https server on this machine that can misbehave."""

import hashlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mldec.checkpoint import zoo
from mldec.errors import CheckpointError

BODY = bytes(i * i % 251 for i in range(300_000))
OTHER = BODY[::-1]
LIMIT = 1_000_000


@dataclass
class Site:
    """What the server does; a test sets what it needs."""

    address: str
    certificate: Path
    body: bytes = BODY
    etag: str = '"one"'
    announced: int | None = None  # Content-Length of a whole answer; None is the truth
    cut: int | None = None  # bytes after which the connection is closed
    ranges: bool = True
    status: int = 200
    content_type: str = "application/octet-stream"
    redirect: str = ""
    send_size: bool = True
    linger: bool = False  # leave the connection open after the answer
    asked: list[str | None] = field(default_factory=list)  # the Range header of each request

    @property
    def url(self) -> str:
        return self.address + "/weights.pth"


class Handler(BaseHTTPRequestHandler):
    site: Site
    release: threading.Event

    def do_GET(self) -> None:
        site = self.site
        span = self.headers.get("Range")
        site.asked.append(span)
        if site.redirect and self.path == "/weights.pth":
            self.send_response(302)
            self.send_header("Location", site.redirect)
            self.end_headers()
            return
        start = int(span.removeprefix("bytes=").rstrip("-")) if span and site.ranges else 0
        if start and start >= len(site.body):
            self.send_error(416)
            return
        if site.status >= 400:
            self.send_error(site.status)
            return
        rest = site.body[start:]
        self.send_response(206 if start else site.status)
        if start:
            self.send_header(
                "Content-Range", f"bytes {start}-{len(site.body) - 1}/{len(site.body)}"
            )
        if site.send_size:
            announced = len(rest) if start or site.announced is None else site.announced
            self.send_header("Content-Length", str(announced))
        self.send_header("ETag", site.etag)
        self.send_header("Content-Type", site.content_type)
        self.end_headers()
        self.wfile.write(rest if site.cut is None else rest[: site.cut])
        if site.linger:
            self.wfile.flush()
            self.release.wait()

    def log_message(self, *args: object) -> None:
        """Keep the test's output clean."""


class Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that turns away in the middle is what several tests are about."""


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    folder = tmp_path_factory.mktemp("certificate")
    made, key = folder / "cert.pem", folder / "key.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 "
        "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    done = subprocess.run(
        [*command.split(), "-keyout", str(key), "-out", str(made)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"openssl made no certificate: {done.stderr.strip().splitlines()[-1]}")
    return made, key


@pytest.fixture
def site(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv(
        "SSL_CERT_FILE", str(certificate[0])
    )  # `fetch` trusts what the system trusts
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    release = threading.Event()
    handler = type("SiteHandler", (Handler,), {"release": release})
    server = Server(("127.0.0.1", 0), handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    handler.site = Site(f"https://127.0.0.1:{server.server_address[1]}", certificate[0])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield handler.site
    release.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "zoo" / "weights.pth"


def get(site: Site, target: Path, sha256: str | None = None) -> None:
    zoo.download(site.url, target, max_bytes=LIMIT, sha256=sha256)


def refusal(site: Site, target: Path, sha256: str | None = None) -> str:
    """Return the message of a download that must fail."""
    with pytest.raises(CheckpointError) as caught:
        get(site, target, sha256)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"cannot download {site.url} (")
    assert "; since 2026-05-14 the authors' links are reported to answer 403" in message
    assert "https://github.com/Alibaba-MIIL/ML_Decoder/issues/87" in message
    assert message.endswith(
        f"/path/to/weights.pth, in place of the zoo: name, or put it at {target}"
    )
    assert "\n" not in message
    assert not target.exists()
    return message


def names(target: Path) -> set[str]:
    return {path.name for path in target.parent.iterdir()}


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def test_a_whole_file_arrives_with_its_hash_beside_it(site: Site, target: Path) -> None:
    get(site, target, sha256=digest(BODY))
    assert target.read_bytes() == BODY
    assert target.with_name("weights.pth.sha256").read_text() == f"{digest(BODY)}  weights.pth\n"
    assert names(target) == {"weights.pth", "weights.pth.sha256"}


def test_a_cut_download_is_resumed(site: Site, target: Path) -> None:
    site.cut = 150_000
    assert "ended after 150,000 of 300,000 bytes; they are kept" in refusal(site, target)
    site.cut = None
    get(site, target)
    assert site.asked == [None, "bytes=150000-"]
    assert target.read_bytes() == BODY
    assert names(target) == {"weights.pth", "weights.pth.sha256"}


def test_a_download_cut_twice_is_resumed_twice(site: Site, target: Path) -> None:
    site.cut = 100_000
    refusal(site, target)
    refusal(site, target)
    site.cut = None
    get(site, target)
    assert site.asked == [None, "bytes=100000-", "bytes=200000-"]
    assert target.read_bytes() == BODY


@pytest.mark.parametrize(
    "change", ["no ranges", "replaced, same size", "replaced, longer", "replaced, too short"]
)
def test_a_rest_that_does_not_fit_starts_over(site: Site, target: Path, change: str) -> None:
    site.cut = 150_000
    refusal(site, target)
    site.cut = None
    if change == "no ranges":
        site.ranges = False
    else:
        sizes = {
            "replaced, same size": OTHER,
            "replaced, longer": OTHER + b"x",
            "replaced, too short": OTHER[:1000],
        }
        site.body, site.etag = sizes[change], '"two"'
    get(site, target)
    assert site.asked[1] == "bytes=150000-"
    assert target.read_bytes() == site.body


def test_a_part_of_unknown_origin_is_not_continued(site: Site, target: Path) -> None:
    target.parent.mkdir()
    target.with_name("weights.pth.part").write_bytes(b"something else")
    get(site, target)
    assert site.asked == [None]
    assert target.read_bytes() == BODY


def test_a_body_shorter_than_announced_is_kept_for_the_rest(site: Site, target: Path) -> None:
    site.announced = len(BODY) + 10
    assert "after 300,000 of 300,010 bytes" in refusal(site, target)
    assert target.with_name("weights.pth.part").read_bytes() == BODY


def test_a_body_longer_than_announced_is_refused(site: Site, target: Path) -> None:
    site.announced = len(BODY) - 10
    assert "sends more than the 299,990 bytes it announced" in refusal(site, target)
    assert names(target) == set()


def test_a_body_without_a_size_is_refused(site: Site, target: Path) -> None:
    site.send_size = False
    assert "announces no size" in refusal(site, target)


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough for a busy machine to begin an answer."""
    monkeypatch.setattr(zoo, "_TIMEOUT", 3)


@pytest.mark.usefixtures("short_timeout")
def test_a_server_that_keeps_the_connection_open_is_served(site: Site, target: Path) -> None:
    site.linger = True
    get(site, target)
    assert target.read_bytes() == BODY


@pytest.mark.usefixtures("short_timeout")
def test_a_server_that_falls_silent_is_left(site: Site, target: Path) -> None:
    site.linger, site.cut = True, 1000
    assert "timed out" in refusal(site, target)
    assert target.with_name("weights.pth.part").read_bytes() == BODY[:1000]


def test_a_file_above_the_cap_is_refused_before_it_is_read(site: Site, target: Path) -> None:
    site.body = bytes(LIMIT + 1)
    assert "its 1,000,001 bytes are more than the 1,000,000 allowed" in refusal(site, target)
    assert names(target) == set()


def test_a_lie_does_not_pass_the_cap(site: Site, target: Path) -> None:
    site.body, site.announced = bytes(LIMIT + 100_000), LIMIT
    assert "sends more" in refusal(site, target)
    assert names(target) == set()


def test_another_hash_than_the_pinned_one_is_refused(site: Site, target: Path) -> None:
    message = refusal(site, target, sha256=digest(OTHER))
    assert digest(BODY) in message
    assert digest(OTHER) in message
    assert names(target) == set()


def test_an_html_page_is_no_file(site: Site, target: Path) -> None:
    site.content_type = "text/html; charset=utf-8"
    assert "HTML page" in refusal(site, target)
    assert names(target) == set()


def test_an_answer_that_is_no_file_is_refused(site: Site, target: Path) -> None:
    site.status = 206  # a part, when the whole was asked for
    assert "the server answers 206" in refusal(site, target)


def test_a_missing_file_is_named(site: Site, target: Path) -> None:
    site.status = 404
    assert "HTTP Error 404" in refusal(site, target)


def test_a_redirect_within_https_is_followed(site: Site, target: Path) -> None:
    site.redirect = site.address + "/elsewhere.pth"
    get(site, target)
    assert target.read_bytes() == BODY


@pytest.mark.parametrize("scheme", ["http", "ftp", "file"])
def test_a_redirect_out_of_https_is_refused(site: Site, target: Path, scheme: str) -> None:
    site.redirect = f"{scheme}://127.0.0.1/weights.pth"
    assert site.redirect in refusal(site, target)
    assert len(site.asked) == 1


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1/weights.pth", "file:///etc/hostname", "weights.pth", ""]
)
def test_only_https_addresses_are_asked(target: Path, address: str) -> None:
    assert "not an https address" in refusal_of(address, target)


def test_a_malformed_address_is_one_line(target: Path) -> None:
    refusal_of("https://[weights.pth", target)


def test_no_network_is_one_line(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as bound:  # bound, but nobody listens
        bound.bind(("127.0.0.1", 0))
        assert "refused" in refusal_of(
            f"https://127.0.0.1:{bound.getsockname()[1]}/weights.pth", target
        )


def test_an_unknown_certificate_is_refused(
    site: Site, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(site, target)
    trusting = ssl.create_default_context(cafile=str(site.certificate))
    zoo.download(site.url, target, max_bytes=LIMIT, context=trusting)
    assert target.read_bytes() == BODY


def test_a_place_that_cannot_be_written_is_one_line(site: Site, tmp_path: Path) -> None:
    (tmp_path / "zoo").write_text("a file, not a folder")
    refusal(site, tmp_path / "zoo" / "weights.pth")


def refusal_of(url: str, target: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        zoo.download(url, target, max_bytes=LIMIT)
    message = str(caught.value)
    assert url in message
    assert str(target) in message
    assert "\n" not in message
    return message


@pytest.fixture
def entry(site: Site, monkeypatch: pytest.MonkeyPatch) -> zoo.File:
    """An entry of the zoo that lies on the test's server."""
    made = zoo.File("sample", "weights.pth", site.url, image_size=224, max_bytes=LIMIT, sha256=None)
    monkeypatch.setitem(zoo.FILES, "sample", made)
    return made


@pytest.mark.usefixtures("entry")
def test_a_cached_file_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    first = zoo.fetch("sample", tmp_path)
    assert zoo.fetch("sample", tmp_path) == first == tmp_path / "weights.pth"
    assert first.read_bytes() == BODY
    assert len(site.asked) == 1


@pytest.mark.usefixtures("entry")
def test_a_damaged_cached_file_is_refused(tmp_path: Path) -> None:
    path = zoo.fetch("sample", tmp_path)
    changed = bytearray(BODY)
    changed[1000] ^= 1
    path.write_bytes(changed)
    with pytest.raises(CheckpointError) as caught:
        zoo.fetch("sample", tmp_path)
    message = str(caught.value)
    for part in (
        str(path),
        digest(bytes(changed)),
        digest(BODY),
        "delete it and weights.pth.sha256",
    ):
        assert part in message
    path.unlink()
    assert zoo.fetch("sample", tmp_path).read_bytes() == BODY


def test_a_cached_file_must_have_the_pinned_hash(
    site: Site, entry: zoo.File, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = zoo.File("sample", entry.file, entry.url, 224, LIMIT, sha256=digest(BODY))
    monkeypatch.setitem(zoo.FILES, "sample", pinned)
    (tmp_path / "weights.pth").write_bytes(OTHER)
    with pytest.raises(CheckpointError, match=r"\(pinned\)"):
        zoo.fetch("sample", tmp_path)
    assert site.asked == []


@pytest.mark.usefixtures("entry")
def test_a_file_put_there_by_hand_is_taken(site: Site, tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(OTHER)
    assert zoo.fetch("sample", tmp_path).read_bytes() == OTHER
    assert site.asked == []


@pytest.mark.usefixtures("entry")
def test_processes_that_fetch_together_download_once(site: Site, tmp_path: Path) -> None:
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(zoo.fetch("sample", tmp_path)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(site.asked) == 1
    assert paths == [tmp_path / "weights.pth"] * 4


@pytest.mark.usefixtures("entry")
def test_the_default_folder_is_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert zoo.fetch("sample") == tmp_path / "xdg" / "mldec" / "zoo" / "weights.pth"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert zoo.fetch("sample") == tmp_path / "home" / ".cache" / "mldec" / "zoo" / "weights.pth"


def test_an_unknown_name_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="did you mean 'tresnet_l_coco_448'"):
        zoo.fetch("tresnet_l_coco_44", tmp_path)


def test_the_released_files_are_known_by_their_file_names() -> None:
    assert set(zoo.FILES) == {
        "tresnet_m_coco_224",
        "tresnet_l_coco_448",
        "tresnet_xl_coco_640",
        "tresnet_m_openimages_224",
        "tresnet_l_cars_384",
        "tresnet_l_pretrain",
        "asl_tresnet_m_coco_224",
        "asl_tresnet_l_coco_448",
        "asl_tresnet_xl_coco_640",
        "asl_tresnet_xl_voc2007_448",
        "asl_tresnet_l_nuswide_448",
        "asl_tresnet_l_openimages_448",
    }
    for name, file in zoo.FILES.items():
        assert file.name == name
        assert file.url.startswith("https://")
        folder = "ASL" if name.startswith("asl_") else "ML_Decoder"
        assert file.url.endswith(f"/model-zoo/{folder}/{file.file}")
        assert zoo.known(Path("anywhere") / file.file) is file
    assert zoo.known(Path("best.pth")) is None
