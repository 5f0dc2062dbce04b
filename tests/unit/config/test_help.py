"""The help of `mldec train` and of its experiments."""

import re
from pathlib import Path

import pytest
import yaml
from support import one_line

from mldec.config.compose import check_key, compose, config_dir, flat, options, to_dict
from mldec.config.help import SETTINGS, help_text
from mldec.config.schema import PARTS, Config


def settings_in(text):
    """Return the lines with a setting: values and the rest of the line by key."""
    found = re.findall(r"^  ([a-z][\w.]*)=(\S+) *(.*)$", text, re.MULTILINE)
    return {key: (value, rest) for key, value, rest in found}


def test_help_lists_settings_with_their_defaults():
    shown = settings_in(help_text([]))
    assert shown.keys() == SETTINGS.keys()
    assert {"data.root", "train.epochs", "optim.lr", "resume", "init", *PARTS} <= shown.keys()

    defaults = flat(to_dict(Config(name="x", data={}, backbone={}, head={})))
    for key, (value, meaning) in shown.items():
        check_key(key)
        assert meaning
        if key in defaults and key != "name":
            assert yaml.safe_load(value) == defaults[key], key


def test_help_lists_all_options_in_lines_of_a_terminal(tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "mine_too.yaml").touch()
    text = help_text([f"--config-dir={tmp_path}"])
    names = {name for part in ("experiment", *PARTS) for name in options(part)}
    assert names | {"mine_too"} <= set(re.findall(r"\w+", text))
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("name", ["coco_tresnet_l", "nuswide_zsl_clip_b16"])
def test_help_of_experiment_shows_header_and_changes(name):
    lines = help_text(["train.epochs=3", f"+experiment={name}", "--help"]).splitlines()
    file = Path(config_dir(), "experiment", f"{name}.yaml").read_text()
    header = re.findall(r"^#(?! @package) ?(.*)", file.partition("\ndefaults:")[0], re.MULTILINE)
    assert lines[: len(header)] == header

    # The settings give the same config without the experiment.
    shown = settings_in("\n".join(lines[len(header) :]))
    words = [f"{key}={value}" for key, (value, _) in shown.items()]
    assert compose([f"name={name}"] + words) == compose([f"+experiment={name}"])


def test_help_of_own_experiment(tmp_path):
    (tmp_path / "experiment").mkdir()
    content = "# @package _global_\n# About mine.\ndefaults:\n  - digits\n  - _self_\n\nseed: 5\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(content + "name: mine\n")
    text = help_text(["--config-dir", str(tmp_path), "+experiment=mine"])
    assert text.startswith("About mine.\n")
    shown = settings_in(text)
    assert shown["seed"] == ("5", "(0)")
    assert shown["train.epochs"] == ("2", "(40)")


def test_unknown_experiment_is_one_line_with_nearest_name(cli):
    one_line(cli.fault("train", "+experiment=digts", "--help"), "experiment=digts", "'digits'")
