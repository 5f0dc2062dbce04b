"""Counts and copies of the null GPU."""

import os
import sys


def test_copies_arrive_when_host_waits(null_gpu, tmp_path):
    result = null_gpu.run("device.py", cwd=tmp_path, devices=2).result

    assert result["devices"] == ["null GPU", "null GPU"]
    assert result["step"]["launches"] > 5
    assert result["step"]["matrix_products"] == 3
    assert result["step"]["stream_waits"] == 0
    assert result["item"]["stream_waits"] == 1
    assert result["upload"] == {"pinned_copies": 1, "pageable_copies": 1}

    # Bytes of 0xFF are NaN. A kernel writes nothing, so that the host reads zeros.
    assert result["early"] == "nan"
    assert result["other stream"] == "nan"
    assert result["other device"] == "nan"
    assert result["same stream"] == 0
    assert result["round trip"] == [1.0, 2.0]


def test_process_writes_its_counts(null_gpu, tmp_path):
    program = "import torch; torch.ones(3, device='cuda').sum().item()"
    words = (sys.executable, [sys.executable, "-c", program])
    counts = null_gpu.run(os.execv, *words, cwd=tmp_path).counts
    assert counts["launches"] == 2
    assert counts["stream_waits"] == 1
