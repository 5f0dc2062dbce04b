"""The options of the jobs: their defaults, and values that are refused."""

import subprocess
import sys

import pytest

from mldec.benchmark import options, parser


def test_the_options_of_a_trial() -> None:
    args = parser().parse_args(["throughput"])
    assert (args.experiment, args.classes, args.repeats) == ("coco_tresnet_l", 80, 20)
    assert parser().parse_args(["profile", "--trace", "x.json"]).trace == "x.json"


def test_only_settings_choose_the_device_of_a_trial() -> None:
    assert parser().parse_args(["head", "--device", "cpu"]).device == "cpu"
    assert not hasattr(parser().parse_args(["profile"]), "device")


@pytest.mark.parametrize("option", ["--classes", "--repeats"])
def test_numbers_from_one_on(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["throughput", option, "0"])
    assert "whole number from 1 on" in capsys.readouterr().err


def test_help_imports_nothing_slow() -> None:
    code = f"import sys, {options.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
