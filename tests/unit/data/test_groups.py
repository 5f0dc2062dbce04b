"""Groups of images, such as the frames of a video, are never divided between splits or folds."""

import logging

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support import made, write_coco

from mldec.data.columns import Rules
from mldec.data.labels import from_dense
from mldec.data.readers import coco, csv_table, folders
from mldec.data.readers.tables import parse, to_csv
from mldec.data.splits import connect, group_pairs
from mldec.data.table import Table
from mldec.errors import DataError, UserError

VIDEOS = 20
FRAMES = 5
NAMES = ("cat", "dog", "sea")


@pytest.fixture
def table(tmp_path):
    """Write photos of videos and a table with their labels; return a function that reads both."""
    rows = ["path,labels,Video"]
    for video in range(VIDEOS):
        labels = ";".join({NAMES[video % 3], NAMES[video % 2]})
        for frame in range(FRAMES):
            path = tmp_path / f"v{video}_{frame}.jpg"
            Image.new("RGB", (8, 8)).save(path)
            rows.append(f"{path.name},{labels},film {video}")
    Image.new("RGB", (8, 8)).save(tmp_path / "single.jpg")
    rows.append("single.jpg,sea,")

    def table(rows=rows, **settings):
        (tmp_path / "data.csv").write_text("\n".join(rows))
        return made(csv_table, root=str(tmp_path), **settings)

    table.rows = rows
    return table


def videos(split):
    """Return the videos in a split."""
    return {key.decode().partition("_")[0] for key in split.dataset.storage.keys}


@pytest.mark.parametrize(
    "setting", [{"group_column": "video"}, {"group_pattern": "(v[0-9]+)_"}, {}], ids=str
)
@pytest.mark.parametrize("split", ["stratified", "hash", "1/3"])
def test_groups_are_not_divided(table, setting, split, caplog):
    caplog.set_level(logging.INFO, logger="mldec")
    rows = table.rows
    if not setting:
        rows = [rows[0].replace("Video", "Group"), *rows[1:]]
    division = {"fold": split} if "/" in split else {"split": split}
    data = table(rows, val_fraction=0.2, **setting, **division)

    assert videos(data.train).isdisjoint(videos(data.val))
    if "/" not in split:  # folds divide the training images
        assert len(videos(data.train) | videos(data.val)) == VIDEOS + 1
        assert len(data.train.dataset) + len(data.val.dataset) == VIDEOS * FRAMES + 1
    counts = f"{len(data.train.dataset)} images are in {len(videos(data.train))} groups"
    assert counts in caplog.text
    for part in (data.train, data.val):
        assert len(np.unique(part.groups)) == len(videos(part))
        assert len(part.groups) == len(part.dataset)
    if split == "stratified":
        # 20 % of the videos of each class, as near as possible with whole videos.
        train, val = (part.dataset.labels.counts() for part in (data.train, data.val))
        shares = val / (train + val)
        assert (shares > 0.1).all()
        assert (shares < 0.3).all()


def test_division_depends_on_neither_the_order_nor_other_groups(table):
    rows = table.rows
    backwards = [rows[0], *rows[:0:-1]]
    fewer = [row for row in rows if not row.startswith("v1_") and "_0.jpg" not in row]
    expected = videos(table(group_column="video").val)
    assert videos(table(backwards, group_column="video").val) == expected
    for settings in ({"val_fraction": 0.3}, {"fold": "2/3"}):
        settings = {"split": "hash", "group_column": "video", **settings}
        expected = videos(table(**settings).val)
        assert videos(table(fewer, **settings).val) == expected - {"v1"}


def test_single_images_are_divided_as_without_groups(table):
    rows = [row.rpartition(",")[0] + "," for row in table.rows[1:]]
    for settings in ({}, {"split": "hash"}, {"fold": "1/4"}):
        parts = []
        for setting in ({}, {"group_column": "video"}):
            parts.append(table([table.rows[0], *rows], **settings, **setting).val)
        without, single = parts
        assert without.groups is None
        assert (without.dataset.storage.keys == single.dataset.storage.keys).all()


def test_pattern_joins_the_groups_of_a_column(table):
    data = table(group_column="video", group_pattern="v([0-9])[0-9]*_", val_fraction=0.3)
    # Video 1 and videos 10 to 19 have the same first digit.
    same_digit = {f"v{number}" for number in [1, *range(10, 20)]}
    assert any(same_digit <= videos(part) for part in (data.train, data.val))


def test_pattern_of_other_readers(tmp_path):
    """Class folders without splits, and folds of COCO."""
    for name in ("cat", "dog"):
        (tmp_path / "own" / name).mkdir(parents=True)
        for number in range(30):
            Image.new("RGB", (8, 8)).save(tmp_path / f"own/{name}/{number // 3}_{number}.jpg")
    data = made(folders, root=str(tmp_path / "own"), group_pattern="(.*)_", val_fraction=0.4)
    assert videos(data.train).isdisjoint(videos(data.val))
    assert len(videos(data.train) | videos(data.val)) == 20

    write_coco(tmp_path / "coco")
    data = made(coco, root=str(tmp_path / "coco"), group_pattern="([0-9])[.]jpg", fold="1/2")
    digits = [{key[-5] for key in part.dataset.storage.keys} for part in (data.train, data.val)]
    assert digits[0].isdisjoint(digits[1])


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"group_pattern": "(a"}, ["data.group_pattern", "'(a'"]),
        ({"group_pattern": "a"}, ["data.group_pattern", "'a'"]),
        ({"group_pattern": "(a)(b)"}, ["data.group_pattern", "'(a)(b)'"]),
        ({"group_pattern": "(film)"}, ["data.group_pattern", "v0_0.jpg"]),
        ({"group_pattern": "(jpg)"}, ["data.val_fraction", "1 groups"]),
        ({"group_column": "Film"}, ["data.group_column", "'Film'"]),
    ],
)
def test_invalid_groups_raise_an_error(table, settings, parts):
    with pytest.raises(UserError) as error:
        _ = table(**settings).val
    for part in parts:
        assert part in str(error.value)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_joined_groups_equal_repeated_merging(pairs):
    first, second = (np.array([b"%d" % pair[side] for pair in pairs]) for side in (0, 1))
    expected = list(range(len(pairs)))
    for _ in pairs:
        for i, (a, b) in enumerate(pairs):
            for j, (c, d) in enumerate(pairs):
                if a == c or b == d:
                    expected[i] = expected[j] = min(expected[i], expected[j])
    both = np.concatenate([group_pairs(first), group_pairs(second)], axis=1)
    joined = connect(first, both)
    for i in range(len(pairs)):
        same = [j for j in range(len(pairs)) if expected[j] == expected[i]]
        assert same == np.flatnonzero(joined == joined[i]).tolist()
        assert joined[i] == min(first[same])


def as_text(file):
    return pandas.read_csv(file, dtype=str, keep_default_na=False)


def test_groups_of_a_data_frame_and_of_its_record(tmp_path):
    frame = pandas.DataFrame({"path": ["a.jpg", "b.jpg", "c.jpg", "d.jpg"], "labels": "cat"})
    frame["group"] = [7, "7", None, float("nan")]
    annotations = parse({"data": frame}, Rules(), folder=tmp_path)
    assert annotations.table.groups.tolist() == [b"7", b"7", b"c.jpg", b"d.jpg"]
    (tmp_path / "data.csv").write_text(to_csv(annotations.table, annotations.splits))
    again = parse({"data": as_text(tmp_path / "data.csv")}, Rules(), folder=tmp_path)
    assert (again.table.groups == annotations.table.groups).all()

    twice = pandas.concat([frame, frame.assign(group="8")])
    with pytest.raises(DataError, match="group"):
        parse({"data": twice}, Rules(), folder=tmp_path)


def test_written_table_keeps_single_unknown_labels(tmp_path):
    """The default of both tables differs, and the labels do not."""
    dense = np.array([[1, -1, 0], [0, 0, 1], [0, 0, -1]], np.int8)
    files = np.array([b"a.jpg", b"b.jpg", b"c.jpg"])
    table = Table(files, from_dense(dense), NAMES)
    (tmp_path / "data.csv").write_text(to_csv(table, np.array(["", "", ""])))
    frame = as_text(tmp_path / "data.csv")
    again = parse({"data": frame}, Rules(), NAMES, folder=tmp_path).table
    assert (again.labels.dense() == dense).all()
