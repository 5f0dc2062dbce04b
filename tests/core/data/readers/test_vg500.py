import json

import pytest
from readers import Reader, write_picture
from support import made

from mldec.data.readers.vg500 import vg500
from mldec.data.types import fixed_sample
from mldec.errors import ConfigError, DataError
from mldec.files.text import read_lines

LABELS = {"1.jpg": [3, 0], "20.jpg": [], "300.jpg": [499], "4.jpg": [7, 3]}


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "vg500"
    for name in LABELS:
        write_picture(root / "VG_100K" / name)
    (root / "train_list_500.txt").write_text(
        "300.jpg\r\n1.jpg\r\n20.jpg"
    )  # no end of the last line
    (root / "test_list_500.txt").write_text("4.jpg\n")
    (root / "vg_category_500_labels_index.json").write_text(json.dumps(LABELS))
    return root


@pytest.fixture
def build(root):
    return Reader(vg500, root, "Visual Genome 500")


def rows(split):
    return [row.nonzero()[0].tolist() for row in split.dataset.labels.dense()]


def test_images_in_the_order_of_the_lists(build, root):
    data = build()
    assert rows(data.train) == [[499], [0, 3], []]
    assert rows(data.val) == [[3, 7]]
    assert data.train.dataset.name(2) == str(root / "VG_100K" / "20.jpg")
    assert data.val.classes.names[7] == "class 7"
    assert len(data.val.classes) == 500
    assert fixed_sample(data.val.dataset, 0)[0].shape == (3, 16, 16)


def test_names_from_a_file(build, root):
    (root / "names.txt").write_text("\n".join(f"thing {number}" for number in range(500)))
    assert build(classes="names.txt").val.classes.names[499] == "thing 499"
    (root / "names.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"names 2 classes, data\.num_classes is 500"):
        build(classes="names.txt")


def test_evaluation_needs_no_training_list(build, root, tmp_path):
    (root / "train_list_500.txt").unlink()
    data = made(vg500, root=str(root), cache_dir=str(tmp_path / "cache"))
    assert len(data.val.dataset) == 1
    with pytest.raises(DataError, match="train_list_500"):
        _ = data.train


def test_overlapping_splits_are_refused(build, root):
    (root / "test_list_500.txt").write_text("4.jpg\n1.jpg\n")
    with pytest.raises(DataError, match=r"share 1 images, such as 1\.jpg"):
        build()


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[[1, 2]]", "JSON of another task"),
        ('{"images": []}', r"lacks 1 images of test_list_500\.txt, the first is 4\.jpg"),
        ('{"4.jpg": [500]}', r"4\.jpg has the labels \[500\], not indices below 500"),
        ('{"4.jpg": [-1]}', "not indices below 500"),
        ('{"4.jpg": [true]}', "not indices below 500"),
        ('{"4.jpg": "12"}', "not indices below 500"),
    ],
)
def test_wrong_labels(build, root, labels, expected):
    (root / "vg_category_500_labels_index.json").write_text(labels)
    with pytest.raises(DataError, match=expected) as caught:
        build(train="test_list_500.txt")
    assert "\n" not in str(caught.value)
    assert "see DATASETS.md, section Visual Genome 500" in str(caught.value)


def test_wrong_lists(build, root):
    for text, expected in [
        ("../4.jpg", "not a path inside"),
        ("4.jpg\n4.jpg", "line 2: .* twice"),
        ("", "is empty"),
    ]:
        (root / "test_list_500.txt").write_text(text)
        with pytest.raises(DataError, match=expected):
            build()
    with pytest.raises(ConfigError, match=r"data\.num_classes is 0: it must be at least 1"):
        build(num_classes=0)


def test_the_lists_of_the_sample(sample_data):
    folder = sample_data / "vg500_lists"
    train, val = (read_lines(folder / f"{part}_list_500.txt", "") for part in ("train", "test"))
    assert (len(train), len(val)) == (82904, 10000)
    assert not set(train) & set(val)
    assert train[0] == "2360596.jpg"
    last = (folder / "test_list_500.txt").read_text().split()[-1]
    assert val[-1] == last
    assert last.endswith(".jpg")
