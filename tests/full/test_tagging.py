"""Many images, predicted by processes that are killed, stopped and restarted."""

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from pictures import picture
from support import assert_same_rows, wait_until

IMAGES = 4000
KILLS, SHARD_KILLS = 20, 12
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


def command(run, photos, folder, *launcher):
    words = [run / "checkpoints" / "best.pt", photos, "--plugin", "patches", "--threshold", "0"]
    words += ["--top", "2", "--jsonl", folder / "r.jsonl", "--features", folder / "r.npy"]
    return [sys.executable, *(launcher or ["-m"]), "mldec", "predict", *map(str, words)]


def start(words, folder):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(words, env=env, stdout=log, stderr=log, text=True)


def done(folder):
    """Return the number of rows in journals."""
    count = 0
    # `os.walk` ignores a folder that the command removes meanwhile; `rglob` raises an error.
    for parent, _, files in os.walk(folder):
        if "rows.jsonl" in files:
            with suppress(FileNotFoundError):
                count += Path(parent, "rows.jsonl").read_bytes().count(b"\n")
    return count


@pytest.fixture(scope="module")
def whole(digits_run, photos, tmp_path_factory):
    """The folder of an uninterrupted result."""
    folder = tmp_path_factory.mktemp("whole")
    status = start(command(digits_run, photos, folder), folder).wait(timeout=240)
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
    words = command(digits_run, photos, folder)
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


@pytest.mark.parametrize(("kind", "shards"), [("jsonl", 3), ("parquet", 2)])
def test_killed_shards_are_merged_to_the_whole_result(
    digits_run, photos, tmp_path, whole, kind, shards
):
    pytest.importorskip("pyarrow")
    generator = random.Random(shards)
    words = [sys.executable, "-m", "mldec", "predict", str(digits_run / "checkpoints" / "best.pt")]
    words += [str(photos), "--plugin", "patches", "--threshold", "0", "--top", "2"]
    remaining = list(range(shards))
    kills = 0
    while remaining:
        number = generator.choice(remaining)
        own = [*words, f"--{kind}", str(tmp_path / "parts"), "--shard", f"{number}/{shards}"]
        signals = [signal.SIGKILL] if kills < SHARD_KILLS else [0]
        status = end_at_random(own, tmp_path, generator, signals)
        text = (tmp_path / "log.txt").read_text()
        # 0: the previous process was killed after it had written its part.
        finished = f"part-{number:05}-of-{shards:05}.{kind} is complete" in text
        assert status in (1, -9) or (status == 0 and finished), text
        kills += status == -9
        if status != -9:
            remaining.remove(number)

    target = tmp_path / f"joined.{kind}"
    merging = [*words, "--merge", str(tmp_path / "parts"), f"--{kind}", str(target)]
    assert start(merging, tmp_path).wait(timeout=240) == 1
    print(f"{kind}: {kills} kills of {shards} shards")
    assert kills >= 3
    expected = whole / "r.jsonl"
    if kind == "parquet":
        expected = tmp_path / "whole.parquet"
        assert start([*words, "--parquet", str(expected)], tmp_path).wait(timeout=240) == 1
    assert_same_rows(target, expected)


def test_stopped_torchrun_resumes(digits_run, photos, tmp_path, whole):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words = command(digits_run, photos, tmp_path, *torchrun)
    process = start(words, tmp_path)
    wait_until(lambda: process.poll() is not None or done(tmp_path) >= 1000)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=240) != 0
    log = (tmp_path / "log.txt").read_text()
    assert "run the same command to resume" in log
    assert "Traceback" not in log.replace("torch.distributed", "").split("mldec: stopped")[0]

    assert 1000 <= done(tmp_path) <= IMAGES
    assert not (tmp_path / "r.jsonl").exists()
    # torchrun returns the status of the process that writes the result.
    assert start(words, tmp_path).wait(timeout=240) == 1
    assert "resuming after" in (tmp_path / "log.txt").read_text()
    check(tmp_path, whole)
