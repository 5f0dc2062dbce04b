"""The benchmark of the training transform measures every part of every way."""

import json

import pytest
import torch
from pictures import picture, saved
from support import one_line

from mldec.data.sampling import SampleRandom
from mldec.tools.benchmark import data as measure_data
from mldec.tools.benchmark.data import PARTS, official, ours

pytest.importorskip("simplejpeg", reason="the fast path needs it")


@pytest.fixture
def small(monkeypatch):
    """Measure next to nothing."""
    for name, value in {"ROUNDS": 1, "IMAGES": 2, "SIZE": 64}.items():
        monkeypatch.setattr(measure_data, name, value)


def test_the_job_writes_its_figures(cli, tmp_path, small):
    photos = tmp_path / "photos"
    (photos / "deeper").mkdir(parents=True)
    for number in range(3):
        saved(picture(160, 120, seed=number), photos / "deeper" / f"{number}.jpg")
    (photos / "notes.txt").write_text("no image")

    threads = torch.get_num_threads()
    out = cli.out("benchmark", "data", photos, "--json", tmp_path / "r.json")
    assert torch.get_num_threads() == threads
    assert "milliseconds per image, of the photos" in out
    assert out.count("official transform") == 2

    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    assert all(isinstance(value, int | float) for value in figures.values())
    for subject in ("made", "photos"):
        for way in measure_data.WAYS:
            parts = [figures.get(f"{subject}_{way}_{part}_ms", 0.0) for part in PARTS]
            own = figures.get(f"{subject}_{way}_seeding_ms", 0.0)
            assert sum(parts) + own == pytest.approx(figures[f"{subject}_{way}_all_ms"])

    # A file that scripts may read.
    assert figures["images_per_second"] == figures["made_default_images_per_second"] > 1
    assert figures["official_images_per_second"] > 1
    assert figures["times_official"] == figures["photos_times_official"] > 0
    assert figures["times_official_fast"] == figures["photos_times_official_fast"] > 0
    assert figures["file_kib"] > 50


def test_a_folder_without_images_is_refused(cli, tmp_path):
    one_line(cli.fault("benchmark", "data", tmp_path), str(tmp_path))


@pytest.fixture
def photo(tmp_path):
    return str(saved(picture(120, 90), tmp_path / "photo.jpg", quality=90))


def through(way, path, seed):
    rng = SampleRandom(seed)
    for step in way.values():
        path = step(path, rng)
    return path


def test_the_official_transform_has_our_pixels(photo):
    theirs, our_own = official(64), ours(64)
    assert tuple(theirs) == tuple(our_own) == PARTS
    for seed in range(150):
        image = through(theirs, photo, seed)
        assert image.dtype == torch.float32
        expected = through(our_own, photo, seed)
        assert torch.equal((255 * image).round().to(torch.uint8), expected), seed
