"""Cost of a model against closed formulas, git commit, and out-of-memory errors."""

import subprocess

import pytest
import torch
from support import decoder_macs
from torch import nn

import mldec
from mldec.errors import UserError
from mldec.heads.gap import GAP
from mldec.heads.ml_decoder import MLDecoder
from mldec.heads.query2label import Query2Label
from mldec.model import Classifier, multiply_accumulates
from mldec.runtime.environment import explain_out_of_memory, git_commit, installed


class Free(nn.Module):
    """A backbone without cost. The number of tokens is the width of the image."""

    num_features = 2048

    def forward(self, images):
        return images.new_empty(len(images), images.shape[-1], self.num_features)


def head_macs(head, tokens, num_classes, **arguments):
    with torch.device("meta"):
        model = Classifier(Free(), head(2048, num_classes, **arguments))
        return multiply_accumulates(model, tokens)


@pytest.mark.parametrize(
    ("tokens", "groups", "classes"), [(196, 20, 80), (49, 100, 9600), (5, 3, 10)]
)
def test_cost_of_ml_decoder_equals_formula(tokens, groups, classes):
    expected = decoder_macs(tokens, groups, classes)
    assert head_macs(MLDecoder, tokens, classes, num_groups=groups) == expected
    full = head_macs(MLDecoder, tokens, groups, num_groups=None, self_attention=True)
    assert full == decoder_macs(tokens, groups, groups, self_attention=True)


def test_cost_of_other_parts_equals_formula():
    assert head_macs(GAP, 49, 9600) == 2048 * 9600  # pooling has no products
    convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    assert multiply_accumulates(convolution, 10) == 5 * 5 * 8 * 27

    t, k, d, f = 49, 80, 2048, 8192
    encoder = 4 * t * d * d + 2 * t * t * d + 2 * t * d * f
    decoder = 2 * t * d * d + 2 * k * d * d + 2 * k * t * d + 2 * k * d * f
    assert head_macs(Query2Label, t, k) == encoder + 2 * decoder

    # A full decoding has one pooling vector, as one class per group. Each query costs 300 x 768.
    model = Classifier(Free(), MLDecoder(2048, 925, num_groups=None, word_dim=300))
    expected = decoder_macs(49, 1006, 1006) + 1006 * 300 * 768
    assert multiply_accumulates(model, 49, (1006, 300)) == expected


# The commit of the checkout


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

    installed_module = tmp_path / "venv" / "mldec" / "__init__.py"
    installed_module.parent.mkdir(parents=True)
    installed_module.touch()
    monkeypatch.setattr(mldec, "__file__", str(installed_module))
    assert git_commit() is None, "it is inside another repository"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit() is None, "there is no git"


# Memory


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
