"""The command line of the report, in a process of its own."""

import sys
from pathlib import Path

import pytest
from support import cpu_seconds

from mldec import report


@pytest.mark.slow
def test_a_report_on_digits_takes_seconds(digits_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    words = [str(digits_run), "--plugin", "patches", "data.val_images=2048", "--out", str(out)]
    assert cpu_seconds([sys.executable, "-m", "mldec.report", *words]) < 30
    assert out.stat().st_size < 10_000_000


def test_the_command_line_has_defaults() -> None:
    args = report.parser().parse_intermixed_args(["x.pt", "data.root=/data", "--out", "r.html"])
    assert (args.compare, args.threshold, args.settings) == (None, None, ["data.root=/data"])
    for words in (["x.pt"], ["x.pt", "--out", "r.html", "--threshold", "2"], ["--out", "r.html"]):
        with pytest.raises(SystemExit):
            report.parser().parse_intermixed_args(words)
