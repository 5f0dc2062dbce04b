"""What the command prints, and in which precision; runs of it are in test_evaluate.py."""

import pytest
import torch

from mldec.config.compose import compose, override
from mldec.config.schema import Config
from mldec.evaluation.command import choose_precision, table

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
        ("auto", [], "auto", None),
    ],
)
def test_half_precision_is_left_out_on_a_cpu_unless_it_is_chosen(
    config: Config,
    recorded: str,
    words: list[str],
    used: str,
    level: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "mldec")
    changed = override(config, [f"train.precision={recorded}"])
    choose_precision(changed, words, CPU)
    assert changed.train.precision.value == used
    assert [record.levelname for record in caplog.records] == ([level] if level else [])

    on_cuda = override(config, [f"train.precision={recorded}"])
    choose_precision(on_cuda, words, torch.device("cuda"))
    assert on_cuda.train.precision.value == recorded


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
