"""Zero-shot classification: classes and images of both splits, and class lists."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mldec.data.labels import from_dense
from mldec.data.table import Table, encode_paths
from mldec.data.tasks import ZeroShot, split_classes
from mldec.data.types import Classes, in_folder
from mldec.errors import DataError
from mldec.words.types import VectorOrigin, WordVectors
from mldec.words.vectors import read_class_list

NAMES = ("ant", "bee", "cat", "dogs")
SEEN, UNSEEN = [0, 2], [1, 3]
VECTORS = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
WORDS = WordVectors(NAMES, VECTORS, VectorOrigin("v.txt", "0" * 64))
DENSE = np.array([[1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]], np.int8)


def task(val_images="unseen", vectors=lambda names: WORDS, threshold=0.5):
    return ZeroShot(lambda names: (SEEN, UNSEEN), vectors, val_images, "/data", threshold)


def images(dense=DENSE, names=NAMES):
    files = encode_paths([str(number) for number in range(len(dense))])
    return in_folder(Table(files, from_dense(dense), names), Path("/"))


def test_training_has_seen_classes_and_their_images():
    used, classes = task().training(images())
    assert classes.names == used.classes == ("ant", "cat")
    assert torch.equal(classes.word_vectors, VECTORS[SEEN])
    assert classes.origin == WORDS.origin
    assert [used.storage.name(index) for index in range(len(used))] == ["/0", "/2"]
    assert used.labels.dense().tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(("val_images", "rows"), [("unseen", [0, 1]), ("all", [0, 1, 2, 3])])
def test_validation_has_all_classes(val_images, rows):
    calls = []

    def vectors(names):
        calls.append(names)
        return WORDS

    zero_shot = task(val_images, vectors)
    used, classes = zero_shot.validation(images())
    assert classes.names == NAMES
    assert classes.word_vectors is VECTORS
    assert used.labels.dense().tolist() == DENSE[rows].tolist()

    evaluator = zero_shot.evaluator(classes)
    assert evaluator.is_unseen.tolist() == [False, True, False, True]
    assert evaluator.all_images == (val_images == "all")
    zero_shot.training(images())
    assert calls == [NAMES], "the vectors are read once"


def test_threshold_reaches_evaluator():
    for threshold, recall in ((0.5, 100), (0.75, 0)):
        evaluator = task(threshold=threshold).evaluator(Classes(NAMES))
        evaluator.update(torch.ones(1, 4), torch.ones(1, 4))  # probability 0.73
        assert evaluator.compute()["zsl_OR"] == recall


def test_roles_are_sorted_indices():
    for unseen in (["dogs", "bee"], ["bee", "dogs"]):
        assert split_classes(NAMES, unseen=unseen, seen=None, where="") == (SEEN, UNSEEN)
        roles = split_classes(NAMES, unseen=unseen, seen=["cat", "ant"], where="")
        assert roles == (SEEN, UNSEEN)


# Class lists


def test_class_list_has_synonyms(tmp_path):
    file = tmp_path / "classes.txt"
    file.write_text("cat; kitten ;house cat\n\n  dog\ntench, Tinca tinca;tench\n")
    class_list = read_class_list(file)
    first, last = ("cat", "kitten", "house cat"), ("tench, Tinca tinca", "tench")
    assert class_list == [first, ("dog",), last]


def read_list(folder, text):
    path = folder / "classes.txt"
    if text is not None:
        path.write_text(text)
    return read_class_list(path)


def split_names(unseen, seen=None):
    return lambda folder: split_classes(NAMES, unseen=unseen, seen=seen, where="a.json")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (split_names(["bee", "bee"]), "a.json: 1 classes .*: bee"),
        (split_names(["bee"], ["ant", "cat", "dogs", "bee"]), "a.json: 1 classes .*: bee"),
        (split_names(["bee", "eel"]), "a.json: 1 classes .*: eel"),
        (lambda folder: task("all").validation(images(DENSE * [1, 0, 1, 0])), "/data: 0 of 4"),
        (lambda folder: task().training(images(DENSE * [0, 1, 0, 1])), "/data: 0 of 4"),
        (lambda folder: read_list(folder, "\n \n"), "classes.txt.*docs/zero_shot.md"),
        (lambda folder: read_list(folder, "cat;;kitten\n"), "classes.txt.*docs/zero_shot.md"),
        (lambda folder: read_list(folder, "cat;pet\ndog;Pet\n"), "classes.txt.*'Pet'"),
        (lambda folder: read_list(folder, None), "classes.txt"),
    ],
)
def test_fault_of_classes_is_named(tmp_path, call, name):
    with pytest.raises(DataError, match=name):
        call(tmp_path)
