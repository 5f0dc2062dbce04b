"""Object storage and the web: an S3 server on the loopback, with errors."""

import io
import json
import os
import tarfile
import threading
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from pictures import picture, png
from support import assert_same_rows, one_line

from mldec.tools.predict import storage
from mldec.tools.predict.decode import read_item
from mldec.tools.predict.inputs import Inputs

pytest.importorskip("s3fs")
pytest.importorskip("moto")
SHARED = ["--plugin", "patches", "--device", "cpu", "--threshold", "0", "--top", "2"]


class Server:
    """An S3 server with one bucket. Requests for some objects fail."""

    def __init__(self, app):
        self.app = app
        self.unavailable = Counter()  # number of answers 503 to come, by file name
        self.requests = Counter()  # by file name

    def __call__(self, environ, start_response):
        """Answer a request."""
        if environ["REQUEST_METHOD"] == "GET":
            name = environ["PATH_INFO"].rpartition("/")[2]
            self.requests[name] += 1
            if self.unavailable[name] > 0:
                self.unavailable[name] -= 1
                start_response("503 Slow Down", [("Content-Length", "0")])
                return [b""]
        return self.app(environ, start_response)


@pytest.fixture
def s3(monkeypatch, tmp_path):
    from moto.server import DomainDispatcherApplication, create_backend_app
    from s3fs import S3FileSystem
    from werkzeug.serving import make_server

    server = Server(DomainDispatcherApplication(create_backend_app))
    running = make_server("127.0.0.1", 0, server, threaded=True)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{running.server_port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setattr(storage, "PAUSE", 0.01)
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    monkeypatch.chdir(tmp_path)
    S3FileSystem.clear_instance_cache()
    server.files = S3FileSystem(skip_instance_cache=True)
    server.files.mkdir("photos")
    yield server
    urllib.request.urlopen(f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/reset", data=b"").close()
    S3FileSystem.clear_instance_cache()
    running.shutdown()


NAMES = ["a.png", "c.png", "in/b.png", "more.tar.gz/3.png", "more.tar.gz/4.png"]


@pytest.fixture
def images(s3):
    """Five images in the bucket, two of them in a compressed tar file."""
    for name, seed in {"a.png": 0, "in/b.png": 1, "c.png": 2}.items():
        s3.files.pipe_file(f"photos/all/{name}", png(seed))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for seed in (3, 4):
            member = tarfile.TarInfo(f"{seed}.png")
            member.size = len(png(seed))
            tar.addfile(member, io.BytesIO(png(seed)))
    s3.files.pipe_file("photos/all/more.tar.gz", buffer.getvalue())
    return "s3://photos/all"


def test_images_are_found_and_read(s3, images):
    items = list(Inputs([images]))
    assert [item.name for item in items] == [f"{images}/{name}" for name in NAMES]
    for item, seed in zip(items, (0, 2, 1, 3, 4), strict=True):
        assert read_item(item).tobytes() == picture(seed=seed).tobytes()
    # Shards do not depend on the place of the folder.
    s3.files.get("photos/all", "all", recursive=True)
    owners = [owner for owner, _ in Inputs([images]).divided(7)]
    assert owners == [owner for owner, _ in Inputs(["all"]).divided(7)]

    s3.files.pipe_file("photos/list.csv", b"url\na.png\ns3://photos/all/c.png\n")
    a, c = Inputs([], "s3://photos/list.csv", root=images)
    assert (a.name, a.path, c.path) == ("a.png", f"{images}/a.png", f"{images}/c.png")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    with s3.files.open("photos/list.parquet", "wb") as file:
        parquet.write_table(pyarrow.table({"bytes": [png(5), png(6)]}), file)
    one, two = Inputs([], "s3://photos/list.parquet")
    assert two.name == "s3://photos/list.parquet/1"
    assert read_item(one).tobytes() == picture(seed=5).tobytes()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_results_equal_those_on_a_disk(s3, images, cli, best, kind):
    pytest.importorskip("pyarrow")
    words = ["predict", best, images, *SHARED, f"--{kind}"]
    assert cli(*words, f"whole.{kind}").status == 0
    assert cli(*words, f"s3://photos/whole.{kind}").status == 0
    content = Path(f"whole.{kind}").read_bytes()
    assert s3.files.cat_file(f"photos/whole.{kind}") == content

    part = f"photos/parts/part-00000-of-00002.{kind}"
    shards = [[*words, "s3://photos/parts", "--shard", f"{number}/2"] for number in (1, 0)]
    s3.files.pipe_file(part, b"of the user")
    assert cli(*shards[1]).status == 1
    assert s3.files.cat_file(part) == b"of the user"
    s3.files.rm_file(part)
    type(s3.files).clear_instance_cache()

    for shard in shards:
        assert cli(*shard).status == 0
    assert "is complete" in cli(*shards[1]).out
    assert cli(*words, "s3://photos/joined." + kind, "--merge", "s3://photos/parts").status == 0
    s3.files.get(f"photos/joined.{kind}", f"joined.{kind}")
    assert_same_rows(f"joined.{kind}", f"whole.{kind}")
    assert not [path for path in Path("cache").rglob("*") if path.is_file()]


def test_unreadable_object_is_an_error_row(s3, images, cli, best):
    for name in ("busy.png", "down.png"):
        s3.files.pipe_file(f"photos/all/{name}", png())
    s3.unavailable["busy.png"] = 2
    s3.unavailable["down.png"] = 10**6
    paths = [f"{images}/{name}.png" for name in ("a", "lost", "busy", "down")]
    Path("list.txt").write_text("\n".join(paths))
    assert cli("predict", best, "--list", "list.txt", *SHARED, "--jsonl", "r.jsonl").status == 1
    rows = [json.loads(line) for line in Path("r.jsonl").read_text().splitlines()]
    assert ["error" in row for row in rows] == [False, True, False, True]
    assert paths[1] in rows[1]["error"]
    assert rows[2]["predictions"] == rows[0]["predictions"]
    assert (s3.requests["busy.png"], s3.requests["down.png"]) == (3, 3)

    s3.unavailable["down.png"] = 0
    s3.files.pipe_file("photos/all/lost.png", png())
    assert cli("predict", best, "--list", "list.txt", *SHARED, "--jsonl", "r.jsonl").status == 0
    assert (s3.requests["busy.png"], s3.requests["down.png"]) == (3, 4)

    s3.unavailable["more.tar.gz"] = 10**6
    [item] = Inputs([f"{images}/more.tar.gz"])
    assert "more.tar.gz" in item.fault


def test_unusable_addresses_raise_an_error(s3, images, cli, best):
    words = ["predict", best, *SHARED]
    for given, name in (
        (["s3://photos/none"], "s3://photos/none"),
        (["--list", "s3://photos/none.txt"], "s3://photos/none.txt"),
        (["s3://elsewhere/a.png"], "s3://elsewhere/a.png"),
        ([f"{images}/a.png", "--jsonl", "s3://elsewhere/r.jsonl"], "s3://elsewhere/r.jsonl"),
        (["gs://photos"], "gs://photos"),
        ([f"{os.environ['AWS_ENDPOINT_URL']}/photos/none.png"], "none.png"),
    ):
        one_line(cli.fault(*words, *given), name)


def test_files_of_the_web_are_read(s3):
    s3.files.pipe_file("photos/a.png", png(7), ACL="public-read")
    address = f"{os.environ['AWS_ENDPOINT_URL']}/photos/a.png"
    [item] = Inputs([address])
    assert read_item(item).tobytes() == picture(seed=7).tobytes()
