"""The publish command without a hub."""

from pathlib import Path

import hostile
import pytest
import torch
from support import one_line

from mldec.checkpoint import load_model


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a checkpoint, and no token."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    torch.save(hostile.good(), "best.pt")
    Path("file").touch()


def test_dry_run_writes_a_checkpoint(cli):
    words = ["publish", "best.pt", "me/mine", "--dry-run", "files/mine", "--weights", "raw"]
    out = cli.out(*words)
    assert "--results" in out
    assert "--license" in out
    folder = Path("files/mine")
    names = {path.name for path in folder.iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors"}
    assert load_model(folder).weights == "raw"

    # It can be published again.
    cli.out("publish", folder, "me/mine", "--dry-run", "again")
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == Path("again", name).read_bytes()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["best.pt", "mine"], "mine"),
        (["best.pt", "me/mine"], "--dry-run"),
        (["clip:ViT-B-32", "me/mine", "--dry-run", "x"], "clip:ViT-B-32"),
        (["best.pt", "me/mine", "--dry-run", "x", "--results", "file"], "file"),
    ],
)
def test_invalid_options_are_errors_and_write_no_file(cli, words, name):
    one_line(cli.fault("publish", *words), name)
    assert not Path("x").exists()
