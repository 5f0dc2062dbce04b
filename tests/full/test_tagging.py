"""Many images, predicted by processes that are killed, stopped and restarted."""

import io
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from pictures import picture
from support import assert_same_rows, wait_until

IMAGES = 4000
KILLS, SHARD_KILLS = 10, 5
ENDS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A tar file of many small images; every hundredth cannot be read."""
    contents = []
    for seed in range(8):
        buffer = io.BytesIO()
        picture(64, 64, seed=seed).save(buffer, "PNG")
        contents.append(buffer.getvalue())

    path = tmp_path_factory.mktemp("photos") / "photos.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(IMAGES):
            content = b"no image" if number % 100 == 50 else contents[number % 8]
            member = tarfile.TarInfo(f"{number:06}.png")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def command(run, photos, *words):
    words = [run / "checkpoints" / "best.pt", photos, "--plugin", "patches", *words]
    words += ["--threshold", "0", "--top", "2"]
    return [sys.executable, "-m", "mldec", "predict", *map(str, words)]


def to(folder):
    """Return the options of the result files in a folder."""
    return ["--jsonl", folder / "r.jsonl", "--features", folder / "r.npy"]


def start(words, folder):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(words, env=env, stdout=log, stderr=log, text=True)


def done(folder):
    """Return the number of rows of unfinished results."""
    count = 0
    for path in folder.glob("*.progress/rows.sqlite"):
        # The command may be writing. `immutable` ignores its transaction.
        with (
            suppress(sqlite3.Error),
            closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as rows,
        ):
            count += rows.execute("SELECT count(*) FROM rows").fetchone()[0]
    return count


@pytest.fixture(scope="module")
def whole(digits_run, photos, tmp_path_factory):
    """The folder of an uninterrupted result."""
    folder = tmp_path_factory.mktemp("whole")
    status = start(command(digits_run, photos, *to(folder)), folder).wait(timeout=240)
    assert status == 1, (folder / "log.txt").read_text()
    return folder


def check(folder, whole):
    """Compare a result with the uninterrupted one."""
    rows = [json.loads(line) for line in (folder / "r.jsonl").read_text().splitlines()]
    names = [Path(row["image"]).name for row in rows]
    assert names == [f"{number:06}.png" for number in range(IMAGES)]
    assert ["error" in row for row in rows] == [number % 100 == 50 for number in range(IMAGES)]
    assert (folder / "r.jsonl").read_bytes() == (whole / "r.jsonl").read_bytes()
    features = np.load(folder / "r.npy")
    np.testing.assert_array_equal(features, np.load(whole / "r.npy"))
    assert sorted(path.name for path in folder.iterdir()) == [
        "log.txt",
        "r.jsonl",
        "r.jsonl.run.json",
        "r.npy",
    ]


def end_at_random(words, folder, generator, signals=ENDS):
    """Start a process, send it a signal, and return its status."""
    before = done(folder)
    process = start(words, folder)

    # Early signals arrive during imports, where libraries handle Ctrl-C.
    is_early = generator.random() < 0.3
    chosen = [name for name in signals if name != signal.SIGINT or not is_early]
    wait_until(lambda: process.poll() is not None or is_early or done(folder) > before)
    time.sleep(generator.random() * (5 if is_early else 1))
    process.send_signal(generator.choice(chosen))
    return process.wait(timeout=120)


def test_killed_command_resumes_with_every_image_once(digits_run, photos, tmp_path, whole):
    generator = random.Random(0)
    folder = tmp_path / "result"
    folder.mkdir()
    words = command(digits_run, photos, *to(folder))
    ends = 0
    while ends < KILLS:
        status = end_at_random(words, folder, generator)
        # 0: the previous process was killed after it had written the result.
        if status in (0, 1):
            check(folder, whole)
            shutil.rmtree(folder)
            folder.mkdir()
        else:
            assert status in (143, 130, -9, -15, -2)
            ends += 1

    assert start(words, folder).wait(timeout=240) in (0, 1)
    check(folder, whole)


def test_killed_shards_have_the_rows_of_the_whole_result(digits_run, photos, tmp_path, whole):
    generator = random.Random(3)
    remaining = [0, 1, 2]
    kills = 0
    while remaining:
        number = generator.choice(remaining)
        name = f"{number}.jsonl"
        words = ["--shard", f"{number}/3", "--jsonl", tmp_path / name]
        signals = [signal.SIGKILL] if kills < SHARD_KILLS else [0]
        status = end_at_random(command(digits_run, photos, *words), tmp_path, generator, signals)
        # Each shard has unreadable images.
        assert status in (-9, 1), (tmp_path / "log.txt").read_text()
        kills += status == -9
        if status != -9:
            remaining.remove(number)
    assert kills >= 3

    rows = []
    for number in range(3):
        rows += (tmp_path / f"{number}.jsonl").read_text().splitlines()
    rows.sort(key=lambda line: json.loads(line)["image"])
    (tmp_path / "joined.jsonl").write_text("\n".join(rows))
    assert_same_rows(tmp_path / "joined.jsonl", whole / "r.jsonl")
