"""Facts of a checkpoint for its card: initial weights, licenses, cost and metrics."""

import json
from dataclasses import replace

import networks
import pytest

from mldec.data.fingerprint import Fingerprint
from mldec.errors import DataError
from mldec.tools.publish import (
    checkpoint_metrics,
    initial_weights,
    published_config,
    read_results,
    without_folders,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/photos", ".../photos"),
        ("~/photos", ".../photos"),
        ("clip:ViT-B-32:~/w.pt", "clip:ViT-B-32:.../w.pt"),
        *((text, text) for text in ("clip:ViT-B-32:openai", "", "data/voc", "https://a.org/b")),
    ],
)
def test_folders_of_absolute_paths_are_removed(text, shown):
    assert without_folders(text) == shown


def test_config_is_published_without_folders():
    data = {"root": "/home/me/x", "classes": ["/m/01"], "size": 3, "files": ["/home/me/y", 4]}
    shown = {"root": ".../x", "classes": ["/m/01"], "size": 3, "files": [".../y", 4]}
    assert published_config({"name": "a", "data": data}) == {"name": "a", "data": shown}


def with_backbone(loaded, **node):
    backbone = {"_target_": "mldec.backbones.TimmBackbone", "name": "resnet50.a1_in1k", **node}
    return replace(loaded, config=replace(loaded.config, backbone=backbone))


@pytest.mark.parametrize(
    ("node", "weights", "license"),
    [
        ({"pretrained": True}, "timm's weights of resnet50.a1_in1k", "apache-2.0"),
        ({"pretrained": False}, "random weights", "none"),
        (
            {"pretrained": "/home/me/w.pth"},
            "the file .../w.pth in resnet50.a1_in1k",
            "unknown: they were read from a file",
        ),
        ({"_target_": "mine.Net", "name": "x"}, "initial weights of x", "unknown"),
    ],
)
def test_initial_weights_and_their_license(saved, loaded, node, weights, license):
    initial, initial_license, base_model = initial_weights(saved, with_backbone(loaded, **node))
    assert initial == weights
    assert initial_license.startswith(license)
    assert base_model == ("timm/resnet50.a1_in1k" if license == "apache-2.0" else None)


CONTENT = {
    "metrics": {"mAP": 50.5, "OP": None, "classes_seen": 2},
    "intervals": {"mAP": [40.0, 60.25], "OP": [None, None]},
    "images": 7,
    "left_out": [],
    "weights": "ema",
    "checkpoint": "best.pt",
    "per_class": {"a": {"AP": 1.0, "positives": 3}, "b": {"AP": None, "positives": 0}},
}


def written(folder, **changes):
    path = folder / "results.json"
    path.write_text(json.dumps({**CONTENT, **changes}))
    return path


def test_results_of_report_and_evaluate_are_read(tmp_path):
    measured = read_results(written(tmp_path), "ema", "best.pt")
    assert (measured.source, measured.images) == ("from results.json", 7)
    assert measured.metrics == CONTENT["metrics"]
    assert measured.intervals == {"mAP": (40.0, 60.25)}
    assert measured.per_class == CONTENT["per_class"]

    # The file of evaluate has no intervals.
    content = {key: value for key, value in CONTENT.items() if key != "intervals"}
    (tmp_path / "results.json").write_text(json.dumps(content))
    measured = read_results(tmp_path / "results.json", "ema", "outputs/a")
    assert (measured.intervals, measured.per_class.keys()) == ({}, {"a", "b"})


@pytest.mark.parametrize("changes", [{"weights": "raw"}, {"intervals": {"mAP": [1]}}])
def test_unusable_results_are_an_error(tmp_path, changes):
    with pytest.raises(DataError, match=r"results\.json"):
        read_results(written(tmp_path, **changes), "ema", "best.pt")


def test_metrics_of_a_run_depend_on_the_weights(saved):
    both = replace(saved, epoch=3, metrics={"val/mAP": 90.0, "val_raw/mAP": 80.0})
    assert checkpoint_metrics(both, "ema").metrics == {"mAP": 90.0}
    assert checkpoint_metrics(both, "raw").metrics == {"mAP": 80.0}
    alone = replace(saved, metrics={"val/mAP": 70.0})
    assert checkpoint_metrics(alone, "raw").metrics == {"mAP": 70.0}


def test_metrics_at_the_thresholds_are_out_of_fold_or_name_their_threshold(saved):
    config = {**saved.config, "data": {**saved.config["data"], "threshold": 0.75}}
    metrics = {"val_raw/mAP": 80.0, "val_raw/OF1": 40.0}
    calibration = networks.CALIBRATION
    fitted = replace(calibration, metrics={"OF1": 60.0, "ECE": 2.0})

    known = {}
    for name, stored in (("none", None), ("older", calibration), ("fitted", fitted)):
        checkpoint = replace(saved, config=config, metrics=metrics, calibration=stored)
        assert checkpoint_metrics(checkpoint, "raw").images is None
        checkpoint = replace(checkpoint, val_fingerprint=Fingerprint(24, "", "", ""))
        known[name] = checkpoint_metrics(checkpoint, "raw")
    assert known["fitted"].metrics == {"mAP": 80.0, "OF1": 60.0, "ECE": 2.0}
    assert "out-of-fold" in known["fitted"].thresholds
    assert known["fitted"].images == 24
    for name in ("none", "older"):
        assert known[name].metrics == {"mAP": 80.0, "OF1": 40.0}
        assert "0.75" in known[name].thresholds
