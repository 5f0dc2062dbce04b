"""A quarter of the training split of Open Images, with random labels. Run with -s for figures."""

import os
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from support import made

from mldec.data.cache import cached_table
from mldec.data.labels import from_statements
from mldec.data.readers import openimages
from mldec.data.table import Table

IMAGES, CLASSES, STATEMENTS, WORKERS = 2_252_804, 9_605, 14_381_088, 8
GIB = 2**30


def random_table():
    random = np.random.default_rng(0)
    owners = random.integers(IMAGES, size=STATEMENTS, dtype=np.int32)
    classes = (
        (CLASSES * random.random(STATEMENTS, np.float32) ** 3)
        .astype(np.int32)
        .clip(max=CLASSES - 1)
    )
    values = (random.random(STATEMENTS, np.float32) < 0.345).astype(np.int8)
    labels, _ = from_statements(owners, classes, values, num_images=IMAGES, num_classes=CLASSES)
    names = np.char.add(
        np.array([f"{row * 2**40:016x}" for row in range(IMAGES)], np.bytes_), b".jpg"
    )
    return Table(names, labels, tuple(f"class {number}" for number in range(CLASSES)))


def proportional(pid):
    """Return the proportional set size of a process in GiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / GIB


def load(root, pipe):
    start = time.process_time()
    split = made(openimages, root=root, absent="unchecked", cache_dir=f"{root}/cache").load_val()
    seconds = time.process_time() - start
    labels = split.dataset.labels

    def read(barrier, first):
        for image in range(first, len(labels), 50 * WORKERS):
            labels.row(image)
            split.dataset.name(image)
        barrier.wait()
        barrier.wait()

    fork = get_context("fork")
    barrier = fork.Barrier(WORKERS + 1)
    workers = [fork.Process(target=read, args=(barrier, first)) for first in range(WORKERS)]
    for worker in workers:
        worker.start()
    barrier.wait()
    total = sum(proportional(pid) for pid in [os.getpid(), *(worker.pid for worker in workers)])
    barrier.wait()
    for worker in workers:
        worker.join()
    pipe.send((seconds, total, len(labels), len(labels.values)))


def test_two_million_images_load_from_cache(tmp_path):
    root = tmp_path / "openimages"
    (root / "annotations").mkdir(parents=True)
    names = [
        "test-annotations-human-imagelabels.csv",
        "oidv6-classes-trainable.txt",
        "oidv6-class-descriptions.csv",
    ]
    sources = [root / "annotations" / name for name in names]
    for source in sources:
        source.touch()
    cached_table("openimages display 0", sources, random_table, str(root / "cache"))
    ours, theirs = get_context("spawn").Pipe()
    # Measure the memory of a separate process.
    process = get_context("spawn").Process(target=load, args=(str(root), theirs))
    process.start()
    assert ours.poll(600)
    seconds, gib, images, statements = ours.recv()
    process.join()
    print(
        f"\n{images:,} images, {statements:,} labels: "
        f"{seconds:.1f} s of processor time, {gib:.2f} GiB with {WORKERS} workers"
    )
    assert images == IMAGES
    assert statements > 0.95 * STATEMENTS
    assert seconds < 15
    assert gib < 1.5  # with the imports of nine processes
