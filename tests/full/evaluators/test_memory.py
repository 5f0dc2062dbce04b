"""The memory that an evaluator needs beyond the predictions."""

import os
import subprocess
import sys

import pytest

PROGRAM = r"""
import re, sys, time
from pathlib import Path
import torch
from mldec.evaluators.multi_label import MultiLabelEvaluator

rows, classes = int(sys.argv[1]), int(sys.argv[2])
generator = torch.Generator().manual_seed(0)

def memory(name):
    return 1024 * int(re.search(name + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

def blocks(rows):
    for start in range(0, rows, 100):
        logits = torch.randn(min(100, rows - start), classes, generator=generator)
        yield logits, (logits > 2).to(torch.int8)

small = MultiLabelEvaluator(classes)  # what the first use loads is not the evaluator's
for logits, targets in blocks(50):
    small.update(logits, targets)
small.compute()
batches = list(blocks(rows))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = memory("VmRSS")
start = time.perf_counter()
evaluator = MultiLabelEvaluator(classes)
for logits, targets in batches:
    evaluator.update(logits, targets)
metrics = evaluator.compute()
assert 0 < metrics["mAP"] <= 100
print(memory("VmHWM") - before, time.perf_counter() - start)
"""


def peak_beyond_the_input(rows, classes):
    """Bytes that the evaluator needs at its peak beyond the predictions, in its own process."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the peak of the memory is read from /proc")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rows), str(classes)],
        env={**os.environ, "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    peak, seconds = map(float, run.stdout.split())
    print(f"{rows} x {classes}: {peak / 2**20:.0f} MiB beyond the input, {seconds:.1f} s")
    return peak


def test_a_test_set_of_the_size_of_open_images_needs_less_than_2_gib_beyond_its_predictions():
    assert peak_beyond_the_input(40_000, 9_605) < 2 * 2**30
