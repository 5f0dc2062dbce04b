"""The GPU report runs to its end with tiny models on the null GPU."""

import json

import pytest

# The other parts of training are the same commands with other arguments.
PARTS = {
    "training": ["throughput", "profile", "official", "head_80"],
    "inference": ["loader", "loader_alone", "predict", "two_ranks", "digits", "query2label"],
}
SCRIPT = "scripts/maintainers/gpu_report.sh"
RUN = f"import os, sys; os.execvp('bash', ['bash', '{SCRIPT}'] + sys.argv[1:])"


@pytest.mark.parametrize("command", PARTS)
def test_report_runs_to_its_end(null_gpu, tmp_path, pytestconfig, command):
    out = tmp_path / "report.json"
    env = {"QUICK": "1", "MINUTES": "60"}
    words = [command, str(out)] + PARTS[command]
    null_gpu.run("-c", RUN, *words, cwd=pytestconfig.rootpath, env=env)
    report = json.loads(out.read_text())
    assert list(report["parts"]) == PARTS[command]
    for name, part in report["parts"].items():
        assert part["status"] == "done", (name, part)
        assert any(isinstance(value, float) for value in part["figures"].values()), name
