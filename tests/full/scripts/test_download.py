"""scripts/download.sh with a server on this machine."""

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

TOP = Path(__file__).parents[3]
COCO = ("/zips/train2014.zip", "/zips/val2014.zip", "/annotations/annotations_trainval2014.zip")


class Handler(BaseHTTPRequestHandler):
    """Serves `server.files`, and records the path and first byte of each request."""

    def do_GET(self):
        content = self.server.files.get(self.path)
        start = int(re.findall(r"\d+", self.headers.get("Range", "0"))[0])
        self.server.requests.append((self.path, start))
        if content is None:
            self.send_error(404)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            last = len(content) - 1
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(content)}")
        self.end_headers()
        self.wfile.write(content[start:])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files = {}
        server.requests = []
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def download(tmp_path, server):
    """Run a copy of the script whose DATASETS.md has the sizes and md5 of the served files."""
    scripts = tmp_path / "checkout" / "scripts"
    scripts.mkdir(parents=True)
    for name in ("download.sh", "unpack_imagenet.sh"):
        shutil.copy(TOP / "scripts" / name, scripts)

    def run(data, folder):
        text = (TOP / "DATASETS.md").read_text(encoding="utf-8")
        for path, content in server.files.items():
            row = rf"^(\| http\S+{re.escape(path)}) \|.*$"
            md5 = hashlib.md5(content).hexdigest()
            text, count = re.subn(row, rf"\1 | {len(content):,} | {md5} |", text, flags=re.M)
            assert count == 1, path
        (tmp_path / "checkout" / "DATASETS.md").write_text(text, encoding="utf-8")
        mirror = f"http://127.0.0.1:{server.server_port}"
        return subprocess.run(
            [scripts / "download.sh", data, folder],
            env={**os.environ, "MIRROR": mirror, "no_proxy": "127.0.0.1"},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def zipped(path, name):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, "content " * 500)
    return path.read_bytes()


def test_download_of_coco_resumes_verifies_and_unpacks(download, server, tmp_path):
    folder = tmp_path / "my coco"
    folder.mkdir()
    inside = ("train2014/a.jpg", "val2014/b.jpg", "annotations/instances_val2014.json")
    for path, name in zip(COCO, inside, strict=True):
        server.files[path] = zipped(tmp_path / "archive.zip", name)
    half = len(server.files[COCO[0]]) // 2
    (folder / "train2014.zip").write_bytes(server.files[COCO[0]][:half])

    done = download("coco", folder)
    assert done.returncode == 0, done.stderr
    assert server.requests == [(COCO[0], half), (COCO[1], 0), (COCO[2], 0)]
    for name in inside:
        assert (folder / name).read_text() == "content " * 500
    assert not list(folder.glob("*.zip"))
    assert f"data=coco data.root={folder}" in done.stdout

    assert download("coco", folder).returncode == 0
    assert len(server.requests) == 3, "the second run downloads nothing"


def test_damaged_archive_is_named_and_not_unpacked(download, server, tmp_path):
    for path in COCO:
        server.files[path] = zipped(tmp_path / "archive.zip", "train2014/a.jpg")
    folder = tmp_path / "coco"
    folder.mkdir()
    damaged = b"x" + server.files[COCO[0]][1:]
    (folder / "train2014.zip").write_bytes(damaged)
    done = download("coco", folder)
    assert (done.returncode, server.requests) == (1, [])
    [line] = done.stderr.splitlines()
    assert f"{folder}/train2014.zip" in line
    assert not (folder / "train2014").exists()

    (folder / "train2014.zip").write_bytes(damaged + b"x")
    assert f"{len(damaged) + 1} bytes" in download("coco", folder).stderr


def test_voc_has_archives_of_its_year(download, server, tmp_path):
    paths = [f"/pascal/VOC/voc2007/VOC{name}_06-Nov-2007.tar" for name in ("trainval", "test")]
    for number, path in enumerate(paths):
        file = tmp_path / f"{number}.txt"
        file.write_text("x")
        with tarfile.open(tmp_path / "archive.tar", "w") as archive:
            archive.add(file, f"VOCdevkit/VOC2007/{number}.txt")
        server.files[path] = (tmp_path / "archive.tar").read_bytes()
    assert download("voc2007", tmp_path / "voc").returncode == 0
    assert [path for path, _ in server.requests] == paths
    found = sorted(path.name for path in (tmp_path / "voc/VOCdevkit/VOC2007").iterdir())
    assert found == ["0.txt", "1.txt"]

    # The year 2012 has one archive, which this server does not have.
    done = download("voc2012", tmp_path / "voc")
    assert done.returncode == 1
    assert "VOCtrainval_11-May-2012.tar" in done.stderr


def test_placed_files_are_checked(download, tmp_path):
    folder = tmp_path / "nus"
    folder.mkdir()
    done = download("nuswide", folder)
    assert done.returncode == 1
    for word in ("data.csv", "benchmark_81_v0.json", "wordvec_array.pth", "images", "nus.edu.sg"):
        assert word in done.stderr
    for name in ("data.csv", "benchmark_81_v0.json", "wordvec_array.pth", "images"):
        (folder / name).touch()
    assert download("nuswide", folder).returncode == 0

    archives = ("img_train.tar", "img_val.tar", "devkit_t12.tar.gz")
    folder = tmp_path / "imagenet"
    folder.mkdir()
    done = download("imagenet", folder)
    assert done.returncode == 1
    assert "image-net.org" in done.stderr
    for name in archives:
        assert f"ILSVRC2012_{name}" in done.stderr
        (folder / f"ILSVRC2012_{name}").write_bytes(b"not the archive")
    assert "ILSVRC2012_img_train.tar: " in download("imagenet", folder).stderr
    for name in ("train", "val"):
        (folder / name).mkdir()
    assert download("imagenet", folder).returncode == 0


@pytest.mark.parametrize("words", [[], ["coco"], ["mnist", "folder"]])
def test_wrong_words_are_one_line(words, tmp_path):
    done = subprocess.run(
        [TOP / "scripts" / "download.sh", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "voc2012" in line
    assert not list(tmp_path.iterdir())
