"""The commands and files of docs/scale.md, and the examples for engines."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pictures import picture
from support import assert_same_rows

from mldec.tools.predict.inputs import NUMBERS

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TOP = Path(__file__).parents[2]
TEXT = (TOP / "docs" / "scale.md").read_text(encoding="utf-8")
EXAMPLES = TOP / "examples"
OPTIONS = ["--plugin", "patches", "--device", "cpu", "--threshold", "0"]


def block(heading: str) -> str:
    """Return the first program below a heading."""
    section = TEXT.partition(f"\n## {heading}\n")[2]
    return re.split(r"```\w*\n", section, maxsplit=1)[1].split("```")[0]


@pytest.fixture
def work(tmp_path, best, monkeypatch):
    """A folder with a checkpoint, photos and a Parquet list of them."""
    monkeypatch.chdir(tmp_path)
    Path("best.pt").symlink_to(best)
    for seed in range(8):
        picture(64, 64, seed=seed).save(f"{seed}.png")
    Path("7.png").write_bytes(b"no image")
    write_list("few.parquet", 40)
    return tmp_path


def write_list(name, rows):
    paths = [str(Path(f"{number % 8}.png").absolute()) for number in range(rows)]
    parquet.write_table(pyarrow.table({"path": paths}), name)


def run(*words, status=0, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def plain(work, cli):
    """A checkpoint without a plugin and without thresholds."""
    words = ["data.train_images=16", "data.val_images=8", "train.batch_size=8", "train.epochs=1"]
    words += ["train.workers=0", "head.embed_dim=16", "head.mlp_dim=16", "device=cpu"]
    cli.out("train", "+experiment=digits", "name=plain", *words)
    return str(work / "outputs" / "plain")


@pytest.mark.parametrize("name", ["ray_predict", "hf_dataset"])
def test_engine_returns_the_rows_of_the_command(work, plain, name):
    pytest.importorskip("ray" if name == "ray_predict" else "datasets")
    program = [EXAMPLES / f"{name}.py"]
    if name == "hf_dataset":
        program.append("predict")
    # All of them use the CPU.
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf")}
    variables["CUDA_VISIBLE_DEVICES"] = ""
    run(sys.executable, *program, plain, "few.parquet", "answers.parquet", **variables)

    words = [plain, "--list", "few.parquet", "--parquet", "c.parquet"]
    run(sys.executable, "-m", "mldec", "predict", *words, status=1, **variables)
    table = parquet.read_table("answers.parquet")
    assert table.column_names == ["path", "error", "classes", "scores"]
    # Engines do not keep the order.
    for name, path in (("engine", "answers.parquet"), ("command", "c.parquet")):
        rows = parquet.read_table(path).rename_columns(["image", "error", "classes", "scores"])
        rows = sorted(rows.to_pylist(), key=lambda row: row["image"])
        for row in rows:
            row["classes"] = row["classes"] or []
        parquet.write_table(pyarrow.Table.from_pylist(rows), f"{name}.parquet")
    assert_same_rows("engine.parquet", "command.parquet")


@pytest.mark.parametrize("heading", ["SLURM", "Kubernetes"])
def test_scheduler_command_predicts_its_shard(work, heading):
    if heading == "SLURM":
        words = shlex.split(block(heading).splitlines()[-1])
    else:
        job = yaml.safe_load((TOP / "scripts/launch/kubernetes.yaml").read_text(encoding="utf-8"))
        assert job["spec"]["completionMode"] == "Indexed"
        [container] = job["spec"]["template"]["spec"]["containers"]
        words = container["command"]
        assert f"auto/{job['spec']['completions']}" in words
    # Two rows per shard.
    shards = int(words[words.index("--shard") + 1].removeprefix("auto/"))
    write_list("photos.parquet", 2 * shards)
    variables = {NUMBERS[heading == "Kubernetes"]: "19"}
    run(sys.executable, "-m", *words, *OPTIONS, status=1, **variables)
    table = parquet.read_table(f"answers/part-00019-of-{shards:05}.parquet")
    assert [Path(path).name for path in table["image"].to_pylist()] == ["6.png", "7.png"]
    again = run(sys.executable, "-m", *words, *OPTIONS, status=1, **variables)
    assert "is complete" in again
