"""The command line of the export."""

import pytest

from mldec.export import PRECISIONS, parser


def test_the_checkpoint_comes_first_and_then_the_file() -> None:
    args = parser().parse_args(["best.pt", "x.onnx", "--precision", "int8", "--verify", "photos"])
    assert (args.checkpoint, args.out, args.precision) == ("best.pt", "x.onnx", "int8")
    assert (args.verify, args.any_size, args.threshold) == ("photos", False, None)
    assert parser().parse_args(["best.pt", "x.pt2"]).precision == PRECISIONS[0] == "fp32"


@pytest.mark.parametrize(
    "words",
    [["best.pt"], ["best.pt", "x.onnx", "--precision", "fp8"], ["a", "b", "--threshold", "2"]],
)
def test_wrong_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(words)
    assert stop.value.code == 2
    assert "usage: python -m mldec.export" in capsys.readouterr().err
