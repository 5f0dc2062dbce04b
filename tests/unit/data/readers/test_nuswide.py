"""NUS-WIDE: the CSV file of the authors of ML-Decoder, and the official lists."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from readers import names, targets
from trees import NUSWIDE, VECTORS, nuswide_csv, tree

from mldec.data.readers import nuswide81
from mldec.errors import DataError

CLASSES = ("cat", "cloud", "clouds", "dog", "sky")


@pytest.fixture
def build(tmp_path):
    return tree("nuswide_zsl", tmp_path)


@pytest.fixture
def official(tmp_path):
    return tree("nuswide_official", tmp_path)


def labels(split):
    """Return the names of the labels by image."""
    by_image = {}
    for name, row in zip(names(split), targets(split), strict=True):
        pairs = zip(split.classes.names, row, strict=True)
        by_image[Path(name).stem] = {label for label, value in pairs if value}
    return by_image


# The CSV file


def test_training_has_seen_classes_and_validation_all_classes(build):
    data = build()
    assert data.train.classes.names == ("cloud", "dog", "sky")
    assert data.val.classes.names == CLASSES
    # Image c has only an unseen class, and d has none.
    assert labels(data.train) == {"a": {"sky", "dog"}, "b": {"sky"}}
    assert labels(data.val) == {"e": {"clouds", "sky", "cloud"}, "g": {"cat"}}
    assert data.val.dataset.name(0) == str(build.root / "images" / "e.jpg")

    assert torch.equal(data.val.classes.word_vectors, VECTORS.T)
    assert torch.equal(data.train.classes.word_vectors, VECTORS.T[[1, 3, 4]])


def test_vectors_of_other_files_are_matched_by_name(build):
    words = sorted(CLASSES, reverse=True)
    torch.save(VECTORS, build.root / "other.pth")
    (build.root / "other.txt").write_text("\n".join(words))
    word_vectors = build(vectors=str(build.root / "other.pth")).val.classes.word_vectors
    assert torch.equal(word_vectors, VECTORS.T.flip(0))
    torch.save(VECTORS[:, :4], build.root / "wordvec_array.pth")
    assert "wordvec_array.pth" in build.fault()


def test_81_concepts_are_multi_label(build):
    data = replace(build, function=nuswide81)()
    assert data.train.classes.names == data.val.classes.names == CLASSES
    assert data.train.classes.word_vectors is None
    train = {"a": {"sky", "dog"}, "b": {"sky", "cat"}, "c": {"cat"}, "d": set()}
    assert labels(data.train) == train
    val = {"e": {"clouds", "sky", "cloud"}, "f": {"dog"}, "g": {"cat"}, "h": set()}
    assert labels(data.val) == val
    evaluator = data.evaluator()
    evaluator.update(torch.zeros(2, 5), torch.eye(5)[:2])
    assert next(iter(evaluator.compute())) == "mAP"


# The official lists


def test_official_lists_have_concepts_and_tags(official):
    data = official()
    assert data.train.classes.names == ("dog", "sky")
    assert data.val.classes.names == ("cat", "dog", "sea", "sky")
    # The other training image has only concepts. The tag "cat" is not used.
    assert labels(data.train) == {"0001_11": {"sky"}, "0003_13": {"dog", "sky"}}
    assert labels(data.val) == {"0001_21": {"sea", "sky"}, "0009_22": {"dog"}}
    assert data.train.dataset.name(0) == str(official.root / "Flickr" / "actor" / "0001_11.jpg")
    word_vectors = data.val.classes.word_vectors
    assert torch.equal(data.train.classes.word_vectors, word_vectors[[1, 3]])
    assert list(labels(official(val_images="unseen").val)) == ["0001_21"]


def test_absent_official_images_are_omitted(official):
    (official.root / "Flickr" / "actor" / "0001_11.jpg").unlink()
    assert labels(official().train) == {"0003_13": {"dog", "sky"}}


def test_official_images_are_found_by_flickr_number(official):
    (official.root / "images").mkdir()
    for number in (11, 13, 21, 22):
        path = official.root / "images" / f"{number}7_{number}_abc_m.jpg"
        Image.new("RGB", (9, 6)).save(path)
    data = official(images="images")
    assert labels(data.train) == {"117_11_abc_m": {"sky"}, "137_13_abc_m": {"dog", "sky"}}
    assert labels(data.val) == {"217_21_abc_m": {"sea", "sky"}, "227_22_abc_m": {"dog"}}


def test_official_81_concepts_need_no_tags(official):
    shutil.rmtree(official.root / "NUS_WID_Tags")
    (official.root / "Flickr" / "actor" / "0001_11.jpg").unlink()
    build = replace(official, function=nuswide81)
    data = build()
    assert data.train.classes.names == data.val.classes.names == ("cat", "sea")
    assert labels(data.train) == {"0002_12": {"cat", "sea"}, "0003_13": set()}
    assert labels(data.val) == {"0001_21": {"sea"}, "0009_22": set()}

    data = build(annotated_only=True)
    assert labels(data.train) == {"0002_12": {"cat", "sea"}}
    assert labels(data.val) == {"0001_21": {"sea"}}

    # The CSV file of ASL has precedence.
    (official.root / "nus_wid_data.csv").write_text(nuswide_csv(NUSWIDE))
    assert "4 of 4 listed images are absent" in build.fault()


# The NumPy lists


@pytest.fixture
def arrays(official):
    """Write the lists of single-positive papers for the images of the official lists."""
    rows = {"actor/0001_11.jpg": [5, 55], "b/0003_13.jpg": [0]}
    lists = {"train": rows, "val": {"b/0001_21.jpg": [80], "actor/0009_22.jpg": []}}
    for split, images in lists.items():
        labels = np.zeros((len(images), 81))
        for row, columns in enumerate(images.values()):
            labels[row, columns] = 1
        np.save(official.root / f"formatted_{split}_images.npy", np.array(list(images)))
        np.save(official.root / f"formatted_{split}_labels.npy", labels)
    build = replace(official, function=nuswide81)
    return partial(build, numpy_lists=True), official.root


def test_numpy_lists_have_81_concepts(arrays):
    build, root = arrays
    data = build()
    assert len(data.train.classes.names) == 81
    assert list(data.train.classes.names) == sorted(data.train.classes.names)
    assert labels(data.train) == {"0001_11": {"boats", "sky"}, "0003_13": {"airport"}}
    assert labels(data.val) == {"0001_21": {"zebra"}, "0009_22": set()}
    assert data.train.dataset.name(0) == str(root / "Flickr" / "actor" / "0001_11.jpg")
    assert [sum(row) for row in targets(build(single_positive=0).train)] == [1, 1]

    (root / "Flickr" / "actor" / "0001_11.jpg").unlink()
    assert labels(build().train) == {"0003_13": {"airport"}}


@pytest.mark.parametrize("content", ["images", "labels"])
def test_faulty_numpy_list_is_named(arrays, content):
    build, root = arrays
    path = root / f"formatted_train_{content}.npy"
    for array in (np.array([{}]), np.zeros((3, 81)), None):
        if array is None:
            path.unlink()
        else:
            np.save(path, array)
        with pytest.raises(DataError, match=path.name):
            build()
