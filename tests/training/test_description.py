"""What a run says of its start weights; its other lines need a trainer: test_trainer.py."""

from dataclasses import replace
from pathlib import Path

import pytest

from mldec import build
from mldec.config.compose import compose
from mldec.training.description import start_weights


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["+experiment=coco_tresnet_l"], "the published tresnet_v2_l.miil_in21k; the head is ran"),
        (["+experiment=coco_tresnet_l", "init=zoo:tresnet_l_pretrain"], "init=zoo:tresnet_l_pret"),
        (["+experiment=coco_tresnet_l", "backbone.pretrained=l.pth"], "backbone.pretrained=l.pth;"),
        (["+experiment=coco_tresnet_xl_640"], "random"),
    ],
)
def test_the_log_names_the_weights_that_a_run_starts_from(words: list[str], expected: str) -> None:
    config = compose(words)
    config = build.recorded(config, build.check(config))
    assert start_weights(config).startswith(f"start weights: {expected}")
    resumed = start_weights(config, Path("last.pt"))
    assert resumed.startswith(f"start weights: last.pt, of a run that began with: {expected}")


def test_of_a_backbone_without_pretrained_the_log_names_the_class() -> None:
    config = replace(compose(["+experiment=digits"]), backbone={"_target_": "patches.Patches"})
    expected = "start weights: those that patches.Patches is built with; the head is random"
    assert start_weights(config) == expected
