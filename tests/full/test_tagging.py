"""Many images, predicted by processes that are killed, stopped and restarted."""

import io
import json
import os
import random
import shutil
import signal
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from forked import Forked, mldec_command
from pictures import picture
from support import assert_same_rows

from mldec.tools.predict import results

IMAGES = 300
ENDS = [signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGKILL]
SHARD_KILLS = 4


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


def predict(number, seconds, *words):
    """Predict, and send this process a signal after some seconds of processor time."""
    results.FLUSHED_ROWS = 25
    # SIGPROF itself ends a process at any instruction, and a handler between two instructions.
    if number != signal.SIGKILL:
        signal.signal(signal.SIGPROF, lambda *_: os.kill(os.getpid(), number))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        mldec_command("predict", *words)
    finally:
        Path("seconds").write_text(str(time.process_time()))


def start(folder, run, photos, *words, number=signal.SIGKILL, seconds=0.0):
    """Run a process to its end or a signal, and return its status. 0 seconds: no signal."""
    words = [run / "checkpoints" / "best.pt", photos, "--plugin", "patches", *words]
    words = [str(word) for word in [*words, "--threshold", "0", "--top", "2"]]
    log = folder / "log.txt"
    return Forked(predict, number, seconds, *words, cwd=folder.parent, out=log).wait()


def to(folder):
    """Return the options of the result files in a folder."""
    return ["--jsonl", folder / "r.jsonl", "--features", folder / "r.npy"]


@pytest.fixture(scope="module")
def whole(digits_run, photos, tmp_path_factory):
    """The folder of an uninterrupted result, and its processor time in seconds."""
    folder = tmp_path_factory.mktemp("whole") / "result"
    folder.mkdir()
    assert start(folder, digits_run, photos, *to(folder)) == 1, (folder / "log.txt").read_text()
    return folder, float((folder.parent / "seconds").read_text())


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


def test_killed_command_resumes_with_every_image_once(digits_run, photos, tmp_path, whole):
    generator = random.Random(0)
    whole, limit = whole
    folder = tmp_path / "result"
    folder.mkdir()
    remaining = list(ENDS)
    while remaining:
        number = remaining[-1]
        # Python handles Ctrl-C until the command does.
        earliest = 0.3 * limit if number == signal.SIGINT else 0.01
        seconds = generator.uniform(earliest, limit)
        status = start(folder, digits_run, photos, *to(folder), number=number, seconds=seconds)
        # 0: the previous process was killed after it had written the result.
        if status in (0, 1):
            check(folder, whole)
            shutil.rmtree(folder)
            folder.mkdir()
        else:
            assert status in (143, 130, -signal.SIGPROF, -signal.SIGTERM)
            remaining.pop()

    assert start(folder, digits_run, photos, *to(folder)) in (0, 1)
    check(folder, whole)


def test_killed_shards_have_the_rows_of_the_whole_result(digits_run, photos, tmp_path, whole):
    generator = random.Random(3)
    whole, limit = whole
    remaining = [0, 1, 2]
    kills = 0
    while remaining:
        number = generator.choice(remaining)
        words = ["--shard", f"{number}/3", "--jsonl", tmp_path / f"{number}.jsonl"]
        seconds = generator.uniform(0.01, limit / 2) if kills < SHARD_KILLS else 0.0
        status = start(tmp_path, digits_run, photos, *words, seconds=seconds)
        # Each shard has unreadable images.
        assert status in (-signal.SIGPROF, 1), (tmp_path / "log.txt").read_text()
        if status == 1:
            remaining.remove(number)
        else:
            kills += 1
    assert kills >= 3

    rows = []
    for number in range(3):
        rows += (tmp_path / f"{number}.jsonl").read_text().splitlines()
    rows.sort(key=lambda line: json.loads(line)["image"])
    (tmp_path / "joined.jsonl").write_text("\n".join(rows))
    assert_same_rows(tmp_path / "joined.jsonl", whole / "r.jsonl")
