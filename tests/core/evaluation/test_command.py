"""What the command prints, and in which precision; runs of it are in test_evaluate.py."""

import pytest
import torch

from mldec.config.compose import compose, override
from mldec.config.schema import Config
from mldec.evaluation import fit_to_device, table
from mldec.runtime import distributed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config() -> Config:
    return compose(["+experiment=digits"])


@pytest.mark.parametrize(
    ("recorded", "words", "used", "level"),
    [
        ("bf16", [], "fp32", "INFO"),
        ("fp16", [], "fp32", "INFO"),
        ("bf16", ["train.precision=bf16"], "bf16", "WARNING"),
        ("fp32", [], "fp32", None),
        ("fp16", ["train.precision=fp16"], "fp32", "INFO"),
        ("auto", [], "fp32", None),
    ],
)
def test_half_precision_is_left_out_on_a_cpu_unless_it_is_chosen(
    config: Config,
    recorded: str,
    words: list[str],
    used: str,
    level: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO", "mldec")
    prepared = []
    monkeypatch.setattr(distributed, "prepare_device", lambda *device, tf32: prepared.append(tf32))
    changed = override(config, [f"train.precision={recorded}"])
    fit_to_device(changed, words, CPU)
    assert changed.train.precision.value == used
    assert [record.levelname for record in caplog.records] == ([level] if level else [])

    on_cuda = override(config, [f"train.precision={recorded}", "train.tf32=true"])
    fit_to_device(on_cuda, words, torch.device("cuda:0"))
    assert on_cuda.train.precision.value == recorded
    assert (changed.train.channels_last, on_cuda.train.channels_last) == (False, True)
    assert prepared == [False, True]


def test_percentages_stand_above_numbers_of_classes() -> None:
    lines = table({"mAP": 12.3456, "classes_x": 81.0, "CF1": 5.0, "classes_long": 6.0}).split("\n")
    assert lines == [
        "  mAP            12.346",
        "  CF1             5.000",
        "number of classes:",
        "  classes_x          81",
        "  classes_long        6",
    ]
    assert "classes" not in table({"mAP": 1.0})
