"""Git commit of the checkout, and out-of-memory errors."""

import subprocess

import pytest
import torch

import mldec
from mldec.errors import UserError
from mldec.runtime.environment import explain_out_of_memory, git_commit, installed


def git(folder, *words):
    own = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *own, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_git_commit_marks_modified_files(tmp_path, monkeypatch):
    assert installed()["mldec"] == mldec.__version__
    module = tmp_path / "mldec" / "__init__.py"
    module.parent.mkdir()
    module.write_text("a = 1\n")
    monkeypatch.setattr(mldec, "__file__", str(module))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit() is None, "there is no repository"

    git(tmp_path, "init")
    assert git_commit() is None, "nothing is committed yet"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    git(tmp_path, "tag", "v1")  # a name would hide the commit
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_commit() == commit

    # A killed run must not leave a lock of git's index.
    index = tmp_path / ".git" / "index"
    module.touch()  # git would refresh its index for that
    before = index.stat().st_mtime_ns, index.read_bytes()
    (tmp_path / "notes.txt").write_text("not tracked")
    assert git_commit() == commit
    assert (index.stat().st_mtime_ns, index.read_bytes()) == before
    module.write_text("a = 2\n")
    assert git_commit() == f"{commit}+dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit() is None, "there is no git"


def allocate():
    """Allocate more memory than any machine has."""
    torch.empty(2**60, dtype=torch.uint8)


def exhaust():
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("fault", [allocate, exhaust])
def test_out_of_memory_becomes_advice(fault):
    with pytest.raises(UserError, match=r"^use less$"):  # noqa: SIM117
        with explain_out_of_memory(lambda: "use less"):
            fault()
    with pytest.raises(RuntimeError, match="shapes differ"):  # noqa: SIM117
        with explain_out_of_memory(lambda: pytest.fail("it is no such error")):
            raise RuntimeError("shapes differ")
