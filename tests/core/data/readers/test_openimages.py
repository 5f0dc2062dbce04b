import csv
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from readers import Reader, names, targets, write_picture
from support import made

from mldec.build import check
from mldec.config.compose import compose
from mldec.data.readers.openimages import (
    class_names,
    openimages,
    openimages_miil,
    read_descriptions,
)
from mldec.data.table import from_entries, from_statements
from mldec.data.types import fixed_sample
from mldec.errors import ConfigError
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.files import text as inputs
from mldec.heads.ml_decoder import MLDecoder

HEADER = "ImageID,Source,LabelName,Confidence"
TRAINABLE = ["/m/0c", "/m/0a", "/m/0b", "/m/0d"]
DESCRIPTIONS = (
    "LabelName,DisplayName\n"
    '/m/0a,"Ducks, geese and ""swans"""\n/m/0b,Ball\n/m/0c,Ball\n/m/0z,Ball\n'
)
TEST = """\
0b00000000000001,verification,/m/0a,1
0b00000000000001,crowdsource-verification,/m/0b,0
0a00000000000002,verification,/m/0z,1
0b00000000000001,verification,/m/0c,1.0
0a00000000000003,verification,/m/0a,0.0
0a00000000000003,verification,/m/0a,1
0a00000000000003,verification,/m/0c,1
0a00000000000003,verification,/m/0c,1
"""
TARGETS = [
    [-1, -1, -1, -1],
    [1, 1, -1, -1],
    [1, 1, 0, -1],
]  # by id; classes in the order of the trainable list
TEST_FILE = "test-annotations-human-imagelabels.csv"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "openimages"
    (folder / "annotations").mkdir(parents=True)
    (folder / "annotations" / "oidv6-classes-trainable.txt").write_text("\n".join(TRAINABLE) + "\n")
    (folder / "annotations" / "oidv6-class-descriptions.csv").write_text(DESCRIPTIONS)
    write(folder, TEST)
    write(
        folder,
        "0c00000000000004,verification,/m/0d,1\n",
        "oidv6-train-annotations-human-imagelabels.csv",
    )
    for file in (
        "test/0b00000000000001",
        "test/0a00000000000002",
        "test/0a00000000000003",
        "train/0c00000000000004",
    ):
        write_picture(folder / f"{file}.jpg")
    return folder


def write(root: Path, rows: str, name: str = TEST_FILE, header: str = HEADER) -> None:
    (root / "annotations" / name).write_text(f"{header}\n{rows}")


@pytest.mark.parametrize("reader", [openimages, openimages_miil])
def test_a_wrong_threshold_is_refused_before_any_file_is_read(tmp_path: Path, reader) -> None:
    with pytest.raises(ConfigError, match=r"threshold.*1\.5"):
        made(reader, root=str(tmp_path / "nowhere"), threshold=1.5)


@pytest.fixture
def build(root: Path) -> Reader:
    return Reader(openimages, root, "Open Images")


# Labels


def test_unknown_is_neither_present_nor_absent(build: Reader) -> None:  # trap 8
    data = build()
    assert targets(data.val) == TARGETS
    # Trap 20: a quarter of what floats would be.
    assert fixed_sample(data.val.dataset, 0)[1].dtype == torch.int8
    assert data.val.dataset.labels.default == -1
    assert names(data.val) == [
        "0a00000000000002.jpg",
        "0a00000000000003.jpg",
        "0b00000000000001.jpg",
    ]
    assert targets(data.train) == [[-1, -1, -1, 1]]
    assert isinstance(data.evaluator(), PartialLabelEvaluator)


def test_a_pair_said_to_be_both_and_a_class_outside_the_list_are_counted(
    build: Reader, caplog
) -> None:
    with caplog.at_level(logging.INFO, "mldec"):
        build()
    assert "1 labels are both present and absent: taken as present" in caplog.text
    assert "1 of 8 labels are of classes outside the class list: left out" in caplog.text
    assert "3 images, 4 classes, 4 present and 1 absent" in caplog.text


def test_pieces_do_not_show(root: Path, build: Reader, monkeypatch) -> None:
    monkeypatch.setattr(inputs, "CSV_ROWS", 2)
    assert targets(build().val) == TARGETS
    write(root, TEST + "0b00000000000001,verification,/m/0a\n")
    assert "row 10 has 3 columns, not 4" in build.fault()


def test_names_that_several_classes_share_get_their_place(
    root: Path, build: Reader
) -> None:  # trap 10
    assert build().val.classes.names == (
        "Ball (0)",
        'Ducks, geese and "swans',
        "Ball (2)",
        "/m/0d",
    )
    assert build(names="mid").val.classes.names == tuple(TRAINABLE)
    display = {"m1": "'\"Human  leg\"'", "m2": "x", "m3": " 'x' "}
    assert class_names(["m1", "m2", "m3"], display, root, "") == ("Human leg", "x (1)", "x (2)")


def test_statements_in_any_order_are_what_lists_say() -> None:
    random = np.random.default_rng(0)
    images, classes = random.integers(30, size=400), random.integers(9, size=400)
    values = random.integers(2, size=400).astype(np.int8)
    said = [[classes[(images == i) & (values == v)].tolist() for i in range(30)] for v in (1, 0)]
    entries = [
        {**dict.fromkeys(no, 0), **dict.fromkeys(yes, 1)} for yes, no in zip(*said, strict=True)
    ]
    labels, clashes = from_statements(images, classes, values, num_images=30, num_classes=9)
    assert np.array_equal(labels.dense(), from_entries(entries, num_classes=9, default=-1).dense())
    assert clashes == sum(len(set(yes) & set(no)) for yes, no in zip(*said, strict=True)) > 0
    empty, _ = from_statements(images[:0], classes[:0], values[:0], num_images=2, num_classes=3)
    assert (empty.dense() == -1).all()


def test_the_second_start_reads_no_csv(build: Reader, monkeypatch) -> None:
    first = targets(build().val)
    monkeypatch.setattr("mldec.data.readers.openimages._read_statements", None)
    assert targets(build().val) == first


def test_9605_classes_in_200_groups() -> None:  # trap 11
    config = compose(["+experiment=openimages_tresnet_m"])
    check(config)
    head = MLDecoder(
        8, 9605, **{key: value for key, value in config.head.items() if key != "_target_"}
    )
    assert head.pool_weight.shape == (200, 768, 49)  # 9,800 outputs, of which 195 are no class
    assert head(torch.zeros(1, 2, 8)).shape == (1, 9605)


# Files on the disk


def test_images_in_sub_folders(root: Path, build: Reader) -> None:
    for path in [*(root / "train").iterdir(), *(root / "test").iterdir()]:
        (path.parent / path.name[:2]).mkdir(exist_ok=True)
        path.rename(path.parent / path.name[:2] / path.name)
    assert targets(build(prefix=2).val) == TARGETS
    assert "3 of 3 listed images are absent" in build.fault()


def test_absent_images(root: Path, build: Reader, caplog) -> None:
    gone = root / "test" / "0a00000000000003.jpg"
    gone.unlink()
    assert f"{root}: 1 of 3 listed images are absent, the first is {gone}" in build.fault()
    assert targets(build(absent="skip").val) == [TARGETS[0], TARGETS[2]]
    assert "1 of 3 listed images are absent and left out" in caplog.text
    assert len(build(absent="unchecked").val.dataset) == 3
    for path in (root / "test").iterdir():
        path.unlink()
    assert "3 of 3 listed images are absent, the first is" in build.fault(absent="skip")


# Faults


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a,verification,/m/0a,1\nb,machine,/m/0a,0.7\n", "row 3 has Confidence '0.7', not 1 or 0"),
        ("a,verification,/m/0a,yes\n", "row 2 has Confidence 'yes'"),
        ("a,verification,/m/0a,-1\n", "row 2 has Confidence '-1'"),
        ("a,verification,/m/0a\n", "row 2 has 3 columns, not 4"),
        ('a,verification,/m/0a,1\nb,verification,"/m/0a,1\n', "wrong quoting after row 1"),
        ('a,verification,"/m/0a"x,1\n', "wrong quoting after row 1"),
        ("../a,verification,/m/0a,1\n", "'../a' is not an image id"),
        ("\u00e9,verification,/m/0a,1\n", "is not ASCII"),
        ("", "test has no image"),
    ],
)
def test_bad_rows(root: Path, build: Reader, rows: str, message: str) -> None:
    write(root, rows)
    assert message in build.fault()


def test_another_header_and_another_encoding(root: Path, build: Reader) -> None:
    write(root, TEST, header="ImageID,LabelName,Confidence")
    assert (
        "the header is 'ImageID,LabelName,Confidence', not 'ImageID,Source,LabelName,Confidence'"
        in build.fault()
    )
    (root / "annotations" / TEST_FILE).write_bytes(HEADER.encode() + b"\n\xff\xfe,x,y,1\n")
    assert "is not UTF-8 text" in build.fault()
    (root / "annotations" / TEST_FILE).write_text(
        f"\ufeff{HEADER}\r\n" + TEST.replace("\n", "\r\n")
    )
    assert targets(build().val) == TARGETS


@pytest.mark.parametrize(
    "name", [TEST_FILE, "oidv6-classes-trainable.txt", "oidv6-class-descriptions.csv"]
)
def test_missing_files_are_named(root: Path, build: Reader, name: str) -> None:
    (root / "annotations" / name).unlink()
    assert name in build.fault()


@pytest.mark.parametrize(
    ("text", "message"), [("", "names no class"), ("/m/0a\n/m/0a\n", "names /m/0a 2 times")]
)
def test_a_class_list_must_name_each_class_once(
    root: Path, build: Reader, text: str, message: str
) -> None:
    (root / "annotations" / "oidv6-classes-trainable.txt").write_text(text)
    assert message in build.fault()


@pytest.mark.parametrize(
    "arguments",
    [{"val": "val"}, {"train": "tset"}, {"names": "both"}, {"prefix": -1}, {"absent": "ignore"}],
)
def test_settings_are_checked_before_the_files(build: Reader, arguments: dict) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{next(iter(arguments))}"):
        build(**arguments)


# The real class files


def test_the_real_descriptions(sample_data: Path) -> None:
    folder = sample_data / "openimages_mini" / "annotations"
    display = read_descriptions(folder / "oidv6-class-descriptions.csv", "")
    assert len(display) == 19_994
    assert display["/m/01c_0l"] == "Ducks, geese and swans"
    mids = (folder / "classes-trainable_2018_04_V4_7186.txt").read_text().split()
    names = class_names(mids, display, folder, "")
    assert len(set(names)) == len(names) == 7_186


def test_the_real_box_file_as_labels(build: Reader, sample_data: Path, root: Path) -> None:
    """The boxes of the sample make a label file with real ids, in the order of the boxes."""
    with (sample_data / "openimages_mini" / "annotations" / "validation-annotations-bbox.csv").open(
        newline=""
    ) as file:
        rows = [(row["ImageID"], row["LabelName"]) for row in csv.DictReader(file)]
    mids = sorted({mid for _, mid in rows})
    (root / "annotations" / "oidv6-classes-trainable.txt").write_text("\n".join(mids))
    write(root, "".join(f"{image},verification,{mid},1\n" for image, mid in rows))
    (root / "test").rename(root / "old")
    (root / "test").symlink_to(sample_data / "openimages_mini" / "validation")
    split = build().val
    assert len(split.dataset) == 100
    assert len(split.dataset.labels.values) == len(set(rows)) == 442
    assert fixed_sample(split.dataset, 99)[0].shape == (3, 16, 16)
