"""The cost of a model against closed formulas, the commit of the checkout, and memory."""

import os
import subprocess
import sys

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
from mldec.runtime import environment as facts
from mldec.runtime.environment import explain_out_of_memory, git_commit, installed


class Free(nn.Module):
    """A backbone without work: as many tokens as an image has pixels a side."""

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
def test_counter_against_the_closed_formula(tokens, groups, classes):
    expected = decoder_macs(tokens, groups, classes)
    assert head_macs(MLDecoder, tokens, classes, num_groups=groups) == expected
    full = head_macs(MLDecoder, tokens, groups, num_groups=None, self_attention=True)
    assert full == decoder_macs(tokens, groups, groups, self_attention=True)


def test_other_heads_convolutions_and_word_queries_by_hand():
    assert head_macs(GAP, 49, 9600) == 2048 * 9600  # pooling has no products
    convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    assert multiply_accumulates(convolution, 10) == 5 * 5 * 8 * 27

    t, k, d, f = 49, 80, 2048, 8192
    encoder = 4 * t * d * d + 2 * t * t * d + 2 * t * d * f
    decoder = 2 * t * d * d + 2 * k * d * d + 2 * k * t * d + 2 * k * d * f
    assert head_macs(Query2Label, t, k) == encoder + 2 * decoder

    # One pooling vector for all: a full decoding with one class per group has that; then 300 x 768
    # per query.
    model = Classifier(Free(), MLDecoder(2048, 925, num_groups=None, word_dim=300))
    expected = decoder_macs(49, 1006, 1006) + 1006 * 300 * 768
    assert multiply_accumulates(model, 49, (1006, 300)) == expected


# The commit of this package's own checkout, and of no other


def git(folder, *words):
    own = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *own, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_and_whether_tracked_files_have_changed(tmp_path, monkeypatch):
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

    # A run that is killed meanwhile must leave no lock that blocks the user's commands.
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
    """Ask torch for more memory than any machine has."""
    torch.empty(2**60, dtype=torch.uint8)


def exhaust():
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("fault", [allocate, exhaust])
def test_an_error_of_memory_becomes_the_advice_and_others_stay(fault):
    with pytest.raises(UserError, match=r"^use less$"):  # noqa: SIM117
        with explain_out_of_memory(lambda: "use less"):
            fault()
    with pytest.raises(RuntimeError, match="shapes differ"):  # noqa: SIM117
        with explain_out_of_memory(lambda: pytest.fail("it is no such error")):
            raise RuntimeError("shapes differ")


# Blocks of 40 MiB, each of which has 10,240 pages; the first one has to be paid for.
CODE = """
import resource
from mldec.runtime.environment import keep_freed_memory

kept = keep_freed_memory()
bytearray(b"x" * 40) * 2**20
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    bytearray(b"x" * 40) * 2**20
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("of_the_user", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_freed_memory_is_used_again_but_settings_of_the_user_stay(of_the_user):
    clean = {key: value for key, value in os.environ.items() if key not in facts.OF_THE_USER}
    command = [sys.executable, "-c", CODE]
    environment = {**clean, **of_the_user}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    kept, count = done.stdout.split()
    if not of_the_user and kept == "False":
        pytest.skip("this C library has no mallopt")
    assert kept == str(not of_the_user)
    assert int(count) > 25_000 if of_the_user else int(count) < 1_000
