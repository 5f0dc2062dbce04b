"""The benchmark of a data set's start reads annotations of COCO's form."""

from pathlib import Path

import pytest

from mldec.benchmark import labels


def test_two_starts_find_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "COCO_TRAIN", (60, 400))
    labels._write_full_size(tmp_path)
    first = labels._start_coco(str(tmp_path))
    assert 0 < first["images"] <= 60, "an image without an object is left out"
    assert list((tmp_path / "cache").rglob("*")), "the next start need not read them again"

    second = labels._start_coco(str(tmp_path))
    assert second["images"] == first["images"]
