"""The GPU report runs to its end with tiny models on the null GPU."""

import json
import os

import pytest

# The other parts are the same commands with other arguments, or commands of test_commands.py.
PARTS = {
    "training": ["throughput", "official"],
    "inference": ["loader", "loader_alone", "predict", "two_ranks"],
}
SCRIPT = "scripts/maintainers/gpu_report.sh"


@pytest.mark.parametrize("command", PARTS)
def test_report_runs_to_its_end(null_gpu, tmp_path, pytestconfig, command):
    out = tmp_path / "report.json"
    env = {"QUICK": "1", "MINUTES": "60"}
    words = ["bash", SCRIPT, command, str(out)] + PARTS[command]
    null_gpu.run(os.execvp, "bash", words, cwd=pytestconfig.rootpath, env=env)
    report = json.loads(out.read_text())
    assert list(report["parts"]) == PARTS[command]
    assert {"commit", "nccl", "gpus_before", "gpus_after"} <= report["environment"].keys()
    for name, part in report["parts"].items():
        assert part["status"] == "done", (name, part)
        assert any(isinstance(value, float) for value in part["figures"].values()), name
