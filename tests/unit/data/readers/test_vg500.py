"""Visual Genome 500: lists, folders and class names."""

import pytest
from readers import targets
from support import made
from trees import tree

from mldec.data.readers import vg500


@pytest.fixture
def build(tmp_path):
    return tree("vg500", tmp_path)


def positives(split):
    return [[column for column, value in enumerate(row) if value] for row in targets(split)]


def test_images_are_in_order_of_lists(build):
    data = build()
    assert positives(data.train) == [[499], [0, 3], []]
    assert positives(data.val) == [[3, 7]]
    assert data.train.dataset.name(2) == str(build.root / "VG_100K" / "20.jpg")
    assert data.val.classes.names == tuple(f"class {number}" for number in range(500))

    lines = [f"thing {number}" for number in range(500)]
    (build.root / "names.txt").write_text("\n".join(lines))
    assert build(classes="names.txt").val.classes.names == tuple(lines)


def test_images_are_in_two_folders(build):
    before = positives(build().train)
    (build.root / "VG_100K_2").mkdir()
    (build.root / "VG_100K" / "1.jpg").rename(build.root / "VG_100K_2" / "1.jpg")
    data = build()
    assert positives(data.train) == before
    inner = ("VG_100K/300.jpg", "VG_100K_2/1.jpg", "VG_100K/20.jpg")
    paths = [data.train.dataset.name(index) for index in range(3)]
    assert paths == [str(build.root / path) for path in inner]


def test_evaluation_needs_no_training_list(build, tmp_path):
    (build.root / "train_list_500.txt").unlink()
    data = made(vg500, root=str(build.root), cache_dir=str(tmp_path / "cache"))
    assert len(data.val.dataset) == 1
    assert "train_list_500" in build.fault()
