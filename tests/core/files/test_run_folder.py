"""The folder of a run: its checkpoint, and the facts in run.json."""

import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mldec.errors import CheckpointError
from mldec.files.run_folder import (
    LOG_FILE,
    RUN_FILE,
    RunFacts,
    command_line,
    find_checkpoint,
    read_facts,
    read_log,
)

FACTS = RunFacts(
    name="x",
    command="python -m mldec.train",
    versions={"mldec": "1"},
    commit=None,
    epochs=2,
    image_size=64,
    parameters=100,
    multiply_accumulates=None,
)


def test_the_best_checkpoint_comes_before_the_last(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(
        CheckpointError, match=f"^{tmp_path} is no folder of a run: .*best.pt nor .*last.pt; check"
    ):
        find_checkpoint(tmp_path)
    folder.mkdir()
    (folder / "last.1.pt").touch()
    with pytest.raises(CheckpointError, match="is no folder of a run"):
        find_checkpoint(tmp_path)
    (folder / "last.pt").touch()
    assert find_checkpoint(tmp_path) == folder / "last.pt"
    (folder / "best.pt").touch()
    assert find_checkpoint(tmp_path) == folder / "best.pt"


@pytest.mark.parametrize(
    "facts",
    [
        FACTS,
        dataclasses.replace(FACTS, commit="abc+dirty", multiply_accumulates=10**12, start_epoch=3),
        dataclasses.replace(FACTS, name="日本", best={"metric": "mAP", "value": 1.5, "epoch": 2}),
    ],
)
def test_facts_are_read_as_they_were_written(tmp_path: Path, facts: RunFacts) -> None:
    (tmp_path / RUN_FILE).write_text(facts.to_json())
    assert read_facts(tmp_path) == facts
    assert json.loads(facts.to_json()).keys() == {
        field.name for field in dataclasses.fields(RunFacts)
    }


def test_a_run_of_an_older_version_has_none_or_fewer(tmp_path: Path) -> None:
    assert read_facts(tmp_path) is None
    older = json.loads(FACTS.to_json())
    del older["start_epoch"], older["best"]
    (tmp_path / RUN_FILE).write_text(json.dumps(older))
    assert read_facts(tmp_path) == FACTS


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b'{"name": "x"}',
        FACTS.to_json().replace('"name"', '"nom"').encode(),
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_what_no_run_writes_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / RUN_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"run\.json is not what a run writes: ") as caught:
        read_facts(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_of_this_name_is_one_line(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).mkdir()
    with pytest.raises(CheckpointError, match="is not what a run writes"):
        read_facts(tmp_path)


def test_the_lines_of_a_log_are_read(tmp_path: Path) -> None:
    path = tmp_path / LOG_FILE
    assert read_log(path) == []
    path.write_text('{"step": 1, "val/mAP": null}\n{"step": 2}\n')
    assert read_log(path) == [{"step": 1, "val/mAP": None}, {"step": 2}]


@pytest.mark.parametrize("content", [b"{\n", b"[]\n", b"7\n", b"[" * 100_000, b"\xff\xfe"])
def test_a_log_that_no_run_writes_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOG_FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is not what a run writes: "):
        read_log(tmp_path / LOG_FILE)


def test_the_command_line_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    script = tmp_path / "a script.py"
    script.write_text("from mldec.files.run_folder import command_line\nprint(command_line())\n")
    words = [sys.executable, str(script), "data.root=/a b", "name='x'", "$HOME", "[1,2]"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert shlex.split(said) == words
    assert shlex.split(command_line()) == sys.orig_argv
