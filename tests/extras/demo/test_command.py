"""The demo command: options, address and model."""

import networks
import pytest
from support import one_line

from mldec.tools.demo import listener, print_address


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--vectors", "x.txt", "--port", "0"], "--vectors"),
        (["--port", "65536"], "--port 65536"),
        (["--port", "0", "--host", "[::1]"], "--host"),
    ],
)
def test_invalid_options_are_errors(cli, tmp_path, words, name):
    calibrated = networks.save_calibrated(tmp_path / "calibrated.pt")
    one_line(cli.fault("demo", calibrated, *words), name)


def test_missing_extra_names_the_pip_command(cli, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, out, err = cli("demo", __file__)
    assert (status, out) == (1, "")
    one_line(err, "fastapi", "run pip install -e '.[demo]'")


def test_a_port_in_use_is_named_before_the_model_is_loaded(cli):
    with listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}" in cli.fault("demo", __file__, "--port", str(port))


def test_address_on_a_network_has_a_warning(capsys):
    for host, warns in (("127.0.0.1", False), ("0.0.0.0", True)):
        with listener(host, 0) as server:
            print_address(host, server)
        out, err = capsys.readouterr()
        assert out.startswith(f"http://{host}:")
        assert ("--host 0.0.0.0" in err) == warns
