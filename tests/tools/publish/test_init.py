"""The command line of `mldec.publish`."""

import argparse

import pytest

from mldec.publish import parser


def test_the_defaults_leave_choices_to_the_checkpoint() -> None:
    args = parser().parse_args(["outputs/digits", "me/digits"])
    assert args == argparse.Namespace(
        checkpoint="outputs/digits",
        repository="me/digits",
        private=False,
        dry_run=None,
        weights=None,
        results=None,
        license=None,
        plugin=[],
    )


@pytest.mark.parametrize(
    "words", [["outputs/digits"], ["a", "b/c", "--weights", "best"], ["a", "b/c", "--dry-run"]]
)
def test_wrong_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(words)
    assert "usage: python -m mldec.publish" in capsys.readouterr().err
