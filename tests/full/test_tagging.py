"""Many images, answered by real processes that are killed, stopped and joined by others."""

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
from pathlib import Path

import numpy as np
import pytest
from pictures import picture
from support import wait_until

IMAGES = 4000
KILLS = 20


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
    return [sys.executable, *(launcher or ["-m"]), "mldec.predict", *map(str, words)]


def start(words, folder):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(words, env=env, stdout=log, stderr=log, text=True)


def blocks(folder):
    parts = folder / "r.jsonl.parts"
    return len(list(parts.glob("0*"))) if parts.is_dir() else 0


@pytest.fixture(scope="module")
def whole(digits_run, photos, tmp_path_factory):
    """The folder of a result that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    status = start(command(digits_run, photos, folder), folder).wait(timeout=240)
    assert status == 1, (folder / "log.txt").read_text()
    return folder


def check(folder, whole):
    """Check that a result has every image once, in order, and the same answers."""
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


def end_at_random(words, folder, generator):
    """Start a process and send it a signal; return its status, 1 if it was complete before."""
    before = blocks(folder)
    process = start(words, folder)

    # From the start of the imports, where Ctrl-C belongs to the libraries, to a few blocks later.
    enough = before + generator.choice([0, 1, 1, 2])
    signals = [signal.SIGKILL, signal.SIGTERM]
    signals += [signal.SIGINT] if enough > before else []
    wait_until(lambda: process.poll() is not None or blocks(folder) >= enough)
    time.sleep(generator.random() * (5 if enough == before else 0.05))
    process.send_signal(generator.choice(signals))
    return process.wait(timeout=120)


def test_every_image_once_after_many_ends(digits_run, photos, tmp_path, whole):
    generator = random.Random(0)
    folder = tmp_path / "result"
    folder.mkdir()
    words = command(digits_run, photos, folder)
    ends = 0
    while ends < KILLS:
        status = end_at_random(words, folder, generator)
        if status == 1:
            check(folder, whole)
            shutil.rmtree(folder)
            folder.mkdir()
        else:
            # As the signals say, or by them: before and after the work.
            assert status in (143, 130, -9, -15, -2)
            ends += 1

    assert start(words, folder).wait(timeout=240) == 1
    check(folder, whole)


def test_processes_share_the_images_and_others_go_on(digits_run, photos, tmp_path, whole):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    words = command(digits_run, photos, tmp_path, *torchrun)
    process = start(words, tmp_path)
    wait_until(lambda: process.poll() is not None or blocks(tmp_path) >= 4)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=240) != 0
    log = (tmp_path / "log.txt").read_text()
    assert "the same command goes on" in log
    assert "Traceback" not in log.replace("torch.distributed", "").split("mldec: stopped")[0]

    done = blocks(tmp_path)
    assert 4 <= done < IMAGES // 128
    assert start(command(digits_run, photos, tmp_path), tmp_path).wait(timeout=240) == 1
    assert f"{128 * done:,} images are done, going on" in (tmp_path / "log.txt").read_text()
    check(tmp_path, whole)
