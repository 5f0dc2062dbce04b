"""NUS-WIDE: the CSV of the authors of ML-Decoder, and the official lists."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from readers import names, targets
from trees import NUSWIDE, UNSEEN, VECTORS, nuswide_csv, tree

from mldec.data.readers import nuswide81

CLASSES = ("cat", "cloud", "clouds", "dog", "sky")


@pytest.fixture
def build(tmp_path):
    return tree("nuswide_zsl", tmp_path)


@pytest.fixture
def official(tmp_path):
    return tree("nuswide_official", tmp_path)


def labels(split):
    """Return the images with the names of their labels."""
    shown = {}
    for name, row in zip(names(split), targets(split), strict=True):
        pairs = zip(split.classes.names, row, strict=True)
        shown[Path(name).stem] = {label for label, value in pairs if value}
    return shown


# The CSV


def test_training_knows_seen_classes_only_and_validation_all(build, caplog):
    with caplog.at_level(logging.INFO, "mldec"):
        data = build()
    assert data.train.classes.names == ("cloud", "dog", "sky")
    assert data.val.classes.names == CLASSES
    # c shows an unseen class only, d nothing.
    assert labels(data.train) == {"a": {"sky", "dog"}, "b": {"sky"}}
    assert labels(data.val) == {"e": {"clouds", "sky", "cloud"}, "g": {"cat"}}
    assert data.val.dataset.name(0) == str(build.root / "images" / "e.jpg")

    assert torch.equal(torch.as_tensor(data.val.classes.word_vectors), VECTORS.T)
    assert torch.equal(torch.as_tensor(data.train.classes.word_vectors), VECTORS.T[[1, 3, 4]])
    assert "1 of 2 unseen classes have a seen singular or plural: clouds/cloud" in caplog.text
    assert "zero-shot: 2 of 4 training images have a seen class" in caplog.text
    assert "zero-shot: 2 of 4 validation images have an unseen class, 2 are used" in caplog.text


def test_validation_images_with_an_unseen_class_or_all(build):
    for val_images, expected in (("unseen", {"e", "g"}), ("all", {"e", "f", "g", "h"})):
        data = build(val_images=val_images)
        assert set(labels(data.val)) == expected
        assert set(labels(data.train)) == {"a", "b"}
        evaluator = data.evaluator()
        assert evaluator.is_unseen.tolist() == [True, False, True, False, False]
        assert evaluator.all_images == (val_images == "all")


def test_the_lists_of_classes(build):
    file = build.root / "benchmark_81_v0.json"
    first = build().train.classes
    # The classes are sorted, whatever the order of the list is.
    file.write_text(json.dumps({"test class": UNSEEN[::-1], "train class": None}))
    assert build().train.classes.names == first.names == tuple(sorted(first.names))


def test_vectors_from_another_file_are_joined_by_name(build):
    words = sorted(CLASSES, reverse=True)
    text = "".join(f"{word} {len(word)}.5 1.0\n" for word in words)
    (build.root / "glove.txt").write_text(text)
    word_vectors = torch.as_tensor(build(vectors="glove.txt").val.classes.word_vectors)
    assert word_vectors[:, 0].tolist() == [len(name) + 0.5 for name in CLASSES]

    torch.save(VECTORS, build.root / "other.pth")
    (build.root / "other.txt").write_text("\n".join(words))
    word_vectors = build(vectors=str(build.root / "other.pth")).val.classes.word_vectors
    assert torch.equal(torch.as_tensor(word_vectors), VECTORS.T.flip(0))

    # SDL's copy, converted: data.vectors names it.
    np.save(build.root / "wordvec_array.npy", VECTORS.numpy())
    word_vectors = build(vectors="wordvec_array.npy").val.classes.word_vectors
    assert torch.equal(torch.as_tensor(word_vectors), VECTORS.T)
    torch.save(VECTORS[:, :4], build.root / "wordvec_array.pth")
    assert "has shape [3, 4]" in replace(build, section="Word vectors").fault()


def test_the_form_of_81_concepts(build):
    data = replace(build, function=nuswide81)()
    assert data.train.classes.names == data.val.classes.names == CLASSES
    assert data.train.classes.word_vectors is None
    shown = {"a": {"sky", "dog"}, "b": {"sky", "cat"}, "c": {"cat"}, "d": set()}
    assert labels(data.train) == shown
    shown = {"e": {"clouds", "sky", "cloud"}, "f": {"dog"}, "g": {"cat"}, "h": set()}
    assert labels(data.val) == shown
    evaluator = data.evaluator()
    evaluator.update(torch.zeros(2, 5), torch.eye(5)[:2])
    assert next(iter(evaluator.compute())) == "mAP"


# The official lists


def test_backslashes_and_the_labels_of_both_kinds(official):
    data = official()
    assert data.train.classes.names == ("dog", "sky")
    assert data.val.classes.names == ("cat", "dog", "sea", "sky")
    # The other training image has concepts only. The tag "cat" is not used.
    assert labels(data.train) == {"0001_11": {"sky"}, "0003_13": {"dog", "sky"}}
    assert labels(data.val) == {"0001_21": {"sea", "sky"}, "0009_22": {"dog"}}
    assert data.train.dataset.name(0) == str(official.root / "Flickr" / "actor" / "0001_11.jpg")
    word_vectors = torch.as_tensor(data.val.classes.word_vectors)
    assert torch.equal(torch.as_tensor(data.train.classes.word_vectors), word_vectors[[1, 3]])
    assert list(labels(official(val_images="unseen").val)) == ["0001_21"]


def test_absent_images_are_dropped_and_counted(official, caplog):
    folder = official.root / "Flickr"
    (folder / "actor" / "0001_11.jpg").unlink()
    data = official()
    assert list(labels(data.train)) == ["0003_13"]
    assert len(data.val.dataset) == 2
    message = "1 of 3 listed images are absent and left out, the first is actor/0001_11.jpg"
    assert f"Train: {message}" in caplog.text


def test_images_may_have_the_names_of_the_tarball(official):
    (official.root / "images").mkdir()
    for number in (11, 13, 21, 22):
        path = official.root / "images" / f"{number}7_{number}_abc_m.jpg"
        Image.new("RGB", (9, 6)).save(path)
    data = official(images="images")
    assert labels(data.train) == {"117_11_abc_m": {"sky"}, "137_13_abc_m": {"dog", "sky"}}
    assert labels(data.val) == {"217_21_abc_m": {"sea", "sky"}, "227_22_abc_m": {"dog"}}


def test_the_81_concepts_of_the_makers(official, caplog):
    # No file of the tags is needed; images without a concept are kept, absent ones are not.
    shutil.rmtree(official.root / "NUS_WID_Tags")
    (official.root / "Flickr" / "actor" / "0001_11.jpg").unlink()
    build = replace(official, function=nuswide81)
    data = build()
    assert data.train.classes.names == data.val.classes.names == ("cat", "sea")
    assert labels(data.train) == {"0002_12": {"cat", "sea"}, "0003_13": set()}
    assert labels(data.val) == {"0001_21": {"sea"}, "0009_22": set()}
    assert "nuswide Train: 1 of 3 listed images are absent and left out" in caplog.text

    data = build(annotated_only=True)
    assert labels(data.train) == {"0002_12": {"cat", "sea"}}
    assert labels(data.val) == {"0001_21": {"sea"}}

    # The CSV of ASL is read if it is there.
    (official.root / "nus_wid_data.csv").write_text(nuswide_csv(NUSWIDE))
    assert "4 of 4 listed images are absent, the first is" in build.fault()
