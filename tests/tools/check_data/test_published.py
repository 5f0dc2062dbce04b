"""The published sizes: of options that exist, and consistent with one another."""

from pathlib import Path

from mldec.check_data.examine import OFFICIAL
from mldec.config.compose import config_dir
from mldec.data.table import COCO_NAMES, VOC


def test_official_counts_are_of_options_that_exist() -> None:
    assert set(OFFICIAL) <= {path.stem for path in Path(config_dir(), "data").glob("*.yaml")}


def test_classes_with_known_names_are_as_many() -> None:
    assert OFFICIAL["coco"][2] == {len(COCO_NAMES)}
    assert OFFICIAL["voc2007"][2] == OFFICIAL["voc2012"][2] == {len(VOC)}


def test_divisions_of_the_same_images_have_the_same_sum() -> None:
    """COCO 2014 and 2017 divide the same images, and both lists of NUS-WIDE all of its images."""
    coco_train, coco_val, _ = OFFICIAL["coco"]
    assert {82_783, 118_287} <= coco_train
    assert {40_504, 5_000} <= coco_val
    assert 82_783 + 40_504 == 118_287 + 5_000 == 123_287

    (train,), (val,), _ = OFFICIAL["nuswide_official"]
    assert train + val == 269_648
    assert train in OFFICIAL["nuswide81"][0]
    assert val in OFFICIAL["nuswide81"][1]


def test_every_count_is_a_number_above_0() -> None:
    for sizes in OFFICIAL.values():
        assert len(sizes) == 3
        assert all(count > 0 for counts in sizes for count in counts)
        assert sizes[2], "the number of classes is known of every dataset"
