"""The pointing game: boxes of the scenes, maxima of maps, and what counts."""

import importlib
import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mldec.checkpoint import load_model
from mldec.data.transforms import EvalTransform
from mldec.predict import heat_maps as relevance

FOLDER = str(Path(__file__).parents[3] / "scripts" / "studies")
sys.path.insert(0, FOLDER)
pointing = importlib.import_module("pointing")
sys.path.remove(FOLDER)


@pytest.fixture(scope="module")
def loaded(digits_run: Path) -> Any:
    return load_model(digits_run, plugins=["patches"], device="cpu")


def test_a_maximum_counts_if_it_lies_in_a_box() -> None:
    heat = torch.zeros(8, 8)
    heat[6, 1] = 2
    assert pointing.maximum(heat) == (0.1875, 0.8125)
    assert pointing.inside((0.1875, 0.8125), [(0.5, 0, 1, 0.5), (0, 0.5, 0.2, 1)])
    assert not pointing.inside((0.1875, 0.8125), [(0.5, 0.5, 1, 1)])
    assert not pointing.inside((0.5, 0.25), [(0, 0, 0.5, 0.5)]), "right and bottom are outside"


def test_boxes_that_overlap_cover_their_union() -> None:
    assert pointing.covered([(0, 0, 0.5, 0.5)]) == 0.25
    assert pointing.covered([(0, 0, 0.5, 0.5), (0.25, 0, 0.75, 0.5), (0, 0, 0.5, 0.5)]) == 0.375
    assert pointing.covered([]) == 0


def test_squares_of_digits_hold_their_ink(loaded: Any) -> None:
    scenes = pointing.digit_scenes(loaded)
    assert scenes.images.shape == (40, 3, 64, 64)
    assert sum(map(len, scenes.boxes)) > 40

    # Within its square, an image varies more than noise does.
    for image, own in zip(scenes.images, scenes.boxes, strict=True):
        for left, top, right, bottom in (box for boxes in own.values() for box in boxes):
            part = image[:, round(64 * top) : round(64 * bottom)]
            part = part[..., round(64 * left) : round(64 * right)].float()
            assert part.amax() - part.amin() > 60


def test_boxes_of_photos_are_in_the_pixels_of_the_originals(loaded: Any, tmp_path: Path) -> None:
    for folder, size in (("small", (20, 10)), ("originals", (200, 100))):
        (tmp_path / folder).mkdir()
        Image.new("RGB", size).save(tmp_path / folder / "x.jpg")
    (tmp_path / "small" / "data.csv").write_text("path,labels,split\nx.jpg,two,val\ny.jpg,,train\n")
    content = {
        "images": {"7": "x.jpg"},
        "categories": [{"id": 3, "name": "two"}],
        "annotations": [{"image_id": 7, "category_id": 3, "bbox": [50, 10, 150, 90]}],
    }
    (tmp_path / "boxes.json").write_text(json.dumps(content))
    scenes = pointing.photo_scenes(
        replace(loaded, transform=EvalTransform(image_size=16)),
        tmp_path / "small",
        tmp_path / "boxes.json",
        tmp_path / "originals",
    )
    assert scenes.images.shape == (1, 3, 16, 16)
    assert scenes.boxes == [{2: [(0.25, 0.1, 0.75, 0.9)]}]


def test_the_game_counts_pairs_that_the_model_finds(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = pointing.digit_scenes(loaded).images[:4]
    everywhere, nowhere = [(0.0, 0.0, 1.0, 1.0)], [(0.0, 0.0, 0.0, 0.0)]
    scenes = pointing.Scenes(images, [{1: everywhere}, {}, {2: nowhere, 5: everywhere}, {}])

    monkeypatch.setattr(pointing, "FOUND", 0.0)
    result = pointing.judge(loaded, scenes)
    assert result["method"] == relevance.ATTENTION
    assert result["pairs"] == 3
    assert result["chance"] == pytest.approx(200 / 3)
    assert result["inside"] == {
        name: pytest.approx(200 / 3)
        for name in ("cells", "own", "through_attention", "times_tokens")
    }

    scores = loaded.model(images).sigmoid().detach()
    monkeypatch.setattr(pointing, "FOUND", float(scores[2, 5]))
    expected = [1.0] * int(scores[0, 1] >= scores[2, 5]) + [1.0]
    expected += [0.0] * int(scores[2, 2] >= scores[2, 5])
    assert pointing.judge(loaded, scenes)["pairs"] == len(expected)


def test_a_report_keeps_the_rows_that_are_not_judged(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outputs" / "pointing_gap_0" / "checkpoints").mkdir(parents=True)
    (tmp_path / "outputs" / "pointing_gap_0" / "checkpoints" / "best.pt").touch()
    monkeypatch.setattr(pointing, "TOP", tmp_path)
    monkeypatch.setattr(pointing, "OUT", tmp_path / "pointing.json")
    monkeypatch.setattr(pointing, "load_model", lambda folder, device: loaded)
    (tmp_path / "pointing.json").write_text('{"rows": [{"row": "photos_gap"}, {"row": "gap"}]}')

    pointing.report(Namespace(part="digits", photos=None, seeds=2))
    kept = json.loads((tmp_path / "pointing.json").read_text())["rows"]
    assert [row["row"] for row in kept] == ["gap", "photos_gap"]
    assert [run["seed"] for run in kept[0]["runs"]] == [0]
    assert kept[0]["runs"][0]["inside"] == kept[0]["inside"]
    assert kept[1] == {"row": "photos_gap"}
