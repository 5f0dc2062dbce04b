"""What `mldec publish` writes without a hub, says and refuses."""

from pathlib import Path

import hostile
import pytest
import torch
from support import one_line

from mldec.checkpoint import load_model


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Work in a folder with a checkpoint, and without a token."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    torch.save(hostile.good(), "best.pt")
    Path("file").touch()


def test_the_folder_of_a_dry_run_is_a_checkpoint(cli):
    words = ["publish", "best.pt", "me/mine", "--dry-run", "files/mine", "--weights", "raw"]
    status, out, err = cli(*words)
    assert status == 0, err
    assert out.splitlines() == [
        "the card has neither intervals nor a table of classes: pass --results with a file of "
        "mldec report --json",
        "the card states no licence of the model: pass --license, such as apache-2.0",
        "files/mine: the files for me/mine; not uploaded",
    ]
    folder = Path("files/mine")
    names = {path.name for path in folder.iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors"}
    assert load_model(folder).weights == "raw"

    # It can be published again, and is not written over.
    assert cli("publish", folder, "me/mine", "--dry-run", "again").status == 0
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == Path("again", name).read_bytes()
    one_line(cli.fault(*words), "--dry-run files/mine: it holds files")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["best.pt", "mine"], ["mldec: mine: 'mine' is no repository; write owner/name"]),
        (["best.pt", "me/mine"], ["there is no token for the hub", "pass --dry-run"]),
        (["clip:ViT-B-32", "me/mine", "--dry-run", "x"], ["is a model of others"]),
        (["best.pt", "me/mine", "--dry-run", "x", "--results", "file"], ["file", "JSON"]),
    ],
)
def test_wrong_words_are_one_line_and_write_nothing(cli, words, parts):
    one_line(cli.fault("publish", *words), *parts)
    assert not Path("x").exists()
