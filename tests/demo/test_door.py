"""What gets through the door to Gradio, and what does not."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from mldec.demo import door as door_module
from mldec.demo.answering import Photo
from mldec.demo.door import MAX_BODY, POLICY, Door, taken
from mldec.demo.shelf import Shelf
from mldec.errors import DataError

Make = Callable[..., Photo]
UPLOAD = "/gradio_api/upload"


class Behind:
    """Note what a request has become behind the door."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        if scope["method"] == "POST":
            body = (await receive())["body"]
            assert dict(scope["headers"])[b"content-length"] == str(len(body)).encode()
        self.requests.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"behind"})


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


def ask(door: Door, method: str, path: str, *pieces: bytes, **headers: str) -> Reply:
    """Send a request in pieces; without headers it is from this machine."""
    sent: list[Any] = []
    waiting = list(pieces or [b""])
    headers = {"host": "127.0.0.1:7860", **headers}

    async def receive() -> Any:
        if not waiting:
            return {"type": "http.disconnect"}
        body = waiting.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(waiting)}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(key.replace("_", "-").encode(), value.encode()) for key, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    asyncio.run(door(scope, receive, send))
    start, *bodies = sent
    got = {key.decode(): value.decode() for key, value in start["headers"]}
    return Reply(start["status"], got, b"".join(part["body"] for part in bodies).decode())


def form(*files: tuple[str, bytes], field: str = "files") -> bytes:
    parts = b""
    for name, content in files:
        disposition = f'Content-Disposition: form-data; name="{field}"; filename="{name}"'
        parts += b"--edge\r\n" + disposition.encode() + b"\r\n\r\n" + content + b"\r\n"
    return parts + b"--edge--\r\n"


def upload(door: Door, *pieces: bytes, **headers: str) -> Reply:
    pytest.importorskip("starlette", reason="needs the extra demo")
    pytest.importorskip("python_multipart", reason="needs the extra demo")
    kind = "multipart/form-data; boundary=edge"
    return ask(door, "POST", UPLOAD, *pieces, **{"content_type": kind, **headers})


@pytest.fixture
def uploads() -> Shelf[Photo]:
    return Shelf(1000, 60)


@pytest.fixture
def behind() -> Behind:
    return Behind()


@pytest.fixture
def door(uploads: Shelf[Photo], behind: Behind) -> Door:
    return Door(behind, uploads, {"127.0.0.1", "localhost"})


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("HEAD", "/"),
        ("GET", "/config"),
        ("GET", "/assets/index-abc.js"),
        ("GET", "/gradio_api/info"),
        ("GET", "/gradio_api/queue/data"),
        ("GET", "/gradio_api/call/answer/0123abc"),
        ("GET", "/gradio_api/heartbeat/abc"),
        ("POST", "/gradio_api/queue/join"),
        ("POST", "/gradio_api/call/answer"),
        ("POST", "/gradio_api/call/v2/answer"),
    ],
)
def test_what_the_page_needs_gets_through(
    door: Door, behind: Behind, method: str, path: str
) -> None:
    reply = ask(door, method, path)
    assert (reply.status, reply.text) == (200, "behind")
    assert [request[0] for request in behind.requests] == [path]
    assert reply.headers["content-security-policy"] == POLICY
    assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/gradio_api/file=/etc/passwd"),
        ("GET", "/gradio_api/file=http://127.0.0.1:1/x"),
        ("GET", "/gradio_api/file/etc/passwd"),
        ("GET", "/gradio_api/proxy=http://127.0.0.1:1/"),
        ("POST", "/gradio_api/component_server"),
        ("POST", "/gradio_api/vibe-edit"),
        ("POST", "/gradio_api/process_recording"),
        ("POST", "/gradio_api/run/answer"),
        ("POST", "/gradio_api/api/answer"),
        ("GET", "/gradio_api/deep_link"),
        ("GET", "/monitoring"),
        ("POST", "/login"),
        ("GET", UPLOAD),
        ("PUT", "/"),
        ("DELETE", "/config"),
        ("GET", "/config\n"),
    ],
)
def test_other_routes_do_not_exist(door: Door, behind: Behind, method: str, path: str) -> None:
    assert ask(door, method, path).status == 404
    assert behind.requests == []


def test_files_are_kept_in_memory_and_taken_once(door: Door, uploads: Shelf[Photo]) -> None:
    body = form(("cat.jpg", b"one"), ("dog.jpg", b"two"))
    reply = upload(door, *(body[start : start + 7] for start in range(0, len(body), 7)))
    assert reply.status == 200
    names = json.loads(reply.text)
    assert uploads.used == 6
    files = [{"upload": name} for name in names]
    assert taken(uploads, files) == [Photo("cat.jpg", b"one"), Photo("dog.jpg", b"two")]
    assert uploads.used == 0
    with pytest.raises(DataError, match="was answered already"):
        taken(uploads, files)


def test_limits_of_an_upload(
    door: Door, uploads: Shelf[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MAX_FILE", 2**20)
    monkeypatch.setattr(door_module, "MAX_UPLOAD", 2 * 2**20)
    large = form(("a.jpg", b"x" * (2**20 + 1)))
    assert upload(door, large)[::2] == (413, "a photo has more than 1 MiB")
    pieces = [large[:1000], *[b"x" * 2**19] * 5]
    assert upload(door, *pieces)[::2] == (413, "the upload has more than 2 MiB")
    # What the header says is enough.
    reply = upload(door, b"", content_length=str(2**40))
    assert reply[::2] == (413, "the upload has more than 2 MiB")
    many = form(*[("a.jpg", b"x")] * 17)
    assert upload(door, many).status == 400
    assert uploads.used == 0

    assert upload(door, form(("a.jpg", b"x" * 1000))).status == 200
    reply = upload(door, form(("a.jpg", b"x")))
    assert reply[::2] == (503, "too many photos are waiting: try again in a minute")


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"", {}),
        (form(), {}),
        (form(("a.jpg", b"x"))[:-20], {}),
        (b"\xff" * 100, {}),
        (b"{}", {"content_type": "application/json"}),
        (b"x", {"content_type": "multipart/form-data"}),
        (b"--edge\r\nContent-Disposition: form-data\r\n\r\nx\r\n--edge--\r\n", {}),
        (b'--edge\r\nContent-Disposition: form-data; name="files"\r\n\r\nx\r\n--edge--\r\n', {}),
    ],
)
def test_broken_uploads_get_an_answer(
    door: Door, uploads: Shelf[Photo], body: bytes, headers: dict[str, str]
) -> None:
    assert upload(door, body, **headers).status == 400
    assert uploads.used == 0


def test_no_request_names_a_file_behind_the_door(door: Door, behind: Behind) -> None:
    def file(**entries: Any) -> dict[str, Any]:
        return {**entries, "meta": {"_type": "gradio.FileData"}}

    data = [
        [file(path="/etc/passwd"), file(path="http://127.0.0.1:1/x", url="http://127.0.0.1:1/x")],
        {"deep": [{"path": "token", "orig_name": "cat.jpg"}]},
        file(url="http://127.0.0.1:1/x"),
        "text",
        0.5,
        None,
    ]
    ask(door, "POST", "/gradio_api/queue/join", json.dumps({"data": data}).encode())
    [(_, body)] = behind.requests
    assert json.loads(body)["data"] == [
        [{"upload": "/etc/passwd"}, {"upload": "http://127.0.0.1:1/x"}],
        {"deep": [{"upload": "token"}]},
        {"upload": None},
        "text",
        0.5,
        None,
    ]


@pytest.mark.parametrize(
    "files",
    [
        None,
        "token",
        {"upload": "x"},
        [None],
        ["x"],
        [{"upload": None}],
        [{"upload": "/etc/passwd"}],
        [{"upload": ["x"]}],
        [{"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}],
    ],
)
def test_only_uploaded_photos_are_taken(uploads: Shelf[Photo], files: Any) -> None:
    uploads.add(Photo("a", b"x"), 1)
    with pytest.raises(DataError, match=r"^photos: "):
        taken(uploads, files)
    assert uploads.used == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe\x00", 400),
        (b"[" * 100_000, 400),
        (b'"' + b"x" * MAX_BODY + b'"', 413),
    ],
)
def test_other_requests_are_small_json(
    door: Door, behind: Behind, body: bytes, status: int
) -> None:
    assert ask(door, "POST", "/gradio_api/queue/join", body).status == status
    assert behind.requests == []


def test_pages_of_other_sites_are_refused(
    door: Door, behind: Behind, uploads: Shelf[Photo]
) -> None:
    own = {"origin": "http://127.0.0.1:7860"}
    assert ask(door, "POST", "/gradio_api/queue/join", b"{}", **own).status == 200
    for origin in ("http://example.com", "http://127.0.0.1:8000", "null"):
        assert ask(door, "POST", "/gradio_api/queue/join", b"{}", origin=origin).status == 403
    # A name that resolves to this machine, of a page that was loaded from elsewhere.
    for host in ("example.com", "127.0.0.1.example.com:7860", ""):
        assert ask(door, "GET", "/", host=host).status == 403
    assert ask(door, "GET", "/", host="localhost:7860").status == 200
    assert len(behind.requests) == 2

    anyhow = Door(behind, uploads, None)
    assert ask(anyhow, "GET", "/", host="example.com").status == 200


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/gradio_api/upload_progress", 'data: {"msg": "done"}\n\n'),
        ("/monitoring/summary", '{"functions": {}}'),
    ],
)
def test_what_the_page_can_do_without_is_answered_here(
    door: Door, behind: Behind, path: str, text: str
) -> None:
    reply = ask(door, "GET", path)
    assert (reply.status, reply.text) == (200, text)
    assert behind.requests == []


def test_a_refused_request_is_read_before_it_is_answered(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    async def receive() -> Any:
        read.append(len(read))
        return {"type": "http.request", "body": b"x" * 100, "more_body": len(read) < 50}

    async def send(message: Any) -> None:
        pass

    def refuse(**headers: str) -> int:
        read.clear()
        raw = [(key.encode(), value.encode()) for key, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": "/x", "headers": raw}
        asyncio.run(door(scope, receive, send))
        return len(read)

    assert refuse(host="localhost") == 50
    assert refuse(host="localhost", expect="100-continue") == 0, "it is not even sent"
    monkeypatch.setattr(door_module, "DISCARDED", 1000)
    assert refuse(host="localhost") == 10


def test_a_slow_upload_ends(
    door: Door, uploads: Shelf[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette", reason="needs the extra demo")
    monkeypatch.setattr(door_module, "PATIENCE", 0.05)
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(10)

    async def send(message: Any) -> None:
        sent.append(message)

    kind = (b"content-type", b"multipart/form-data; boundary=edge")
    headers = [(b"host", b"localhost"), kind]
    scope = {"type": "http", "method": "POST", "path": UPLOAD, "headers": headers}
    asyncio.run(door(scope, receive, send))
    assert sent[0]["status"] == 408
