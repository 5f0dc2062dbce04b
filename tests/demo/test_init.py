"""The command line of the web page."""

import pytest

from mldec.demo import HOST, PORT, parser


def test_the_page_is_local_by_default() -> None:
    args = parser().parse_args(["best.pt"])
    assert (args.host, args.port) == (HOST, PORT) == ("127.0.0.1", 7860)
    assert (args.vectors, args.device) == (None, "auto")
    args = parser().parse_args(["x.onnx", "--port", "0", "--host", "0.0.0.0"])
    assert (args.checkpoint, args.port, args.host) == ("x.onnx", 0, "0.0.0.0")


@pytest.mark.parametrize("words", [[], ["x", "--port", "65536"], ["x", "--port", "-1"]])
def test_wrong_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parser().parse_args(words)
    assert stop.value.code == 2
    assert "usage: python -m mldec.demo" in capsys.readouterr().err
