"""The commit that a checkpoint names: of this package's own checkout, and of no other."""

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

import mldec
from mldec.runtime.facts import git_commit, installed


def git(folder: Path, *words: str) -> str:
    own = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *own, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose package takes the place of ours."""
    module = tmp_path / "mldec" / "__init__.py"
    module.parent.mkdir()
    module.write_text("a = 1\n")
    git(tmp_path, "init")
    monkeypatch.setattr(mldec, "__file__", str(module))
    return tmp_path


def test_versions_are_those_that_are_installed() -> None:
    versions = installed()
    assert versions["mldec"] == mldec.__version__
    assert versions["timm"] == importlib.metadata.version("timm")
    assert (
        versions["torch"].partition("+")[0]
        == (importlib.metadata.version("torch").partition("+")[0])
    )
    assert {type(version) for version in versions.values()} == {str}


def test_the_commit_and_whether_tracked_files_have_changed(checkout: Path) -> None:
    assert git_commit() is None, "nothing is committed yet"
    git(checkout, "add", ".")
    git(checkout, "commit", "-m", "one")
    git(checkout, "tag", "v1")  # a name would hide the commit
    commit = git(checkout, "rev-parse", "HEAD")
    assert len(commit) == 40
    assert git_commit() == commit

    (checkout / "notes.txt").write_text("not tracked")
    assert git_commit() == commit
    (checkout / "mldec" / "__init__.py").write_text("a = 2\n")
    assert git_commit() == f"{commit}+dirty"


def test_a_package_inside_another_repository_has_no_commit(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(checkout, "add", ".")
    git(checkout, "commit", "-m", "one")
    installed_module = checkout / "venv" / "mldec" / "__init__.py"
    installed_module.parent.mkdir(parents=True)
    installed_module.touch()
    monkeypatch.setattr(mldec, "__file__", str(installed_module))
    assert git_commit() is None


def test_without_a_repository_or_without_git_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(mldec, "__file__", str(tmp_path / "__init__.py"))
    assert git_commit() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit() is None


def test_the_index_is_not_locked(checkout: Path) -> None:
    """A run that is killed meanwhile must leave no lock that blocks the user's commands."""
    git(checkout, "add", ".")
    git(checkout, "commit", "-m", "one")
    index = checkout / ".git" / "index"
    (checkout / "mldec" / "__init__.py").touch()  # git would refresh its index for that
    before = index.stat().st_mtime_ns, index.read_bytes()
    assert git_commit() == git(checkout, "rev-parse", "HEAD")
    assert (index.stat().st_mtime_ns, index.read_bytes()) == before
