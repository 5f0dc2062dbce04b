"""`hf:owner/name[@revision]` against a server on this machine that speaks the Hub's protocol."""

import logging
import shutil
from pathlib import Path

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


def refused(address, *parts):
    with pytest.raises(UserError) as caught:
        load_model(f"hf:{address}")
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    for part in (address, *parts):
        assert part in message, message
    return message


def test_a_checkpoint_is_downloaded_once_and_its_commit_is_said(hub, commit, folder, caplog):
    with caplog.at_level(logging.INFO, "mldec"):
        path = local(f"hf:{NAME}")
    assert f"hf:{NAME} is commit {commit}" in caplog.text
    assert path.read_bytes() == (folder / WEIGHTS).read_bytes()
    assert path.parent.name == commit
    downloads = [line for line in hub.asked if line.startswith("GET /me/")]
    assert downloads == [
        f"GET /{NAME}/resolve/main/{CONFIG}",
        f"GET /{NAME}/resolve/{commit}/{WEIGHTS}",
    ]

    # A branch is asked for once more, a commit never again; a tag stays where the branch moves on.
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


def test_without_a_network_the_cache_serves(hub, commit, monkeypatch):
    path = local(f"hf:{NAME}")

    # A server that fails, one that is not there, and one that must not be asked.
    hub.status = 503
    assert local(f"hf:{NAME}") == path
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert local(f"hf:{NAME}") == path
    refused("me/other", "check the network")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert local(f"hf:{NAME}") == path
    refused("me/other", "check the network")


def test_what_the_hub_refuses_is_one_line(hub, commit, monkeypatch):
    refused("me/none", "Repository Not Found", "make sure you are authenticated")
    refused(f"{NAME}@v9", "Revision Not Found")
    hub.status = 500
    refused(NAME, "check the network")
    hub.status = None
    hub.repositories[NAME].gated = True
    refused(NAME, "gated")

    hub.repositories[NAME].gated, hub.repositories[NAME].private = False, True
    refused(NAME, "Repository Not Found")
    monkeypatch.setenv("HF_TOKEN", fake_hub.READER)
    assert load_model(f"hf:{NAME}").weights == "raw"


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"README.md": b"", "model.pth": b""}, "Entry Not Found"),
        ({CONFIG: b"{}", WEIGHTS: b""}, "is not one that mldec publish wrote"),
        ({CONFIG: b"[" * 9999, WEIGHTS: b""}, "RecursionError"),
    ],
)
def test_a_repository_of_something_else_is_refused_before_its_weights(hub, files, fault):
    hub.repositories["me/else"] = fake_hub.Repository()
    hub.repositories["me/else"].commit(files)
    with pytest.raises(CheckpointError, match=fault):
        load_model("hf:me/else")
    assert not [line for line in hub.asked if line.endswith((WEIGHTS, ".pth", ".bin", ".pt"))]


def test_damaged_weights_are_refused_with_a_remedy_that_helps(hub, commit, folder):
    repository = hub.repositories[NAME]
    good = (folder / WEIGHTS).read_bytes()
    repository.commit({WEIGHTS: good[:-1] + bytes([good[-1] ^ 1])})
    with pytest.raises(
        CheckpointError, match=r"is damaged: its sha256 is .* fetch it anew"
    ) as info:
        load_model(f"hf:{NAME}")

    # The remedy helps: the file that it names is what the cache holds.
    blob = Path(str(info.value).partition("delete ")[2].partition(",")[0])
    assert blob.is_file()
    blob.unlink()
    repository.commits[repository.refs["main"]][WEIGHTS] = good
    assert load_model(f"hf:{NAME}").weights == "raw"


def test_an_upload_is_one_commit_that_can_be_loaded(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", fake_hub.WRITER)
    commit = upload(folder, NAME, private=False)
    repository = hub.repositories[NAME]
    assert not repository.private
    assert [*repository.commits][1:] == [commit]
    assert set(repository.commits[commit]) == {".gitattributes", "README.md", CONFIG, WEIGHTS}
    assert local(f"hf:{NAME}@{commit}").read_bytes() == (folder / WEIGHTS).read_bytes()

    # Private means private.
    for _ in range(2):
        upload(folder, "me/secret", private=True)
        assert hub.repositories["me/secret"].private
    with pytest.raises(CheckpointError, match=rf"--private: {NAME} exists and is public"):
        upload(folder, NAME, private=True)
    assert len(repository.commits) == 2


def test_an_upload_that_is_not_allowed_is_one_line(hub, folder, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"no token .* hf auth login, set HF_TOKEN"):
        require_token()
    monkeypatch.setenv("HF_TOKEN", fake_hub.READER)
    require_token()
    hub.repositories["me/public"] = fake_hub.Repository()
    for name in ("me/public", "other/new"):
        with pytest.raises(CheckpointError, match=rf"^hf:{name}: "):
            upload(folder, name, private=False)

    monkeypatch.setenv("HF_TOKEN", fake_hub.WRITER)
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    (wrong / "README.md").write_text("---\nlicense: nonsense\n---\n")
    with pytest.raises(CheckpointError, match=r"hf:me/mine.*license"):
        upload(wrong, NAME, private=False)
