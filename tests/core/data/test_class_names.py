"""The class names of COCO and VOC: their order is that of every published network."""

import json
from pathlib import Path

import pytest

from mldec.data.table import COCO_NAMES, VOC, names_fault


@pytest.mark.parametrize(("names", "count"), [(COCO_NAMES, 80), (VOC, 20)])
def test_there_are_so_many_different_ones(names: tuple[str, ...], count: int) -> None:
    assert len(set(names)) == len(names) == count
    assert names_fault(names) is None
    assert all(name == name.strip().lower() for name in names)


def test_coco_is_in_the_order_of_the_category_ids(sample_data: Path) -> None:
    file = sample_data / "coco2014_mini" / "annotations" / "instances_val2014.json"
    categories = json.loads(file.read_text())["categories"]
    by_id = sorted(categories, key=lambda category: category["id"])
    assert tuple(category["name"] for category in by_id) == COCO_NAMES


def test_voc_is_in_alphabetical_order_and_has_a_list_of_each_class(sample_data: Path) -> None:
    assert list(VOC) == sorted(VOC)
    lists = [path.stem for path in (sample_data / "voc2012_mini").rglob("*_trainval.txt")]
    assert sorted(name.removesuffix("_trainval") for name in lists) == list(VOC)
