"""Zero-shot: which classes and images are learnt from, and which are evaluated on."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from mldec.data.labels import from_dense
from mldec.data.table import Table, encode_paths
from mldec.data.tasks import ZeroShot, split_classes, warn_duplicate_names
from mldec.data.types import Classes, in_folder
from mldec.errors import DataError
from mldec.tools.check_data.examine import neighbours
from mldec.words.types import VectorOrigin, WordVectors
from mldec.words.vectors import read_class_list

NAMES = ("ant", "bee", "cat", "dogs")
SEEN, UNSEEN = [0, 2], [1, 3]
VECTORS = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
WORDS = WordVectors(NAMES, VECTORS, VectorOrigin("v.txt", "0" * 64))
DENSE = np.array([[1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]], np.int8)


def task(**changed):
    settings = {
        "roles": lambda names: (SEEN, UNSEEN),
        "vectors": lambda names: WORDS,
        "val_images": "unseen",
        "where": "/data (see there)",
    }
    return ZeroShot(**{**settings, **changed})


def images(dense=DENSE, names=NAMES):
    files = encode_paths([str(number) for number in range(len(dense))])
    return in_folder(Table(files, from_dense(dense), names), Path("/"), "")


def test_training_is_of_images_with_a_seen_class_and_of_seen_classes():
    used, classes = task().training(images())
    assert classes.names == used.classes == ("ant", "cat")
    assert torch.equal(torch.as_tensor(classes.word_vectors), VECTORS[SEEN])
    assert classes.origin == WORDS.origin
    assert [used.storage.name(index) for index in range(len(used))] == ["/0", "/2"]
    assert used.labels.dense().tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(("val_images", "rows"), [("unseen", [0, 1]), ("all", [0, 1, 2, 3])])
def test_validation_is_of_all_classes(val_images, rows, caplog):
    asked = []

    def vectors(names):
        asked.append(names)
        return WORDS

    whole = task(val_images=val_images, vectors=vectors)
    with caplog.at_level(logging.INFO, "mldec"):
        used, classes = whole.validation(images())
    assert classes.names == NAMES
    assert classes.word_vectors is VECTORS
    assert used.labels.dense().tolist() == DENSE[rows].tolist()
    text = f"zero-shot: 2 of 4 validation images have an unseen class, {len(rows)} are used"
    assert caplog.messages == [text]

    evaluator = whole.evaluator(classes)
    assert evaluator.is_unseen.tolist() == [False, True, False, True]
    assert evaluator.all_images == (val_images == "all")
    whole.training(images())
    assert asked == [NAMES], "they are read once"


def test_the_threshold_reaches_the_evaluator():
    for threshold, recall in ((0.5, 100), (0.75, 0)):
        evaluator = task(threshold=threshold).evaluator(Classes(NAMES))
        evaluator.update(torch.ones(1, 4), torch.ones(1, 4))  # probability 0.73
        assert evaluator.compute()["zsl_OR"] == recall


def test_splits_without_a_class_of_their_kind():
    only_seen = images(DENSE * np.array([1, 0, 1, 0], np.int8))
    with pytest.raises(DataError, match=r"^/data \(see there\): 0 of 4 validation images have an"):
        task(val_images="all").validation(only_seen)
    only_unseen = images(DENSE * np.array([0, 1, 0, 1], np.int8))
    with pytest.raises(DataError, match=r"^/data \(see there\): 0 of 4 training images have a"):
        task().training(only_unseen)


def test_twins_across_the_split(sample_data, caplog):
    task().validation(images(names=("dog", "bee", "cat", "dogs")))
    assert "1 of 2 unseen classes have a seen singular or plural: dogs/dog" in caplog.text

    seen, unseen = ["dogs", "bus", "city", "tree"], ["dog", "buses", "cities", "trees", "sea"]
    expected = [("buses", "bus"), ("cities", "city"), ("dog", "dogs"), ("trees", "tree")]
    warn_duplicate_names(seen, unseen)
    pairs = ", ".join(f"{name}/{twin}" for name, twin in expected)
    assert f"4 of 5 unseen classes have a seen singular or plural: {pairs}" in caplog.text
    folder = sample_data / "nus_wide_zsl"
    official = [folder / f"{name}_sorted.txt" for name in ("seen_925", "unseen_81")]
    warn_duplicate_names(*(path.read_text().split() for path in official))
    assert "30 of 81 unseen classes have a seen singular or plural" in caplog.text


def test_roles_are_indices_in_ascending_order():
    for unseen in (["dogs", "bee"], ["bee", "dogs"]):
        assert split_classes(NAMES, unseen=unseen, seen=None, where="") == (SEEN, UNSEEN)
        roles = split_classes(NAMES, unseen=unseen, seen=["cat", "ant"], where="")
        assert roles == (SEEN, UNSEEN)


@pytest.mark.parametrize(
    ("unseen", "seen", "expected"),
    [
        (["bee", "bee"], None, "1 classes are named twice: bee"),
        (["bee"], ["ant", "cat", "dogs", "bee"], "1 classes are both seen and unseen: bee"),
        (["bee", "eel"], None, "1 classes do not occur in the data: eel"),
        (["bee"], ["ant"], "2 classes of the data are neither seen nor unseen: cat, dogs"),
    ],
)
def test_roles_that_cannot_be(unseen, seen, expected):
    with pytest.raises(DataError, match=f"^a.json: {expected}"):
        split_classes(NAMES, unseen=unseen, seen=seen, where="a.json")


def test_the_nearest_seen_classes_of_each_unseen_one():
    vectors = torch.tensor([[2.0, 0], [0, 3], [1, 1], [5, 0.1]])
    table = neighbours(
        Classes(("a", "b", "c")), Classes(("a", "b", "c", "d"), word_vectors=vectors), 2
    )
    assert list(table) == ["d"]
    assert [name for name, _ in table["d"]] == ["a", "c"]
    assert table["d"][0][1] == pytest.approx(5 / np.hypot(5, 0.1))
    train = Classes(("ant", "cat"), word_vectors=VECTORS[SEEN])
    near = neighbours(train, Classes(NAMES, word_vectors=VECTORS))
    assert {name: of_name[0][0] for name, of_name in near.items()} == {"bee": "ant", "dogs": "cat"}
    assert neighbours(Classes(("ant", "cat")), Classes(NAMES)) == {}


# Class lists


def test_names_of_a_class_stand_on_its_line(tmp_path):
    file = tmp_path / "classes.txt"
    file.write_text("cat; kitten ;house cat\n\n  dog\ntench, Tinca tinca;tench\n")
    class_list = read_class_list(file)
    first, last = ("cat", "kitten", "house cat"), ("tench, Tinca tinca", "tench")
    assert class_list == [first, ("dog",), last]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("\n \n", "is empty"),
        ("cat;;kitten\n", "the class name '' is empty"),
        ("cat;pet\ndog;Pet\n", "'Pet'"),
        ("cat;\x1b[2J\n", "has the control character"),
        (None, "cannot be read"),
    ],
)
def test_faults_of_a_class_list_are_named(tmp_path, text, part):
    if text is not None:
        (tmp_path / "classes.txt").write_text(text)
    with pytest.raises(DataError, match=part) as caught:
        read_class_list(tmp_path / "classes.txt")
    assert str(tmp_path / "classes.txt") in str(caught.value)
    assert "see docs/zero_shot.md" in str(caught.value)
