"""Prediction with engines and by several processes: examples and commands of the documents."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pictures import picture
from support import assert_same_rows, train_here

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TOP = Path(__file__).parents[2]
EXAMPLES = TOP / "examples"
# All processes use the CPU.
VARIABLES = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with photos, a list of them, and a checkpoint without a plugin and thresholds."""
    folder = tmp_path_factory.mktemp("scale")
    photos = folder / "photos"
    photos.mkdir()
    for number in range(40):
        picture(64, 64, seed=number % 8).save(photos / f"{number:02}.png")
    (photos / "07.png").write_bytes(b"no image")
    paths = [str(path) for path in sorted(photos.iterdir())]
    parquet.write_table(pyarrow.table({"path": paths}), folder / "photos.parquet")

    words = ["data.train_images=16", "data.val_images=8", "train.batch_size=8", "train.epochs=1"]
    words += ["train.workers=0", "head.embed_dim=16", "head.mlp_dim=16", "device=cpu"]
    train_here(folder, "+experiment=digits", "name=plain", *words)
    return folder


@pytest.fixture
def work(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def environment(**variables):
    return {**os.environ, **VARIABLES, **variables}


def run(*words, status=0, **variables):
    done = subprocess.run(
        words, env=environment(**variables), capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def check(cli, rows, images):
    """Compare the rows of an engine, in any order, with those of the command."""
    words = ["outputs/plain", *images, "--overwrite", "--parquet", "command.parquet"]
    assert cli("predict", *words).status == 1
    expected = parquet.read_table("command.parquet").to_pylist()
    for row in rows:
        row["image"] = row.pop("path")
    rows.sort(key=lambda row: row["image"])
    for row in rows + expected:
        row["classes"] = row["classes"] or []
    for name, table in (("engine", rows), ("command", expected)):
        parquet.write_table(pyarrow.Table.from_pylist(table), f"{name}.parquet")
    assert_same_rows("engine.parquet", "command.parquet")


def test_dataset_of_hugging_face_has_the_rows_of_the_command(work, cli):
    pytest.importorskip("datasets")
    words = ["predict", "outputs/plain", "photos.parquet", "answers.parquet"]
    run(sys.executable, EXAMPLES / "hf_dataset.py", *words, HF_HOME=str(work / "hf"))
    table = parquet.read_table("answers.parquet")
    assert table.column_names == ["path", "error", "classes", "scores"]
    check(cli, table.to_pylist(), ["--list", "photos.parquet"])


@pytest.fixture
def store(work, monkeypatch):
    """The photos on an S3 server of this machine; returns its file system."""
    pytest.importorskip("ray")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(work / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(work / "none"),
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)

    from pyarrow.fs import FileSystem, LocalFileSystem, copy_files

    importlib.import_module("boto3").client("s3").create_bucket(Bucket="bucket")
    files, folder = FileSystem.from_uri("s3://bucket/photos")
    copy_files("photos", folder, source_filesystem=LocalFileSystem(), destination_filesystem=files)
    yield files
    server.stop()


def actors(process):
    """Return the descendants of a process in which Ray runs the model, by their ids."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes().decode()
            ancestor = int(folder.name)
            while title.startswith("ray::MapWorker") and ancestor not in (process, 0):
                stat = Path(f"/proc/{ancestor}/stat").read_text()
                ancestor = int(stat.rpartition(")")[2].split()[1])
        except OSError:
            continue
        if ancestor == process:
            found[int(folder.name)] = title
    return found


def answers(files):
    """Return the rows in the bucket, and the paths of their files."""
    from pyarrow.fs import FileSelector

    selector = FileSelector("bucket/answers", allow_not_found=True)
    paths = [info.path for info in files.get_file_info(selector)]
    rows = []
    for path in paths:
        rows += parquet.ParquetFile(files.open_input_file(path)).read().to_pylist()
    return rows, paths


def test_ray_predicts_the_other_photos_like_the_command_after_a_kill(store, cli):
    # An earlier run has predicted two photos, and was killed while it wrote another file.
    earlier = {
        "path": ["bucket/photos/00.png", "bucket/photos/39.png"],
        "error": pyarrow.array([None, None], pyarrow.string()),
        "classes": [["zero"], ["one"]],
        "scores": pyarrow.array([[2.0], [2.0]], pyarrow.list_(pyarrow.float32())),
    }
    table = pyarrow.table(earlier)
    parquet.write_table(table, "bucket/answers/earlier.parquet", filesystem=store)
    with store.open_output_stream("bucket/answers/half.parquet") as file:
        file.write(b"PAR1 incomplete")

    words = ["outputs/plain", "s3://bucket/photos", "s3://bucket/answers"]
    words += ["--batch-size", "4", "--actors", "1"]
    command = [sys.executable, EXAMPLES / "ray_predict.py", *words]
    with Path("log.txt").open("w") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)

    # Kill the actor while it predicts.
    busy = []
    while not busy and process.poll() is None:
        found = actors(process.pid)
        busy = [number for number, title in found.items() if title.rstrip("\0").endswith(".submit")]
        time.sleep(0.05)
    assert busy, Path("log.txt").read_text()[-3000:]
    os.kill(busy[0], signal.SIGKILL)
    assert process.wait(timeout=1200) == 0, Path("log.txt").read_text()[-3000:]

    rows, paths = answers(store)
    assert "bucket/answers/earlier.parquet" in paths
    assert "bucket/answers/half.parquet" not in paths
    assert [row for row in rows if row["path"] in earlier["path"]] == table.to_pylist()
    new = [row for row in rows if row["path"] not in earlier["path"]]
    for row in new:
        row["path"] = row["path"].removeprefix("bucket/")
        row["error"] = row["error"] and row["error"].removeprefix("bucket/")
    check(cli, new, [f"photos/{number:02}.png" for number in range(1, 39)])


def test_loop_of_shards_has_the_rows_of_one_process(work, cli):
    text = (TOP / "docs" / "predicting.md").read_text(encoding="utf-8")
    section = text.partition("## Several processes\n")[2]
    loop = re.split(r"```\w*\n", section)[1].split("```")[0]
    assert len(loop.splitlines()) == 4
    program = f'mldec() {{ {sys.executable} -m mldec "$@"; }}\n'
    run("bash", "-c", program + loop.replace("outputs/finetune_frozen", "outputs/plain"))
    words = ["outputs/plain", "photos", "--jsonl", "whole.jsonl"]
    assert cli("predict", *words).status == 1
    for name in ("answers", "whole"):
        lines = sorted(Path(f"{name}.jsonl").read_text().splitlines())
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    assert_same_rows("answers.jsonl", "whole.jsonl")
