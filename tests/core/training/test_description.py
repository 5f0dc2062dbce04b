"""What a run says of its start weights; its other lines need a trainer: test_trainer.py."""

from dataclasses import replace
from pathlib import Path

import pytest

from mldec import build
from mldec.config.compose import compose
from mldec.training.trainer import groups, start_weights


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


@pytest.mark.parametrize(
    ("wanted", "classes", "expected"),
    [
        (None, 12, None),
        (100, 12, "head.num_groups=100: one query for each of the 12 classes"),
        (12, 12, "head.num_groups=12: one query for each of the 12 classes"),
        (5, 12, "head.num_groups=5: 4 queries for 12 classes, 3 per query"),
        (200, 9605, "head.num_groups=200: 197 queries for 9,605 classes, 49 per query"),
        (1, 80, "head.num_groups=1: 1 queries for 80 classes, 80 per query; the paper has at most"),
    ],
)
def test_the_log_says_how_classes_share_queries(
    wanted: int | None, classes: int, expected: str | None
) -> None:
    line = groups({"num_groups": wanted}, classes)
    assert line is None if expected is None else str(line).startswith(expected)
    if classes > 12 and wanted == 200:
        assert str(line) == expected
    assert groups({}, classes) is None


def test_of_a_backbone_without_pretrained_the_log_names_the_class() -> None:
    config = replace(compose(["+experiment=digits"]), backbone={"_target_": "patches.Patches"})
    expected = "start weights: those that patches.Patches is built with; the head is random"
    assert start_weights(config) == expected
