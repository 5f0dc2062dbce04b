"""`hf:owner/name[@revision]` with a local server of the Hub's protocol."""

import shutil
import time

import fake_hub
import hostile
import huggingface_hub
import pytest

from mldec.checkpoint import load_model, published
from mldec.checkpoint.published import CONFIG, WEIGHTS
from mldec.checkpoint.sources import local, require_token, upload
from mldec.checkpoint.state import Checkpoint
from mldec.errors import CheckpointError, UserError

NAME = "me/mine"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of a repository; tests must not change them."""
    folder = tmp_path_factory.mktemp("published")
    saved = Checkpoint.from_state(hostile.good(), folder)
    published.write(folder, published.with_weights(saved, "raw", folder))
    (folder / "README.md").write_text("---\nlibrary_name: mldec\n---\n")
    return folder


@pytest.fixture
def commit(hub, folder):
    """The commit of a published checkpoint."""
    hub.repositories[NAME] = fake_hub.Repository()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return hub.repositories[NAME].commit(files)


def test_checkpoint_is_downloaded_once(hub, commit, folder):
    path = local(f"hf:{NAME}")
    assert path.read_bytes() == (folder / WEIGHTS).read_bytes()
    assert path.parent.name == commit
    downloads = [line for line in hub.asked if line.startswith("GET /me/")]
    assert downloads == [
        f"GET /{NAME}/resolve/main/{CONFIG}",
        f"GET /{NAME}/resolve/{commit}/{WEIGHTS}",
    ]

    # A branch is looked up again, a commit is not. A tag keeps its commit.
    hub.asked.clear()
    assert local(f"hf:{NAME}@main") == path
    assert [line for line in hub.asked if line.startswith("GET")] == []
    assert hub.asked
    hub.asked.clear()
    assert local(f"hf:{NAME}@{commit}") == path
    assert hub.asked == []
    hub.repositories[NAME].refs["v1"] = commit
    newer = hub.repositories[NAME].commit({"README.md": b"newer"})
    assert local(f"hf:{NAME}").parent.name == newer
    assert local(f"hf:{NAME}@v1") == path


def test_cache_is_used_without_a_network(hub, commit, monkeypatch):
    path = local(f"hf:{NAME}")
    hub.status = 503
    assert local(f"hf:{NAME}") == path
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert local(f"hf:{NAME}") == path
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert local(f"hf:{NAME}") == path


@pytest.mark.parametrize(
    ("address", "settings", "name"),
    [
        ("me/none", {}, "authenticated"),
        (f"{NAME}@v9", {}, "v9"),
        (NAME, {"status": 500}, "network"),
        (NAME, {"gated": True}, "gated"),
        (NAME, {"private": True}, "authenticated"),
        ("me/no-config", {"files": {"README.md": b"", "model.pth": b""}}, CONFIG),
        ("me/other", {"files": {CONFIG: b"{}", WEIGHTS: b""}}, CONFIG),
        ("me/deep", {"files": {CONFIG: b"[" * 9999, WEIGHTS: b""}}, CONFIG),
    ],
)
def test_unavailable_checkpoint_raises_an_error(hub, commit, monkeypatch, address, settings, name):
    # huggingface_hub waits half a minute in all before it gives up.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.status = settings.get("status")
    hub.repositories[NAME].gated = settings.get("gated", False)
    hub.repositories[NAME].private = settings.get("private", False)
    if "files" in settings:
        hub.repositories[address] = fake_hub.Repository()
        hub.repositories[address].commit(settings["files"])
    with pytest.raises(UserError, match=name) as caught:
        load_model(f"hf:{address}")
    assert "\n" not in str(caught.value)
    # Other files of a repository are not read.
    assert not [line for line in hub.asked if line.endswith((WEIGHTS, ".pth"))]
    if "private" in settings:
        monkeypatch.setenv("HF_TOKEN", fake_hub.READER)
        assert load_model(f"hf:{address}").weights == "raw"


def test_upload_is_one_commit(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", fake_hub.WRITER)
    commit = upload(folder, NAME, private=False)
    repository = hub.repositories[NAME]
    assert not repository.private
    assert list(repository.commits)[1:] == [commit]
    assert set(repository.commits[commit]) == {".gitattributes", "README.md", CONFIG, WEIGHTS}
    assert local(f"hf:{NAME}@{commit}").read_bytes() == (folder / WEIGHTS).read_bytes()

    for _ in range(2):
        upload(folder, "me/secret", private=True)
        assert hub.repositories["me/secret"].private
    with pytest.raises(CheckpointError, match=f"--private.*{NAME}"):
        upload(folder, NAME, private=True)
    assert len(repository.commits) == 2


def test_failed_upload_raises_an_error(hub, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", fake_hub.READER)
    require_token()
    hub.repositories["me/public"] = fake_hub.Repository()
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    (wrong / "README.md").write_text("---\nlicense: nonsense\n---\n")
    for token, source, repository, name in (
        (fake_hub.READER, folder, "me/public", "403"),
        (fake_hub.READER, folder, "other/new", "403"),
        (fake_hub.WRITER, wrong, NAME, "license"),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(CheckpointError, match=f"^hf:{repository}.*{name}"):
            upload(source, repository, private=False)
