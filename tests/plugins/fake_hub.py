"""A server on this machine that speaks the part of the Hub's protocol that its client uses."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

WRITER, READER = "hf_writer", "hf_reader"  # tokens
LARGE = ".safetensors"  # files that go to the large file storage


@dataclass
class Repository:
    """A repository, whose branches and tags point to commits."""

    private: bool = False
    gated: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with a commit, as the Hub does."""
        self.commit({".gitattributes": b"*.safetensors filter=lfs"})

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add files to those of a branch; return the name of the commit."""
        content = {**self.commits.get(self.refs.get(branch, ""), {}), **files}
        parts = [name.encode() + body for name, body in sorted(content.items())]
        name = hashlib.sha1(b"".join(parts) + str(len(self.commits)).encode()).hexdigest()
        self.commits[name], self.refs[branch] = content, name
        return name


@dataclass
class Hub:
    """What the server holds, and what it was asked; tests change both."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # method and path of each request
    status: int | None = None  # answer everything with it
    ranges: list[str] = field(default_factory=list)  # those that were asked for
    cut: int | None = None  # break off after so many bytes of a file


class Handler(BaseHTTPRequestHandler):
    """Answers from a `Hub`."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send an answer; of a HEAD request the headers only."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, value: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), Content_Type="application/json")

    def fail(self, status: int, code: str) -> None:
        self.answer(status, X_Error_Code=code, X_Error_Message=code)

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if self.hub.status is not None:
            self.answer(self.hub.status)
            return

        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.api("/".join(parts[2:4]), parts[4:], body)
        elif parts[2:3] == ["resolve"]:
            self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif path == "/api/validate-yaml":
            is_wrong = "license: nonsense" in json.loads(body)["content"]
            errors = [{"message": '"license" must be one of [apache-2.0, mit]'}] * is_wrong
            self.answer_json({"warnings": [], "errors": errors}, 400 if is_wrong else 200)
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.batch(json.loads(body))
        elif parts[0] == "storage" and hashlib.sha256(body).hexdigest() == parts[1]:
            self.hub.blobs[parts[1]] = body
            self.answer(200)
        else:
            self.answer(404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def seen(self, name: str) -> Repository | None:
        """Return a repository that the asker may see; else answer that there is none."""
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self.token()):
            self.fail(401, "RepoNotFound")
            return None
        if repository.gated:
            self.fail(403, "GatedRepo")
            return None
        return repository

    def files_at(
        self, repository: Repository, revision: str
    ) -> tuple[str, dict[str, bytes]] | None:
        """Return a commit and its files; else answer that there is no such revision."""
        name = repository.refs.get(revision, revision)
        if name not in repository.commits:
            self.fail(404, "RevisionNotFound")
            return None
        return name, repository.commits[name]

    def resolve(self, name: str, revision: str, file: str) -> None:
        repository = self.seen(name)
        found = repository and self.files_at(repository, revision)
        if not found:
            return
        commit, files = found
        if file not in files:
            self.fail(404, "EntryNotFound")
            return
        content = files[file]
        headers = {"X_Repo_Commit": commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        status, asked, start = 200, self.headers.get("Range"), 0
        if asked:
            self.hub.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            status = 206
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        length = str(len(content) - start)
        self.answer(status, content[start : self.hub.cut], Content_Length=length, **headers)
        self.close_connection = self.hub.cut is not None

    def api(self, name: str, rest: list[str], body: bytes) -> None:
        repository = self.seen(name)
        if repository is None:
            return
        if rest and rest[0] in ("preupload", "commit"):
            if self.token() != WRITER:
                self.fail(403, "Forbidden")
            elif rest[0] == "preupload":
                self.preupload(json.loads(body))
            else:
                self.commit(name, repository, rest[1], body)
            return

        found = self.files_at(repository, rest[1] if rest else "main")
        if found:
            commit, files = found
            siblings = [{"rfilename": file} for file in files]
            about = {"id": name, "sha": commit, "private": repository.private, "tags": []}
            self.answer_json({**about, "siblings": siblings})

    def create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        if self.token() != WRITER:
            self.fail(403, "Forbidden")
        elif name in self.hub.repositories:
            self.answer_json({"url": f"{self.hub.address}/{name}"}, 409)
        else:
            # Older clients send the flag, newer ones the word.
            is_private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
            self.hub.repositories[name] = Repository(private=is_private)
            self.answer_json({"url": f"{self.hub.address}/{name}"})

    def preupload(self, wanted: dict[str, Any]) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
            }
            for file in wanted["files"]
        ]
        self.answer_json({"files": files})

    def batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for entry in wanted["objects"]:
            action = {"upload": {"href": f"{self.hub.address}/storage/{entry['oid']}"}}
            objects.append({**entry, "actions": action})
        self.answer_json({"transfer": "basic", "objects": objects})

    def commit(self, name: str, repository: Repository, branch: str, body: bytes) -> None:
        files = {}
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
        commit = repository.commit(files, branch)
        url = f"{self.hub.address}/{name}/commit/{commit}"
        self.answer_json({"success": True, "commitOid": commit, "commitUrl": url})


@contextmanager
def serving() -> Iterator[Hub]:
    """Run a server, empty at first."""
    hub = Hub()
    handler = type("Handler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    # By default the server looks twice per second whether it should stop.
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
