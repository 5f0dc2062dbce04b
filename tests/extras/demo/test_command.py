"""The demo command: options, address and model."""

import networks
import pytest
from support import one_line

from mldec.errors import CheckpointError, ConfigError
from mldec.tools.demo import listener, parser, print_address
from mldec.tools.predict.engine import EngineOptions, ExportedEngine, open_engine


def opened(*words):
    args = parser().parse_args([str(word) for word in words])
    return open_engine(EngineOptions.of(vars(args)), typed_classes=True)


def test_port_in_use_is_an_error_before_the_model_is_loaded(cli):
    with listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        one_line(cli.fault("demo", "absent.pt", "--port", str(port)), f"--port {port}")


@pytest.mark.parametrize(
    ("host", "port"),
    [("127.0.0.1", 65536), ("127.0.0.1", 10**30)]
    + [(host, 0) for host in ("", ".", "http://localhost", "[::1]", "a" * 300, "a\0b")],
)
def test_invalid_address_is_an_error(host, port):
    with pytest.raises(ConfigError, match="--host"):
        listener(host, port)


def test_address_on_a_network_has_a_warning(capsys):
    for host, warns in (("127.0.0.1", False), ("0.0.0.0", True)):
        with listener(host, 0) as server:
            print_address(host, server)
        out, err = capsys.readouterr()
        assert out.startswith(f"http://{host}:")
        assert ("--host 0.0.0.0" in err) == warns


def test_checkpoint_and_exported_file_are_opened(tmp_path):
    calibrated = networks.save_calibrated(tmp_path / "calibrated.pt")
    assert opened(calibrated, "--device", "cpu").thresholds == pytest.approx([0.2, 0.4, 0.6])
    exported = networks.save_onnx(tmp_path / "x.onnx", "words")
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("".join(f"thing_{number} 1 0 {number} 0 1\n" for number in range(7)))
    engine = opened(exported, "--vectors", vectors)
    assert isinstance(engine, ExportedEngine)
    assert engine.classes.names == tuple(f"thing {number}" for number in range(7))

    for error, name, words in (
        (ConfigError, "--weights", [exported, "--weights", "raw"]),
        (ConfigError, "--vectors", [calibrated, "--vectors", "x.txt"]),
        (CheckpointError, "--vectors", [exported]),
    ):
        with pytest.raises(error, match=name):
            opened(*words)

    # Released zero-shot files have no classes.
    networks.save_onnx(exported, "words", classes=[])
    assert opened(exported, "--vectors", vectors).classes.names == ()
