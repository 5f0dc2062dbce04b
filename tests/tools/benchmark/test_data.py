"""The job `data`: the parts of the training transform."""

import json

import pytest
from pictures import picture, saved

from mldec.tools.benchmark import data
from mldec.tools.benchmark.data import PARTS

pytest.importorskip("simplejpeg", reason="the fast decoder")


def test_parts_add_up(cli, tmp_path, monkeypatch):
    for name, value in {"ROUNDS": 1, "IMAGES": 2, "SIZE": 64}.items():
        monkeypatch.setattr(data, name, value)
    photos = tmp_path / "photos" / "subfolder"
    photos.mkdir(parents=True)
    for number in range(3):
        saved(picture(160, 120, seed=number), photos / f"{number}.jpg")
    (photos / "notes.txt").write_text("no image")

    cli.out("benchmark", "data", photos.parent, "--json", tmp_path / "r.json")
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    for name in ("default", "fast"):
        *parts, total = [figures[f"{name}_{part}_ms"] for part in PARTS]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(total)
        assert figures[f"{name}_images_per_second"] == pytest.approx(1000 / total)
