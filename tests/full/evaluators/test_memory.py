"""Peak memory of an evaluator on as many classes as Open Images has."""

import os
import subprocess
import sys

import pytest

PROGRAM = r"""
import re, sys
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

small = MultiLabelEvaluator(classes)  # imports and caches of the first use
for logits, targets in blocks(50):
    small.update(logits, targets)
small.compute()
batches = list(blocks(rows))
Path("/proc/self/clear_refs").write_text("5")  # reset the peak
before = memory("VmRSS")
evaluator = MultiLabelEvaluator(classes)
for logits, targets in batches:
    evaluator.update(logits, targets)
metrics = evaluator.compute()
assert 0 < metrics["mAP"] <= 100
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_quarter_of_open_images_needs_less_than_half_a_gib_beyond_predictions():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, "10000", "9605"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(run.stdout) < 2**29
