"""Open Images in both formats: labels are present, absent or not annotated."""

import logging

import pytest
import torch
from readers import names, targets
from support import made
from trees import MIIL, OPENIMAGES, tree

from mldec.data.readers import openimages_miil
from mldec.data.readers.open_images import class_names
from mldec.data.types import fixed_sample
from mldec.evaluators.partial import PartialLabelEvaluator
from mldec.files import tables as files

# By image id; classes in the order of the trainable list.
TARGETS = [[-1, -1, -1, -1], [1, 1, -1, -1], [1, 1, 0, -1]]
TEST_FILE = "annotations/test-annotations-human-imagelabels.csv"
MIIL_TARGETS = [[1, 1, 0, -1], [-1, -1, -1, -1], [-1, -1, 0, -1]], [[0, 1, -1, 1]]


@pytest.fixture
def build(tmp_path):
    return tree("openimages", tmp_path)


@pytest.fixture
def miil(tmp_path):
    return tree("openimages_miil", tmp_path)


# The official files


def test_labels_without_statement_are_unknown(build, caplog):
    with caplog.at_level(logging.INFO, "mldec"):
        data = build()
    assert targets(data.val) == TARGETS
    assert fixed_sample(data.val.dataset, 0)[1].dtype == torch.int8
    ids = ("0a00000000000002", "0a00000000000003", "0b00000000000001")
    assert names(data.val) == [f"{image}.jpg" for image in ids]
    assert targets(data.train) == [[-1, -1, -1, 1]]
    assert isinstance(data.evaluator(), PartialLabelEvaluator)
    assert "1 labels are both present and absent" in caplog.text
    assert "1 of 8 labels are omitted" in caplog.text


def test_chunks_and_line_ends_do_not_change_labels(build, monkeypatch):
    monkeypatch.setattr(files, "CSV_ROWS", 2)
    assert targets(build().val) == TARGETS
    text = OPENIMAGES[TEST_FILE]
    (build.root / TEST_FILE).write_text(text + "0b00000000000001,verification,/m/0a\n")
    assert "row 10" in build.fault()
    (build.root / TEST_FILE).write_text("\ufeff" + text.replace("\n", "\r\n"))
    assert targets(build().val) == TARGETS


def test_repeated_display_names_get_class_index(build):
    expected = ("Ball (0)", 'Ducks, geese and "swans', "Ball (2)", "/m/0d")
    assert build().val.classes.names == expected
    assert build(names="mid").val.classes.names == ("/m/0c", "/m/0a", "/m/0b", "/m/0d")
    display = {"m1": "'\"Human  leg\"'", "m2": "x", "m3": " 'x' "}
    assert class_names(["m1", "m2", "m3"], display) == ("Human leg", "x (1)", "x (2)")


def test_images_are_in_sub_folders(build):
    for path in [*(build.root / "train").iterdir(), *(build.root / "test").iterdir()]:
        (path.parent / path.name[:2]).mkdir(exist_ok=True)
        path.rename(path.parent / path.name[:2] / path.name)
    assert targets(build(prefix=2).val) == TARGETS
    assert "3 of 3 listed images are absent" in build.fault()


# The MIIL format


def test_miil_has_positives_negatives_and_unknown(miil, monkeypatch):
    data = miil()
    assert (targets(data.train), targets(data.val)) == MIIL_TARGETS
    assert data.train.classes.names == data.val.classes.names
    assert data.train.classes.names == ("/m/0a", "/m/0b", "/m/0c", "/m/0d")
    assert names(data.train) == ["b.jpg", "a.jpg", "d.jpg"]
    assert data.val.dataset.name(0) == str(miil.root / "test" / "c.jpg")

    monkeypatch.setattr(files, "CSV_ROWS", 1)
    again = miil(cache_dir=str(miil.root / "cache"))
    assert (targets(again.train), targets(again.val)) == MIIL_TARGETS


def test_miil_class_list_gives_classes_and_order(miil):
    (miil.root / "list.txt").write_text("/m/0x\n/m/0b\n/m/0a\n")
    data = miil(class_list="list.txt")
    assert targets(data.train) == [[-1, 1, 1], [-1, -1, -1], [-1, -1, -1]]
    assert data.train.classes.names == ("/m/0x", "/m/0b", "/m/0a")
    (miil.root / "data.csv").write_text(MIIL.replace(",val\n", ",test\n"))
    assert "val" in miil.fault()


def test_sample_has_166_classes(sample_data, tmp_path):
    root = str(sample_data / "openimages_mini")
    data = made(openimages_miil, root=root, image_size=16, cache_dir=str(tmp_path))
    assert (len(data.train.dataset), len(data.val.dataset)) == (100, 100)
    assert len(data.val.classes) == 166
    assert data.val.classes.names == tuple(sorted(data.val.classes.names))
    for split, statements, classes in ((data.train, 328, 112), (data.val, 442, 103)):
        rows = torch.tensor(targets(split))
        # The sample has no negatives.
        assert ((rows == 1).sum(), (rows == 0).sum()) == (statements, 0)
        assert (rows == 1).any(0).sum() == classes
