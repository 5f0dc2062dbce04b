"""The command of the web page: its options, its address, and the model that it opens."""

import networks
import pytest
from support import one_line

from mldec.errors import CheckpointError, ConfigError
from mldec.tools.demo import announce, listener, parser
from mldec.tools.predict.engine import EngineOptions, ExportedEngine, open_engine


def options(*words):
    return parser().parse_args([*map(str, words)])


def opened(args):
    return open_engine(EngineOptions.of(vars(args)), typed_classes=True)


def test_a_missing_extra_names_the_pip_command(cli, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, out, err = cli("demo", "absent.pt")
    assert (status, out) == (1, "")
    one_line(err, "needs fastapi", "run pip install -e '.[demo]'")


def test_a_port_in_use_is_named_before_the_model_is_loaded(cli):
    with listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        status, out, err = cli("demo", "absent.pt", "--port", str(port))
    assert (status, out) == (1, "")
    one_line(
        err, f"--host 127.0.0.1 --port {port}: cannot listen there", "in use", "another --port"
    )


@pytest.mark.parametrize("port", [65536, 99999, 10**30])
def test_port_above_range_is_an_error(port):
    with pytest.raises(ConfigError, match=f"^--port {port}: "):
        listener("127.0.0.1", port)


@pytest.mark.parametrize("host", ["", ".", "http://localhost", "[::1]", "a" * 300, "a\0b"])
def test_host_that_is_no_address_is_an_error(host):
    with pytest.raises(ConfigError, match=r"^--host "):
        listener(host, 0)


def test_the_console_says_who_can_reach_the_page(capsys):
    with listener(options("x").host, 0) as server:
        announce(options("x"), server)
    out, err = capsys.readouterr()
    assert out.endswith(": only this machine can reach it; Ctrl-C ends it\n")
    assert err == ""

    for words, risk in (([], "without a password"), (["--token", "x"], "knows the token")):
        with listener("0.0.0.0", 0) as server:
            announce(options("x", "--host", "0.0.0.0", *words), server)
        out, err = capsys.readouterr()
        assert out.endswith(": Ctrl-C ends it\n")
        one_line(err, "--host 0.0.0.0: anyone who reaches port", risk)


def test_a_checkpoint_and_an_exported_file_are_opened(tmp_path):
    calibrated = networks.save_calibrated(tmp_path / "calibrated.pt")
    engine = opened(options(calibrated, "--device", "cpu"))
    assert engine.thresholds == pytest.approx([0.2, 0.4, 0.6])
    exported = networks.save_onnx(tmp_path / "x.onnx", "gap")
    assert isinstance(opened(options(exported)), ExportedEngine)
    with pytest.raises(ConfigError, match="--weights has no effect on an exported file"):
        opened(options(exported, "--weights", "raw"))
    with pytest.raises(ConfigError, match="--vectors has no effect"):
        opened(options(calibrated, "--vectors", "x.txt"))


def test_an_exported_zero_shot_file_needs_vectors(tmp_path):
    path, vectors = networks.save_onnx(tmp_path / "x.onnx", "words"), tmp_path / "vectors.txt"
    with pytest.raises(CheckpointError, match="pass --vectors"):
        opened(options(path))
    vectors.write_text("".join(f"thing_{number} 1 0 {number} 0 1\n" for number in range(7)))
    engine = opened(options(path, "--vectors", vectors))
    assert engine.classes.names == tuple(f"thing {number}" for number in range(7))
    # A released zero-shot file has no classes of its own.
    path = networks.save_onnx(path, "words", classes=[])
    assert opened(options(path, "--vectors", vectors)).classes.names == ()
