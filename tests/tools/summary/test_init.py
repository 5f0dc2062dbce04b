"""The command: its table, its plot, and what it refuses."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from support import one_line

from mldec.summary import parser

Cli = Callable[..., tuple[int, str, str]]
Make = Callable[..., Path]
HEADS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".PNG": b"\x89PNG"}


@pytest.mark.parametrize("suffix", HEADS)
def test_the_suffix_says_the_format_of_the_plot(
    cli: Cli, make: Make, tmp_path: Path, suffix: str
) -> None:
    plot = tmp_path / f"plot{suffix}"
    status, out, err = cli("summary", make("a", [1.0, 2.0]), "--plot", plot)
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == 2, "the table, and nothing is left out"
    assert plot.read_bytes().startswith(HEADS[suffix])


def test_runs_that_cannot_be_drawn_are_named(cli: Cli, make: Make, tmp_path: Path) -> None:
    make("started", [])
    make("undefined", [None])
    outputs = make("good", [1.0, None, 2.0], macs=None)
    plot = tmp_path / "plot.png"
    status, out, _ = cli("summary", outputs, "--plot", plot, "--cost", "gmacs")
    assert status == 0
    assert out.splitlines()[4:] == [
        "left out of the plot: started has no evaluation in metrics.jsonl",
        "left out of the plot: undefined has no evaluation in metrics.jsonl",
        "left out of the second panel: good, multiply-accumulates per image (billions) is unknown",
    ]
    assert Image.open(plot).width == 1300


def test_without_an_evaluation_there_is_no_plot(cli: Cli, make: Make, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    status, _, err = cli("summary", make("started", []), "--plot", plot)
    assert status == 1
    one_line(err, "--plot: no run has an evaluation", "nothing to draw")
    assert not plot.exists()


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--plot", "plot.jpg"], "--plot plot.jpg: the name must end in .png, .svg, .pdf"),
        (["--plot", "plot"], "--plot plot: the name must end in"),
        (["--plot", "nowhere/plot.png"], "cannot write nowhere/plot.png: there is no folder"),
        (["--plot", "t.png", "--csv", "t.png"], "cannot write two results to"),
        (["--cost", "gmacs"], "--cost has no effect without --plot FILE"),
    ],
)
def test_wrong_options_are_refused_before_a_run_is_read(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = cli("summary", "absent", *words)
    assert (status, out) == (1, "")
    one_line(err, fault)


def test_without_matplotlib_the_plot_is_refused(
    cli: Cli, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outputs = make("a", [1.0])
    status, out, err = cli("summary", outputs, "--plot", tmp_path / "plot.png")
    assert (status, out) == (1, "")
    one_line(err, "--plot: the charts need matplotlib", "pip install 'mldec[plot]'")
    assert cli("summary", outputs)[0] == 0


def test_a_plot_that_cannot_be_written_is_named(cli: Cli, make: Make, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    plot.symlink_to("/dev/full")
    status, _, err = cli("summary", make("a", [1.0]), "--plot", plot)
    assert status == 1
    one_line(err, f"cannot write {plot}: No space left on device")


def test_the_folder_is_outputs_by_default() -> None:
    assert parser().parse_args([]).folder == "outputs"
