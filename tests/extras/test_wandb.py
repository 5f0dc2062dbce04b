"""Runs with the real wandb package, offline."""

import pytest
from forked import mldec_command, run
from support import QUICK

from mldec.training.log import WANDB_ID

SECRET = "8d1f0000feed0000feed0000feed0000feed1c2b"


def test_resumed_run_continues_its_record(tmp_path):
    pytest.importorskip("wandb")
    environment = {"HOME": str(tmp_path), "WANDB_MODE": "offline", "WANDB_API_KEY": SECRET}
    for words in (["train.stop_epoch=1"], ["resume=auto"]):
        command = ["train", *QUICK, "log.wandb=true", *words]
        done = run(mldec_command, *command, cwd=tmp_path, env=environment)
        assert done.status == 0, done.err

    folder = tmp_path / "outputs" / "digits"
    run_id = (folder / WANDB_ID).read_text().strip()
    records = sorted(folder.glob("wandb/offline-run-*"))
    assert [path.name.endswith(f"-{run_id}") for path in records] == [True, True]
    for path in records:
        [file] = path.glob("*.wandb")
        content = file.read_bytes()
        assert b"main/train_loss" in content
    # The first run has the first evaluation, which is the best one so far.
    first = records[0] / "files" / "media"
    assert list(first.glob("images/*.png"))
    assert list(first.glob("table/*.json"))
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
