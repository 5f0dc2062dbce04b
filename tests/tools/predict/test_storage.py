"""Object storage and the web: a real S3 server on the loopback, with faults."""

import io
import json
import os
import tarfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from pictures import picture
from support import assert_same_rows, one_line

from mldec.errors import DataError
from mldec.tools.predict import results, storage
from mldec.tools.predict.decode import read_item
from mldec.tools.predict.inputs import Inputs

pytest.importorskip("s3fs")
pytest.importorskip("moto")
SHARED = ["--plugin", "patches", "--device", "cpu", "--threshold", "0", "--top", "2"]


class Server:
    """An S3 server with one bucket, whose answers about some objects are faulty."""

    def __init__(self, app):
        self.app = app
        self.seconds = {}  # to wait before the answer, by the end of a path
        self.unavailable = Counter()  # answers of 503 that are still to come, likewise
        self.asked = Counter()

    def __call__(self, environ, start_response):
        """Answer a request."""
        if environ["REQUEST_METHOD"] == "GET":
            name = environ["PATH_INFO"].rpartition("/")[2]
            self.asked[name] += 1
            time.sleep(self.seconds.get(name, 0))
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
        "AWS_MAX_ATTEMPTS": "1",  # of its library, which has its own pauses
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


def png(seed=0):
    buffer = io.BytesIO()
    picture(64, 64, seed=seed).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def images(s3):
    """Five images in the bucket, two of them in a tar file that is compressed."""
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


NAMES = ["a.png", "c.png", "in/b.png", "more.tar.gz/3.png", "more.tar.gz/4.png"]


def test_images_of_a_store_are_found_and_read(s3, images):
    items = list(Inputs([images]))
    assert [item.name for item in items] == [f"{images}/{name}" for name in NAMES]
    for item, seed in zip(items, (0, 2, 1, 3, 4), strict=True):
        assert read_item(item).tobytes() == picture(64, 64, seed=seed).tobytes()
    # Paths below the folder decide, wherever it is.
    local = Path("all")
    s3.files.get("photos/all", str(local), recursive=True)
    for shards in (2, 7):
        owners = [owner for owner, _ in Inputs([images]).divided(shards)]
        assert owners == [owner for owner, _ in Inputs([str(local)]).divided(shards)]

    s3.files.pipe_file("photos/list.csv", b"url\na.png\ns3://photos/all/c.png\n")
    a, c = Inputs([], "s3://photos/list.csv", root=images)
    assert (a.name, a.path, c.path) == ("a.png", f"{images}/a.png", f"{images}/c.png")
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    with s3.files.open("photos/list.parquet", "wb") as file:
        parquet.write_table(pyarrow.table({"bytes": [png(5), png(6)]}), file)
    one, two = Inputs([], "s3://photos/list.parquet")
    assert two.name == "s3://photos/list.parquet/1"
    assert read_item(one).tobytes() == picture(64, 64, seed=5).tobytes()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_results_in_a_store_are_those_of_a_disk(s3, images, cli, best, monkeypatch, kind):
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(results, "CHUNK", 2)
    words = ["predict", best, images, *SHARED, f"--{kind}"]
    assert cli(*words, f"whole.{kind}").status == 0
    assert cli(*words, f"s3://photos/whole.{kind}").status == 0
    content = Path(f"whole.{kind}").read_bytes()
    assert s3.files.cat_file(f"photos/whole.{kind}") == content

    for number in (1, 0):
        assert cli(*words, "s3://photos/parts", "--shard", f"{number}/2").status == 0
    again = cli(*words, "s3://photos/parts", "--shard", "0/2").out
    assert again.endswith("nothing to do\n")
    assert cli(*words, "s3://photos/joined." + kind, "--merge", "s3://photos/parts").status == 0
    s3.files.get(f"photos/joined.{kind}", f"joined.{kind}")
    assert_same_rows(f"joined.{kind}", f"whole.{kind}")
    assert not [path for path in Path("cache").rglob("*") if path.is_file()], "no rows are left"
    err = cli.fault(*words, "s3://photos/parts", "--shard", "0/2", "--draft")
    one_line(err, "was begun with --draft false, not true")


def test_a_fault_of_an_object_is_a_row(s3, images, cli, best, monkeypatch):
    monkeypatch.setattr(storage, "PATIENCE", 1.0)
    for name in ("slow.png", "gone.png", "busy.png", "down.png"):
        s3.files.pipe_file(f"photos/all/{name}", png())
    s3.seconds["slow.png"] = 5
    s3.unavailable["busy.png"] = 2
    s3.unavailable["down.png"] = 10**6
    Path("list.txt").write_text(
        "\n".join(f"{images}/{name}.png" for name in ("a", "slow", "lost", "busy", "down"))
    )
    status, _, _ = cli("predict", best, "--list", "list.txt", *SHARED, "--jsonl", "r.jsonl")
    assert status == 1
    rows = [json.loads(line) for line in Path("r.jsonl").read_text().splitlines()]
    faults = [row.get("error", "") for row in rows]
    assert [bool(fault) for fault in faults] == [False, True, True, False, True]
    assert faults[1].endswith("tried once; try again later")
    assert faults[2] == f"{images}/lost.png: there is no such object; check it"
    assert faults[4].endswith("tried 3 times; try again later")
    assert rows[3]["predictions"] == [*rows[0]["predictions"]]
    assert s3.asked["busy.png"] == 3
    assert s3.asked["down.png"] == 3

    # A stream that breaks keeps the images before it.
    s3.unavailable["more.tar.gz"] = 10**6
    [item] = Inputs([f"{images}/more.tar.gz"])
    assert "more.tar.gz: it cannot be read as a tar file" in str(item.fault)


def test_objects_that_fail_once_are_answered_by_a_rerun(s3, cli, best, monkeypatch):
    """Answers of 503, cut and empty answers, and access that is denied for a while."""
    app = s3.app
    for number in range(12):
        s3.files.pipe_file(f"photos/all/{number:02}.png", png(number))
    s3.files.pipe_file("photos/all/text.png", b"no image")
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    words = ["predict", best, "s3://photos/all", *SHARED, "--batch-size", "1", "--jsonl"]
    assert cli(*words, "whole.jsonl").status == 1

    def faulty(environ, start_response):
        name = environ["PATH_INFO"].rpartition("/")[2]
        status = {"01": "503 Slow Down", "02": "403 Forbidden", "03": "404 Not Found"}.get(name[:2])
        content = {"04": b"", "05": png(5)[:-40]}.get(name[:2])
        is_object = environ["REQUEST_METHOD"] == "GET" and name.endswith("png")
        if not is_object or (status is None and content is None):
            return app(environ, start_response)
        content = content or b""
        start_response(status or "200 OK", [("Content-Length", str(len(content)))])
        return [content]

    s3.app = faulty
    assert cli(*words, "r.jsonl").status == 1
    rows = [json.loads(line) for line in Path("r.jsonl").read_text().splitlines()]
    failed = [row["image"][-6:-4] for row in rows if "error" in row]
    assert failed == ["01", "02", "03", "04", "05", "xt"]
    s3.app = app
    s3.asked.clear()
    assert cli(*words, "r.jsonl").status == 1, "one object is not an image"
    assert Path("r.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    asked = sorted(name for name in s3.asked if name.endswith("png"))
    assert asked == [f"{number:02}.png" for number in range(1, 6)]


def test_keys_with_double_slashes_are_named(s3):
    for key in ("all/a?b.png", "all/c#d.png", "all//e.png", "all/f//g.png"):
        s3.files.call_s3("put_object", Bucket="photos", Key=key, Body=png())
    items = list(Inputs(["s3://photos/all"]))
    found = {item.name.removeprefix("s3://photos/all/"): item.fault for item in items}
    assert found.keys() == {"/", "a?b.png", "c#d.png", "f//"}
    assert "//" in str(found["/"])
    assert "//" in str(found["f//"])
    for item in items:
        if item.fault is None:
            assert read_item(item).size == (64, 64)


def test_a_part_of_somebody_else_in_a_store_stays(s3, images, cli, best):
    words = ["predict", best, images, *SHARED, "--jsonl", "s3://photos/parts", "--shard", "0/2"]
    s3.files.pipe_file("photos/parts/part-00000-of-00002.jsonl", b"mine")
    one_line(cli.fault(*words), "part-00000-of-00002.jsonl exists, and nothing says how it was")
    assert s3.files.cat_file("photos/parts/part-00000-of-00002.jsonl") == b"mine"


def test_what_cannot_be_used_is_one_line(s3, images, cli, best, monkeypatch):
    words = ["predict", best, *SHARED]
    for given, message in (
        (["s3://photos/none"], "s3://photos/none: no such file or folder"),
        (["--list", "s3://photos/none.txt"], "s3://photos/none.txt: there is no such object"),
        (["s3://elsewhere/a.png"], "s3://elsewhere/a.png: no such file or folder"),
        ([f"{images}/a.png", "--jsonl", "s3://elsewhere/r.jsonl"], "s3://elsewhere/r.jsonl"),
    ):
        one_line(cli.fault(*words, *given), message)

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    type(s3.files).clear_instance_cache()
    one_line(cli.fault(*words, images), "s3://photos/all: no access", "credentials that s3fs looks")
    monkeypatch.setattr(storage.importlib.util, "find_spec", lambda name: None)
    one_line(cli.fault(*words, "gs://photos"), "needs gcsfs, which is not installed; run")


def test_the_web_gives_single_files(s3, monkeypatch, tmp_path):
    s3.files.pipe_file("photos/a.png", png(7), ACL="public-read")
    address = f"{os.environ['AWS_ENDPOINT_URL']}/photos/a.png"
    [item] = Inputs([address])
    assert read_item(item).tobytes() == picture(64, 64, seed=7).tobytes()
    with pytest.raises(DataError, match="no such file or folder"):
        Inputs([f"{address}.none"])
