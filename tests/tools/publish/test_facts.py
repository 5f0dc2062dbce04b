"""What a card says of start weights, licences and cost, and what it leaves out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import hostile
import pytest

from mldec.checkpoint import Checkpoint, Loaded, load_model, published
from mldec.publish import command_of, cost_of, published_config, start_of, without_folders
from mldec.runtime.facts import count_parameters, multiply_accumulates


@pytest.fixture(scope="module")
def saved() -> Checkpoint:
    return Checkpoint.from_state(hostile.good(), Path("x"))


@pytest.fixture(scope="module")
def loaded(saved: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("facts")
    published.write(folder, published.with_weights(saved, "raw", folder))
    return load_model(folder)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/photos", ".../photos"),
        ("~/secret/x.csv", ".../x.csv"),
        ("/data", ".../data"),
        ("[/home/me/a.tar, 'b/c', \"~/d e.tar\"]", "[.../a.tar, 'b/c', \".../d e.tar\"]"),
        ("clip:/home/me/tower", "clip:.../tower"),
        ("clip:ViT-B-32:~/w.pt", "clip:ViT-B-32:.../w.pt"),
        *((text, text) for text in ("clip:ViT-B-32:openai", "clip:hf-hub:me/x")),
        *((text, text) for text in ("", "/", ";", "data/voc", "../x", "zoo:x", "https://a.org/b")),
    ],
)
def test_folders_of_absolute_paths_are_left_out(text: str, shown: str) -> None:
    assert without_folders(text) == shown


def test_a_config_keeps_everything_but_folders() -> None:
    data = {"root": "/home/me/x", "classes": ["/m/01"], "size": 3, "files": ["/home/me/y", 4]}
    shown = {"root": ".../x", "classes": ["/m/01"], "size": 3, "files": [".../y", 4]}
    assert published_config({"name": "a", "data": data}) == {"name": "a", "data": shown}


def with_backbone(loaded: Loaded, **node: Any) -> Loaded:
    backbone = {"_target_": "mldec.backbones.TimmBackbone", "name": "resnet50.a1_in1k", **node}
    return replace(loaded, config=replace(loaded.config, backbone=backbone))


def test_the_licence_of_published_weights_is_that_of_timm(
    saved: Checkpoint, loaded: Loaded
) -> None:
    start = start_of(saved, with_backbone(loaded, pretrained=True))
    assert start == ("timm's weights of resnet50.a1_in1k", "apache-2.0", "timm/resnet50.a1_in1k")


@pytest.mark.parametrize(
    ("node", "weights", "licence"),
    [
        ({"pretrained": False}, "random weights", "none: no weights of others were used"),
        (
            {"pretrained": "/home/me/w.pth"},
            "the file .../w.pth in resnet50.a1_in1k",
            "unknown: they were read from a file; timm states apache-2.0 for the weights of that",
        ),
        (
            {"pretrained": "w.pth", "name": "resnet50.none"},
            "the file w.pth in resnet50.none",
            "unknown: they were read from a file",
        ),
        ({"pretrained": True, "name": "none"}, "timm's weights of none", "unknown to timm"),
        (
            {"pretrained": True, "_target_": "mldec.backbones.HFBackbone", "name": "/home/me/x"},
            "published weights of .../x",
            "unknown: they are not from timm",
        ),
        ({"_target_": "mine.Net"}, "those that mine.Net is built with", "unknown: the backbone"),
    ],
)
def test_what_is_not_known_of_a_start_is_said(
    saved: Checkpoint, loaded: Loaded, node: dict[str, Any], weights: str, licence: str
) -> None:
    start = start_of(saved, with_backbone(loaded, **node))
    assert start.weights == weights
    assert start.licence.startswith(licence)
    assert start.base_model is None


def test_other_starts_are_unknown(saved: Checkpoint, loaded: Loaded) -> None:
    begun = replace(saved, config={**saved.config, "init": "/home/me/x.pth"})
    assert start_of(begun, loaded)[:2] == ("init=.../x.pth", "unknown: see these weights")
    of_authors = replace(saved, step=0)
    assert start_of(of_authors, loaded).licence.startswith("unknown: the weights are not those")


def test_the_cost_is_computed_and_what_the_run_says(loaded: Loaded, tmp_path: Path) -> None:
    costs = dict(cost_of(loaded, tmp_path / "best.pt"))
    size = loaded.transform.image_size
    macs = multiply_accumulates(loaded.model, size) / 1e9
    assert costs["Parameters"] == f"{count_parameters(loaded.model)[1]:,}"
    assert (
        costs["Multiply-accumulates"] == f"{macs:,.3f} billion per image, at {size} x {size} pixels"
    )
    assert costs["Training time"].startswith("unknown")
    assert command_of(tmp_path / "best.pt") is None

    run = {"name": "x", "versions": {}, "commit": None, "epochs": 1, "image_size": 64}
    run |= {"parameters": 1, "multiply_accumulates": None}
    run["command"] = "/usr/bin/python -m mldec.train 'data.root=/home/me/my x' init=zoo:a lr=0.1"
    (tmp_path / "run.json").write_text(json.dumps(run))
    lines = [{"step": step, "time": 100.0 * step} for step in (1, 40)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    expected = ".../python -m mldec.train 'data.root=.../my x' init=zoo:a lr=0.1"
    for path in (tmp_path / "best.pt", tmp_path / "checkpoints" / "best.pt"):
        assert command_of(path) == expected
        assert dict(cost_of(loaded, path))["Training time"].startswith("1:06:40 ")
