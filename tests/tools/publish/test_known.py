"""What is known of a checkpoint: start weights, licences, cost and metrics; what is left out."""

import json
from dataclasses import replace

import pytest

from mldec.data.types import Classes
from mldec.errors import DataError
from mldec.model import count_parameters, multiply_accumulates
from mldec.tools.publish import (
    command_of,
    cost_of,
    of_checkpoint,
    published_config,
    read_results,
    start_of,
    without_folders,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/photos", ".../photos"),
        ("~/secret/x.csv", ".../x.csv"),
        ("[/home/me/a.tar, 'b/c', \"~/d e.tar\"]", "[.../a.tar, 'b/c', \".../d e.tar\"]"),
        ("clip:ViT-B-32:~/w.pt", "clip:ViT-B-32:.../w.pt"),
        *((text, text) for text in ("clip:ViT-B-32:openai", "", "data/voc", "https://a.org/b")),
    ],
)
def test_folders_of_absolute_paths_are_left_out(text, shown):
    assert without_folders(text) == shown


def test_a_config_keeps_everything_but_folders():
    data = {"root": "/home/me/x", "classes": ["/m/01"], "size": 3, "files": ["/home/me/y", 4]}
    shown = {"root": ".../x", "classes": ["/m/01"], "size": 3, "files": [".../y", 4]}
    assert published_config({"name": "a", "data": data}) == {"name": "a", "data": shown}


def with_backbone(loaded, **node):
    backbone = {"_target_": "mldec.backbones.TimmBackbone", "name": "resnet50.a1_in1k", **node}
    return replace(loaded, config=replace(loaded.config, backbone=backbone))


@pytest.mark.parametrize(
    ("node", "weights", "licence"),
    [
        ({"pretrained": True}, "timm's weights of resnet50.a1_in1k", "apache-2.0"),
        ({"pretrained": False}, "random weights", "none: no weights of others were used"),
        (
            {"pretrained": "/home/me/w.pth"},
            "the file .../w.pth in resnet50.a1_in1k",
            "unknown: they were read from a file; timm states apache-2.0 for the weights of that",
        ),
        (
            {"pretrained": True, "_target_": "mldec.backbones.HFBackbone", "name": "/home/me/x"},
            "published weights of .../x",
            "unknown: they are not from timm",
        ),
        ({"_target_": "mine.Net"}, "those that mine.Net is built with", "unknown: the backbone"),
    ],
)
def test_what_a_run_started_from(saved, loaded, node, weights, licence):
    start = start_of(saved, with_backbone(loaded, **node))
    assert start.weights == weights
    assert start.licence.startswith(licence)
    assert start.base_model == ("timm/resnet50.a1_in1k" if licence == "apache-2.0" else None)


def test_the_cost_is_computed_and_what_the_run_says(loaded, tmp_path):
    costs = dict(cost_of(loaded, tmp_path / "best.pt"))
    size = loaded.transform.image_size
    macs = multiply_accumulates(loaded.model, size) / 1e9
    assert costs["Parameters"] == f"{count_parameters(loaded.model)[1]:,}"
    shown = f"{macs:,.3f} billion per image, at {size} x {size} pixels"
    assert costs["Multiply-accumulates"] == shown
    assert costs["Training time"].startswith("unknown")
    assert command_of(tmp_path / "best.pt") is None

    run = {"name": "x", "versions": {}, "commit": None, "epochs": 1, "image_size": 64}
    run |= {"parameters": 1, "multiply_accumulates": None}
    run["command"] = "/usr/bin/mldec train 'data.root=/home/me/my x' init=zoo:a lr=0.1"
    (tmp_path / "run.json").write_text(json.dumps(run))
    lines = [{"step": step, "time": 100.0 * step} for step in (1, 40)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    expected = ".../mldec train 'data.root=.../my x' init=zoo:a lr=0.1"
    for path in (tmp_path / "best.pt", tmp_path / "checkpoints" / "best.pt"):
        assert command_of(path) == expected
        assert dict(cost_of(loaded, path))["Training time"].startswith("1:06:40 ")


CLASSES = Classes(("a", "b"))
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


def test_a_file_of_results_is_read(tmp_path, caplog):
    measured = read_results(written(tmp_path), "ema", "best.pt")
    assert (measured.source, measured.images) == ("from results.json", 7)
    assert measured.metrics == CONTENT["metrics"]
    assert measured.intervals == {"mAP": (40.0, 60.25)}
    assert measured.per_class == CONTENT["per_class"]
    assert caplog.text == ""

    # That of evaluate has no intervals.
    content = {key: value for key, value in CONTENT.items() if key != "intervals"}
    (tmp_path / "results.json").write_text(json.dumps(content))
    measured = read_results(tmp_path / "results.json", "ema", "outputs/a")
    assert (measured.intervals, measured.per_class.keys()) == ({}, {"a", "b"})
    assert "is of best.pt, and outputs/a is published" in caplog.text


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"weights": "raw"}, "it is of the raw weights, and the ema ones are published"),
        ({"intervals": {"mAP": [1]}}, r"cannot be used .* pass a file that mldec report --json"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, changes, fault):
    with pytest.raises(DataError, match=rf"results\.json:? {fault}"):
        read_results(written(tmp_path, **changes), "ema", "best.pt")


def test_the_metrics_of_a_run_are_those_of_the_chosen_weights(saved):
    both = replace(saved, epoch=3, metrics={"val/mAP": 90.0, "val_raw/mAP": 80.0})
    assert of_checkpoint(both, "ema").metrics == {"mAP": 90.0}
    assert of_checkpoint(both, "raw").metrics == {"mAP": 80.0}
    alone = replace(saved, metrics={"val/mAP": 70.0})
    assert of_checkpoint(alone, "raw").metrics == {"mAP": 70.0}
