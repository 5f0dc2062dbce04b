"""What stands between the network and Gradio: few routes, small bodies, no paths, no other host.

Gradio takes files by path or URL: from a client, a path would be read on this machine and a URL be
fetched by it. Here Gradio never sees one. Photos are uploaded into memory under random names, and
whatever looks like a file in a request is replaced by the name alone.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from mldec.demo.answering import MAX_PHOTOS, Photo
from mldec.demo.shelf import FullError, Shelf
from mldec.errors import DataError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

API = "/gradio_api"
MAX_FILE = 20 * 2**20  # bytes of a photo
MAX_UPLOAD = 100 * 2**20  # bytes of the photos that are uploaded together
MAX_BODY = 2**18  # bytes of any other request
DISCARDED = 2**30  # bytes of a refused request that are read before it is answered
UPLOADS = 8  # that are received at a time; more of them wait
PATIENCE = 120.0  # seconds for receiving an upload

# All that the page and the endpoint need; Gradio has many more routes, some that fetch or write.
ROUTES = {
    "GET": re.compile(
        r"/|/config|/theme\.css|/favicon\.ico|/manifest\.json|/(assets|static)/.*|/gradio_api/"
        r"(info|openapi\.json|app_id|startup-events|heartbeat/\w+|queue/data|call/(v2/)?\w+/\w+)"
    ),
    "POST": re.compile(r"/gradio_api/(queue/join|call/(v2/)?\w+|cancel|reset)/?"),
}

# What the page asks for and can do without: the progress of an upload, and how much it is used.
ANSWERED = {
    f"{API}/upload_progress": ('data: {"msg": "done"}\n\n', "text/event-stream"),
    "/monitoring/summary": ('{"functions": {}}', "application/json"),
}

# Scripts and styles inside the page are Gradio's way; hosts other than this one are not needed.
POLICY = "; ".join(
    [
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'self'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Refused(Exception):
    """A request is not answered.

    Args:
        status: of HTTP.
        reason: a sentence for whoever sent it.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _Body:
    """The body of a request, as a `receive` that knows whether more of it is to come."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._more = True

    async def __call__(self) -> Message:
        message = await self._receive()
        self._more = message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Read what is still to come, up to a limit, and drop it."""
        size = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while self._more and size < DISCARDED:
                    size += len((await self()).get("body", b""))


class Door:
    """Let requests in that the page needs; an ASGI application around that of Gradio.

    Args:
        app: of Gradio.
        uploads: where photos wait to be answered.
        hosts: names by which this machine may be called; None for any. A page of another site can
            call it by a name of its own (DNS rebinding), and then read the answers.
    """

    def __init__(self, app: App, uploads: Shelf[Photo], hosts: Iterable[str] | None) -> None:
        self._app = app
        self._uploads = uploads
        self._hosts = None if hosts is None else frozenset(hosts)
        self._receiving = asyncio.Semaphore(UPLOADS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return

        # There are no web sockets.
        if scope["type"] != "http":
            return

        send, body = _with_headers(send), _Body(receive)
        try:
            await self._answer(scope, body, send)
        except Refused as refused:
            # Most programs read an answer only after they have sent everything.
            if "expect" not in _headers(scope):
                await body.discard()
            await _reply(send, refused.status, str(refused), "text/plain")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], _headers(scope)
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        self._check_sender(method, headers)

        if (method, path) == ("POST", f"{API}/upload"):
            names = await self._keep(headers, receive)
            await _reply(send, 200, json.dumps(names), "application/json")
        elif method == "GET" and path in ANSWERED:
            await _reply(send, 200, *ANSWERED[path])
        elif method not in ROUTES or not ROUTES[method].fullmatch(path):
            raise Refused(404, "not found")
        elif method == "POST":
            body = _without_files(await _body(receive))
            scope["headers"] = [
                (key, value) for key, value in scope["headers"] if key != b"content-length"
            ] + [(b"content-length", str(len(body)).encode())]
            await self._app(scope, _replayed(body, receive), send)
        else:
            await self._app(scope, receive, send)

    def _check_sender(self, method: str, headers: dict[str, str]) -> None:
        """Raise `Refused` for requests that pages of other sites make in the user's browser."""
        host = headers.get("host", "")
        if self._hosts is not None and urlsplit(f"//{host}").hostname not in self._hosts:
            raise Refused(403, f"this server is not called {host}")

        origin = headers.get("origin")
        if method == "POST" and origin is not None and urlsplit(origin).netloc != host:
            raise Refused(403, f"{origin} may not use this server")

    async def _keep(self, headers: dict[str, str], receive: Receive) -> list[str]:
        """Keep the files of an upload in memory, and return their names on the shelf."""
        try:
            async with self._receiving:
                async with asyncio.timeout(PATIENCE):
                    photos = await _received(headers, receive)
        except TimeoutError as error:
            raise Refused(408, f"the upload took more than {PATIENCE:g} seconds") from error

        try:
            return [self._uploads.add(photo, len(photo.content)) for photo in photos]
        except FullError as error:
            raise Refused(503, str(error)) from error


def taken(uploads: Shelf[Photo], files: Any) -> list[Photo]:
    """Return the photos that a request names, and keep them no longer.

    Args:
        uploads: where they wait.
        files: of the request, after the door.

    Raises:
        DataError: if a photo was not uploaded here, or too long ago.
    """
    if not isinstance(files, list):
        raise DataError("photos: pass a list of uploaded files")

    photos = []
    for file in files:
        name = file.get("upload") if isinstance(file, dict) else None
        photo = uploads.take(name) if isinstance(name, str) else None
        if photo is None:
            raise DataError(
                "photos: a file was not uploaded here, was answered already, or waited too long; "
                "upload it again (paths and web addresses are not read)"
            )
        photos.append(photo)
    return photos


async def _received(headers: dict[str, str], receive: Receive) -> list[Photo]:
    """Read the files of an upload; see RFC 7578.

    Raises:
        Refused: if there are too many, or they are too large, or the request is broken.
    """
    from starlette.datastructures import Headers, UploadFile
    from starlette.formparsers import MultiPartException, MultiPartParser

    if not headers.get("content-type", "").startswith("multipart/form-data"):
        raise Refused(400, "an upload is multipart/form-data with fields 'files'")
    if headers.get("content-length", "0").isdecimal():
        _check_upload(int(headers.get("content-length", "0")))

    async def stream() -> AsyncIterator[bytes]:
        total = 0
        async for chunk in _chunks(receive):
            total += len(chunk)
            _check_upload(total)
            yield chunk

    parser = MultiPartParser(
        Headers(headers), stream(), max_files=MAX_PHOTOS, max_fields=MAX_PHOTOS
    )
    parser.spool_max_size = MAX_UPLOAD  # never to the disk
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise Refused(400, error.message) from error
    except (KeyError, ValueError, UnicodeError) as error:
        raise Refused(400, "the upload is broken") from error

    photos = []
    try:
        for _, file in form.multi_items():
            if not isinstance(file, UploadFile):
                continue
            content = await file.read()
            if len(content) > MAX_FILE:
                raise Refused(413, f"a photo has more than {MAX_FILE // 2**20} MiB")
            photos.append(Photo(file.filename or "", content))
    finally:
        await form.close()
    if not photos:
        raise Refused(400, "the upload holds no file")
    return photos


def _check_upload(size: int) -> None:
    if size > MAX_UPLOAD:
        raise Refused(413, f"the upload has more than {MAX_UPLOAD // 2**20} MiB")


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the body of a request piece by piece."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "the connection was closed")
        yield message.get("body", b"")
        more = message.get("more_body", False)


async def _body(receive: Receive) -> bytes:
    """Return the body of a request that is no upload."""
    body = bytearray()
    async for chunk in _chunks(receive):
        body += chunk
        if len(body) > MAX_BODY:
            raise Refused(413, f"the request has more than {MAX_BODY:,} bytes")
    return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that begins with a body."""
    waiting = [body]

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replay


def _without_files(body: bytes) -> bytes:
    """Replace all that Gradio would take for a file; raise `Refused` if the body is no JSON."""
    try:
        return json.dumps(_plain(json.loads(body or b"null"))).encode()
    except (ValueError, RecursionError) as error:
        raise Refused(400, "the request is no JSON") from error


def _plain(value: Any) -> Any:
    """Replace each file by the name under which it waits; whether there is one is seen later."""
    if isinstance(value, dict):
        if "path" in value or "url" in value or "meta" in value:
            return {"upload": value.get("path")}
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _headers(scope: Scope) -> dict[str, str]:
    return {
        key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]
    }


def _with_headers(send: Send) -> Send:
    """Add `HEADERS` to the answer."""
    own = [(key.encode(), value.encode()) for key, value in HEADERS.items()]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *own]
        await send(message)

    return sending


async def _reply(send: Send, status: int, text: str, kind: str) -> None:
    """Send an answer of ours; the connection is closed, because its request may not be read."""
    headers = [(b"content-type", f"{kind}; charset=utf-8".encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
